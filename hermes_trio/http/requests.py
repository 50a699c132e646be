"""Requests and answers as handlers see them: the same small types, whoever carries the bytes.

A handler is `async def handler(request: Request) -> Response | EventStream`. It runs under Quart or directly in front of it, and cannot tell. A
request lives as long as its handler; an event stream is run by the carrier, in the same task, after the handler has returned it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, final
from urllib.parse import parse_qsl

import msgspec

from hermes_trio.http.server import BodyTooLarge, InvalidJSON, Scope, decode_json

from .errors import ApiError, body_too_large, invalid_body

if TYPE_CHECKING:
    from .auth import Principal
    from .core import ApiCore
    from .streams import StreamWriter

__all__ = ["EventStream", "Handler", "HandlerResult", "HeaderPairs", "Request", "Response", "encode_json"]

T = TypeVar("T")

HeaderPairs: TypeAlias = Iterable[tuple[bytes, bytes]]

encode_json: Final = msgspec.json.Encoder().encode
"""The one JSON encoder of the front end."""

JSON_TYPE: Final = b"application/json"


@final
class Request:
    """One request. `caller` is known before a handler is called, except on open routes."""

    __slots__ = ("_body", "_headers", "_query", "_read_body", "caller", "core", "params", "scope")

    def __init__(
        self,
        core: ApiCore,
        scope: Scope,
        read_body: Callable[[], Awaitable[bytes]],
        params: Mapping[str, str],
    ) -> None:
        self.core = core
        self.scope = scope
        self.params = params
        self.caller: Principal
        self._read_body = read_body
        self._body: bytes | None = None
        self._query: dict[str, str] | None = None
        # From the last to the first, so that of two headers of one name the first stays.
        self._headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))

    @property
    def method(self) -> str:
        """The method, in capitals."""
        return self.scope["method"]

    @property
    def path(self) -> str:
        """The decoded path."""
        return self.scope["path"]

    def header(self, name: bytes) -> str | None:
        """The first header of that (lower-case) name, or None."""
        value = self._headers.get(name)
        return None if value is None else value.decode("latin-1")

    def raw_header(self, name: bytes) -> bytes | None:
        """The same, as it came."""
        return self._headers.get(name)

    def query(self, name: str, default: str = "") -> str:
        """The first query parameter of that name."""
        if self._query is None:
            self._query = {}
            text: str = self.scope["query_string"].decode("latin-1")
            if text:
                for key, value in parse_qsl(text, keep_blank_values=True, errors="replace"):
                    self._query.setdefault(key, value)
        return self._query.get(name, default)

    @property
    def read_body(self) -> bytes:
        """The body as far as it has been read: all of it, or nothing."""
        return self._body or b""

    async def body(self) -> bytes:
        """The whole body, read once. Raises 413 as soon as it is longer than the limit."""
        if self._body is None:
            try:
                self._body = await self._read_body()
            except BodyTooLarge as error:
                raise body_too_large(error.limit) from None
        return self._body

    async def json(self, decoder: msgspec.json.Decoder[T]) -> T:
        """The body as the decoder's type; 400 with the path of the mistake if it is something else."""
        body = await self.body()
        try:
            return decode_json(body, decoder, max_depth=self.core.limits.json_depth)
        except InvalidJSON as error:
            raise ApiError(400, f"{error}", code="invalid_json") from None
        except msgspec.ValidationError as error:
            raise invalid_body(error) from None


@final
class Response:
    """A whole answer. `headers` are those that belong to this answer alone; the carrier adds the rest."""

    __slots__ = ("body", "headers", "media", "status")

    def __init__(
        self,
        body: bytes,
        status: int = 200,
        headers: HeaderPairs = (),
        media: bytes = JSON_TYPE,
    ) -> None:
        self.body = body
        self.status = status
        self.headers = headers
        self.media = media

    @classmethod
    def of(cls, value: Any, status: int = 200, headers: HeaderPairs = ()) -> Response:
        """A JSON answer."""
        return cls(encode_json(value), status, headers)


@final
class EventStream:
    """An answer that goes on. `run(writer)` opens the writer, sends the events and returns when there are no more; the carrier closes it.

    What `run` raises before it has opened the writer is answered like any error. Cancelling it means that the client has left.
    """

    __slots__ = ("run",)

    def __init__(self, run: Callable[[StreamWriter], Awaitable[None]]) -> None:
        self.run = run


HandlerResult: TypeAlias = Response | EventStream
Handler: TypeAlias = Callable[[Request], Awaitable[HandlerResult]]
