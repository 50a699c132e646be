"""Several processes on one listening address: `serve --workers N`. Each is a whole gateway, and a node of the shared store.

The parent binds the address once for each worker (SO_REUSEPORT) and keeps all sockets open, so that no connection is refused or reset while one of them
restarts. Every worker has all sockets: it accepts on its own, and takes the connections that another worker leaves waiting. The parent restarts a worker
that exits by itself, with growing delays, forwards signals, and merges the reports of all drains. A socket pair connects it to each worker: the worker
sends its messages on it, and drains when its parent has exited.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import trio

logger: Final = logging.getLogger("hermes_trio.gateway.workers")

VARIABLE: Final = "HERMES_TRIO_WORKER"
"""The environment variable of a worker: its number, the listening sockets of all workers, and the socket to its parent."""

FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 30.0
HEALTHY_SECONDS: Final = 60.0
"""A worker that ran at least this long resets the delays when it exits."""


class WorkerLink:
    """A worker's side: its number, its listening socket, those of the others, and its parent. `take` returns None in a process that is no worker."""

    def __init__(self, number: int, sockets: Sequence[int], parent: socket.socket) -> None:
        self.number = number
        self.bind = f"fd://{sockets[number]}"
        self.others: tuple[int, ...] = tuple(one for one in sockets if one != sockets[number])
        self._sockets = sockets
        self._parent = parent
        self.draining = False
        """Set when this worker drains: the end of its parent changes nothing then."""

    @classmethod
    def take(cls) -> WorkerLink | None:
        """Read this worker's identity from the environment, and remove it from there, so that commands do not inherit it."""
        given = os.environ.pop(VARIABLE, "")
        if not given:
            return None
        number, sockets, parent = given.split(":")
        descriptors = [int(one) for one in sockets.split(",")]
        for descriptor in (*descriptors, int(parent)):
            os.set_inheritable(descriptor, False)
        return cls(int(number), descriptors, socket.socket(fileno=int(parent)))

    def release(self) -> None:
        """Close the inherited sockets, once this worker has drained: what arrives now is for the others, or refused if there are none."""
        for descriptor in self._sockets:
            os.close(descriptor)

    def watch(self) -> None:
        """Drain, as after a first signal, when the parent has exited."""
        threading.Thread(target=self._watch, name="hermes-trio parent", daemon=True).start()

    def _watch(self) -> None:
        try:
            while self._parent.recv(1):
                pass
        except OSError:
            pass
        if not self.draining:
            os.kill(os.getpid(), signal.SIGTERM)

    def send(self, kind: str, value: object) -> None:
        """Send the parent a message: `started` with the lines of a start, `draining` with a line, or `report` with that of a drain."""
        try:
            self._parent.sendall(msgspec.json.encode({"kind": kind, "value": value}) + b"\n")
        except OSError as error:
            logger.warning("could not send a message to the parent of this worker: %s", error)


