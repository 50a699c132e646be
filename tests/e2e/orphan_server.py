"""Servers in miniature for the orphan tests: Runtime, toolbox and demo model on a store in a file, told what to do over a socket.

`python -m tests.e2e.orphan_server` is a template that has imported everything: for each socket that it is sent over its standard input it forks a server.
To a server comes one JSON array a line (`["say", SESSION, TEXT]`, `["stop", SESSION]`, `["end", SESSION]`, `["drain"]`), and one JSON object a line goes
back. It ends at the end of its input or at SIGTERM, and says so if it could.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from typing import Any

import trio

from hermes_trio import CancelCause, Cause, SessionContext
from hermes_trio.store import open_store
from tests.tools.bench_of_tools import Bench, open_demo


async def obey(bench: Bench, order: str, *arguments: str) -> dict[str, Any]:
    """Do one thing and say what came of it."""
    runtime = bench.runtime
    match order:
        case "say":
            session, text = arguments
            outcome = await runtime.run_turn(text, SessionContext(session_id=session, session_key=session))
            return {"text": outcome.text, "error": outcome.error, "warden": bench.box.warden.warden_pid}
        case "stop":
            receipts = await runtime.stop_session(arguments[0])
            return {"ok": all(receipt.ok for receipt in receipts), "receipts": len(receipts)}
        case "end":
            receipts = await runtime.supervisor.stop_session(arguments[0], Cause(CancelCause.SESSION_ENDED))
            await runtime.store.end_session(arguments[0], "over")
            return {"ok": all(receipt.ok for receipt in receipts), "receipts": len(receipts)}
        case "drain":
            return (await runtime.drain(0.2)).as_dict()
        case _:
            raise ValueError(f"unknown order {order!r}")


async def read_orders(bench: Bench, link: trio.SocketStream, over: trio.CancelScope) -> None:
    """Obey until there are no more orders."""
    unread = b""
    async for data in link:
        *lines, unread = (unread + data).split(b"\n")
        for line in lines:
            await link.send_all(json.dumps(await obey(bench, *json.loads(line))).encode() + b"\n")
    over.cancel()


async def wait_for_signal(over: trio.CancelScope, task_status: trio.TaskStatus[None]) -> None:
    """The other way to end."""
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        task_status.started()
        async for _ in signals:
            over.cancel()


async def serve(database: str, link: socket.socket) -> None:
    """Serve until told to end."""
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(link))
    async with (
        open_demo(store=open_store(database), table={"terminal": {"kill_grace": 0.3}}) as bench,
        trio.open_nursery() as nursery,
    ):
        await nursery.start(wait_for_signal, nursery.cancel_scope)
        await read_orders(bench, stream, nursery.cancel_scope)
    try:
        await stream.send_all(b'{"closed": true}\n')
    except trio.BrokenResourceError:
        pass


def main() -> None:
    """Fork a server for each socket, and answer with its number."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=os.dup(0)) as control:
        while True:
            database, descriptors, _, _ = socket.recv_fds(control, 4096, 1)
            if not database:
                return
            pid = os.fork()
            if pid == 0:
                control.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                trio.run(serve, database.decode(), socket.socket(fileno=descriptors[0]))
                os._exit(0)
            os.close(descriptors[0])
            control.sendall(str(pid).encode())


if __name__ == "__main__":
    main()
