"""Several processes behind one listening address: `serve --workers N`. Each is a whole gateway, and a node of the store that they share.

The parent binds the address once and hands the socket to every worker, so that no connection is refused while one of them starts again. It restarts a worker
that ends by itself, with growing pauses, passes signals on, and makes one report of all drains. A pair of sockets joins it to each worker: the worker tells
what it has to tell, and drains when its parent is gone.
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

__all__ = ["WorkerLink", "WorkerPool", "merged_report", "worker_command"]

logger: Final = logging.getLogger("hermes_trio.gateway.workers")

VARIABLE: Final = "HERMES_TRIO_WORKER"
"""Tells a process that it is a worker: its number, the socket that it listens on, and the one that joins it to its parent."""

FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 30.0
HEALTHY_SECONDS: Final = 60.0
"""A worker that lived this long was a good one: its end starts the pauses afresh."""


class WorkerLink:
    """A worker's side: who it is, what it listens on, and whom it tells. `None` from `take` means that this process is no worker."""

    def __init__(self, number: int, listens_on: int, parent: socket.socket) -> None:
        self.number = number
        self.bind = f"fd://{listens_on}"
        self._parent = parent

    @classmethod
    def take(cls) -> WorkerLink | None:
        """Read who this process is from its environment, and remove it from there: commands must not inherit it."""
        given = os.environ.pop(VARIABLE, "")
        if not given:
            return None
        number, listens_on, parent = (int(part) for part in given.split(":"))
        os.set_inheritable(listens_on, False)
        os.set_inheritable(parent, False)
        return cls(number, listens_on, socket.socket(fileno=parent))

    def watch(self) -> None:
        """Drain, as after a signal, when the parent is gone."""
        threading.Thread(target=self._watch, name="hermes-trio parent", daemon=True).start()

    def _watch(self) -> None:
        try:
            while self._parent.recv(1):
                pass
        except OSError:
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    def tell(self, kind: str, value: object) -> None:
        """Tell the parent something: `started` with the lines of a start, `draining` with a line, or `report` with that of a drain."""
        try:
            self._parent.sendall(msgspec.json.encode({"kind": kind, "value": value}) + b"\n")
        except OSError as error:
            logger.warning("the parent of this worker could not be told: %s", error)


class WorkerPool:
    """The parent's side. `run` is its life: it returns the exit code of the program."""

    def __init__(
        self, count: int, command: Sequence[str], listens_on: socket.socket, say: Callable[[str], None]
    ) -> None:
        self._command = list(command)
        self._listens_on = listens_on
        self._say = say
        self._count = count
        self._live: dict[int, trio.Process] = {}
        self._stopping = False
        self._asked = trio.Event()
        self._announced = False
        self._reports: list[dict[str, Any]] = []
        self._code = 0

    async def run(self) -> int:
        """Run the workers until a signal has come and all of them have ended. A worker that cannot start at all ends the others, and its code is returned."""
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
        """Ask every worker to end: the first time it drains, the second time it cancels everything."""
        self._stopping = True
        self._asked.set()
        for process in list(self._live.values()):
            process.send_signal(signal.SIGTERM)

    async def _keep(self, number: int) -> None:
        pause = FIRST_PAUSE
        while not self._stopping:
            began = trio.current_time()
            code, started = await self._live_once(number)
            if self._stopping:
                self._code = self._code or (0 if code in (0, -signal.SIGTERM) else abs(code))
                return
            if not started and code > 0 and not self._announced:
                # The first start fails: the configuration, the store or the key are not right, and the worker has said what is.
                self._code = code
                self.stop()
                return
            if trio.current_time() - began > HEALTHY_SECONDS:
                pause = FIRST_PAUSE
            logger.error("worker %d ended with code %d, it is started again in %g s", number, code, pause)
            with trio.move_on_after(pause):
                await self._asked.wait()
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _live_once(self, number: int) -> tuple[int, bool]:
        """One life of a worker: its exit code, and whether it had started to serve."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            listens_on = self._listens_on.fileno()
            environment = {**os.environ, VARIABLE: f"{number}:{listens_on}:{theirs.fileno()}"}
            # A session of its own: what is typed in the terminal reaches the parent alone, which passes it on.
            process = await trio.lowlevel.open_process(
                self._command,
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=(listens_on, theirs.fileno()),
                start_new_session=True,
            )
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
                        started = self._hear(msgspec.json.decode(line)) or started
            except trio.BrokenResourceError:
                pass
            code = await process.wait()
            del self._live[number]
            return code, started

    def _hear(self, told: dict[str, Any]) -> bool:
        """Take what a worker tells; say whether it is that it serves now."""
        kind, value = told["kind"], told["value"]
        if kind == "started" and not self._announced:
            self._announced = True
            self._say("\n".join([value[0] + f" with {self._count} workers", *value[1:]]))
        elif kind == "report":
            self._reports.append(value)
        return kind == "started"


def merged_report(reports: Sequence[dict[str, Any]]) -> str:
    """One line for the drains of all workers. They share the store, so that what waits there is counted once."""

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
    """How a worker is started: this program, with the arguments of `serve`."""
    return [sys.executable, "-m", "hermes_trio", "serve", *arguments]
