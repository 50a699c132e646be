"""Open connections: address, proxy, TLS.

A `Dialer` owns the TLS context (made once, on first use: loading the system's certificates takes tens of
milliseconds) and the proxy rules. It keeps no connection: what `connect` returns belongs to the caller.
"""

from __future__ import annotations

import base64
import ipaddress
import socket
import ssl
from collections.abc import Mapping
from typing import ClassVar, Final, cast, final
from urllib.parse import unquote, urlsplit

import msgspec
import trio

from hermes_trio.base.structs import RedactedStruct

PROXY_ANSWER_LIMIT: Final = 16 * 1024
"""Bytes of a proxy's answer to CONNECT that are read before giving up on it."""


class InvalidURL(ValueError):
    """An address that cannot be used; the text says why."""


class ConnectFailed(Exception):
    """No connection could be made; the text says to whom and why, and holds no credentials."""


class Origin(msgspec.Struct, frozen=True):
    """Where a connection goes: two equal origins can share connections."""

    scheme: str
    host: str
    port: int

    @property
    def secure(self) -> bool:
        """Return whether the connection is encrypted."""
        return self.scheme == "https"

    @property
    def authority(self) -> str:
        """`host` or `host:port`, as the Host header wants it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.secure else 80) else f"{host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Return whether the connection stays on this machine."""
        return self.host == "localhost" or self.host.endswith(".localhost") or _is_loopback(self.host)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_base_url(url: str) -> tuple[Origin, str]:
    """Split a provider's base URL into its origin and its path without a trailing slash.

    Raise `InvalidURL` for anything else.
    """
    parts = urlsplit(url.strip())
    if parts.scheme not in ("http", "https"):
        raise InvalidURL(
            f"a base URL starts with http:// or https://, not with {parts.scheme!r}: for example https://api.example.com/v1"
        )
    if parts.username or parts.password:
        raise InvalidURL("a base URL must not hold a user name or password: put the key into its own setting")
    if parts.query or parts.fragment:
        raise InvalidURL("a base URL must not have a query or a fragment")
    if any(character.isspace() or not character.isprintable() for character in parts.path):
        raise InvalidURL("a base URL must not hold white space or control characters")
    try:
        port = parts.port
        host = parts.hostname or ""
        if not _is_literal(host):
            host = host.encode("idna").decode("ascii")
    except ValueError as error:
        raise InvalidURL(f"the host or port of the base URL is not valid: {error}") from None
    if not host:
        raise InvalidURL("a base URL needs a host, for example https://api.example.com/v1")
    return Origin(parts.scheme, host, port or (443 if parts.scheme == "https" else 80)), parts.path.rstrip("/")


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class Proxy(RedactedStruct, frozen=True):
    """An HTTP proxy. Its credentials show up in no `repr`."""

    hidden: ClassVar[tuple[str, ...]] = ("authorization",)
    host: str
    port: int
    authorization: str = ""


def _parse_proxy(name: str, url: str) -> Proxy:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme != "http":
        raise InvalidURL(f"{name}: only http:// proxies are supported (they carry https, too), not {parts.scheme}://")
    if not parts.hostname:
        raise InvalidURL(f"{name}: a proxy is given as http://host:port")
    authorization = ""
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = f"Basic {base64.b64encode(pair.encode()).decode('ascii')}"
    return Proxy(parts.hostname, parts.port or 80, authorization)


class Proxies(msgspec.Struct, frozen=True):
    """Choose the proxy for an origin. Loopback is proxied only if one proxy was named for `everything`."""

    http: Proxy | None = None
    https: Proxy | None = None
    exempt: tuple[str, ...] = ()
    everything: bool = False

    @classmethod
    def through(cls, url: str) -> Proxies:
        """Use one proxy, given as `http://host:port`, for every origin. Raises `InvalidURL`."""
        proxy = _parse_proxy("proxy", url)
        return cls(proxy, proxy, everything=True)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Proxies:
        """Read `HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY` and `NO_PROXY` (also in lower case) from a mapping."""

        def find(name: str) -> tuple[str, str]:
            for spelling in (name.lower(), name.upper()):
                if value := environment.get(spelling, "").strip():
                    return spelling, value
            return name, ""

        def proxy(name: str) -> Proxy | None:
            for candidate in (name, "all_proxy"):
                spelling, value = find(candidate)
                if value:
                    return _parse_proxy(spelling, value)
            return None

        exempt = tuple(entry.strip().lower() for entry in find("no_proxy")[1].split(",") if entry.strip())
        if exempt == ("*",):
            return cls(exempt=exempt)
        return cls(proxy("http_proxy"), proxy("https_proxy"), exempt)

    def choose(self, origin: Origin) -> Proxy | None:
        """Return the proxy for this origin, or None for a direct connection."""
        proxy = self.https if origin.secure else self.http
        if proxy is None or self.everything:
            return proxy
        if origin.loopback or any(_exempts(entry, origin) for entry in self.exempt):
            return None
        return proxy


