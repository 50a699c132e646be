"""Simulated processes: a warden that is a task, and commands whose text says what they do.

The real `Warden` and `KeptProcess` use it with real pipes and links; only the processes behind the warden's control socket are simulated.
A command is `simulated WORD=VALUE …`: `seconds` until it exits, `code`, what it `says` (once at the start and once at the end), `deaf` to SIGTERM,
`chatty` for output without end, `fails` to start. `simulated-mcp` is an MCP server. Anything else exits at once with 0, as `true` does.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any, Final, cast

import trio

from hermes_trio.tools.warden.daemon.wire import FRAME, Kind, Means, Plan, Stage
from hermes_trio.tools.warden.process import KeptProcess

from .mcp_server import MCP_COMMAND, SimulatedMcpServer

CHATTER: Final = b"more and more and more\n"
FIRST_PID: Final = 1000


class SimulatedProcess:
    """One command. `words` are the values in its text."""

    def __init__(self, pid: int, text: str) -> None:
        self.pid = pid
        self.text = text
        self.words: dict[str, str] = {}
        for word in text.partition("simulated ")[2].split():
            name, equals, value = word.partition("=")
            if equals:
                self.words[name] = value
        self.alive = True
        self.ended_at: float | None = None
        self.term = trio.Event()
        self.kill = trio.Event()


class SimulatedKernel:
    """All processes of one life of a node. `most` is the highest number that were alive at once."""

    def __init__(self, nursery: trio.Nursery, told: Callable[[str, str], None], context: Context | None = None) -> None:
        self.processes: list[SimulatedProcess] = []
        self.servers: list[SimulatedProcess] = []
        """The MCP servers, which run as long as the gateway."""
        self.mcp_faults: list[str] = []
        """The faults of the next calls of MCP servers."""
        self.most = 0
        self._nursery = nursery
        self._context = copy_context() if context is None else context
        """The context of the processes, not that of the calling node: they continue while the node is paused."""
        self._told = told
        self._scopes: list[trio.CancelScope] = []
        self._dead = False
        self._begun = 0

    @property
    def alive(self) -> list[SimulatedProcess]:
        """Return the running commands."""
        return [one for one in self.processes if one.alive]

    def custody(self) -> SimulatedCustody:
        """Return a new warden."""
        return SimulatedCustody(self)

    def power_off(self) -> None:
        """End every process at this instant, without a report to its owner."""
        self._dead = True
        for process in (*self.processes, *self.servers):
            process.alive = False
        for scope in self._scopes:
            scope.cancel()

    def begin(self, custody: SimulatedCustody, process: KeptProcess, descriptors: list[int]) -> None:
        """Fork a keeper for a job; the descriptors are copied, as passing them over a socket does."""
        if self._dead:
            return
        copies = [os.dup(one) for one in descriptors]
        self._context.copy().run(self._nursery.start_soon, self._keep, custody, process, copies)

    async def _keep(self, custody: SimulatedCustody, kept: KeptProcess, descriptors: list[int]) -> None:
        link = trio.SocketStream(cast("Any", trio.socket.from_stdlib_socket(socket.socket(fileno=descriptors[0]))))
        try:
            with trio.CancelScope() as scope:
                self._scopes.append(scope)
                if self._dead:
                    return
                await self._job(kept, link, descriptors[1:])
                custody.close(kept)
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            pass
        finally:
            for one in descriptors[1:]:
                os.close(one)
            await trio.aclose_forcefully(link)

    async def _job(self, kept: KeptProcess, link: trio.SocketStream, descriptors: list[int]) -> None:
        text = await _read_plan(link)
        process = SimulatedProcess(FIRST_PID + self._begun, text)
        self._begun += 1
        await link.send_all(FRAME.pack(Kind.HELLO, process.pid + 50_000, 0))
        if self._dead:
            return  # the power failed in this instant, before the command was started
        if "fails" in process.words:
            process.alive = False
            await link.send_all(FRAME.pack(Kind.FAILED, Stage.EXEC, errno.ENOENT))
            await link.send_all(FRAME.pack(Kind.EMPTY, Means.NONE, 0))
            return
        what = "server" if text == MCP_COMMAND else "process"
        (self.servers if text == MCP_COMMAND else self.processes).append(process)
        self.most = max(self.most, len(self.alive))
        self._told(f"{what} starts", f"{process.pid} {text}")
        await link.send_all(FRAME.pack(Kind.STARTED, process.pid, 0))
        # Standard output is the last descriptor before what is inherited: with standard input there are two.
        output = descriptors[1] if kept.spec.stdin.value == "pipe" else descriptors[0]
        means = Means.NONE
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._listen, link, process)
            code, signal = await self._live(process, descriptors[0], output)
            process.alive = False
            process.ended_at = trio.current_time()
            means = Means.SIGKILL if signal == 9 else Means.SIGTERM if signal else Means.NONE
            self._told(f"{what} ends", f"{process.pid} {process.words.get('says', '')} code {code} signal {signal}")
            await link.send_all(FRAME.pack(Kind.EXITED, code, signal))
            nursery.cancel_scope.cancel()
        await link.send_all(FRAME.pack(Kind.EMPTY, means, 0))

    async def _live(self, process: SimulatedProcess, stdin: int, output: int) -> tuple[int, int]:
        words = process.words
        seconds = float(words.get("seconds", "0"))
        said = words.get("says", "")
        _write(output, f"{said} begins\n".encode() if said else b"")
        ended: tuple[int, int] | None = None
        async with trio.open_nursery() as nursery:

            async def over(after: trio.Event, signal: int, delay: float) -> None:
                nonlocal ended
                await after.wait()
                await trio.sleep(delay)
                ended = (-1, signal)
                nursery.cancel_scope.cancel()

            if "deaf" not in words:
                nursery.start_soon(over, process.term, 15, 0.01)
            nursery.start_soon(over, process.kill, 9, 0.0)
            if process.text == MCP_COMMAND:
                await SimulatedMcpServer(stdin, output, self.mcp_faults, self._told).run()
            began = trio.current_time()
            while trio.current_time() - began < seconds:
                if "chatty" in words:
                    _write(output, CHATTER * 100)
                    await trio.sleep(min(5.0, seconds))
                else:
                    await trio.sleep(seconds)
            ended = (int(words.get("code", "0")), 0)
            _write(output, f"{said} ends\n".encode() if said else b"")
            nursery.cancel_scope.cancel()
        assert ended is not None
        return ended

    async def _listen(self, link: trio.SocketStream, process: SimulatedProcess) -> None:
        """Wait for an order to end, or for the end of the link, then send SIGTERM and, after the grace, SIGKILL."""
        unread = b""
        grace = 1.0
        while received := bytes(await link.receive_some()):
            unread += received
            if len(unread) >= FRAME.size:
                _, milliseconds, _ = FRAME.unpack_from(unread)
                unread = unread[FRAME.size :]
                grace = milliseconds / 1000
                break
        process.term.set()
        await trio.sleep(grace)
        process.kill.set()


class SimulatedCustody:
    """Replaces `Custody`: a simulated warden process."""

    def __init__(self, kernel: SimulatedKernel) -> None:
        self.token = "simulated"
        self.pid = FIRST_PID - 1
        self.died = trio.Event()
        self.over = trio.Event()
        self._kernel = kernel
        self._kept: dict[int, KeptProcess] = {}
        self._dismissed = trio.Event()

    @property
    def ended(self) -> bool:
        """Return whether the warden has ended."""
        return self.over.is_set()

    async def hand_over(self, process: KeptProcess, descriptors: list[int], template: object = None) -> None:
        """Have a keeper forked for this process."""
        await trio.lowlevel.checkpoint()
        self._kept[process.job] = process
        self._kernel.begin(self, process, descriptors)

    def close(self, process: KeptProcess) -> None:
        """Report that the keeper of this process was reaped."""
        if self._kept.pop(process.job, None) is not None:
            process.clear()

    async def discard(self, job: int) -> None:
        """Have the keeper of this job killed."""
        await trio.lowlevel.checkpoint()
        process = self._kept.pop(job, None)
        if process is not None:
            process.clear()

    def fail(self) -> None:
        """Kill the warden."""
        for process in self._kept.values():
            process.clear()
        self._kept.clear()
        self._dismissed.set()

    async def dismiss(self, limit: float) -> None:
        """End the warden and wait for its end."""
        self.fail()
        await self.over.wait()

    async def attend(self) -> None:
        """Wait until the warden ends."""
        await self._dismissed.wait()
        self.died.set()
        self.over.set()


async def _read_plan(link: trio.SocketStream) -> str:
    """Read a plan from the link and return its command, the last of its arguments. Raises `BrokenResourceError` if it is cut off."""
    unread = b""
    while len(unread) < Plan.HEADER.size or len(unread) < Plan.HEADER.size + Plan.HEADER.unpack_from(unread)[0]:
        received = bytes(await link.receive_some())
        if not received:
            raise trio.BrokenResourceError("the plan was cut off")
        unread += received
    header, body = unread[: Plan.HEADER.size], unread[Plan.HEADER.size :]
    return Plan.decode(header, body[: Plan.HEADER.unpack(header)[0]]).argv[-1].decode()


def _write(descriptor: int, data: bytes) -> None:
    """Write as much as the pipe takes and drop the rest; if the pipe is closed, drop everything."""
    os.set_blocking(descriptor, False)
    try:
        os.write(descriptor, data)
    except (BlockingIOError, BrokenPipeError):
        pass
