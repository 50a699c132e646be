"""Mixed load from many clients on the real server: nothing is left behind, and nothing acknowledged is lost when it is told to end.

`HERMES_SOAK_SECONDS` says for how long, `HERMES_SOAK_CLIENTS` how many clients.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from .server_process import KEY, ServerProcess, server_process

SECONDS = float(os.environ.get("HERMES_SOAK_SECONDS", "20"))
CLIENTS = int(os.environ.get("HERMES_SOAK_CLIENTS", "200"))

pytestmark = pytest.mark.slow


class Refused(Exception):
    """The server closed the door: it drains, or has ended."""


@attrs.define
class Load:
    """What the clients did, and which runs they were promised."""

    port: int
    done: Counter[str] = attrs.Factory(Counter[str])
    promised: list[str] = attrs.Factory(list[str])
    problems: list[str] = attrs.Factory(list[str])

    async def _open(self, method: str, path: str, body: Any) -> trio.SocketStream:
        data = b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\nconnection: close\r\n"
            f"content-length: {len(data)}\r\n\r\n"
        )
        try:
            stream = await trio.open_tcp_stream("127.0.0.1", self.port)
            await stream.send_all(head.encode() + data)
        except OSError as error:
            raise Refused from error
        return stream

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """One request, one whole answer."""
        answer = bytearray()
        try:
            async with await self._open(method, path, body) as stream:
                async for data in stream:
                    answer += data
        except trio.BrokenResourceError as error:
            raise Refused from error
        if not answer:
            raise Refused
        head, _, rest = bytes(answer).partition(b"\r\n\r\n")
        return int(head.split()[1]), rest

    async def expect(self, what: str, method: str, path: str, body: Any = None, status: int = 200) -> bytes:
        """A request whose answer is known."""
        found, answer = await self.ask(method, path, body)
        if found == 503:
            raise Refused
        if found == 429:
            self.done["busy"] += 1
        elif found != status:
            self.problems.append(f"{what}: {found} {answer[:300]!r}")
        else:
            self.done[what] += 1
        return answer

    async def leave(self, path: str, body: Any) -> None:
        """Leave in the middle of an answer."""
        async with await self._open("POST", path, body) as stream:
            with trio.move_on_after(0.2):
                await stream.receive_some()
        self.done["left"] += 1

    async def run(self, text: str) -> str:
        """Start a run; its id is a promise."""
        answer = await self.expect("run", "POST", "/v1/runs", {"input": text}, 202)
        match = re.search(rb'"run_id":"(run_\w+)"', answer)
        if match is None:
            return ""
        run_id = match[1].decode()
        self.promised.append(run_id)
        return run_id

    async def client(self, seed: int) -> None:
        """One client: does this and that until the door is closed."""
        dice = random.Random(seed)
        message = [{"role": "user", "content": f"Hello {seed}"}]
        slow = [{"role": "user", "content": "!sleep 20"}]
        try:
            while True:
                match dice.randrange(9):
                    case 0 | 1:
                        await self.expect("chat", "POST", "/v1/chat/completions", {"messages": message})
                    case 2:
                        body = {"messages": message, "stream": True}
                        answer = await self.expect("stream", "POST", "/v1/chat/completions", body)
                        if b"[DONE]" not in answer and b"rate_limit" not in answer:
                            self.problems.append("a stream was cut off")
                    case 3:
                        await self.expect("response", "POST", "/v1/responses", {"input": f"Hello {seed}"})
                    case 4:
                        await self.leave("/v1/chat/completions", {"messages": slow, "stream": dice.random() < 0.5})
                    case 5:
                        await self.leave("/v1/responses", {"input": "!sleep 20", "stream": True})
                    case 6:
                        if run_id := await self.run(f"Hello {seed}"):
                            answer = await self.expect("events", "GET", f"/v1/runs/{run_id}/events")
                            if b"run.completed" not in answer:
                                self.problems.append(f"{run_id} has no end: {answer[-300:]!r}")
                    case 7:
                        if run_id := await self.run("!sleep 20"):
                            await self.stop(run_id)
                    case _:
                        if dice.random() < 0.1 and (run_id := await self.run("!run sleep 30")):
                            await trio.sleep(dice.random() / 2)
                            await self.stop(run_id)
                await trio.sleep(dice.random() / 10)
        except Refused:
            return

    async def stop(self, run_id: str) -> None:
        """Stop a run and look at the receipt."""
        answer = await self.expect("stop", "POST", f"/v1/runs/{run_id}/stop?wait=true")
        if b'"ok":true' not in answer:
            self.problems.append(f"stop of {run_id}: {answer[-500:]!r}")

    async def for_seconds(self, seconds: float) -> None:
        """All clients for so long."""
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                for seed in range(CLIENTS):
                    nursery.start_soon(self.client, seed)


def memory_of(pid: int) -> int:
    """Resident memory, in kilobytes."""
    match = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert match
    return int(match[1])


def descriptors_of(pid: int) -> int:
    """Open descriptors."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def descendants_of(pid: int) -> list[str]:
    """The commands of all processes below this one."""
    parents: dict[int, list[tuple[int, str]]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
            except OSError:
                continue
            name, _, rest = text.partition("(")[2].rpartition(")")
            parents.setdefault(int(rest.split()[1]), []).append((int(entry.name), name))
    found: list[str] = []
    pending = [pid]
    while pending:
        for child, name in parents.get(pending.pop(), []):
            found.append(name)
            pending.append(child)
    return found


async def settled(load: Load) -> dict[str, Any]:
    """Stop the runs whose clients were cut off, wait until nothing runs any more, and return the tree."""
    while True:
        _, runs = await load.ask("GET", "/v1/runs?status=running&limit=200")
        for run in json.loads(runs)["data"]:
            await load.ask("POST", f"/v1/runs/{run['run_id']}/stop")
        _, health = await load.ask("GET", "/health/detailed")
        queues = json.loads(health)["readiness"]["checks"]["background_queues"]
        if not json.loads(health)["active_agents"] and not queues["live_runs"]:
            assert (queues["jobs"], queues["approvals"], queues["runs"]) == (0, 0, 0)
            _, tree = await load.ask("GET", "/v1/tree")
            return json.loads(tree)
        await trio.sleep(0.1)


async def warmed_up(load: Load, pid: int) -> int:
    """Load in rounds until the database's caches are full, which memory shows by growing no more; returns it."""
    memory = memory_of(pid)
    for _ in range(8):
        await load.for_seconds(SECONDS / 2)
        await settled(load)
        before, memory = memory, memory_of(pid)
        if memory <= before * 1.02:
            break
    return memory


def _start(home: Path) -> str:
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text("[log]\nlevel = 'error'\n[server]\ndrain_seconds = 3\n")
    return str(home)


def port_of(server: ServerProcess) -> int:
    """Where it listens."""
    return int(server.url.rpartition(":")[2])


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """After the load: the idle tree, no process, as many descriptors as before, memory as after the warm-up, no open row."""
    _start(tmp_path)
    with server_process(tmp_path) as server:
        load = Load(port_of(server))

        async def main() -> None:
            with trio.fail_after(SECONDS * 6 + 120):
                idle = await settled(load)
                descriptors = descriptors_of(server.pid)
                memory = await warmed_up(load, server.pid)
                await load.for_seconds(SECONDS)
                after = await settled(load)
                assert after["size"] <= idle["size"] + 1, json.dumps(after)[:3000]
                assert descriptors_of(server.pid) <= descriptors + 8
                assert memory_of(server.pid) <= memory * 1.1
                assert "sleep" not in descendants_of(server.pid)

        trio.run(main)
        assert load.problems == []
        assert min(load.done[what] for what in ("chat", "stream", "response", "left", "run", "events", "stop")) > 0
        assert server.stop() == 0
        assert "0 turns, 0 jobs, 0 threads left" in server.output


def test_nothing_acknowledged_is_lost_when_it_ends_under_load(tmp_path: Path) -> None:
    """SIGTERM under load: a drain report, exit 0, and after a restart every promised run has a truthful end."""
    _start(tmp_path)
    with server_process(tmp_path) as server:
        load = Load(port_of(server))

        async def main() -> None:
            with trio.fail_after(SECONDS + 90):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(load.for_seconds, SECONDS)
                    await trio.sleep(min(5.0, SECONDS / 2))
                    await trio.to_thread.run_sync(server.stop)
                    nursery.cancel_scope.cancel()

        trio.run(main)
        assert server.wait() == 0
        assert "0 turns, 0 jobs, 0 threads left" in server.output
    assert load.promised
    with server_process(tmp_path) as server:
        load.port = port_of(server)

        async def check() -> None:
            with trio.fail_after(60):
                for run_id in load.promised:
                    status, body = await load.ask("GET", f"/v1/runs/{run_id}")
                    assert status == 200, run_id
                    run = json.loads(body)
                    assert run["status"] in ("completed", "cancelled", "failed"), run
                    assert run.get("error_code") != "interrupted", run

        trio.run(check)
