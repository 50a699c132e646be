"""`[mcp]` of the configuration: the servers and their addresses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, cast

import msgspec
from msgspec import Meta

from hermes_trio.base.settings import SettingsError, read_settings
from hermes_trio.base.structs import RedactedStruct
from hermes_trio.tools.warden import Profile

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,32}")
_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")

Seconds = Annotated[float, Meta(gt=0)]


class McpServer(RedactedStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[mcp.servers.NAME]`: a `command` that speaks over its standard streams, or the `url` of a streamable HTTP server.

    `${NAME}` in `env` and `headers` is replaced by a variable of this process, so that secrets need not be in the file.
    """

    hidden: ClassVar[tuple[str, ...]] = (
        "env",
        "headers",
    )
    command: str = ""
    args: tuple[str, ...] = ()
    env: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    cwd: str = ""
    url: str = ""
    headers: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    timeout: Seconds = 120.0
    """The time limit of a call, in seconds."""
    connect_timeout: Seconds = 30.0
    enabled: bool = True
    tools: tuple[str, ...] = ()
    """Only these tools; empty for all."""
    profile: Profile = Profile.PROTECT
    """What the process of a `command` may read and write. A workspace is its `cwd`."""
    allowed: tuple[str, ...] = ()
    """Tenants and platforms that may use it although their commands are confined to a workspace. All others may use it anyway."""


class McpSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[mcp]`."""

    servers: dict[str, McpServer] = msgspec.field(default_factory=dict[str, McpServer])
    startup_seconds: Annotated[float, Meta(ge=0)] = 5.0
    """How long the start of the gateway waits for servers; later ones are used when they are connected."""

    @classmethod
    def read(cls, table: Mapping[str, Any], environment: Mapping[str, str]) -> McpSettings:
        """Read `[mcp]` of a configuration, with variables replaced. Raises `SettingsError`."""
        given: Any = table.get("servers", {})
        if not isinstance(given, dict):
            raise SettingsError("mcp.servers must be a table of servers, [mcp.servers.NAME]")
        settings = read_settings({**table, "servers": {}}, cls, "mcp")
        servers: dict[str, McpServer] = {}
        for name, entry in cast("dict[str, Any]", given).items():
            where = f"mcp.servers.{name}"
            if not isinstance(entry, dict):
                raise SettingsError(f"{where} must be a table, [{where}]")
            server = read_settings(cast("dict[str, Any]", entry), McpServer, where)
            if not _NAME.fullmatch(name):
                raise SettingsError(f"{where}: a name has 1 to 32 letters, digits, '_' or '-'")
            if bool(server.command) == bool(server.url):
                raise SettingsError(f"{where}: give either a command or a url")
            if server.profile.confines_files and server.command and not server.cwd:
                raise SettingsError(
                    f"{where}: the profile {str(server.profile)!r} needs a cwd, which is all that the server may write in"
                )
            if server.url and not server.url.startswith(("http://", "https://")):
                raise SettingsError(f"{where}.url must start with http:// or https://")
            servers[name] = msgspec.structs.replace(
                server,
                env=_filled(server.env, environment, f"{where}.env"),
                headers=_filled(server.headers, environment, f"{where}.headers"),
            )
        return msgspec.structs.replace(settings, servers=servers)


def _filled(values: Mapping[str, str], environment: Mapping[str, str], where: str) -> dict[str, str]:
    filled: dict[str, str] = {}
    for name, value in values.items():
        missing = [variable for variable in _VARIABLE.findall(value) if variable not in environment]
        if missing:
            raise SettingsError(f"{where}.{name} needs the environment variable {missing[0]}, which is not set")
        filled[name] = _VARIABLE.sub(lambda match: environment[match[1]], value)
    return filled
