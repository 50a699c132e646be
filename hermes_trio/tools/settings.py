"""The settings of the tools, read from a raw configuration table. A mistake names the key, what stands there and what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

__all__ = ["DelegationTable", "SettingsError", "TerminalSettings", "ToolSettings", "read_table"]

Seconds = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
S = TypeVar("S", bound=msgspec.Struct)


class SettingsError(ValueError):
    """A table of the configuration that cannot be used."""


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
        return read_table(table, cls, "tools")


def read_table(table: Mapping[str, Any], kind: type[S], where: str) -> S:
    """A table as `kind`; a mistake is a `SettingsError` that starts with the key's full name."""
    try:
        return msgspec.convert(dict(table), kind)
    except msgspec.ValidationError as error:
        raise SettingsError(_explain(error, table, kind, where)) from None


_UNKNOWN: Final = "Object contains unknown field `"


def _explain(error: msgspec.ValidationError, table: Mapping[str, Any], kind: type[msgspec.Struct], where: str) -> str:
    problem, _, place = str(error).partition(" - at `$")
    path = place.rstrip("`").strip(".")
    full = f"{where}.{path}" if path else where
    if problem.startswith(_UNKNOWN):
        name = problem.removeprefix(_UNKNOWN).rstrip("`")
        known = _fields(kind, path)
        near = difflib.get_close_matches(name, known, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        return f"{full}.{name} is not a setting{hint}; [{full}] takes {', '.join(known)}"
    value: Any = table
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    shown = f" is {value!r}" if isinstance(value, str | int | float | bool) else ""
    return f"{full}{shown}: {problem[:1].lower()}{problem[1:]}"


def _fields(kind: type[msgspec.Struct], path: str) -> tuple[str, ...]:
    for part in filter(None, path.split(".")):
        inner = next((field.type for field in msgspec.structs.fields(kind) if field.encode_name == part), None)
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            kind = inner
    return tuple(kind.__struct_fields__)
