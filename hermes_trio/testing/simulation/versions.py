"""The versions that decide a trace."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import apsw

_DECIDING = ("trio", "msgspec", "httpx2", "h11")
"""The packages whose code decides the order of tasks, the bytes of messages and the number of steps in which they arrive."""


def versions() -> str:
    """Return the versions that decide a trace, in one line: two runs of a seed are comparable if theirs are equal."""
    from hermes_trio import __version__

    packages = ", ".join(f"{name} {_version(name)}" for name in _DECIDING)
    return (
        f"hermes-trio {__version__}, Python {platform.python_version()}, SQLite {apsw.sqlite_lib_version()}"
        f" (apsw {apsw.apsw_version()}), {packages}"
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
