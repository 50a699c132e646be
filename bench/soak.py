"""Mixed load for a while, then the proof that nothing is left: `python -m bench.soak [--seconds 120]` or `make soak`.

`hermes-trio serve` with the demo model, its tools and a durable store, under 200 clients that chat, stream, start runs, follow and stop them, run shell
commands, and leave in the middle of everything. When they pause: no node in the tree that an idle server has not, no process, no more descriptors,
memory within a tenth of its value after the warm-up, and no row that has not ended. Then SIGTERM in the middle of the same load: the server drains, says
what it found, and exits with 0; every run and every answer that it acknowledged is in the store. Exit status 1 if anything of that does not hold.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import apsw
import attrs
import trio
from rich.progress import Progress

from bench.load import free_port, raise_descriptor_limit, request_bytes
from bench.pinned_server import REFERENCE_KEY, ROOT, rss_bytes
from bench.report import Report, arguments_for, progress

CLIENTS = 200
CALM_SECONDS = 30.0
"""Seconds that the tree may take to become idle again."""
END_SECONDS = 60.0
RSS_BOUND = 1.10
SPARE_DESCRIPTORS = 5
"""Readers of the store are opened when they are first needed."""

_OPEN_ROWS = {
    "runs": "SELECT count(*) FROM runs WHERE ended_at IS NULL",
    "jobs": "SELECT count(*) FROM jobs WHERE ended_at IS NULL",
    "turns": "SELECT count(*) FROM sessions WHERE open_turn IS NOT NULL",
    "inbox": "SELECT count(*) FROM inbox WHERE settled_at IS NULL",
    "outbox": "SELECT count(*) FROM outbox WHERE settled_at IS NULL",
    "approvals": "SELECT count(*) FROM approvals WHERE state = 'pending'",
}


class Left(Exception):
    """The server closed the connection, or there is none: expected while it ends."""


@attrs.define
class Tally:
    """What the clients did, and what was acknowledged."""

    done: Counter[str] = attrs.field(factory=Counter[str])
    wrong: list[str] = attrs.field(factory=list[str])
    prompts: set[str] = attrs.field(factory=set[str])
    """Questions that were answered with 200: they must be in the store."""
    runs: set[str] = attrs.field(factory=set[str])
    """Runs that were answered with 202."""
    ending: bool = False

    def expect(self, good: bool, what: str) -> None:
        """Record an unexpected response."""
        if not good and not self.ending:
            self.wrong.append(what)


# -- a client --------------------------------------------------------------------------------------------------------------------


class Connection:
    """One HTTP/1.1 connection of a client."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._data = b""

    @classmethod
    async def open(cls, port: int) -> Connection:
        """Connect, or raise `Left`."""
        try:
            return cls(await trio.open_tcp_stream("127.0.0.1", port))
        except OSError as error:
            raise Left from error

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """Send a request and read the whole answer."""
        await self.send(method, path, body)
        status, length = await self.head()
        return status, await self.body(length)

    async def send(self, method: str, path: str, body: Any = None) -> None:
        """Send a request."""
        text = "" if body is None else json.dumps(body)
        try:
            await self._stream.send_all(request_bytes(text, path=path, method=method))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise Left from error

    async def head(self) -> tuple[int, int | None]:
        """The status, and the length of the body; None for a chunked one."""
        while (end := self._data.find(b"\r\n\r\n")) < 0:
            await self._more()
        head, self._data = self._data[:end].lower(), self._data[end + 4 :]
        _, found, length = head.partition(b"content-length:")
        return int(head[9:12]), int(length.partition(b"\r\n")[0]) if found else None

    async def body(self, length: int | None) -> bytes:
        """The rest of an answer."""
        if length is not None:
            while len(self._data) < length:
                await self._more()
            body, self._data = self._data[:length], self._data[length:]
            return body
        parts: list[bytes] = []
        while True:
            while (end := self._data.find(b"\r\n")) < 0:
                await self._more()
            size = int(self._data[:end], 16)
            while len(self._data) < end + 2 + size + 2:
                await self._more()
            parts.append(self._data[end + 2 : end + 2 + size])
            self._data = self._data[end + 4 + size :]
            if not size:
                return b"".join(parts)

    async def _more(self) -> None:
        try:
            data = await self._stream.receive_some()
        except trio.BrokenResourceError as error:
            raise Left from error
        if not data:
            raise Left
        self._data += data

    async def close(self) -> None:
        """Disconnect."""
        await self._stream.aclose()


def _chat(prompt: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}], **more}


async def chat(one: Connection, tally: Tally, prompt: str) -> None:
    """Send a chat completion and read the response."""
    status, _ = await one.ask("POST", "/v1/chat/completions", _chat(prompt))
    tally.expect(status == 200, f"chat {status}")
    if status == 200:
        tally.prompts.add(prompt)