class WorkerPool:
    """The parent's side. `run` returns the exit code of the program."""

    def __init__(self, command: Sequence[str], sockets: Sequence[socket.socket], say: Callable[[str], None]) -> None:
        """Make a pool of one worker for each of `sockets`, which it closes when it stops."""
        self._command = list(command)
        self._sockets = sockets
        self._say = say
        self._count = len(sockets)
        self._live: dict[int, trio.Process] = {}
        self._stopping = False
        self._starting = 0
        self._asked = trio.Event()
        self._announced = False
        self._reports: list[dict[str, Any]] = []
        self._code = 0

    async def run(self) -> int:
        """Run the workers until a signal has arrived and all of them have exited. A worker that fails at its first start stops the others, and its
        code is returned.
        """
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async with trio.open_nursery() as nursery:

                async def listen() -> None:
                    async for number in signals:
                        logger.info(
                            "received %s: passing it on to %d workers", signal.Signals(number).name, len(self._live)
                        )
                        self.stop()

                nursery.start_soon(listen)
                async with trio.open_nursery() as workers:
                    for number in range(self._count):
                        workers.start_soon(self._keep, number, name=f"worker {number}")
                nursery.cancel_scope.cancel()
        if self._reports:
            self._say(merged_report(self._reports))
        return self._code

    def stop(self) -> None:
        """Signal every worker to end: the first call drains, the second cancels everything."""
        self._stopping = True
        self._asked.set()
        for process in list(self._live.values()):
            process.send_signal(signal.SIGTERM)
        self._close_sockets()

    def _close_sockets(self) -> None:
        """Close the parent's sockets after a stop, so that new connections are refused once all workers have drained. A start in progress needs them."""
        if self._stopping and not self._starting:
            for sock in self._sockets:
                sock.close()

    async def _keep(self, number: int) -> None:
        pause = FIRST_PAUSE
        while not self._stopping:
            began = trio.current_time()
            code, started = await self._live_once(number)
            if self._stopping:
                self._code = self._code or (0 if code in (0, -signal.SIGTERM) else abs(code))
                return
            if not started and code > 0 and not self._announced:
                # The first start failed: the configuration, the store or the key is wrong, and the worker has printed why.
                self._code = code
                self.stop()
                return
            if trio.current_time() - began > HEALTHY_SECONDS:
                pause = FIRST_PAUSE
            logger.error("worker %d exited with code %d; restarting it in %g s", number, code, pause)
            with trio.move_on_after(pause):
                await self._asked.wait()
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _live_once(self, number: int) -> tuple[int, bool]:
        """Run a worker once. Return its exit code, and whether it had started to serve."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            sockets = [sock.fileno() for sock in self._sockets]
            environment = {**os.environ, VARIABLE: f"{number}:{','.join(map(str, sockets))}:{theirs.fileno()}"}
            self._starting += 1
            try:
                # A session of its own: signals of the terminal reach only the parent, which forwards them.
                process = await trio.lowlevel.open_process(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    env=environment,
                    pass_fds=(*sockets, theirs.fileno()),
                    start_new_session=True,
                )
            finally:
                self._starting -= 1
                self._close_sockets()
            theirs.close()
            self._live[number] = process
            if self._stopping:
                process.send_signal(signal.SIGTERM)
            started = False
            stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
            try:
                left = b""
                async for part in stream:
                    *lines, left = (left + part).split(b"\n")
                    for line in lines:
                        started = self._receive(msgspec.json.decode(line)) or started
            except trio.BrokenResourceError:
                pass
            code = await process.wait()
            del self._live[number]
            return code, started

    def _receive(self, told: dict[str, Any]) -> bool:
        """Handle a message of a worker. Return whether it says that the worker serves now."""
        kind, value = told["kind"], told["value"]
        if kind == "started" and not self._announced:
            self._announced = True
            self._say("\n".join([value[0] + f" with {self._count} workers", *value[1:]]))
        elif kind == "report":
            self._reports.append(value)
        return kind == "started"


def merged_report(reports: Sequence[dict[str, Any]]) -> str:
    """Return one line for the drains of all workers. They share the store, so rows that wait there are counted once."""

    def total(name: str) -> int:
        return sum(int(report[name]) for report in reports)

    backlog: dict[str, int] = {}
    for report in reports:
        for name, count in report["backlog"].items():
            backlog[name] = max(backlog.get(name, 0), count)
    left = ", ".join(f"{count} {name}" for name, count in backlog.items() if count) or "nothing"
    return (
        f"{len(reports)} workers drained in {max(report['seconds'] for report in reports):.1f} s: {total('turns')} turns, {total('jobs')} jobs,"
        f" {total('threads')} threads left; {total('cancelled')} turns were cancelled, {total('stopped_jobs')} jobs were stopped;"
        f" waiting in the store: {left}"
    )


def worker_command(arguments: Sequence[str]) -> list[str]:
    """Return the command of a worker: this program, with the arguments of `serve`."""
    return [sys.executable, "-m", "hermes_trio", "serve", *arguments]
