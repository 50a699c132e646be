"""Lazy module attributes: a package exports names whose modules are imported on first use, which keeps the start quick."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_attributes(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package whose `modules` (by relative name, with the names in them) are loaded when one of the names is used.

    Tell the type checker what they are with imports below `if TYPE_CHECKING`.
    """
    homes = {name: module for module, names in modules.items() for name in names}

    def find(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(home, package), name)

    return find
