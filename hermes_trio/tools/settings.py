"""The settings of the tools, read from a raw configuration table. A mistake names the key, what stands there and what would be right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from hermes_trio.base.settings import read_settings
from hermes_trio.runtime.budget import Budget

from .warden import CommandLimits, Profile

__all__ = ["ConfinementSettings", "DelegationSettings", "TerminalSettings", "ToolSettings"]

Seconds = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
SHORTEST_CHILD: Final = 30.0


class TerminalSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[tools.terminal]`."""

    timeout: Count = 180
    """Seconds that a foreground command may take unless it is told."""
    max_timeout: Count = 600
    cwd: str = ""
    """Where a session's first command starts; empty for the server's own directory. Never inside the gateway's home."""
    workspace: Literal["auto", "per-session", "shared"] = "auto"
    """Whether a session has a folder of its own: with `auto`, those that are confined to a workspace."""
    session_folder: str = ""
    """Where the folders of sessions are; empty for `hermes-trio-sessions` in the user's state folder."""
    output_characters: Annotated[int, Meta(ge=100)] = 50_000
    ring_characters: Annotated[int, Meta(ge=100)] = 200_000
    kill_grace: Seconds = 2.0
    """Seconds between SIGTERM and SIGKILL."""
    foreground_grace: Seconds = 1.0
    leftover_grace: Seconds = 1.0
    """Seconds that processes which a command left behind may take to end by themselves."""
    keep_seconds: Seconds = 1800.0
    """For how long an ended process can still be looked at."""
    keep_count: Count = 256
    max_processes: Count = 256
    max_processes_per_session: Count = 32
    pass_environment: tuple[str, ...] = ()
    """Names or globs of the server's variables that commands get besides the harmless ones."""
    login_shell: bool = False


class DelegationSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[tools.delegation]`: the limits of delegation."""

    max_concurrent_children: Count = 3
    """Children in one batch, and background batches in the whole process."""
    max_spawn_depth: Count = 1
    """How deep children may have children: 1 means that children cannot delegate."""
    orchestrators: bool = True
    child_seconds: Seconds | None = None
    """How long one child may take, at least 30 s; None or 0 for as long as it needs."""
    paused: bool = False
    profile: Profile | None = None
    """Narrows the confinement of children; they never have a wider one than their parent."""

    @property
    def child_budget(self) -> Budget | None:
        """The budget of one child."""
        if self.child_seconds is None or self.child_seconds <= 0:
            return None
        return Budget(seconds=max(SHORTEST_CHILD, self.child_seconds))


class ConfinementSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[tools.confinement]`: what commands may see and touch."""

    profile: Profile = Profile.PROTECT
    platforms: dict[str, Profile] = {}
    """By platform (`api_server`, `telegram`, `webhook`, `cron`, …)."""
    routes: dict[str, Profile] = {}
    """By webhook route."""
    tenants: dict[str, Profile] = {}
    """By the tenant of an API key; `*` for every tenant but the owner, who has none. Default: workspace."""
    keys: dict[str, Profile] = {}
    """By the id of an API key; `admin` is the admin key's. Goes before all the others."""
    hide: tuple[str, ...] = ()
    """Files and folders that commands must not see."""
    show: tuple[str, ...] = ()
    """Folders inside of the gateway's home that commands may read."""
    read_only: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()
    """What commands in a workspace may read besides system folders."""
    limits: CommandLimits = CommandLimits()


class ToolSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[tools]`. `disabled` names tools that no turn gets."""

    terminal: TerminalSettings = TerminalSettings()
    delegation: DelegationSettings = DelegationSettings()
    confinement: ConfinementSettings = ConfinementSettings()
    disabled: tuple[Literal["terminal", "process", "delegate_task"], ...] = ()

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> ToolSettings:
        """From `[tools]` of a configuration; raises `SettingsError`."""
        return read_settings(table, cls, "tools")
