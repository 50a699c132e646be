"""Builds the models from the configuration and the environment, by name.

`ModelRoutes` owns the connections of its network models and closes them when its `async with` block ends. Nothing here reads the process's
environment: the caller passes the variables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, ClassVar, Final, TypeVar, cast, final

import msgspec

from hermes_trio.agent.model import DEFAULT_CONTEXT_WINDOW, Model
from hermes_trio.base.redaction import Secret
from hermes_trio.base.structs import RedactedStruct
from hermes_trio.net.dial import Dialer, InvalidURL, Proxies, parse_base_url
from hermes_trio.net.http1 import ConnectionPool
from hermes_trio.plugins import PROVIDERS, build_plugin, installed_plugins

from .demo import DemoModel
from .http_model import ANTHROPIC_URL, OPENAI_URL, HttpModel, Retries, Timeouts

DEMO: Final = "demo"

_WINDOWS: Final = (
    ("gpt-4.1", 1_047_576),
    ("gpt-5", 400_000),
    ("gpt-4o", 128_000),
    ("o1", 200_000),
    ("o3", 200_000),
    ("o4", 200_000),
)
"""Context windows by the prefix of a model's name; `context_window` of a route overrides them."""

T = TypeVar("T")


class InvalidRoute(ValueError):
    """Raised for a route that cannot be built. The text names the key, what is wrong and what is accepted."""


class UnknownRoute(KeyError):
    """Raised if there is no route of a name. The text lists the routes."""

    def __str__(self) -> str:
        return str(self.args[0])


class _Provider(msgspec.Struct, frozen=True):
    default_url: str
    url_variable: str
    key_variable: str


_PROVIDERS: Final[Mapping[str, _Provider]] = {
    "openai": _Provider(OPENAI_URL, "OPENAI_BASE_URL", "OPENAI_API_KEY"),
    "anthropic": _Provider(ANTHROPIC_URL, "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"),
}

_ROUTE_KEYS: Final = (
    "provider",
    "model",
    "base_url",
    "api_key",
    "api_key_env",
    "context_window",
    "max_tokens",
    "headers",
    "timeouts",
    "attempts",
    "bearer",
)


