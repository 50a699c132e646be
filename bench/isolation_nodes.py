"""The isolation benchmark with several nodes: `make bench-isolation ARGS="--nodes 3"`, with `--sabotage` to see it fail.

So many runtimes share one PostgreSQL server, which the benchmark starts. Each turn of a session is given to another node than the one before, as a load
balancer without sticky sessions would: half of the sessions are conversations of a delivering front, half run in-process. The identity is read in the
turn, in child tasks, in a worker thread and in a child turn; and the history that a node reads for a session must be of that session alone, whole and in
order. There are no processes and no jobs: they would keep their session on one node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from itertools import pairwise

import msgspec
import trio
from rich.progress import Progress

from bench.isolation import TASKS, Conversations, Hosted, Identity, Tally, Workload, context_of, read_here
from bench.report import Report
from hermes_trio import Inbox, NewMessage, Runtime, RuntimeSettings, Turn
from hermes_trio.store.postgres.link import open_link
from hermes_trio.store.postgres.schema import migrate_schema
from hermes_trio.store.postgres.store import open_postgres
from tests.postgres_server import postgres_server

PLACES = ("turn", "child task", "worker thread", "child turn", "history")


class Hopping(Hosted):
    """The workload on several nodes."""

    def __init__(self, work: Workload, tally: Tally, advance: Callable[[], None], url: str, nodes: int) -> None:
        super().__init__(work, tally, advance)
        self._url = url
        self._nodes = nodes
        self.places: dict[int, list[str]] = defaultdict(list)
        """By session: the node of each turn."""

    async def run(self) -> None:
        """All sessions, each turn on another node."""
        async with open_link(self._url, "isolation") as link:
            await migrate_schema(link, "isolation")
        settings = RuntimeSettings(max_turns=self.work.sessions, watchdog_seconds=0)
        async with AsyncExitStack() as stack:
            runtimes: list[Runtime] = []
            fronts: list[Inbox] = []
            for number in range(self._nodes):
                opened = open_postgres(self._url, node_name=f"node-{number}", lease_seconds=120.0)
                runtime = Runtime(agent=self.agent, store=opened, settings=settings, seed=number)
                runtimes.append(await stack.enter_async_context(runtime))
                front = runtime.delivering(Conversations(self.ended))
                fronts.append(await stack.enter_async_context(front))
            async with trio.open_nursery() as sessions:
                for session in range(self.work.sessions):
                    sessions.start_soon(self.hop, runtimes, fronts, session)

    async def hop(self, runtimes: list[Runtime], fronts: list[Inbox], session: int) -> None:
        """One session: each turn is given to the next node."""
        for number in range(self.work.turns):
            step = self.work.step(session, number)
            place = (session + number) % self._nodes
            text = f"{session} {number}"
            if session % 2:
                answered = self.answers[step.identity.message] = trio.Event()
                routing = context_of(step.identity, "bench")
                message = NewMessage(inbox="bench", session_key=step.identity.key, routing=routing, text=text)
                await fronts[place].accept(message)
                await answered.wait()
            else:
                await runtimes[place].run_turn(text, context_of(step.identity, "embedded"))

    async def agent(self, turn: Turn) -> str:
        """One turn. What it expects comes with its input, never from what is being tested."""
        session, number = map(int, turn.input.text.split())
        step = self.work.step(session, number)
        mine, check = step.identity, self.tally.check
        check("turn", mine, read_here())
        self.places[session].append(turn.core.store.owner)
        for task in range(TASKS):
            turn.start_soon(self.task, step.pause * (task + 1), mine)
        await trio.sleep(step.pause)
        check("worker thread", mine, await turn.run_sync(read_here))
        theirs = mine.child()
        context = msgspec.structs.replace(turn.context, message_id=theirs.message, session_id=f"child-{theirs.message}")
        await turn.run_child("child", agent=partial(self.child, step.pause, theirs), context=context)
        history = await turn.core.store.load_history(turn.context.session_id)
        said = [entry.text for entry in history if entry.role == "user"]
        whole = said == [f"{session} {earlier}" for earlier in range(number)]
        check("history", mine, mine if whole else Identity(key=" ".join(said[-2:]) or "none"))
        check("turn", mine, read_here())
        self.advance()
        if mine.message in self.answers:
            self.answers.pop(mine.message).set()
        return "done"


def main(report: Report, work: Workload, nodes: int, bar: Progress, *, sabotaged: bool) -> None:
    """Run it, and put the figures into the report. `work` is made anew: identities of the program and of the module are not the same class."""
    work = Workload(work.sessions, work.turns, work.seed, work.sample, work.folder)
    tally = Tally()
    row = bar.add_task(f"{nodes} nodes", total=work.sessions * work.turns)
    with postgres_server() as server:
        hopping = Hopping(work, tally, partial(bar.advance, row), server.url(server.new_database()), nodes)
        trio.run(hopping.run)
    hops = sum(before != after for places in hopping.places.values() for before, after in pairwise(places))
    possible = work.sessions * (work.turns - 1)
    cells = [[place, f"{tally.crossings(place):,} of {tally.reads[place]:,}"] for place in PLACES]
    title = f"Crossings, {work.sessions:,} sessions x {work.turns} turns on {nodes} nodes, seed {work.seed}"
    report.table(title, ["read in", "crossings"], cells)
    report.figures = {
        "nodes": nodes,
        "sessions": work.sessions,
        "turns": work.turns,
        "sabotaged": sabotaged,
        "crossings": tally.total,
        "hops": hops,
        "places": {place: {"reads": tally.reads[place], "crossings": tally.crossings(place)} for place in PLACES},
    }
    words = "crossings with a sabotaged ContextVar" if sabotaged else "crossings"
    report.bound(f"{words}: {tally.total:,}", bool(tally.total) is sabotaged)
    report.bound(f"{hops:,} of {possible:,} turns were on another node than the one before", hops > possible // 2)
