"""A plain ASGI application whose paths behave in the ways that the serving layer must cope with."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import attrs
import msgspec
import trio

from hermes_trio.http.server import (
    BodyTooLarge,
    Ending,
    EventStreamWriter,
    Message,
    Receive,
    Scope,
    Send,
    ending_of,
    read_body,
    send_json,
)

BODY_LIMIT = 1_000_000
left_over: ContextVar[str] = ContextVar("left_over", default="clean")


class AppCrash(Exception):
    """What the application raises on purpose."""


@attrs.define
class SampleApp:
    """Counts what was started and remembers how waiting requests ended."""

    waiting: trio.Event = attrs.field(factory=trio.Event)
    cancelled: trio.Event = attrs.field(factory=trio.Event)
    finish: trio.Event = attrs.field(factory=trio.Event)
    endings: list[Ending | None] = attrs.field(factory=list[Ending | None])
    disconnects: int = 0
    started: int = 0
    lifespan: list[str] = attrs.field(factory=list[str])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._lifespan(receive, send)
        if scope["type"] == "websocket":
            return await self._websocket(receive, send)
        self.started += 1
        handler = getattr(self, "on_" + scope["path"].strip("/"), None)
        if handler is None:
            return await send_json(send, 404, b'{"error":"no such path"}')
        return await handler(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            self.lifespan.append(message["type"])
            await send({"type": message["type"] + ".complete"})
            if message["type"] == "lifespan.shutdown":
                return

    async def _websocket(self, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "websocket.connect"
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            await send({"type": "websocket.send", "text": message["text"].upper()})

    async def on_echo(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(receive, BODY_LIMIT)
        except BodyTooLarge:
            return await send_json(send, 413, b'{"error":"too large"}')
        seen: dict[str, Any] = {
            "method": scope["method"],
            "path": scope["path"],
            "query": scope["query_string"].decode(),
            "version": scope["http_version"],
            "headers": [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]],
            "body": body.decode("latin-1"),
        }
        return await send_json(send, 200, msgspec.json.encode(seen))

    async def on_refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 401, b'{"error":"no key"}')

    async def on_refuse_in_parts(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"{}", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def on_crash(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise AppCrash("on purpose")

    async def on_crash_in_group(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            raise AppCrash("on purpose")

    async def on_silent(self, scope: Scope, receive: Receive, send: Send) -> None:
        return

    async def on_cut(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise AppCrash("after half of the answer")

    async def on_wait(self, scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(receive, BODY_LIMIT)
        self.waiting.set()
        try:
            await self.finish.wait()
        except trio.Cancelled:
            self.endings.append(ending_of(scope))
            self.cancelled.set()
            raise
        await send_json(send, 200, b'{"waited":true}')

    async def on_listen(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Waits for the disconnect by asking for messages, under a shield: only the message can end it."""
        await read_body(receive, BODY_LIMIT)
        self.waiting.set()
        with trio.CancelScope(shield=True):
            assert (await receive())["type"] == "http.disconnect"
        self.disconnects += 1
        self.cancelled.set()

    async def on_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = EventStreamWriter(send)
        await writer.open()
        for number in range(3):
            await writer.event(b"%d" % number)
        self.waiting.set()
        try:
            await self.finish.wait()
        except trio.Cancelled:
            self.endings.append(ending_of(scope))
            self.cancelled.set()
            raise
        await writer.event(b"last")
        await writer.close()

    async def on_flood(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Streams without end and without a checkpoint of its own."""
        await send({"type": "http.response.start", "status": 200, "headers": []})
        chunk: Message = {"type": "http.response.body", "body": b"x" * 65536, "more_body": True}
        try:
            while True:
                await send(chunk)
                self.waiting.set()
        except trio.Cancelled:
            self.endings.append(ending_of(scope))
            self.cancelled.set()
            raise

    async def on_shielded_flood(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An answer larger than every buffer whose sender may not be cancelled."""
        await send({"type": "http.response.start", "status": 200, "headers": []})
        self.waiting.set()
        with trio.CancelScope(shield=True):
            await send({"type": "http.response.body", "body": b"x" * 64_000_000})
        self.cancelled.set()

    async def on_both_ways(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Streams without end in one task while another reads the body."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.on_flood, scope, receive, send)
            while (await receive()).get("more_body"):
                continue

    async def on_large(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(5_000_000)})

    async def on_nobody(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def on_remember(self, scope: Scope, receive: Receive, send: Send) -> None:
        before = left_over.get()
        left_over.set("dirty")
        await send_json(send, 200, before.encode())
