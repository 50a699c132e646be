"""Relays requests that another node has to handle: the node handles the whole request, and its response is returned here.

A session is bound to the node that has its shell, its files or its jobs, and a tree is known to its own node. The node that received a request finds
that out before anything has happened, for a turn when it is about to start. It sends the request to the other node, which calls the same handler,
and reads the response piece by piece, with one membership request each. A client that disconnects is reported to the other node, and a node that ends
counts as a client that has disconnected. Keys and cookies are not sent; the principal is.
"""

from __future__ import annotations

import logging
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from math import inf
from typing import TYPE_CHECKING, Any, Final, Protocol, final

import msgspec
import trio

from hermes_trio.http.server import Message, Scope
from hermes_trio.runtime.errors import HandledElsewhere
from hermes_trio.runtime.hosts import running_here
from hermes_trio.runtime.ports import NODE_TOPIC, NodeAnswer, NodeRequest
from hermes_trio.store import StoreError

from .auth import Principal
from .errors import ApiError, retry_after
from .requests import EventStream, HandlerResult, Request, Response
from .routing import Route
from .streams import STREAM_TYPE, StreamWriter

if TYPE_CHECKING:
    from .core import ApiCore

logger: Final = logging.getLogger("hermes_trio.http.relay")

HANDLE: Final = "http"
MORE: Final = "http_more"
LEAVE: Final = "http_leave"

POLL_SECONDS: Final = 10.0
"""Seconds that the other node waits for data before it answers that there is none yet."""
ANSWER_SECONDS: Final = 10.0
"""Seconds beyond that after which the other node counts as not answering."""
JOIN_SECONDS: Final = 0.05
"""Pieces of a stream that arrive within this time are sent together."""
PIECE_BYTES: Final = 512 * 1024
KEPT_SECONDS: Final = 600.0
"""How long a request is handled, and its response kept, after the other node has last asked for a piece. A slow reader may take minutes for one."""
LOOK_SECONDS: Final = 60.0
LEAVE_SECONDS: Final = 5.0

_KEPT_BACK: Final = frozenset({b"authorization", b"cookie", b"x-api-key", b"proxy-authorization"})


class HostGone(Exception):
    """Raised if the node that a request was to be relayed to has ended. Nothing was begun there."""


class RelayingApp(Protocol):
    """The application that handles relayed requests."""

    async def handle(self, route: Route, request: Request) -> HandlerResult: ...

    async def run_stream(
        self, route: Route, request: Request, stream: EventStream, writer: StreamWriter
    ) -> Response | None: ...


class AnswerHead(msgspec.Struct, frozen=True):
    """Status and headers of a response; `stream` says that its body is a stream of events."""

    status: int
    headers: list[tuple[str, str]]
    media: str = ""
    stream: bool = False

    def pairs(self) -> list[tuple[bytes, bytes]]:
        """Return the headers as bytes."""
        return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self.headers]


class AnswerPiece(msgspec.Struct, frozen=True):
    """The part of a response behind an offset. `cut` says that a stream was cut off."""

    head: AnswerHead | None = None
    data: str = ""
    over: bool = False
    cut: bool = False


def _headers(pairs: Any) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in pairs]


@final
class _Exchange:
    """A request of another node that is handled here. `data` is its response from offset `start` on.

    `scope` ends it as if its client had left, also when the other node has not asked for a piece for `KEPT_SECONDS`: it may have failed to say that its client
    has left.
    """

    def __init__(self) -> None:
        self.head: AnswerHead | None = None
        self.data = bytearray()
        self.start = 0
        self.over = False
        self.cut = False
        self.scope = trio.CancelScope()
        self.read = trio.Event()
        self._changed = trio.Event()
        self._asking = 0

    async def send(self, message: Message) -> None:
        """Append a message of a stream to the response, as a connection sends it."""
        if message["type"] == "http.response.start":
            own = list(message["headers"])[len(STREAM_TYPE) :]
            self.head = AnswerHead(message["status"], _headers(own), stream=True)
        else:
            self.data += message.get("body", b"")
            self.tell()
        await trio.lowlevel.checkpoint()

    def tell(self) -> None:
        """Wake the tasks that wait for a piece."""
        self._changed.set()
        self._changed = trio.Event()

    async def piece(self, after: int) -> AnswerPiece:
        """Return the data from offset `after` on, and drop the data before it. Without data the piece is empty after a while."""
        self._asking += 1
        self.scope.deadline = inf
        try:
            return await self._piece(after)
        finally:
            self._asking -= 1
            if not self._asking:
                self.scope.deadline = trio.current_time() + KEPT_SECONDS

    async def _piece(self, after: int) -> AnswerPiece:
        del self.data[: max(0, after - self.start)]
        self.start = max(self.start, after)
        with trio.move_on_after(POLL_SECONDS):
            while not self.data and not self.over:
                await self._changed.wait()
        if self.data and not self.over:
            await trio.sleep(JOIN_SECONDS)
        data = bytes(self.data[:PIECE_BYTES])
        over = self.over and len(data) == len(self.data)
        if over:
            self.read.set()
        return AnswerPiece(self.head, b64encode(data).decode(), over, over and self.cut)


