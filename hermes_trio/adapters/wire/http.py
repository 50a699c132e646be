"""One HTTP link to one platform: a connection pool, a deadline for each call, and no secret in any text.

The link uses httpx2's transport and not its client, because the client logs every URL and Telegram's URLs
hold the bot token. A `PlatformClient` owns its link; leaving the client closes every pooled connection.
"""

from __future__ import annotations

import functools
import ssl
from collections.abc import Mapping
from types import TracebackType
from typing import Any, ClassVar, Self, final

import httpx2
import msgspec
import trio

from hermes_trio.base.structs import RedactedStruct
from hermes_trio.messaging.errors import PlatformError, PlatformErrorKind, Redaction

# Sending is cheap to repeat for the caller, so a call that takes longer than this is given up.
CALL_TIMEOUT = 30.0
# Closing sockets needs no peer; the bound is for a TLS goodbye into a full buffer.
CLOSE_TIMEOUT = 1.0
# A platform's answers are small; a body above this is not one of them.
MAX_ANSWER_BYTES = 32 * 1024 * 1024


@functools.cache
def verifying_tls() -> ssl.SSLContext:
    """Return the process's TLS client settings. Reading the trust store takes about 20 ms, so it is read once."""
    return httpx2.create_ssl_context()


@functools.cache
def _no_tls() -> ssl.SSLContext:
    # Has no trusted certificates: a plain-HTTP link that is sent to an https address fails instead of trusting it unread.
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


@final
class PlatformResponse(RedactedStruct, frozen=True):
    """A complete HTTP answer. Header names are lower-case."""

    hidden: ClassVar[tuple[str, ...]] = ("body",)
    status: int
    headers: Mapping[str, str]
    body: bytes

    def decode(self) -> Any:
        """Return the JSON value of the body, or None where the body is not JSON (a proxy's error page)."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None


@final
class HttpLink:
    """Calls below one base URL.

    `proxy` is an HTTP proxy's URL; the environment's proxy settings are not read, because configuration is explicit.
    """

    def __init__(
        self,
        base_url: str,
        *,
        redaction: Redaction,
        headers: Mapping[str, str] | None = None,
        timeout: float = CALL_TIMEOUT,
        proxy: str | None = None,
    ) -> None:
        url = httpx2.URL(base_url)
        if url.scheme not in {"http", "https"} or not url.host:
            raise ValueError(f"base URL {redaction(base_url)!r} must be an absolute http:// or https:// address")
        self.base_url = base_url.rstrip("/")
        self.timeout = timeout
        self._redaction = redaction
        self._headers = {"user-agent": "hermes-trio", "accept-encoding": "gzip, deflate", **(headers or {})}
        self._transport = httpx2.AsyncHTTPTransport(
            verify=verifying_tls() if url.scheme == "https" or proxy is not None else _no_tls(),
            trust_env=False,
            proxy=proxy,
            limits=httpx2.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=30),
        )

    def __repr__(self) -> str:
        return f"HttpLink({self._redaction(self.base_url)!r})"

    async def aclose(self) -> None:
        """Close every pooled connection."""
        await self._transport.aclose()

    async def call(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        absolute: bool = False,
    ) -> PlatformResponse:
        """Make one call and read its whole answer, whatever its status.

        `path` is below the base URL, or with `absolute` an address that the platform itself gave out.
        Raises `PlatformError(TRANSIENT)` when no complete answer arrived in time; it is `ambiguous` unless the
        connection could not even be made. Cancelling it closes the connection that the call was using.
        """
        limit = self.timeout if timeout is None else timeout
        url = path if absolute else self.base_url + path
        sent = {**self._headers, **(headers or {})}
        content: bytes | None = None
        if json is not None:
            content = msgspec.json.encode(json)
            sent["content-type"] = "application/json; charset=utf-8"
        request = httpx2.Request(method, url, params=query, headers=sent, content=content)
        try:
            with trio.fail_after(limit):
                return await self._exchange(request)
        except trio.TooSlowError:
            message = f"{method} {self._redaction(path)}: no complete answer within {limit:g} s"
            raise PlatformError(PlatformErrorKind.TRANSIENT, message, ambiguous=True) from None
        except httpx2.HTTPError as error:
            never_sent = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.ProxyError)
            detail = self._redaction(str(error)) or "the connection was lost"
            message = f"{method} {self._redaction(path)}: {type(error).__name__}: {detail}"
            # The original's traceback would name the URL, and with it the token.
            raise PlatformError(PlatformErrorKind.TRANSIENT, message, ambiguous=not never_sent) from None

    async def _exchange(self, request: httpx2.Request) -> PlatformResponse:
        response = await self._transport.handle_async_request(request)
        try:
            declared = response.headers.get("content-length", "0")
            if declared.isdigit() and int(declared) > MAX_ANSWER_BYTES:
                raise httpx2.DecodingError(f"the answer has {declared} bytes, at most {MAX_ANSWER_BYTES} are read")
            body = await response.aread()
        finally:
            await response.aclose()
        headers = {name.lower(): value for name, value in response.headers.items()}
        return PlatformResponse(response.status_code, headers, body)


class PlatformClient:
    """What the clients of all platforms share: they are entered by their owner, and own one link until left."""

    def __init__(self, link: HttpLink) -> None:
        self._link = link

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._link!r})"

    async def __aenter__(self) -> Self:
        await trio.lowlevel.checkpoint()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with trio.move_on_after(CLOSE_TIMEOUT, shield=True):
            await self._link.aclose()
