"""The settings of the tools. An error names the key, its value and what is accepted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from hermes_trio.base.settings import read_settings
from hermes_trio.runtime.budget import Budget

from .warden import CommandLimits, Profile

Seconds = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
SHORTEST_CHILD: Final = 30.0


class TerminalSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[tools.terminal]`."""

    timeout: Count = 180
    """The default time limit of a foreground command, in seconds."""
    max_timeout: Count = 600
    cwd: str = ""
    """The directory of a session's first command; empty for the server's own. Never inside the gateway's home."""
    workspace: Literal["auto", "per-session", "shared"] = "auto"
    """Whether a session has a directory of its own: with `auto`, sessions that are confined to a workspace."""
    session_folder: str = ""
    """The parent of those directories; empty for `hermes-trio-sessions` in the user's state directory."""
    output_characters: Annotated[int, Meta(ge=100)] = 50_000
    ring_characters: Annotated[int, Meta(ge=100)] = 200_000
    kill_grace: Seconds = 2.0
    """Seconds between SIGTERM and SIGKILL."""
    foreground_grace: Seconds = 1.0
    leftover_grace: Seconds = 1.0
    """Seconds that processes which a command has left running may take to end by themselves."""
    keep_seconds: Seconds = 1800.0
    """How long an ended process can still be read, in seconds."""
    keep_count: Count = 256
    max_processes: Count = 256
    max_processes_per_session: Count = 32
    pass_environment: tuple[str, ...] = ()
    """Names or globs of variables of the server that commands get in addition to the default allow-list."""
    login_shell: bool = False


class DelegationSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[tools.delegation]`: the limits of delegation."""

    max_concurrent_children: Count = 3
    """The maximum of children in one batch, and of background batches in the whole process."""
    max_spawn_depth: Count = 1
    """The maximum depth of children: 1 means that children cannot delegate."""
    orchestrators: bool = True
    child_seconds: Seconds | None = None
    """The time limit of one child, at least 30 s; None or 0 for none."""
    paused: bool = False
    profile: Profile | None = None
    """Narrows the confinement of children. It is never wider than their parent's."""

    @property
    def child_budget(self) -> Budget | None:
        """Return the budget of one child."""
        if self.child_seconds is None or self.child_seconds <= 0:
            return None
        return Budget(seconds=max(SHORTEST_CHILD, self.child_seconds))


class ConfinementSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[tools.confinement]`: what commands may read and write."""

    profile: Profile = Profile.PROTECT
    platforms: dict[str, Profile] = {}
    """By platform (`api_server`, `telegram`, `webhook`, `cron`, …)."""
    routes: dict[str, Profile] = {}
    """By webhook route."""
    tenants: dict[str, Profile] = {}
    """By the tenant of an API key; `*` for every tenant but the owner, who has none. Default: workspace."""
    keys: dict[str, Profile] = {}
    """By the id of an API key; `admin` for the admin key. Overrides all the others."""
    hide: tuple[str, ...] = ()
    """Files and directories that are hidden from commands."""
    show: tuple[str, ...] = ()
    """Directories inside the gateway's home that commands may read."""
    read_only: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()
    """What commands in a workspace may read besides system directories."""
    limits: CommandLimits = CommandLimits()


ToolName: TypeAlias = Literal["terminal", "process", "delegate_task"]
"""The names of the tools of the toolbox. No plugin can take one, and `disabled` accepts no other."""


class ToolSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[tools]`. `disabled` names tools that no turn gets."""

    terminal: TerminalSettings = TerminalSettings()
    delegation: DelegationSettings = DelegationSettings()
    confinement: ConfinementSettings = ConfinementSettings()
    disabled: tuple[ToolName, ...] = ()

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> ToolSettings:
        """Read `[tools]` of a configuration. Raises `SettingsError`."""
        return read_settings(table, cls, "tools")
