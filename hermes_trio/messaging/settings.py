"""The settings of the message gateway and its adapters.

A chat platform's table holds keys of its own (a token, an address) beside the shared ones: `split_settings` separates them. An error names the table,
the key and the accepted values. Secrets may be named by a variable (`secret_env`) instead of written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from hermes_trio.base.settings import SettingsError, near, read_settings
from hermes_trio.base.structs import RedactedStruct

from .addresses import Address
from .session_keys import Isolation

Seconds = Annotated[float, Meta(gt=0)]
Positive = Annotated[int, Meta(ge=1)]
S = TypeVar("S", bound=msgspec.Struct)


class ResetSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a conversation is reset (GW-78): after `idle_minutes` without activity, at `at_hour` of each day, both, or never.

    `at_hour` is in `timezone`. Background work younger than `bg_process_max_age_hours` prevents a reset.
    """

    mode: Literal["none", "idle", "daily", "both"] = "none"
    idle_minutes: Positive = 1440
    at_hour: Annotated[int, Meta(ge=0, le=23)] = 4
    timezone: str = "UTC"
    notify: bool = True
    bg_process_max_age_hours: Annotated[float, Meta(ge=0)] = 24


class HomeChannel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The chat for answers that name the platform only."""

    chat_id: str
    thread_id: str = ""
    name: str = ""


class PlatformSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys that every chat platform's table may have.

    People in `allowed_users` (and those admitted by a pairing code) may talk to the agent; `allow_all` admits everyone. Strangers in a direct chat
    get a pairing code (`unknown_dm = "pair"`) or no reply. `busy` says what a message does while a turn runs: wait (`queue`), stop it (`interrupt`),
    or be passed to it (`steer`). `reset` has overrides by chat type in `reset_by_chat_type`.
    """

    enabled: bool = True
    allowed_users: list[str] = msgspec.field(default_factory=list[str])
    approval_admins: list[str] = msgspec.field(default_factory=list[str])
    """People who may answer all approvals in a group; `*` means everyone who may talk to the agent."""
    allow_all: bool = False
    allow_bots: bool = False
    unknown_dm: Literal["pair", "ignore"] = "pair"
    busy: Literal["queue", "interrupt", "steer"] = "queue"
    busy_ack: bool = False
    stream: bool = False
    typing: bool = True
    home: HomeChannel | None = None
    reset: ResetSettings = ResetSettings()
    reset_by_chat_type: dict[str, ResetSettings] = msgspec.field(default_factory=dict[str, ResetSettings])
    group_sessions_per_user: bool = True
    thread_sessions_per_user: bool = False
    deadline: Seconds | None = None

    @property
    def isolation(self) -> Isolation:
        """Return which people share a conversation."""
        return Isolation(self.group_sessions_per_user, self.thread_sessions_per_user)

    def home_address(self, platform: str) -> Address | None:
        """Return the home channel as an address."""
        return None if self.home is None else Address(platform, self.home.chat_id, self.home.thread_id or None)


class OutboxSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How replies are sent. After `give_up_hours` of failing attempts a reply becomes a dead letter; after `unanswered_attempts` that the platform took
    without an answer, too, because it probably has the reply.

    `look_seconds` is how often an idle sender polls for replies that another process has queued (`hermes-trio outbox retry`).
    """

    concurrency: Positive = 16
    send_seconds: Seconds = 60.0
    flush_seconds: Annotated[float, Meta(ge=0)] = 5.0
    first_delay: Seconds = 2.0
    longest_delay: Seconds = 300.0
    give_up_hours: Seconds = 24.0
    unanswered_attempts: Positive = 3
    look_seconds: Seconds = 60.0


class RouteSettings(RedactedStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[webhook.routes.NAME]`. Several secrets are alternatives, for rotation. `linger` is how long a delivery's session waits for its background work.

    `scheme` pins how requests are signed; without it the headers choose among the schemes that the secret fits. `repeats` accepts the same
    signed body again under another id: for senders whose events look alike, at the price of replays.
    """

    hidden: ClassVar[tuple[str, ...]] = ("secret",)
    enabled: bool = True
    secret: str | list[str] = ""
    secret_env: str = ""
    scheme: Literal["", "svix", "github", "gitlab", "generic_v2", "generic_v1", "standard", "stripe"] = ""
    repeats: bool = False
    events: list[str] = msgspec.field(default_factory=list[str])
    filters: Any = None
    prompt: str = ""
    deliver: str = "log"
    deliver_extra: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    deliver_only: bool = False
    linger: Seconds = 3600.0
    deadline: Seconds | None = None
    model: str = ""


class WebhookSettings(RedactedStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[webhook]`. `rate_limit` is requests a minute and route; `max_pending` limits deliveries that are accepted and not finished."""

    hidden: ClassVar[tuple[str, ...]] = ("secret",)
    enabled: bool = True
    secret: str | list[str] = ""
    secret_env: str = ""
    rate_limit: Positive = 30
    max_body_bytes: Positive = 1_048_576
    max_pending: Positive = 1000
    routes: dict[str, RouteSettings] = msgspec.field(default_factory=dict[str, RouteSettings])


class CronSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[cron]`. `deadline` stops a job that overruns, `linger` limits the wait for its background work, `wrap_response` adds the job's name to its answer."""

    enabled: bool = True
    timezone: str = "UTC"
    deadline: Seconds = 600.0
    linger: Seconds = 3600.0
    wrap_response: bool = True
    max_parallel_jobs: Positive | None = None


class CliSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[cli]`: what a line does while a turn runs, and whether answers are shown as formatted Markdown."""

    busy: Literal["queue", "interrupt", "steer"] = "queue"
    markdown: bool = True
    show_tools: bool = True


_SHARED: Final = frozenset(PlatformSettings.__struct_fields__)


def split_settings(table: Mapping[str, Any], where: str, own: type[S]) -> tuple[PlatformSettings, S]:
    """Split a table into the shared settings of a chat platform and its own. Raises `SettingsError`."""
    shared = {name: value for name, value in table.items() if name in _SHARED}
    rest = {name: value for name, value in table.items() if name not in _SHARED}
    known = sorted([*own.__struct_fields__, *_SHARED])
    for name in rest:
        if name not in own.__struct_fields__:
            raise SettingsError(
                f"{where}.{name} is not a setting{near(name, known)}; [{where}] takes {', '.join(known)}"
            )
    return read_settings(shared, PlatformSettings, where), read_settings(rest, own, where)
