"""The shell guard: reads a command before it runs and reports what it would do.

`inspect_command` is the entry point and returns a `Verdict`. Nothing here runs a command, opens a file or keeps state. The reader is imported with the first
command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
