"""Reads a chat platform's table of the configuration file, completes it from the environment, and splits it into shared and own settings.

The file overrides the environment. Ids may be written as numbers. An error names the table and the key, its value and the accepted values; a token is
never quoted.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeVar, cast
from urllib.parse import urlsplit

import msgspec

from hermes_trio.base.settings import SettingsError

from .errors import PlatformError, require_token
from .settings import PlatformSettings, split_settings

S = TypeVar("S", bound=msgspec.Struct)

_ID_LISTS: Final = (
    "allowed_users",
    "approval_admins",
    "allowed_chats",
    "free_chats",
    "allowed_channels",
    "free_channels",
)


def is_configured(table: Mapping[str, Any], environment: Mapping[str, str], variable: str) -> bool:
    """Return whether the platform is configured: it has a table or a token in the environment, and is not disabled."""
    wanted = bool(table) or bool(environment.get(variable, "").strip())
    return wanted and table.get("enabled", True) is not False


def complete_table(
    table: Mapping[str, Any], platform: str, environment: Mapping[str, str], variables: Mapping[str, str]
) -> dict[str, Any]:
    """Complete the table from the environment: `variables` by key, and `<PLATFORM>_ALLOWED_USERS`, `<PLATFORM>_HOME_CHANNEL`, `…_THREAD_ID`."""

    def look_up(variable: str) -> str:
        return environment.get(variable, "").strip()

    completed = dict(table)
    for key, variable in variables.items():
        if key not in completed and look_up(variable):
            completed[key] = look_up(variable)
    name = platform.upper()
    if "allowed_users" not in completed and look_up(f"{name}_ALLOWED_USERS"):
        completed["allowed_users"] = [one.strip() for one in look_up(f"{name}_ALLOWED_USERS").split(",") if one.strip()]
    if "home" not in completed and look_up(f"{name}_HOME_CHANNEL"):
        completed["home"] = {
            "chat_id": look_up(f"{name}_HOME_CHANNEL"),
            "thread_id": look_up(f"{name}_HOME_CHANNEL_THREAD_ID"),
        }
    for key in _ID_LISTS:
        if isinstance(completed.get(key), list):
            completed[key] = [_id(one) for one in cast("list[Any]", completed[key])]
    if isinstance(completed.get("home"), dict):
        home = cast("dict[str, Any]", completed["home"])
        completed["home"] = {key: _id(value) for key, value in home.items()}
    return completed


def _id(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def read_platform(table: Mapping[str, Any], where: str, own: type[S]) -> tuple[PlatformSettings, S]:
    """Return the shared and the own settings of a table. Raises `SettingsError`, with the accepted words for a wrong one."""
    for kind in (own, PlatformSettings):
        for key, hint in typing.get_type_hints(kind).items():
            accepted = _words(hint)
            if accepted and key in table and table[key] not in accepted:
                listed = ", ".join(repr(word) for word in accepted)
                raise SettingsError(f"[{where}]: {key} is {table[key]!r}; accepted are {listed}")
    return split_settings(table, where, own)


def _words(hint: Any) -> Sequence[str]:
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [word for part in typing.get_args(hint) for word in _words(part)]
    return ()


def required_token(value: str, where: str, key: str, variable: str, advice: str) -> str:
    """Return a token. Raises `SettingsError` for one that is missing or invalid; `advice` says where a person gets it."""
    if not value:
        raise SettingsError(f'[{where}]: {key} is missing; write {key} = "…" or set the variable {variable} ({advice})')
    try:
        return require_token(key, value)
    except PlatformError:
        raise SettingsError(
            f"[{where}]: {key} has spaces or other characters that no token has; copy it again ({advice})"
        ) from None


def check_addresses(where: str, **addresses: str | None) -> None:
    """Check that these settings, by their keys, are absolute HTTP addresses; None is not set. Raises `SettingsError`."""
    for key, value in addresses.items():
        if value is None:
            continue
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingsError(f"[{where}]: {key} is {value!r}; it must be an absolute http:// or https:// address")
