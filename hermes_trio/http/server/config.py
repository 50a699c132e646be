"""What the serving layer can be told: Hypercorn's own configuration and the limits of one connection.

Hypercorn's `Config` stays the one place for addresses, TLS, HTTP/2, WebSocket, logging and the graceful timeout;
`ServerConfig` adds only what Hypercorn has no word for. On the fast path these settings of Hypercorn are honoured:
`bind`, `insecure_bind`, `backlog`, `keep_alive_timeout`, `graceful_timeout`, `root_path`, `server_names`,
`include_date_header`, `include_server_header`, `accesslog` and the loggers. `keep_alive_max_requests` and
`max_requests` concern the stock connections only. QUIC is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from hypercorn.config import Config

KIBI = 1024


def hypercorn_config(bind: str | Sequence[str] = "127.0.0.1:8642") -> Config:
    """Return a Hypercorn configuration with the defaults of this server: a long keep-alive, a deep backlog, no server
    header.
    """
    config = Config()
    config.bind = [bind] if isinstance(bind, str) else list(bind)
    config.backlog = 4096
    config.keep_alive_timeout = 75.0
    config.graceful_timeout = 10.0
    config.ssl_handshake_timeout = 15.0
    config.include_server_header = False
    config.worker_class = "trio"
    return config


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How to serve: Hypercorn's configuration, whether plain HTTP/1.1 takes the fast path, and the bounds of a
    connection.

    Times are seconds, sizes are bytes.
    """

    hypercorn: Config = msgspec.field(default_factory=hypercorn_config)
    fast_path: bool = True
    """Plain-text HTTP/1.1 on our own connection class; off, every connection is Hypercorn's (with the fixes)."""

    head_timeout: float = 15.0
    """From the first byte of a request to the end of its head."""
    body_timeout: float = 30.0
    """What the body may take before `body_rate` is expected of it."""
    body_rate: float = 1.0 * KIBI
    """Bytes a second that each part of a slow body buys."""
    write_timeout: float = 30.0
    """How long a write may go without the reader taking a byte."""
    drain_timeout: float = 5.0
    """How long the rest of a body is read and dropped after an answer that did not need it, so that the answer arrives."""
    linger_timeout: float = 1.0
    """How long input is read and dropped before a refused connection closes, so that the refusal arrives."""

    target_bytes: int = 8 * KIBI
    """Longest request target; above it 414."""
    head_bytes: int = 32 * KIBI
    """Longest head, and longest trailer section; above it 431."""
    drain_bytes: int = KIBI * KIBI
    """How much of an unwanted body is read to keep its connection."""

    others: tuple[int, ...] = ()
    """Listening sockets of other processes that serve the same address, by descriptor; they are not closed. Connections that their own processes leave
    waiting are accepted here."""
    raise_descriptor_limit: bool = True
    """Raise the soft limit of open descriptors to the hard one when serving starts."""
    lifespan: bool = True
    """Run the application's lifespan. Off for one that has nothing to start: Hypercorn's part is then not loaded."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if name.endswith(("_timeout", "_bytes", "_rate")) and not getattr(self, name) > 0:
                raise ValueError(f"{name} must be a number above 0, got {getattr(self, name)!r}")
