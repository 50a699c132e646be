"""Requests and responses as handlers see them, with Quart or without.

A handler is `async def handler(request: Request) -> Response | EventStream`. A request exists as long as its handler; an event stream is run in the
same task after the handler has returned it.
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

T = TypeVar("T")

HeaderPairs: TypeAlias = Iterable[tuple[bytes, bytes]]

encode_json: Final = msgspec.json.Encoder().encode
"""The JSON encoder of the API."""

JSON_TYPE: Final = b"application/json"


@final
class Request:
    """One request. `caller` is known before a handler is called, except on open routes.

    `relayed` says that another node has received it and authorised its caller; it has no credentials here. `signed_in` says that the caller was found by the
    cookie of a browser session.
    """

    __slots__ = (
        "_body",
        "_headers",
        "_query",
        "_read_body",
        "caller",
        "core",
        "params",
        "relayed",
        "scope",
        "signed_in",
    )

    def __init__(
        self,
        core: ApiCore,
        scope: Scope,
        read_body: Callable[[], Awaitable[bytes]],
        params: Mapping[str, str],
        headers: dict[bytes, bytes] | None = None,
    ) -> None:
        self.core = core
        self.scope = scope
        self.params = params
        self.caller: Principal
        self.relayed: bool = False
        self.signed_in: bool = False
        self._read_body = read_body
        self._body: bytes | None = None
        self._query: dict[str, str] | None = None
        # From the last to the first, so that of two headers of one name the first stays.
        self._headers: dict[bytes, bytes] = dict(reversed(scope["headers"])) if headers is None else headers

    @property
    def method(self) -> str:
        """Return the method, in capitals."""
        return self.scope["method"]

    @property
    def path(self) -> str:
        """Return the decoded path."""
        return self.scope["path"]

    def header(self, name: bytes) -> str | None:
        """Return the first header of that (lower-case) name, or None."""
        value = self._headers.get(name)
        return None if value is None else value.decode("latin-1")

    def raw_header(self, name: bytes) -> bytes | None:
        """Return the first header of that name as bytes, or None."""
        return self._headers.get(name)

    def query(self, name: str, default: str = "") -> str:
        """Return the first query parameter of that name."""
        if self._query is None:
            self._query = {}
            text: str = self.scope["query_string"].decode("latin-1")
            if text:
                for key, value in parse_qsl(text, keep_blank_values=True, errors="replace"):
                    self._query.setdefault(key, value)
        return self._query.get(name, default)

    @property
    def read_body(self) -> bytes:
        """Return the body if it has been read, or nothing."""
        return self._body or b""

    async def body(self) -> bytes:
        """Read the whole body, once. Raises 413 as soon as it exceeds the limit."""
        if self._body is None:
            try:
                self._body = await self._read_body()
            except BodyTooLarge as error:
                raise body_too_large(error.limit) from None
        return self._body

    async def json(self, decoder: msgspec.json.Decoder[T]) -> T:
        """Decode the body as the decoder's type. Raises 400 with the path of the mistake."""
        body = await self.body()
        try:
            return decode_json(body, decoder, max_depth=self.core.limits.json_depth)
        except InvalidJSON as error:
            raise ApiError(400, f"{error}", code="invalid_json") from None
        except msgspec.ValidationError as error:
            raise invalid_body(error) from None


@final
class Response:
    """A whole response. `headers` are those of this response only; the application adds the rest."""

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
        """Return a JSON response."""
        return cls(encode_json(value), status, headers)


@final
class EventStream:
    """A streamed response. `run(writer)` opens the writer, sends the events and returns after the last; the application closes it.

    What `run` raises before it has opened the writer becomes an error response. Cancelling it means that the client has disconnected.
    """

    __slots__ = ("run",)

    def __init__(self, run: Callable[[StreamWriter], Awaitable[None]]) -> None:
        self.run = run


HandlerResult: TypeAlias = Response | EventStream
Handler: TypeAlias = Callable[[Request], Awaitable[HandlerResult]]