def _exempts(entry: str, origin: Origin) -> bool:
    if entry == "*":
        return True
    try:
        return ipaddress.ip_address(origin.host) in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        pass
    name, colon, port = entry.rpartition(":")
    if colon and port.isdigit():
        if int(port) != origin.port:
            return False
        entry = name
    entry = entry.removeprefix("*").removeprefix(".")
    return origin.host == entry or origin.host.endswith(f".{entry}")


@final
class Dialer:
    """Opens connections.

    `tls` replaces the context that trusts the system's certificates (or, where there are none, certifi's).
    """

    def __init__(self, *, proxies: Proxies | None = None, tls: ssl.SSLContext | None = None) -> None:
        self._proxies = proxies if proxies is not None else Proxies()
        self._tls = tls

    def proxy_for(self, origin: Origin) -> Proxy | None:
        """Return the proxy that `connect` uses for this origin, or None."""
        return self._proxies.choose(origin)

    async def connect(self, origin: Origin, *, tunnel: bool = False) -> tuple[trio.abc.Stream, trio.socket.SocketType]:
        """Open a connection, ready for HTTP.

        Returns the stream and the socket under it; cancelling leaves nothing open. Raises `ConnectFailed`. Through a proxy, a plain connection ends at
        the proxy, which wants whole addresses in requests; with `tunnel` it ends at the origin.
        """
        proxy = self.proxy_for(origin)
        host, port = (proxy.host, proxy.port) if proxy else (origin.host, origin.port)
        where = f"the proxy {host}:{port}" if proxy else str(origin)
        try:
            plain = await trio.open_tcp_stream(host, port)
        except (OSError, trio.BrokenResourceError) as error:
            raise ConnectFailed(f"cannot connect to {where}: {_words(error)}") from None
        try:
            # A model may be silent for minutes: without this, a connection that a router has forgotten looks like a
            # thinking model.
            plain.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if proxy and (tunnel or origin.secure):
                await _tunnel(plain, proxy, origin)
            if not origin.secure:
                return plain, plain.socket
            secure = trio.SSLStream(plain, self._context(), server_hostname=origin.host, https_compatible=True)
            try:
                await secure.do_handshake()
            except (trio.BrokenResourceError, ssl.SSLError) as error:
                raise ConnectFailed(f"no TLS connection to {origin}: {_words(error.__cause__ or error)}") from None
        except BaseException:
            plain.socket.close()
            raise
        return secure, plain.socket

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            context = ssl.create_default_context()
            if not context.cert_store_stats()["x509_ca"]:
                import certifi  # comes with the HTTP client library; needed only on systems without certificates

                context.load_verify_locations(certifi.where())
            context.set_alpn_protocols(["http/1.1"])
            self._tls = context
        return self._tls


async def _tunnel(stream: trio.SocketStream, proxy: Proxy, origin: Origin) -> None:
    host = f"[{origin.host}]" if ":" in origin.host else origin.host
    lines = [f"CONNECT {host}:{origin.port} HTTP/1.1", f"Host: {host}:{origin.port}"]
    if proxy.authorization:
        lines.append(f"Proxy-Authorization: {proxy.authorization}")
    answer = b""
    try:
        await stream.send_all("\r\n".join([*lines, "", ""]).encode("ascii"))
        while b"\r\n\r\n" not in answer and len(answer) < PROXY_ANSWER_LIMIT:
            data = await stream.receive_some(4096)
            if not data:
                break
            answer += data
    except trio.BrokenResourceError as error:
        raise ConnectFailed(f"the proxy {proxy.host}:{proxy.port} closed the connection: {_words(error)}") from None
    status_line = answer.split(b"\r\n", 1)[0].decode("latin-1")
    words = status_line.split(None, 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or words[1] != "200" or b"\r\n\r\n" not in answer:
        raise ConnectFailed(f"the proxy {proxy.host}:{proxy.port} did not connect to {origin}: {status_line[:200]!r}")


def _words(error: BaseException) -> str:
    """Describe an error by its cause: trio wraps the errors of several attempts, of which the first is shown."""
    cause = error.__cause__
    if cause is not None and not getattr(error, "errno", None):
        return _words(cause)
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return _words(group.exceptions[0])
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate not accepted: {error.verify_message}"
    return str(error) or type(error).__name__
