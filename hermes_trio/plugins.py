"""Extension points: packages that bring tools, adapters or model providers name them in entry points, and a configuration asks for them by name.

Nothing is loaded because it is installed: code runs in the server only after its owner has named it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, cast

from hermes_trio.base.settings import SettingsError, near

__all__ = [
    "ADAPTERS",
    "PROVIDERS",
    "TOOLS",
    "PluginProblem",
    "build_plugin",
    "installed_plugins",
    "load_plugin",
    "load_tools",
]

TOOLS: Final = "hermes_trio.tools"
"""Each entry is a tool, or a list or tuple of tools. Asked for in `plugins.tools`."""

ADAPTERS: Final = "hermes_trio.adapters"
"""Each entry is `build(table, environment) -> Platform`. Asked for with a table `[plugins.adapters.NAME]`, which it gets."""

PROVIDERS: Final = "hermes_trio.providers"
"""Each entry is `build(name, table, environment) -> Model`. Asked for as the `provider` of a route of `[models]`, whose table it gets."""


class PluginProblem(SettingsError):
    """A plugin that was asked for cannot be used; the text names it, its package and what is wrong."""


def installed_plugins(group: str) -> Mapping[str, EntryPoint]:
    """The plugins of a group that are installed, by name. None of them is loaded."""
    return {entry.name: entry for entry in entry_points(group=group)}


def load_plugin(group: str, name: str, where: str) -> Any:
    """Load a plugin. Raises `PluginProblem` if none of that name is installed or it cannot be imported; `where` is the key that asked for it."""
    found = installed_plugins(group)
    entry = found.get(name)
    if entry is None:
        known = f"installed are {', '.join(sorted(found))}" if found else "none is installed"
        raise PluginProblem(f"{where} names {name!r}, which no package brings as {group}{near(name, found)}; {known}")
    try:
        return entry.load()
    except Exception as error:
        package = entry.dist.name if entry.dist is not None else entry.module
        raise PluginProblem(
            f"{where}: {name!r} of the package {package} cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def build_plugin(group: str, name: str, where: str, arguments: tuple[object, ...], kind: type[Any]) -> Any:
    """Call a plugin that builds something. Raises `PluginProblem` if it fails or makes something else than a `kind`; its own `SettingsError` goes on."""
    build = load_plugin(group, name, where)
    try:
        made = build(*arguments)
    except SettingsError:
        raise
    except Exception as error:
        raise PluginProblem(f"{where}: {name!r} of {group} failed: {type(error).__name__}: {error}") from error
    if not isinstance(made, kind):
        raise PluginProblem(
            f"{where}: {name!r} of {group} made a {type(made).__name__}; it must make a {kind.__name__}"
        )
    return made


def load_tools(names: Iterable[str], kind: type[Any]) -> list[Any]:
    """The tools of these plugins, in order, each of them a `kind`. Raises `PluginProblem`."""
    tools: list[Any] = []
    for name in names:
        loaded = load_plugin(TOOLS, name, "plugins.tools")
        many = cast("list[Any]", list(loaded) if isinstance(loaded, list | tuple) else [loaded])  # pyright: ignore[reportUnknownArgumentType]
        for one in many:
            if not isinstance(one, kind):
                raise PluginProblem(
                    f"plugins.tools: {name!r} brings a {type(one).__name__}, which is no tool; make one with @hermes_trio.tool()"
                )
        tools += many
    return tools
