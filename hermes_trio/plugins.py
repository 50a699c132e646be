"""Plugins: packages offer tools, adapters or model providers as entry points, and the configuration names those to use.

An installed plugin is not loaded unless the configuration names it; nor is `importlib.metadata`, which takes two megabytes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from hermes_trio.base.redaction import HIDDEN, redact
from hermes_trio.base.settings import SettingsError, near

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints

TOOLS: Final = "hermes_trio.tools"
"""Each entry is a tool, or a list or tuple of tools. Named in `plugins.tools`."""

ADAPTERS: Final = "hermes_trio.adapters"
"""Each entry is `build(table, environment) -> Platform`. Named by a table `[plugins.adapters.NAME]`, which it receives."""

PROVIDERS: Final = "hermes_trio.providers"
"""Each entry is `build(name, table, environment) -> Model`. Named as the `provider` of a route of `[models]`, whose table it receives."""


_SECRET_NAME: Final = re.compile(r"key|token|secret|passw|credential|auth|cookie|dsn|webhook", re.IGNORECASE)
"""Names of settings and variables whose values are redacted."""


class PluginProblem(SettingsError):
    """Raised for a plugin that is configured and cannot be used. The text names it, its package and the cause."""


def entry_points(*, group: str) -> EntryPoints:
    """Return the entry points of a group, of all installed packages."""
    from importlib import metadata

    return metadata.entry_points(group=group)


def installed_plugins(group: str) -> Mapping[str, EntryPoint]:
    """Return the installed plugins of a group, by name, without loading them."""
    return {entry.name: entry for entry in entry_points(group=group)}


def load_plugin(group: str, name: str, where: str) -> Any:
    """Load a plugin; `where` is the key that names it.

    Raises `PluginProblem` if no package offers it, several packages do, or it cannot be imported.
    """
    entry = _find(group, name, where)
    try:
        return entry.load()
    except (Exception, SystemExit) as error:
        raise PluginProblem(f"{where}: {_blamed(entry)} cannot be loaded: {_words(error)}") from None


def build_plugin(group: str, name: str, where: str, arguments: tuple[object, ...], kind: type[Any]) -> Any:
    """Call a plugin that builds a `kind`. Raises `PluginProblem` if it fails or returns something else; its `SettingsError` propagates.

    The text of other errors is redacted: text that looks like a credential, and values that the plugin received as one.
    """
    build = load_plugin(group, name, where)
    blamed = _blamed(_find(group, name, where))
    if not callable(build):
        raise PluginProblem(
            f"{where}: {blamed} is a {type(build).__name__}; it must be a function that makes a {kind.__name__}"
        )
    try:
        made = build(*arguments)
    except SettingsError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginProblem(f"{where}: {blamed} failed: {_words(error, arguments)}") from None
    if inspect.iscoroutine(made):
        made.close()
    if not isinstance(made, kind):
        raise PluginProblem(f"{where}: {blamed} made a {type(made).__name__}; it must make a {kind.__name__}")
    return made


def load_tools(names: Iterable[str], kind: type[Any], taken: Iterable[str] = ()) -> list[Any]:
    """Load the tools of these plugins, in order, each a `kind`. Raises `PluginProblem`, also for a name that is in `taken` or occurs twice."""
    tools: list[Any] = []
    owners = dict.fromkeys(taken, "hermes-trio itself")
    for name in names:
        loaded = load_plugin(TOOLS, name, "plugins.tools")
        blamed = _blamed(_find(TOOLS, name, "plugins.tools"))
        many = cast("list[Any]", list(loaded) if isinstance(loaded, list | tuple) else [loaded])  # pyright: ignore[reportUnknownArgumentType]
        for one in many:
            if not isinstance(one, kind):
                raise PluginProblem(
                    f"plugins.tools: {blamed} brings a {type(one).__name__}, which is no tool; make one with @hermes_trio.tool()"
                )
            called = one.spec.name
            if called in owners:
                raise PluginProblem(
                    f"plugins.tools: {blamed} brings a tool named {called!r}, and so does {owners[called]}; one of them must be renamed or left out"
                )
            owners[called] = blamed
        tools += many
    return tools


def _find(group: str, name: str, where: str) -> EntryPoint:
    """Return the entry point of this name. Raises `PluginProblem` if several packages have it: which one runs must not depend on the order of directories."""
    found = entry_points(group=group)
    entries = [entry for entry in found if entry.name == name]
    if not entries:
        names = sorted(found.names)
        known = f"installed are {', '.join(names)}" if names else "none is installed"
        raise PluginProblem(f"{where} names {name!r}, which no package brings as {group}{near(name, names)}; {known}")
    if len({(_package(entry), entry.value) for entry in entries}) > 1:
        packages = " and ".join(sorted({_package(entry) for entry in entries}))
        raise PluginProblem(f"{where} names {name!r}, which {packages} bring as {group}; uninstall one of them")
    return entries[0]


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.module


def _blamed(entry: EntryPoint) -> str:
    return f"{entry.name!r} of the package {_package(entry)}"


def _words(error: BaseException, arguments: tuple[object, ...] = ()) -> str:
    """Return the text of an error, redacted: text that looks like a credential, and values that the plugin received under such a name."""
    text = f"{type(error).__name__}: {error}"
    secrets = {secret for given in arguments for secret in _secrets(given)}
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return redact(text)


def _secrets(given: object) -> Iterator[str]:
    if isinstance(given, Mapping):
        for name, value in cast("Mapping[object, object]", given).items():
            if isinstance(value, str) and len(value) >= 4 and _SECRET_NAME.search(str(name)):
                yield value
            else:
                yield from _secrets(value)
    elif isinstance(given, list | tuple):
        for value in cast("Iterable[object]", given):
            yield from _secrets(value)