async def stream(one: Connection, tally: Tally, prompt: str) -> None:
    """Send a streamed chat completion and read its events."""
    await one.send("POST", "/v1/chat/completions", _chat(prompt, stream=True))
    status, length = await one.head()
    body = await one.body(length)
    tally.expect(status == 200 and body.endswith(b"data: [DONE]\n\n"), f"stream {status}")
    if status == 200 and body.endswith(b"data: [DONE]\n\n") and b'"finish_reason":"stop"' in body:
        tally.prompts.add(prompt)


async def _start(one: Connection, tally: Tally, prompt: str) -> str:
    status, body = await one.ask("POST", "/v1/runs", {"input": prompt})
    tally.expect(status == 202, f"run {status} {body[:200]!r}")
    if status != 202:
        return ""
    run_id: str = json.loads(body)["run_id"]
    tally.runs.add(run_id)
    return run_id


async def run(one: Connection, tally: Tally, prompt: str) -> None:
    """Start a run and wait until all of it is over."""
    if run_id := await _start(one, tally, prompt):
        status, body = await one.ask("GET", f"/v1/runs/{run_id}?wait=settled&timeout=60")
        tally.expect(status == 200 and b'"completed"' in body, f"waiting for a run {status} {body[:200]!r}")


async def follow(one: Connection, tally: Tally, prompt: str) -> None:
    """Start a run and read its events to the end."""
    if run_id := await _start(one, tally, prompt):
        await one.send("GET", f"/v1/runs/{run_id}/events")
        status, length = await one.head()
        body = await one.body(length)
        tally.expect(status == 200 and b"run.completed" in body, f"events {status} {body[-200:]!r}")


async def command(one: Connection, tally: Tally, prompt: str) -> None:
    """Let the agent run a shell command."""
    status, body = await one.ask(
        "POST", "/v1/chat/completions", _chat(f"!run echo {prompt.replace(' ', '-')}\n{prompt}")
    )
    tally.expect(status == 200 and prompt.replace(" ", "-").encode() in body, f"command {status} {body[:200]!r}")


async def stop(one: Connection, tally: Tally, prompt: str) -> None:
    """Stop a run that would take long: a wait, or a shell command."""
    order = "!sleep 60" if random.random() < 0.7 else "!run sleep 60"
    if run_id := await _start(one, tally, f"{order}\n{prompt}"):
        await trio.sleep(random.random() * 0.3)
        status, body = await one.ask("POST", f"/v1/runs/{run_id}/stop?wait=true")
        tally.expect(status == 200 and b'"ok":true' in body, f"stop {status} {body[:300]!r}")


async def leave(one: Connection, tally: Tally, prompt: str) -> None:
    """Send a long request, and disconnect before the response."""
    order = random.choice(["!sleep 60", "!run sleep 60"])
    streamed = random.random() < 0.5
    await one.send("POST", "/v1/chat/completions", _chat(f"{order}\n{prompt}", stream=streamed))
    await trio.sleep(random.random() * 0.3)
    await one.close()


MIX: list[tuple[Callable[[Connection, Tally, str], Awaitable[None]], float]] = [
    (chat, 0.40),
    (stream, 0.20),
    (run, 0.08),
    (follow, 0.09),
    (command, 0.03),
    (stop, 0.10),
    (leave, 0.10),
]


async def client(number: int, port: int, tally: Tally, until: float) -> None:
    """Run one client: a mix of all actions, on one connection for as long as it lasts."""
    choice = random.Random(number)
    one: Connection | None = None
    count = 0
    # Not all at the same moment.
    await trio.sleep(choice.random())
    try:
        while trio.current_time() < until:
            count += 1
            if one is None:
                one = await Connection.open(port)
            act = choice.choices([act for act, _ in MIX], [weight for _, weight in MIX])[0]
            await act(one, tally, f"soak {os.getpid()} {number} {id(tally)} {count}")
            tally.done[act.__name__] += 1
            if act is leave:
                one = None
            await trio.sleep(choice.random() * 0.4)
    except Left:
        tally.expect(False, f"client {number} lost its connection")
    finally:
        if one is not None:
            with trio.CancelScope(shield=True):
                await one.close()


async def load(port: int, seconds: float, tally: Tally, clients: int = CLIENTS) -> None:
    """Run all clients for `seconds`, and wait until each has got its last response."""
    until = trio.current_time() + seconds
    async with trio.open_nursery() as nursery:
        for number in range(clients):
            nursery.start_soon(client, number, port, tally, until)


# -- what is left ----------------------------------------------------------------------------------------------------------------


