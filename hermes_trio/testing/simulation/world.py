"""A world: nodes with real gateways, people, platforms and models, in one Trio run on virtual time.

`World.run` executes a program: actions of users and faults, then a time without faults in which all work has to end, then a drain. The events are in
`trace`, the rows in `store`, and the messages and responses that users and clients received in `seen`.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs
import outcome
import trio

from hermes_trio.adapters.cron.jobs import new_job
from hermes_trio.config import Config, PluginSettings
from hermes_trio.http.settings import Limits, ServerSettings
from hermes_trio.runtime.ports import Agent
from hermes_trio.store import Runner, SqliteStore, Store, open_store
from hermes_trio.store.errors import StoreBusy
from hermes_trio.testing.clock import virtual_clock
from hermes_trio.testing.faults import InjectedFault, StoreFaults
from hermes_trio.testing.model_server import ModelServer, ScriptedAnswer, ScriptedRefusal
from hermes_trio.testing.model_server.script import Fault as ModelFault
from hermes_trio.testing.model_server.script import ScriptedCall

from . import script
from .accounts import SPARE, TURN_SECONDS, count_tasks, left_over
from .archive import SHORT_RETENTION, Archive
from .boundary import Boundary
from .cluster import Balancer, SignalNetwork
from .coverage import STATES_SQL, Coverage
from .discord import SimulatedDiscord
from .disk import SimulatedDisk
from .embedding_program import EmbeddingSeen
from .habits import EPOCH, NIGHTLY, NIGHTLY_JOB, ZONE
from .invariants import BURST, LIMITED_RUNS, REQUESTS_PER_MINUTE, held_rows
from .mcp_server import MCP_COMMAND
from .node import ADMIN_KEY, CrashPoint, SimulatedNode, caller_of, current_node, is_paused
from .people import WEBHOOK_SECRET, ChatSeen, PageSeen, People, Promise, RunSeen, SaidOnPage, WebhookSeen
from .platform import WEBHOOK_CHAT, SimulatedPlatform
from .program import PLATFORMS, TENANTS, Program, Step
from .slack import SimulatedSlack
from .telegram import SimulatedTelegram
from .threads import PLUGIN, thread_work
from .trace import Trace

DRAIN_SECONDS: Final = 60.0
"""Seconds within which a draining node must have ended: its drain time (20), the grace of its server (5), the flush of its replies (5), `finish_seconds` for
the waits of the drain and again for the last attempts of the close (20), and a reserve for processes that ignore SIGTERM."""

HOT_REFUSALS: Final = 50
"""The number of refused calls in one instant of virtual time that counts as a retry loop without a pause."""

STORE_MEMORY: Final = 120.0
"""Seconds after a fault of the store in which a process may end with unwritten job ends."""

CRON_MARK: Final = "m9001"

NIGHTLY_MARK: Final = "m9003"
"""The mark of the daily job of a world that begins near a change of the clock."""

LIMITED_MARK: Final = "m9002"
"""The mark of the cron job that runs `LIMITED_RUNS` times, on all nodes together."""


@attrs.frozen
class WorldSettings:
    """The settings of a world that do not depend on the seed."""

    calm_seconds: float = 600.0
    """Virtual seconds after the last fault within which all work must have ended."""
    concurrent_turns: int = 4
    narrow_turns: int = 2
    processes: int = 6
    cron: str = "*/3 * * * *"
    """The schedule of the one job of a world; empty for none."""
    agent: Agent | None = None
    """The agent of every turn, instead of the agent loop with the scripted model."""


@attrs.define
class CallSeen:
    """A call that the model received: the life of the node that made it, the message, the start and the end."""

    life: str
    asked: str
    child: bool
    at: float
    knows: frozenset[str] = frozenset()
    """The marks of all messages that it contains."""
    ended_at: float | None = None


@attrs.define
class Seen:
    """The messages and responses that users and clients received, for the invariants."""

    runs: list[RunSeen] = attrs.Factory(list[RunSeen])
    chats: list[ChatSeen] = attrs.Factory(list[ChatSeen])
    web: list[SaidOnPage] = attrs.Factory(list[SaidOnPage])
    pages: list[PageSeen] = attrs.Factory(list[PageSeen])
    webhooks: list[WebhookSeen] = attrs.Factory(list[WebhookSeen])
    confirmed: set[str] = attrs.Factory(set[str])
    """The texts of chat messages that the gateway has confirmed to the platform."""
    said: list[tuple[int, str]] = attrs.Factory(list[tuple[int, str]])
    allowed: dict[str, float] = attrs.Factory(dict[str, float])
    """The marks of requests for approval that their askers have allowed, with the time of the first answer."""
    decided: list[tuple[str, str, str]] = attrs.Factory(list["tuple[str, str, str]"])
    """The requests for approval whose answers were acknowledged, with the choice and the person."""
    direct: list[tuple[str, list[int]]] = attrs.Factory(list["tuple[str, list[int]]"])
    """The texts of deliveries without an agent, with the status of each attempt."""
    trusted: set[str] = attrs.Factory(set[str])
    """Where commands were allowed for good: `chat` for the platform, or a tenant."""

    def allow(self, about: str, at: float) -> None:
        """Record that the asker has allowed what is asked about in a text."""
        for mark in script.marks(about):
            self.allowed.setdefault(mark, at)

    embedding: EmbeddingSeen = attrs.Factory(EmbeddingSeen)
    health: Any = None
    calls: list[CallSeen] = attrs.Factory(list[CallSeen])
    promises: list[Promise] = attrs.Factory(list[Promise])
    """What the responses to chores acknowledged."""
    answers: list[tuple[int, str, bytes]] = attrs.Factory(list["tuple[int, str, bytes]"])
    """The responses that tenants got to their chores: tenant, request and body."""
    crossings: list[str] = attrs.Factory(list[str])
    """What chores received of another tenant's data, or with a revoked key."""
    let_through: int = 0
    """The number of requests of a flooding client that the rate limit let through."""
    flood_seconds: float = 0.0
    """The duration of the flood."""
    most_calls: int = 0
    """The highest number of concurrent model calls of one node, without those of children."""
    most_children: int = 0
    """The highest number of concurrent model calls of the children of one message on one node."""


