"""The configuration, from the environment, one TOML file and the command line; later ones override earlier ones.

The file overrides the environment, which is often inherited. An error names the key, its value and the accepted values. Sections of other parts of
the product are kept as tables, which their owners validate.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast

import msgspec
from msgspec import Meta

from hermes_trio.base.retention import Retention
from hermes_trio.base.settings import SettingsError, explain, near
from hermes_trio.http.settings import KEY_FILE, Limits, ServerSettings
from hermes_trio.tracing.settings import TracingSettings

CONFIG_NAME: Final = "config.toml"
DATABASE_NAME: Final = "state.db"
STORE_VARIABLE: Final = "HERMES_STORE_URL"

Table = dict[str, Any]


class ConfigError(SettingsError):
    """Raised for a configuration that cannot be used. The text names the key and the accepted values."""


class LogSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[log]`: level and format. `auto` is text on a terminal and JSON otherwise."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "text", "json"] = "auto"


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[store]`: the place of the store. Without `url` it is a SQLite file in the home directory."""

    url: Annotated[
        str, Meta(pattern=r"^(postgres(ql)?://.+)?$", description="an address such as postgresql://user@host:5432/name")
    ] = ""
    node_name: str = ""
    lease_seconds: Annotated[float, Meta(ge=1, le=300)] = 15.0

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        # An address may hold a password.
        return [("url", "…" if self.url else ""), ("node_name", self.node_name), ("lease_seconds", self.lease_seconds)]

    def __repr__(self) -> str:
        return f"StoreSettings({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"


class PluginSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[plugins]`: which installed plugins are used, by the names of their entry points."""

    tools: list[str] = msgspec.field(default_factory=list[str])
    adapters: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict[str, dict[str, Any]])


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole configuration. `home` is the directory of all state, `environment` is what models and adapters may read."""

    server: ServerSettings = ServerSettings()
    limits: Limits = Limits()
    log: LogSettings = LogSettings()
    store: StoreSettings = StoreSettings()
    retention: Retention = Retention()
    tracing: TracingSettings = TracingSettings()
    plugins: PluginSettings = PluginSettings()
    models: Table = msgspec.field(default_factory=dict[str, Any])
    agent: Table = msgspec.field(default_factory=dict[str, Any])
    approvals: Table = msgspec.field(default_factory=dict[str, Any])
    tools: Table = msgspec.field(default_factory=dict[str, Any])
    mcp: Table = msgspec.field(default_factory=dict[str, Any])
    cli: Table = msgspec.field(default_factory=dict[str, Any])
    webhook: Table = msgspec.field(default_factory=dict[str, Any])
    cron: Table = msgspec.field(default_factory=dict[str, Any])
    telegram: Table = msgspec.field(default_factory=dict[str, Any])
    discord: Table = msgspec.field(default_factory=dict[str, Any])
    slack: Table = msgspec.field(default_factory=dict[str, Any])
    home: Path = Path()
    path: Path | None = None
    environment: dict[str, str] = msgspec.field(default_factory=dict[str, str])

    @property
    def database(self) -> Path:
        """Return the path of the SQLite file. A server on PostgreSQL announces its address beside this path, too."""
        return self.home / DATABASE_NAME

    @property
    def place(self) -> Path | str:
        """Return the place of the store: the address of a PostgreSQL database, or a file."""
        return self.store.url or self.database

    @property
    def tables(self) -> dict[str, Table]:
        """Return the sections that their owners validate, by name. `plugins` holds the tables of adapters in other packages."""
        sections = {name: getattr(self, name) for name in SECTIONS}
        tables = {name: cast("Table", value) for name, value in sections.items() if isinstance(value, dict)}
        return {**tables, "plugins": cast("Table", self.plugins.adapters)}

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        # Tables and the environment hold secrets.
        return [("home", str(self.home)), ("path", str(self.path))]

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"


_OWN: Final = ("home", "path", "environment")
SECTIONS: Final = tuple(name for name in Config.__struct_fields__ if name not in _OWN)

_SERVER_VARIABLES: Final[Mapping[str, str]] = {
    "host": "API_SERVER_HOST",
    "port": "API_SERVER_PORT",
    "key": "API_SERVER_KEY",
    "cors_origins": "API_SERVER_CORS_ORIGINS",
    "model_name": "API_SERVER_MODEL_NAME",
}


def default_home(environment: Mapping[str, str]) -> Path:
    """Return `HERMES_HOME`, else `~/.hermes-trio`."""
    given = environment.get("HERMES_HOME", "").strip()
    return Path(given).expanduser() if given else Path("~/.hermes-trio").expanduser()


def loose_modes(config: Config) -> list[str]:
    """Return a line, with the remedy, for each of the home directory, key file and configuration file that other users can read or change."""
    found: list[str] = []
    for path, right in ((config.home, 0o700), (config.path, 0o600), (config.home / KEY_FILE, 0o600)):
        try:
            mode = None if path is None else stat.S_IMODE(path.stat().st_mode)
        except OSError:
            continue
        if path is None or mode is None or not mode & 0o077:
            continue
        what = "changed" if mode & 0o022 else "read"
        found.append(f"{path} can be {what} by other users (mode {mode:04o}): run `chmod {right:o} {path}`")
    return found


def load_config(
    environment: Mapping[str, str],
    *,
    home: Path | None = None,
    path: Path | None = None,
    server: Mapping[str, Any] | None = None,
) -> Config:
    """Read the configuration. Raises `ConfigError` if it cannot be used. `server` holds options of the command line.

    Without a `path` the file is `config.toml` in the home directory, and may be missing. Creates nothing.
    """
    home = (default_home(environment) if home is None else home.expanduser()).absolute()
    explicit = path is not None
    file = (home / CONFIG_NAME) if path is None else path.expanduser()
    tables = _read(file, must_exist=explicit)
    for name in tables:
        if name not in SECTIONS:
            raise ConfigError(
                f"{file}: [{name}] is not a section{near(name, SECTIONS)}; sections are {', '.join(SECTIONS)}"
            )
    where = {f"server.{key}": f"{file}: server.{key}" for key in _table(tables, "server", file)}
    section = _from_environment(environment, where)
    section.update(_table(tables, "server", file))
    for key, value in (server or {}).items():
        if value is not None:
            section[key] = value
            where[f"server.{key}"] = f"--{key}"
    kept = _table(tables, "store", file)
    where.update({f"store.{key}": f"{file}: store.{key}" for key in kept})
    if given := environment.get(STORE_VARIABLE, "").strip():
        where.setdefault("store.url", STORE_VARIABLE)
        kept = {"url": given, **kept}
    tables = {**tables, "server": section, "store": kept}
    try:
        config = msgspec.convert(
            {**tables, "home": home, "path": file if file.exists() else None}, Config, strict=True, dec_hook=_path
        )
    except msgspec.ValidationError as error:

        def named(place: str) -> str:
            return where.get(place, f"{file}: {place}")

        raise ConfigError(explain(error, tables, Config, named, secret=("server.key", "store.url"))) from None
    return msgspec.structs.replace(config, environment=dict(environment))


def _path(kind: type, value: Any) -> Any:
    if kind is Path or isinstance(value, Path):
        return value
    raise NotImplementedError(f"no value of type {kind}")


def _read(file: Path, *, must_exist: bool) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        if must_exist:
            raise ConfigError(f"{file} does not exist; give --config the path of a TOML file") from None
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    import tomllib  # only here: most starts have no file

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from None


def _table(tables: Mapping[str, Any], name: str, file: Path) -> dict[str, Any]:
    table: Any = tables.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: {name} must be a table, [{name}]")
    return cast("dict[str, Any]", table)


def _from_environment(environment: Mapping[str, str], where: dict[str, str]) -> dict[str, Any]:
    section: dict[str, Any] = {}
    for key, variable in _SERVER_VARIABLES.items():
        text = environment.get(variable, "").strip()
        if not text:
            continue
        where.setdefault(f"server.{key}", variable)
        if key == "port":
            if not text.isascii() or not text.isdigit():
                raise ConfigError(f"{variable} is {text!r}; it must be a port number from 0 to 65535")
            section[key] = int(text)
        elif key == "cors_origins":
            section[key] = [origin.strip() for origin in text.split(",") if origin.strip()]
        else:
            section[key] = text
    return section