@attrs.frozen
class State:
    """The state of the server: nodes of its tree by kind, processes, descriptors and memory."""

    nodes: dict[str, int]
    processes: int
    descriptors: int
    rss: int


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for word in (task / "children").read_text().split():
            found += [int(word), *_descendants(int(word))]
    return found


def _nodes(tree: dict[str, Any], counts: Counter[str]) -> Counter[str]:
    counts[tree["kind"]] += 1
    for child in tree.get("children", ()):
        _nodes(child, counts)
    return counts


async def state_of(pid: int, port: int) -> State:
    """Read the state of the server from its tree and from /proc."""
    one = await Connection.open(port)
    _, body = await one.ask("GET", "/v1/tree")
    await one.close()
    await trio.sleep(0.1)
    tree = json.loads(body)
    nodes = _nodes(tree.get("tree", tree), Counter())
    return State(dict(nodes), len(_descendants(pid)), len(os.listdir(f"/proc/{pid}/fd")), rss_bytes(pid))


async def calm_state(pid: int, port: int, idle: State | None) -> State:
    """Return the state when the tree is idle again, or after the time limit."""
    deadline = trio.current_time() + CALM_SECONDS
    while True:
        state = await state_of(pid, port)
        same = idle is None or (state.nodes == idle.nodes and state.processes <= idle.processes)
        if same or trio.current_time() > deadline:
            return state
        await trio.sleep(0.25)


def open_rows(database: Path) -> dict[str, int]:
    """How many rows of each kind have not ended."""
    db = apsw.Connection(str(database), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        return {name: cast("int", db.execute(sql).fetchall()[0][0]) for name, sql in _OPEN_ROWS.items()}
    finally:
        db.close()


def lost(database: Path, tally: Tally) -> tuple[int, int]:
    """Acknowledged runs without an end, and acknowledged questions that are not in the store."""
    db = apsw.Connection(str(database), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        ended = {row[0] for row in db.execute("SELECT run_id FROM runs WHERE ended_at IS NOT NULL")}
        kept = {
            row[0] for row in db.execute("SELECT content FROM messages WHERE role = 'user' AND content LIKE 'soak %'")
        }
    finally:
        db.close()
    return len(tally.runs - ended), len(tally.prompts - kept)


# -- the whole -------------------------------------------------------------------------------------------------------------------


@attrs.define
class Soak:
    """What was seen. `memory` is the server's, every second of the load after the warm-up."""

    memory: list[int]
    idle: State
    warm: State
    after: State
    rows: dict[str, int]
    tally: Tally
    last: Tally
    status: int | None
    output: str
    lost_runs: int
    lost_answers: int
    rows_at_the_end: dict[str, int]


async def _weigh(pid: int, memory: list[int]) -> None:
    while True:
        memory.append(rss_bytes(pid))
        await trio.sleep(1)


async def soak(process: subprocess.Popen[str], port: int, home: Path, seconds: float, bar: Progress) -> Soak:
    """Warm up, load, measure, and end the server under load."""
    database = home / "state.db"
    task = bar.add_task("warming up", total=4)
    tally, last = Tally(), Tally()
    warming = max(3.0, seconds / 3)
    memory: list[int] = []
    await load(port, warming, Tally())
    warm = await calm_state(process.pid, port, None)
    idle = await calm_state(process.pid, port, warm)
    bar.update(task, advance=1, description=f"{CLIENTS} clients for {seconds - warming:.0f} s")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_weigh, process.pid, memory)
        await load(port, seconds - warming, tally)
        nursery.cancel_scope.cancel()
    bar.update(task, advance=1, description="looking at what is left")
    after = await calm_state(process.pid, port, idle)
    rows = await trio.to_thread.run_sync(open_rows, database)
    bar.update(task, advance=1, description="SIGTERM under load")
    with trio.move_on_after(END_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load, port, END_SECONDS, last)
            await trio.sleep(3)
            last.ending = True
            process.send_signal(signal.SIGTERM)
            await trio.to_thread.run_sync(process.wait, abandon_on_cancel=True)
            nursery.cancel_scope.cancel()
    bar.advance(task)
    output = "" if process.stdout is None or process.poll() is None else process.stdout.read()
    missing = await trio.to_thread.run_sync(lost, database, last)
    earlier = await trio.to_thread.run_sync(lost, database, tally)
    return Soak(
        memory,
        idle,
        warm,
        after,
        rows,
        tally,
        last,
        process.poll(),
        output,
        missing[0] + earlier[0],
        missing[1] + earlier[1],
        await trio.to_thread.run_sync(open_rows, database),
    )


def main() -> int:
    """Run the soak; 1 if something is left or was lost."""
    parser = arguments_for(__doc__)
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("SECONDS_", 120)))
    parser.add_argument(
        "--nodes", type=int, default=1, help="several nodes on PostgreSQL, one of them killed every 20 s"
    )
    args = parser.parse_args()
    raise_descriptor_limit()
    if args.nodes > 1:
        from bench import soak_nodes

        report = Report("soak-nodes", args.results, args.plot)
        return soak_nodes.main(args.nodes, 45.0 if args.quick else args.seconds, report)
    seconds = 20.0 if args.quick else args.seconds
    report = Report("soak", args.results, args.plot)
    with progress() as bar, tempfile.TemporaryDirectory(prefix="hermes-trio-soak-") as folder:
        home, port = Path(folder), free_port()
        environment = os.environ | {"API_SERVER_KEY": REFERENCE_KEY, "HERMES_HOME": folder}
        program = [str(Path(sys.executable).with_name("hermes-trio")), "serve", "--port", str(port)]
        with (home / "log").open("w") as log:
            process = subprocess.Popen(
                program,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                cwd=ROOT,
                start_new_session=True,
            )
            try:
                assert process.stdout is not None
                if "listens on" not in process.stdout.readline():
                    raise SystemExit(f"the server did not start: {(home / 'log').read_text()}")
                began = time.monotonic()
                seen = trio.run(soak, process, port, home, seconds, bar)
                took = time.monotonic() - began
            finally:
                if process.poll() is None:
                    process.kill()
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()
    return _tell(report, seen, took)