class World:
    """One simulated run of a `Program`. See the module."""

    def __init__(self, program: Program, settings: WorldSettings | None = None) -> None:
        self.program = program
        self.settings = WorldSettings() if settings is None else settings
        self.turns = self.settings.concurrent_turns if program.seed % 3 else self.settings.narrow_turns
        """The limit of concurrent turns: `narrow_turns` for every third seed."""
        self.started_at = program.start
        self.clock = virtual_clock(self.started_at)
        self.boundary = Boundary(program.seed, self.clock, self)
        self.trace = Trace(lambda: self.clock.current_time() - self.started_at)
        self.faults = StoreFaults(seed=program.seed)
        self.faults.told = self._injected
        self.nodes: list[SimulatedNode] = []
        self.balancer = Balancer(self.nodes, program.seed)
        self.seen = Seen()
        self.coverage = Coverage()
        self.store: SqliteStore
        self.archive: Archive | None = None
        """What retention has removed, in a world with `upkeep`."""
        self.disk: SimulatedDisk
        self.beside: Store
        """The store as commands beside the servers use it, with the same faults."""
        self.chat: SimulatedPlatform[Any]
        """The chat platform of the people, by the program's `platform`."""
        self.model = ModelServer(otherwise=self._model_answer)
        self.keys: list[str] = []
        self.calm = False
        """Whether the faults have ended."""
        self.calm_until = program.seconds + self.settings.calm_seconds
        """The time at which all work must have ended, in seconds since the start of the world."""
        self.boundary.end_by(self.started_at + self.calm_until + 3600)
        self.spare = SPARE.get(program.seed % 16, "")
        """What is scarce in this world; empty for nothing."""
        self.leftovers: list[str] = []
        """Tasks and rows of nodes that grow with the work, at the end of the calm."""
        self.held: list[str] = []
        """Rows that were still open after `calm_seconds`, before the drain."""
        self.late: list[str] = []
        """Violations of time limits: nodes that drained too slowly or did not run at the end."""
        self.hot: list[str] = []
        """Instants in which the store refused `HOT_REFUSALS` calls: retry loops without a pause."""
        self._refused = (0.0, 0)
        self.left_behind: list[str] = []
        """Jobs without an end of processes that ended by themselves while the store worked."""
        self.zombies: list[str] = []
        """Processes and lives of nodes that were still running at the end."""
        self.failure: BaseException | None = None
        self._hosts: dict[str, Callable[[trio.SocketStream], Awaitable[None]]] = {}
        self._model_faults: list[tuple[str, int]] = []
        self._nursery: trio.Nursery
        self._people: dict[str, Callable[[Step], Awaitable[None]]] = {}

    # -- running ------------------------------------------------------------------------------------------------------------------

    def run(self, after: Callable[[World], Awaitable[None]] | None = None) -> None:
        """Execute the program to its end. `after` is called before the store closes, so that the invariants can read rows."""
        with self.boundary:
            trio.run(self._live, after, clock=self.clock)
        self.coverage.calls.update(self.faults.calls)
        if self.boundary.breaches:
            self.trace.note("breach", self.boundary.breaches[0])

    async def _live(self, after: Callable[[World], Awaitable[None]] | None) -> None:
        upkeep = self.program.upkeep
        opening = open_store(
            None, runner=Runner.INLINE, clock=self.boundary.store_wall, maintenance=upkeep, retention=SHORT_RETENTION
        )
        async with (
            opening as self.store,
            self.faults.around(self._open_beside()) as self.beside,
            trio.open_nursery() as self._nursery,
        ):
            await self._prepare()
            try:
                await self._play()
                if after is not None:
                    with ExitStack() as shown:
                        if self.archive is not None:
                            shown.enter_context(self.archive.showing())
                        await after(self)
            finally:
                self._nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def _open_beside(self) -> AsyncGenerator[Any]:
        """Open the store once more, as commands beside the servers do."""
        handle = SqliteStore(self.store.database)
        handle.secret = self.store.secret
        yield handle

    async def _prepare(self) -> None:
        """Make the platform, the keys and the nodes."""
        writer: Any = self.store._writer
        if self.program.upkeep:
            self.archive = Archive(writer._db)
        self.disk = SimulatedDisk(writer._db, self._disk_failed)
        if any(step.kind == "disk" for step in self.program.steps):
            # Write as for a file: a database in memory takes a shorter path.
            writer._at_once = False
        self.chat = _PLATFORMS[self.program.platform](self.trace.note, self._nursery)
        self._hosts = {**self.chat.open(), "model.localhost": self.model._serve}
        for tenant in range(TENANTS):
            _, secret = await self.store.create_api_key(
                f"tenant{tenant}", scopes=("chat", "runs", "sessions"), tenant=f"t{tenant}"
            )
            self.keys.append(secret)
        if self.settings.cron:
            await self._schedule("c10c10c10c10", CRON_MARK, schedule=self.settings.cron)
            if self.program.start != EPOCH:
                await self._schedule(NIGHTLY_JOB, NIGHTLY_MARK, schedule=NIGHTLY)
            if self.program.nodes > 1:
                await self._schedule("c20c20c20c20", LIMITED_MARK, schedule="* * * * *", repeat=LIMITED_RUNS)
        network = SignalNetwork(self.store, self.trace) if self.program.nodes > 1 else None
        self.boundary.skew = _clock_offset
        for number in range(self.program.nodes):
            node = SimulatedNode(
                f"node{number}",
                store=self.store,
                faults=self.faults,
                trace=self.trace,
                nursery=self._nursery,
                config=self._config(),
            )
            node.agent = self.settings.agent
            node.network = network
            node.on_pause = self._hold_paused
            node.on_crash = partial(self._crashed, node)
            node.on_end = partial(self._ended, node)
            node.embedding_seen = self.seen.embedding
            node.spare = self.spare
            self.nodes.append(node)
            node.start()

    async def _schedule(self, id: str, mark: str, **fields: Any) -> None:
        given = {"name": f"clockwork {mark}", "prompt": f"{mark} say", "deliver": self.chat.name, **fields}
        now, platforms = self.boundary.wall(), (self.chat.name,)
        job = new_job(given, id=id, tenant="", now=now, timezone=ZONE, platforms=platforms)
        await self.store.put_cron_job(job)

    def _rate(self) -> dict[str, int]:
        """Return a request limit for programs with a flood; without one there is none, because other clients repeat refused requests."""
        if all(step.kind != "flood" for step in self.program.steps):
            return {}
        return {"requests_per_minute": REQUESTS_PER_MINUTE, "burst": BURST}

    def _config(self) -> Config:
        settings, chat = self.settings, self.chat
        tables: dict[str, Any] = {chat.name: {**chat.settings(), "busy": self.program.busy}}
        return Config(
            server=ServerSettings(host="127.0.0.1", key=ADMIN_KEY, drain_seconds=20.0, graceful_seconds=5.0),
            limits=Limits(
                concurrent_turns=self.turns,
                turn_seconds=TURN_SECONDS if self.spare == "seconds" else 0.0,
                **self._rate(),
            ),
            models={
                "default": "simulated",
                "routes": {
                    "simulated": {
                        "provider": "openai",
                        "model": "simulated-1",
                        "base_url": "http://model.localhost/v1",
                        "api_key": "simulated-key",
                    }
                },
            },
            tools={
                "terminal": {"max_processes": settings.processes, "cwd": _home()},
                "confinement": {"profile": "off", "tenants": {"*": "off"}},
            },
            approvals={"timeout": 60.0},
            webhook={
                "secret": WEBHOOK_SECRET,
                "routes": {
                    "hook": {
                        "prompt": "{text}",
                        "deliver": chat.name,
                        "deliver_extra": {"chat_id": chat.address(WEBHOOK_CHAT)},
                        "linger": 300.0,
                    },
                    "direct": {
                        "prompt": "{text}",
                        "deliver": chat.name,
                        "deliver_extra": {"chat_id": chat.address(WEBHOOK_CHAT)},
                        "deliver_only": True,
                    },
                },
            },
            mcp={"servers": {"sim": {"command": MCP_COMMAND, "profile": "off"}}} if self.program.mcp else {},
            cron={"timezone": ZONE, "linger": 300.0},
            home=Path(_home()) / "state",
            plugins=PluginSettings(tools=[PLUGIN]),
            environment={"HOME": _home(), "PATH": "/usr/bin:/bin"},
            **tables,
        )

    async def _play(self) -> None:
        people = People(self, self._nursery)
        await self._until_ready()
        tasks = count_tasks()
        people.arrange()
        for step in self.program.steps:
            await trio.sleep_until(self.started_at + step.at)
            if step.is_fault:
                self._fail(step)
            elif step.kind in ("restart", "upgrade"):
                self.trace.note("operator", str(step).strip())
                self._nursery.start_soon(self._operate, step)
            else:
                people.act(step)
        await trio.sleep_until(self.started_at + self.program.seconds)
        self._heal()
        await trio.sleep(self.settings.calm_seconds)
        self.held = held_rows(self)
        self.leftovers = left_over(self, tasks)
        self.zombies = [text for node in self.nodes for text in node.zombies()]
        await people.finish()
        for node in self.nodes:
            if node.alive:
                node.drain()
                with trio.move_on_after(300):
                    await node.ended.wait()
            else:
                self.late.append(f"{node.name} does not run at the end of the calm")
        await trio.sleep(60)
        self.zombies += [text for node in self.nodes for text in node.left_servers()]
        self.trace.note("over", "")

    async def _operate(self, step: Step) -> None:
        """Restart the node of the step, or all nodes one after the other for an upgrade."""
        down = float(script.options_of(step.words).get("down", "0"))
        for node in self.nodes if step.kind == "upgrade" else [self._node(step)]:
            await self._restart(node, down)

    async def _restart(self, node: SimulatedNode, down: float) -> None:
        """Drain a node, wait for its end, and start it again after `down` seconds. Does nothing if it is down or draining."""
        if not node.alive or node.draining:
            return
        began = trio.current_time()
        ended, faulty, before = node.ended, node.paused or bool(node.cut), len(self.trace)
        node.drain()
        await ended.wait()
        # A draining node waits for a slow write, and does nothing while it is paused or cut off.
        slow = any(one.kind == "injected" and one.text.endswith(" slow") for one in self.trace)
        faulty = faulty or any(
            one.kind == "fault" and one.text.startswith(("pause", "partition")) for one in list(self.trace)[before:]
        )
        if trio.current_time() - began > DRAIN_SECONDS and not faulty and not node.paused and not slow:
            self.late.append(f"{node.name} took {trio.current_time() - began:.0f} s to end after it was asked to drain")
        await trio.sleep(down)
        if not node.alive:
            node.start()

    def _node(self, step: Step) -> SimulatedNode:
        """Return the node that a step names."""
        return self.nodes[step.who % len(self.nodes)]

    async def _until_ready(self) -> None:
        with trio.fail_after(120):
            for node in self.nodes:
                await node.ready.wait()

    def _heal(self) -> None:
        self.trace.note("calm", "faults end")
        self.calm = True
        self.faults.heal()
        self.disk.heal()
        self.chat.heal()
        self._model_faults.clear()
        for node in self.nodes:
            node.crash_points.clear()
            node.wake_faults.clear()
            node.mcp_faults.clear()
            node.partition("")
            node.resume()
            node.calm = True

    def _restart_later(self, node: SimulatedNode, down: float) -> None:
        async def restart() -> None:
            await trio.sleep(down)
            if not node.alive:
                node.start()

        self._nursery.start_soon(restart)

    # -- faults -------------------------------------------------------------------------------------------------------------------

    def _fail(self, step: Step) -> None:
        script.check_fault(step.kind, step.words)
        words = step.words.split()
        options = script.options_of(step.words)
        self.trace.note("fault", f"{step.kind} {step.words}")
        if step.kind not in ("store", "crash", "disk"):
            how = "step" if step.kind == "clock" else words[1] if step.kind in PLATFORMS else words[0]
            self._cover(f"{'platform' if step.kind in PLATFORMS else step.kind} {how}")
        match step.kind:
            case "store":
                self._store_fault(words[0], words[1], options)
            case "crash":
                down = float(options["down"])
                if words[0] == "now":
                    self._node(step).crash(down)
                else:
                    self._node(step).crash_points.append(CrashPoint(words[1], after=words[0] == "after", down=down))
            case kind if kind in PLATFORMS:
                if kind == self.chat.name:
                    self.chat.fail(words[0], words[1], int(options.get("times", 1)), step.number)
            case "model":
                self._model_faults.append((words[0], int(options["after"])))
            case "mcp":
                self._node(step).mcp_faults.append(words[0])
            case "receiver":
                self._node(step).break_receiver()
            case "disk":
                self.disk.fail(words[0], words[1], skip=int(options.get("skip", 0)), undone="undone" in options)
            case "clock":
                self._step_clock(self._node(step), float(options["step"]))
            case "pause":
                self._nursery.start_soon(self._pause, self._node(step), float(options["seconds"]))
            case "partition":
                self._nursery.start_soon(self._partition, self._node(step), words[0], float(options["seconds"]))
            case _:
                self._node(step).wake_faults.extend([words[0]] * int(options["times"]))

    def _step_clock(self, node: SimulatedNode, seconds: float) -> None:
        """Step the clock: that of the world with one node, that of the node's host with several. Leases use the clock of the database."""
        if len(self.nodes) == 1:
            self.boundary.offset += seconds
        else:
            node.clock_offset += seconds

    async def _pause(self, node: SimulatedNode, seconds: float) -> None:
        node.pause()
        await trio.sleep(seconds)
        node.resume()

    async def _partition(self, node: SimulatedNode, how: str, seconds: float) -> None:
        node.partition(how)
        await trio.sleep(seconds)
        node.partition("")

    def _hold_paused(self) -> None:
        self.boundary.hold(is_paused if any(node.paused for node in self.nodes) else None)

    def _injected(self, fault: InjectedFault) -> None:
        self.trace.note("injected", f"{fault.verb} {fault.kind.value}")
        at, count = self._refused
        self._refused = (self.trace.last.at, count + 1 if at == self.trace.last.at else 1)
        if self._refused[1] >= HOT_REFUSALS:
            # Without a pause between retries virtual time would not advance: end the faults of the store.
            self.hot.append(f"the store refused {HOT_REFUSALS} calls in one instant, the last was {fault.verb}")
            self.faults.heal()
        self.coverage.verbs[fault.verb, fault.kind.value] += 1
        self._cover(f"store {fault.kind.value}")

    def _disk_failed(self, point: str, error: str) -> None:
        self.trace.note("injected", f"disk {error} at {point}")
        self.coverage.disk[point, error] += 1
        self._cover("disk")

    def _crashed(self, node: SimulatedNode, down: float) -> None:
        failed = [one.text for one in self.trace if one.kind == "power fails"]
        if failed:
            when, verb = failed[-1].split()
            self.coverage.verbs[verb, f"crash {when}"] += 1
        self._cover("crash")
        self._restart_later(node, down)

    def _cover(self, fault: str) -> None:
        """Count a fault for every state that a row has now."""
        for (state,) in self.rows(STATES_SQL):
            self.coverage.states[fault, state] += 1

    def _ended(self, node: SimulatedNode) -> None:
        """Record the jobs without an end if the only node has ended by itself and the store had no recent fault."""
        if len(self.nodes) > 1:
            return
        now = trio.current_time() - self.started_at
        if any(one.kind == "injected" and now - one.at < STORE_MEMORY for one in reversed(list(self.trace))):
            return
        for (job,) in self.rows("SELECT job_id || ' ' || state FROM jobs WHERE ended_at IS NULL"):
            self.left_behind.append(f"{node.name} ended by itself and left the job {job}")

    def _store_fault(self, verb: str, how: str, options: Mapping[str, str]) -> None:
        times, skip = int(options.get("times", 1)), int(options.get("skip", 0))
        seconds = float(options["seconds"]) if "seconds" in options else None
        verbs = () if verb == "*" else (verb,)
        if seconds is not None and how != "slow":
            self.faults.fail(*verbs, times=None, seconds=seconds, after_commit=how == "after")
            return
        chance = 0.15 if verb == "*" else 1.0
        match how:
            case "full":
                self.faults.full(*verbs, times=times, skip=skip)
            case "slow":
                self.faults.slow(*verbs, seconds=seconds or 12.0, times=times, skip=skip)
            case "busy":
                self.faults.fail(*verbs, times=times, skip=skip, chance=chance, error=_busy)
            case _:
                self.faults.fail(*verbs, times=times, skip=skip, chance=chance, after_commit=how == "after")

    def _model_answer(self, call: ScriptedCall) -> ScriptedAnswer | ScriptedRefusal:
        reply = script.answer(call)
        messages: Any = call.body.get("messages") or [{}]
        child = script.is_child(call)
        at = self.clock.current_time() - self.started_at
        seen = CallSeen(caller_of.get(), script.asked_of(call), child, at, script.known_to(call))
        self.seen.calls.append(seen)
        self._nursery.start_soon(self._note_end, seen, call)
        beside = [
            one for one in self.seen.calls if one.life == seen.life and one.ended_at is None and one.child is child
        ]
        if child:
            about = script.marks(seen.asked)
            self.seen.most_children = max(
                self.seen.most_children, sum(script.marks(one.asked) == about for one in beside)
            )
        else:
            self.seen.most_calls = max(self.seen.most_calls, len(beside))
        what = reply.text or reply.tool_calls[0].arguments
        self.trace.note("model", f"{caller_of.get()} {len(messages)} messages, {what}")
        if not self._model_faults:
            return reply
        how, after = self._model_faults.pop(0)
        self.trace.note("model fault", how)
        if how == "refuse":
            return ScriptedRefusal(status=500)
        if how == "limit":
            return ScriptedRefusal(status=429, headers={"retry-after": "3"})
        return attrs.evolve(reply, fault=ModelFault[how.upper()], fault_after=after)

    async def _note_end(self, seen: CallSeen, call: ScriptedCall) -> None:
        await call.ended.wait()
        seen.ended_at = self.clock.current_time() - self.started_at

    # -- OutsideWorld -------------------------------------------------------------------------------------------------------------

    def custody(self) -> Any:
        """Return a new warden of the calling node."""
        node = current_node.get()
        assert node is not None
        return node.custody()

    async def in_thread(self, call: Callable[[], Any]) -> Any:
        """Run `call` in a simulated thread of the calling node. Only a crash ends the thread; cancelling abandons it."""
        node = current_node.get()
        assert node is not None
        life = node.starts
        note = node.note_of_life()
        seconds, says = thread_work.get()
        results: list[outcome.Outcome[Any]] = []
        over = trio.Event()

        async def live() -> None:
            await trio.sleep(seconds)
            if not node.alive or node.starts != life:
                return
            if says:
                note("thread ends", says)
            results.append(outcome.capture(call))
            over.set()

        if says:
            note("thread starts", says)
        self._nursery.start_soon(live)
        await over.wait()
        return results[0].unwrap()

    async def dial(self, host: str, port: int) -> trio.SocketStream:
        """Connect the calling node to a host of this world. Raises `OSError` if there is no such host."""
        node = current_node.get()
        assert node is not None, f"only nodes connect to {host}"
        serve = self._hosts.get(host)
        if serve is None:
            raise OSError(f"no host {host} in this world")
        return await node.dial(serve)

    # -- rows ----------------------------------------------------------------------------------------------------------------------

    def was_removed(self, run_id: str) -> bool:
        """Return whether retention has removed a run."""
        return self.archive is not None and self.archive.has_run(run_id)

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a query on the shared database, for the invariants."""
        writer: Any = self.store._writer
        return list(writer._db.execute(sql, values))


_PLATFORMS: Final[Mapping[str, Callable[[Callable[[str, str], None], trio.Nursery], SimulatedPlatform[Any]]]] = {
    "telegram": SimulatedTelegram,
    "discord": SimulatedDiscord,
    "slack": SimulatedSlack,
}


def _clock_offset() -> float:
    node = current_node.get()
    return 0.0 if node is None else node.clock_offset


def _busy(verb: str) -> StoreBusy:
    return StoreBusy(f"injected: {verb} is busy")


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="hermes-trio-simulation-")


def _home() -> str:
    """Return a real folder in which commands start. Nothing is written to it; it is removed when this process ends."""
    return _folder().name
