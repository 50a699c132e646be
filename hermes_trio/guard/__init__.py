"""The shell guard: reads a command before it runs and reports what it would do.

`inspect_command` is the entry point and returns a `Verdict`. Nothing here runs a command, opens a file or keeps state. The reader is imported with the first
command, or in short steps by `load_steps`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Final

from hermes_trio.base.lazy import lazy_attributes

from .verdict import Block, BlockCategory, Category, Finding, Verdict

if TYPE_CHECKING:
    from .foreground import Detachment, Reason, detaches, exit_code_meaning
    from .inspection import Remembered, inspect_command, simple_command_words
    from .views import normalise, strip_comments

__all__ = [
    "Block",
    "BlockCategory",
    "Category",
    "Detachment",
    "Finding",
    "Reason",
    "Remembered",
    "Verdict",
    "detaches",
    "exit_code_meaning",
    "inspect_command",
    "is_loaded",
    "load_steps",
    "normalise",
    "simple_command_words",
    "strip_comments",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        ".foreground": ("Detachment", "Reason", "detaches", "exit_code_meaning"),
        ".inspection": ("Remembered", "inspect_command", "simple_command_words"),
        ".views": ("normalise", "strip_comments"),
    },
)

_STEPS: Final = (
    "reader",
    "expansion",
    "rules.code",
    "registry",
    "rules.words",
    "shell",
    "inspection",
    "foreground",
    "views",
)
"""The modules, each after those that it imports, so that no step takes long."""


def is_loaded() -> bool:
    """Return whether everything is imported."""
    return all(f"{__name__}.{step}" in sys.modules for step in _STEPS)


def load_steps() -> Iterator[None]:
    """Import everything in steps of a few milliseconds; a caller with an event loop lets other tasks run between them."""
    for step in _STEPS:
        import_module(f"{__name__}.{step}")
        yield