@final
class Relay:
    """Relays requests to other nodes, and handles theirs."""

    def __init__(self, core: ApiCore, app: RelayingApp) -> None:
        self._core = core
        self._app = app
        self._open: dict[str, _Exchange] = {}
        self._answering = ExitStack()
        membership = core.runtime.membership
        for kind, handler in ((HANDLE, self._handle_here), (MORE, self._more_here), (LEAVE, self._leave_here)):
            # Not removed: the membership closes after everything that uses it here.
            self._answering.enter_context(membership.answering(kind, handler))

    # -- the node that a request came in on --------------------------------------------------------------------------------------

    async def hand_on(self, route: Route, request: Request, elsewhere: HandledElsewhere) -> HandlerResult:
        """Return the response of another node to a request. Raises `HostGone` if that node is gone, and 503 if it does not answer.

        Cancelling it means that the client has disconnected; the other node is told.
        """
        core = self._core
        exchange = core.ids.make("relay_", 16)
        node = elsewhere.node
        payload = {
            "route": route.name,
            "method": request.method,
            "path": request.path,
            "query": request.scope["query_string"].decode("latin-1"),
            "headers": [pair for pair in _headers(request.scope["headers"]) if pair[0].encode() not in _KEPT_BACK],
            "params": dict(request.params),
            "body": b64encode(await request.body()).decode(),
            "caller": msgspec.to_builtins(request.caller),
            "node": core.store.owner,
        }
        core.metrics.relayed += 1
        return await self._following(node, exchange, lambda: self._answer(node, exchange, payload))

    async def _answer(self, node: str, exchange: str, payload: Mapping[str, Any]) -> HandlerResult:
        piece = await self._ask(node, HANDLE, exchange, payload)
        while piece.head is None and not piece.over:
            piece = await self._more(node, exchange, 0)
        head = piece.head
        if head is None:
            raise _unanswered(node)
        if head.stream:
            first = piece

            async def run(writer: StreamWriter) -> None:
                async def copy() -> None:
                    await self._copy(node, exchange, first, writer)

                await self._following(node, exchange, copy)

            return EventStream(run)
        body = bytearray(b64decode(piece.data))
        while not piece.over:
            piece = await self._more(node, exchange, len(body))
            body += b64decode(piece.data)
        return Response(bytes(body), head.status, head.pairs(), head.media.encode("latin-1"))

    async def _copy(self, node: str, exchange: str, piece: AnswerPiece, writer: StreamWriter) -> None:
        """Write a stream of another node until it ends."""
        assert piece.head is not None
        data = b64decode(piece.data)
        await writer.open(data, piece.head.pairs())
        read = len(data)
        while not piece.over:
            piece = await self._more(node, exchange, read)
            data = b64decode(piece.data)
            read += len(data)
            if data:
                writer.put(data)
                await writer.flush()
        if piece.cut:
            raise _unanswered(node)

    async def _following(self, node: str, exchange: str, work: Callable[[], Awaitable[Any]]) -> Any:
        """Run `work`; if it is cancelled, tell the other node that the client has disconnected."""
        followed = False
        try:
            result = await work()
            followed = True
            return result
        finally:
            if not followed:
                await self._leave(node, exchange)  # noqa: ASYNC102 - shielded, for LEAVE_SECONDS at most

    async def _leave(self, node: str, exchange: str) -> None:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + LEAVE_SECONDS):
            try:
                await self._core.runtime.membership.ask(node, LEAVE, exchange, seconds=0)
            except Exception as error:
                logger.warning(
                    "could not report to node %s that the client of request %s has disconnected; it continues: %s",
                    node[:8],
                    exchange,
                    error,
                )

    async def _more(self, node: str, exchange: str, after: int) -> AnswerPiece:
        return await self._ask(node, MORE, exchange, {"after": after})

    async def _ask(self, node: str, kind: str, exchange: str, payload: Mapping[str, Any]) -> AnswerPiece:
        """Request a piece. `ask` repeats what the store refuses, under the same id: the other node forgets what it has answered, and would handle it again."""
        seconds = POLL_SECONDS + ANSWER_SECONDS
        ask = self._core.runtime.membership.ask
        return _piece(await ask(node, kind, exchange, payload, seconds=seconds, shown=False), node, kind)

    # -- the node that handles it -------------------------------------------------------------------------------------------

    async def _handle_here(self, request: NodeRequest) -> Mapping[str, Any]:
        exchange = self._open.get(request.target)
        if exchange is None:
            exchange = self._open[request.target] = _Exchange()
            asked = dict(request.payload)
            try:
                self._core.runtime.start_receiver(
                    f"relay {request.target}", lambda: self._live(request.target, exchange, asked)
                )
            except BaseException:
                del self._open[request.target]
                raise
        return msgspec.to_builtins(await exchange.piece(0))

    async def _more_here(self, request: NodeRequest) -> Mapping[str, Any]:
        exchange = self._open.get(request.target)
        if exchange is None:
            return {"error": f"no request {request.target} is handled here"}
        return msgspec.to_builtins(await exchange.piece(int(request.payload.get("after", 0))))

    async def _leave_here(self, request: NodeRequest) -> Mapping[str, Any]:
        exchange = self._open.get(request.target)
        if exchange is not None:
            exchange.scope.cancel()
            exchange.read.set()
        return {}

    async def _live(self, name: str, exchange: _Exchange, asked: Mapping[str, Any]) -> None:
        """Handle a request that another node has relayed. It ends as if its client had disconnected if that node ends or says so."""
        try:
            with exchange.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._watch, str(asked["node"]), exchange.scope)
                    try:
                        with running_here():
                            await self._run(exchange, asked)
                    except Exception:
                        # The requesting node reports that this one does not answer, or cuts its stream off.
                        exchange.cut = True
                        logger.exception(
                            "request %s (%s), relayed by node %s, failed", name, asked["route"], str(asked["node"])[:8]
                        )
                    exchange.over = True
                    exchange.tell()
                    await exchange.read.wait()
                    nursery.cancel_scope.cancel()
        finally:
            exchange.over = True
            exchange.tell()
            del self._open[name]

    async def _run(self, exchange: _Exchange, asked: Mapping[str, Any]) -> None:
        core = self._core
        route = next(one for one in core.routes if one.name == asked["route"])
        scope: Scope = {
            "type": "http",
            "method": asked["method"],
            "path": asked["path"],
            "query_string": str(asked["query"]).encode("latin-1"),
            "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in asked["headers"]],
        }
        body = b64decode(asked["body"])

        async def read_body() -> bytes:
            return body

        request = Request(core, scope, read_body, dict(asked["params"]))
        request.caller = msgspec.convert(asked["caller"], Principal)
        request.relayed = True
        answer = await self._app.handle(route, request)
        if isinstance(answer, EventStream):
            answered = await self._app.run_stream(route, request, answer, StreamWriter(exchange.send, list))
            if answered is None:
                return
            answer = answered
        exchange.head = AnswerHead(answer.status, _headers(answer.headers), answer.media.decode("latin-1"))
        exchange.data += answer.body

    async def _watch(self, node: str, scope: trio.CancelScope) -> None:
        """Cancel the scope when a node has ended."""
        store = self._core.store
        while True:
            woken = trio.Event()
            with store.subscribe(NODE_TOPIC, lambda _, woken=woken: woken.set(), node):
                try:
                    alive = any(row.incarnation == node for row in await store.list_nodes())
                except StoreError:
                    alive = True
                if not alive:
                    scope.cancel()
                    return
                with trio.move_on_after(LOOK_SECONDS):
                    await woken.wait()


def _piece(answer: NodeAnswer | None, node: str, kind: str) -> AnswerPiece:
    if answer is not None and answer.gone and kind == HANDLE:
        raise HostGone
    if answer is None or answer.gone or "over" not in answer.value:
        raise _unanswered(node)
    return msgspec.convert(answer.value, AnswerPiece)


def _unanswered(node: str) -> ApiError:
    return ApiError(
        503,
        f"Node {node[:8]} has to handle this request, because what it concerns is there, and that node does not answer now.",
        code="node_unreachable",
        headers=retry_after(1),
    )