def _tell(report: Report, seen: Soak, took: float) -> int:
    done = seen.tally.done + seen.last.done
    report.table("What the clients did", ["", "times"], [[name, f"{count:,}"] for name, count in done.most_common()])
    warm, after = seen.warm, seen.after
    extra = {
        kind: count - seen.idle.nodes.get(kind, 0)
        for kind, count in after.nodes.items()
        if count > seen.idle.nodes.get(kind, 0)
    }
    grown = after.rss / warm.rss
    report.table(
        "The server while nobody asks",
        ["", "after the warm-up", "after the load"],
        [
            ["tree nodes", str(sum(warm.nodes.values())), str(sum(after.nodes.values()))],
            ["processes", str(warm.processes), str(after.processes)],
            ["descriptors", str(warm.descriptors), str(after.descriptors)],
            ["RSS, MB", f"{warm.rss / 1e6:.1f}", f"{after.rss / 1e6:.1f}"],
            ["rows without an end", "", str(sum(seen.rows.values()))],
        ],
    )
    for problem, count in Counter(seen.tally.wrong).most_common(10):
        print(f"unexpected, {count} times: {problem}")
    report.figures |= {
        "seconds": round(took, 1),
        "done": dict(done),
        "memory_by_second": seen.memory,
        "warm": attrs.asdict(warm),
        "after": attrs.asdict(after),
        "rows": seen.rows,
        "exit_status": seen.status,
        "acknowledged_runs": len(seen.tally.runs | seen.last.runs),
        "acknowledged_answers": len(seen.tally.prompts | seen.last.prompts),
    }
    report.bound(f"{sum(done.values()):,} exchanges, {len(seen.tally.wrong)} unexpected answers", not seen.tally.wrong)
    report.bound(f"{sum(extra.values())} nodes beyond the idle tree", not extra)
    report.bound(f"{after.processes - seen.idle.processes} processes left", after.processes <= seen.idle.processes)
    descriptors = after.descriptors - warm.descriptors
    report.bound(f"descriptors {descriptors:+d}", descriptors <= SPARE_DESCRIPTORS)
    report.bound(f"RSS {grown:.2f} x its value after the warm-up (at most {RSS_BOUND})", grown <= RSS_BOUND)
    report.bound(f"{sum(seen.rows.values())} rows without an end", not sum(seen.rows.values()))
    drained = next((line for line in seen.output.splitlines() if line.startswith("drained in")), "no drain report")
    report.bound(
        f"SIGTERM under load: exit {seen.status}, {drained}", seen.status == 0 and drained.startswith("drained")
    )
    promised = len(seen.tally.runs | seen.last.runs) + len(seen.tally.prompts | seen.last.prompts)
    lost_words = f"{seen.lost_runs + seen.lost_answers} of {promised:,} acknowledged lost"
    report.bound(lost_words, not seen.lost_runs and not seen.lost_answers)
    left = sum(seen.rows_at_the_end.values())
    report.bound(f"{left} rows without an end after it", not left)

    def draw(axes: Any) -> None:
        axes.plot([rss / 1e6 for rss in seen.memory])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("seconds of load after the warm-up")
        axes.set_title(f"memory of a server under {CLIENTS} clients, MB")

    report.plot(draw, height=3)
    return report.finish(strict=True)


if __name__ == "__main__":
    sys.exit(main())