@final
class ModelRoutes:
    """The models, by route. Made by `build_routes`; as an async context manager it closes their connections."""

    def __init__(self, default: str, models: Mapping[str, Model], transport: ConnectionPool) -> None:
        self._default = default
        self._models = dict(models)
        self._transport = transport

    @property
    def default(self) -> str:
        """Return the name of the default route."""
        return self._default

    @property
    def names(self) -> tuple[str, ...]:
        """Return all names, the default first."""
        return (self._default, *sorted(name for name in self._models if name != self._default))

    def __contains__(self, name: object) -> bool:
        return name in self._models

    def served(self, name: str) -> str:
        """Return the provider's name of a route's model, or the name of the route if it has no provider."""
        model = self.get(name)
        return model.served if isinstance(model, HttpModel) else name

    def get(self, name: str = "") -> Model:
        """Return the model of a name, or the default for an empty one. Raises `UnknownRoute`."""
        model = self._models.get(name or self._default)
        if model is None:
            raise UnknownRoute(f"there is no model route {name!r}; there are: {', '.join(self.names)}")
        return model

    async def __aenter__(self) -> ModelRoutes:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the idle connections. Calls in progress keep theirs until they end."""
        self._transport.close()


def build_routes(
    spec: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    dialer: Dialer | None = None,
) -> ModelRoutes:
    """Build every route of a configuration, and those that the environment names. Raises `InvalidRoute`.

    `spec` has two optional keys: `routes`, a table of routes by name, each a table or a short `provider/model`; and `default`, a route's name or such
    a short form. `HERMES_MODEL` in `environment` overrides the default. `demo` always exists, and is the default if there is no other.
    """
    spec = spec or {}
    environment = environment or {}
    _only(spec, ("default", "routes"), "models")
    if dialer is None:
        try:
            dialer = Dialer(proxies=Proxies.from_environment(environment))
        except (InvalidURL, ValueError) as error:
            raise InvalidRoute(str(error)) from None
    builder = _Builder(environment, ConnectionPool(dialer))
    models: dict[str, Model] = {DEMO: DemoModel()}
    routes = _table(spec.get("routes", {}), "models.routes")
    for name, route in routes.items():
        models[name] = builder.route(name, route, f"models.routes.{name}")
    source, default = "HERMES_MODEL", environment.get("HERMES_MODEL", "").strip()
    if not default:
        source, default = "models.default", _text(spec, "default", "models", required=False) or DEMO
    if default not in models:
        models[default] = builder.short(default, default, source, routes)
    return ModelRoutes(default, models, builder.transport)


class _Builder(RedactedStruct, frozen=True):
    hidden: ClassVar[tuple[str, ...]] = ("environment",)
    environment: Mapping[str, str]
    transport: ConnectionPool

    def route(self, name: str, route: object, where: str) -> Model:
        """Build a route from its table, or from its short form."""
        if isinstance(route, str):
            return self.short(name, route, where, ())
        table = _table(route, where)
        provider = _text(table, "provider", where)
        if provider not in _PROVIDERS and provider != DEMO and provider in installed_plugins(PROVIDERS):
            return build_plugin(PROVIDERS, provider, f"{where}.provider", (name, table, self.environment), Model)
        _only(table, _ROUTE_KEYS, where)
        if provider == DEMO:
            _only(table, ("provider", "context_window"), where)
            return DemoModel(name, _whole(table, "context_window", where) or DEFAULT_CONTEXT_WINDOW)
        if provider not in _PROVIDERS:
            more = "".join(f", {name}" for name in sorted(installed_plugins(PROVIDERS)))
            raise InvalidRoute(f"{where}.provider is {provider!r}; accepted are openai, anthropic and demo{more}")
        return self._network(name, provider, table, where)

    def short(self, name: str, short: str, where: str, routes: Iterable[str]) -> Model:
        """Build a route from `openai/MODEL`, `anthropic/MODEL` or `demo`."""
        provider, slash, model = short.partition("/")
        if short == DEMO:
            return DemoModel(name)
        if provider not in _PROVIDERS or not slash or not model:
            known = "".join(f", or the name of a route ({route})" for route in [", ".join(sorted(routes))] if route)
            raise InvalidRoute(f"{where} is {short!r}; accepted are openai/MODEL, anthropic/MODEL and demo{known}")
        return self._network(name, provider, {"model": model}, where)

    def _network(self, name: str, provider: str, table: Mapping[str, Any], where: str) -> Model:
        facts = _PROVIDERS[provider]
        model = _text(table, "model", where)
        own_url = _text(table, "base_url", where, required=False)
        url, url_source = own_url, f"{where}.base_url"
        if not url:
            url, url_source = self.environment.get(facts.url_variable, "").strip(), facts.url_variable
        if not url:
            url = facts.default_url
        try:
            parse_base_url(url)
        except InvalidURL as error:
            raise InvalidRoute(f"{url_source}: {error}") from None
        key = self._key(table, where, facts, own_url=bool(own_url))
        if not key and url == facts.default_url:
            raise InvalidRoute(
                f"{where} needs a key for {url}: set {facts.key_variable}"
                + (
                    ""
                    if where == "HERMES_MODEL"
                    else f", or {where}.api_key_env to the name of the variable that holds it"
                )
            )
        arguments: dict[str, Any] = {
            "transport": self.transport,
            "base_url": url,
            "key": key,
            "name": name,
            "max_tokens": _whole(table, "max_tokens", where),
            "headers": _headers(table, where),
            "timeouts": _timeouts(table, where),
            "retries": Retries(attempts=_whole(table, "attempts", where) or Retries().attempts),
        }
        window = _whole(table, "context_window", where)
        if provider == "anthropic":
            # Imported here: an unused provider is not loaded.
            from .anthropic import AnthropicModel

            bearer = _flag(table, "bearer", where)
            return AnthropicModel(model, context_window=window, bearer=bearer, **arguments)
        if "bearer" in table:
            raise InvalidRoute(f"{where}.bearer is for the anthropic provider; openai keys are always bearer tokens")
        from .openai import OpenAIModel

        return OpenAIModel(model, context_window=window or _window(model), **arguments)

    def _key(self, table: Mapping[str, Any], where: str, facts: _Provider, *, own_url: bool) -> Secret:
        key = _text(table, "api_key", where, required=False)
        source = f"{where}.api_key"
        if not key and (variable := _text(table, "api_key_env", where, required=False)):
            key = self.environment.get(variable, "").strip()
            source = variable
            if not key:
                raise InvalidRoute(f"{where}.api_key_env names {variable}, which is not set")
        if not key and not own_url:
            # Only for the address that the variables belong to: a provider's key is not sent to another server.
            key, source = self.environment.get(facts.key_variable, "").strip(), facts.key_variable
        if not key.isascii() or not key.isprintable() or " " in key:
            raise InvalidRoute(f"{source} holds white space or characters that a key cannot have")
        return Secret(key)


def _window(model: str) -> int:
    short = model.rpartition("/")[2]
    return next((window for beginning, window in _WINDOWS if short.startswith(beginning)), DEFAULT_CONTEXT_WINDOW)


def _table(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRoute(f"{where} must be a table, not {_kind(value)}")
    table = cast("Mapping[object, Any]", value)
    for key in table:
        if not isinstance(key, str) or not key:
            raise InvalidRoute(f"{where} has the key {key!r}; keys are names")
    return cast("Mapping[str, Any]", table)


def _only(table: Mapping[str, Any], accepted: Iterable[str], where: str) -> None:
    accepted = tuple(accepted)
    for key in table:
        if key not in accepted:
            raise InvalidRoute(f"{where}.{key} is not a setting; accepted are {', '.join(accepted)}")


def _read(table: Mapping[str, Any], key: str, where: str, wanted: str, check: Callable[[Any], T | None]) -> T | None:
    value: Any = table.get(key)
    if value is None:
        return None
    checked = check(value)
    if checked is None:
        shown = _kind(value) if key == "api_key" or not isinstance(value, (int, float, str)) else repr(value)
        raise InvalidRoute(f"{where}.{key} must be {wanted}, not {shown}")
    return checked


def _text(table: Mapping[str, Any], key: str, where: str, *, required: bool = True) -> str:
    def check(value: Any) -> str | None:
        return value.strip() if isinstance(value, str) and value.strip() else None

    text = _read(table, key, where, "a non-empty string", check)
    if text is None and required:
        raise InvalidRoute(f"{where}.{key} is missing")
    return text or ""


def _whole(table: Mapping[str, Any], key: str, where: str) -> int | None:
    def check(value: Any) -> int | None:
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    return _read(table, key, where, "a whole number above 0", check)


def _flag(table: Mapping[str, Any], key: str, where: str) -> bool:
    def check(value: Any) -> bool | None:
        return value if isinstance(value, bool) else None

    return _read(table, key, where, "true or false", check) or False


def _seconds(table: Mapping[str, Any], key: str, where: str) -> float | None:
    def check(value: Any) -> float | None:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return float(value) if number and 0 < value <= 86_400 else None

    return _read(table, key, where, "a number of seconds above 0 and up to 86400", check)


def _timeouts(table: Mapping[str, Any], where: str) -> Timeouts:
    where = f"{where}.timeouts"
    values = _table(table.get("timeouts", {}), where)
    names = Timeouts.__struct_fields__
    _only(values, names, where)
    given = {name: seconds for name in names if (seconds := _seconds(values, name, where)) is not None}
    return Timeouts(**given)


def _headers(table: Mapping[str, Any], where: str) -> tuple[tuple[str, str], ...]:
    where = f"{where}.headers"
    headers: list[tuple[str, str]] = []
    for name, value in _table(table.get("headers", {}), where).items():
        if not name.replace("-", "").isalnum() or not name.isascii():
            raise InvalidRoute(f"{where}: {name!r} is not the name of a header")
        if not isinstance(value, str) or not value.isascii() or not value.isprintable():
            raise InvalidRoute(f"{where}.{name} must be a string of printable ASCII characters")
        headers.append((name, value))
    return tuple(headers)


_KINDS: Final[Mapping[type[object], str]] = {
    dict: "a table",
    list: "a list",
    str: "a string",
    bool: "a truth value",
    int: "a number",
}


def _kind(value: object) -> str:
    return _KINDS.get(type(value), type(value).__name__)
