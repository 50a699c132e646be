"""The settings of the tools, read from a raw configuration table. A mistake names the key, what stands there and what would be right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from hermes_trio.base.settings import read_settings

__all__ = ["DelegationTable", "TerminalSettings", "ToolSettings"]

Seconds = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]


class TerminalSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[tools.terminal]`."""

    timeout: Count = 180
    """Seconds that a foreground command may take unless it is told."""
    max_timeout: Count = 600
    cwd: str = ""
    """Where a session's first command starts; empty for the server's own directory."""
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


class DelegationTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[tools.delegation]`."""

    max_concurrent_children: Count = 3
    max_spawn_depth: Count = 1
    orchestrators: bool = True
    child_seconds: Annotated[float, Meta(ge=0)] | None = None
    paused: bool = False


class ToolSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[tools]`. `disabled` names tools that no turn gets."""

    terminal: TerminalSettings = TerminalSettings()
    delegation: DelegationTable = DelegationTable()
    disabled: tuple[Literal["terminal", "process", "delegate_task"], ...] = ()

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> ToolSettings:
        """From `[tools]` of a configuration; raises `SettingsError`."""
        return read_settings(table, cls, "tools")
