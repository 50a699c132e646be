"""The settings of the server: `[server]` and `[limits]`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

import msgspec
from msgspec import Meta

from hermes_trio.base.structs import RedactedStruct

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]

KEY_FILE: Final = "api_server.key"
"""The file in the home directory that holds a generated admin key."""


class ServerSettings(RedactedStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[server]`: address, key, origins, and how the server ends."""

    hidden: ClassVar[tuple[str, ...]] = ("key",)
    host: Annotated[str, Meta(min_length=1, max_length=255)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535)] = 8642
    key: str = ""
    """The admin key. Empty: one is generated on the first start, and only loopback addresses are served."""
    cors_origins: list[str] = msgspec.field(default_factory=list[str])
    hosts: list[str] = msgspec.field(default_factory=list[str])
    """Names, besides loopback and `host`, under which the console may be opened. Requests with bearer keys may use any name."""
    model_name: Annotated[str, Meta(max_length=200)] = "hermes-trio"
    """The name under which `/v1/models` offers the default model."""
    on_disconnect: Literal["cancel", "detach"] = "cancel"
    """What happens to the turn of a chat completion, response or message whose client disconnects. A request's header overrides it."""
    server_tools: Literal["mcp_call", "function_call"] = "mcp_call"
    """How responses show the server's own tool calls. A request's header overrides it."""
    access_log: bool = False
    fast_path: bool = True
    drain_seconds: Annotated[float, Meta(ge=0)] = 30.0
    """How long running turns may continue after SIGTERM before they are cancelled."""
    graceful_seconds: Seconds = 5.0
    """How long open requests may continue after the drain."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[limits]`: sizes in bytes, times in seconds; 0 means no limit where a count or a rate is meant."""

    body_bytes: Positive = 10_000_000
    json_depth: Positive = 64
    concurrent_turns: Positive = 1000
    requests_per_minute: Count = 0
    """For each key except the admin key."""
    burst: Count = 0
    """Requests that a key may make at once; 0 is a minute's worth."""
    event_readers: Positive = 256
    """The maximum of streams of run events that a key may read at once."""
    turn_seconds: Annotated[float, Meta(ge=0)] = 0.0
    """The time limit of a turn; 0 for none."""
    wait_seconds: Seconds = 600.0
    """The longest `timeout` that `GET /v1/runs/{id}?wait=…` accepts."""
