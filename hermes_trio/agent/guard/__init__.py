"""The shell guard: reads a command before it runs and says what it would do.

`inspect_command` is the entry; `Verdict` is its answer. Nothing here runs, opens or remembers anything.
"""

from __future__ import annotations

from .foreground import Detachment, Reason, detaches, exit_code_meaning
from .inspection import inspect_command, simple_command_words
from .verdict import Block, BlockCategory, Category, Finding, Verdict
from .views import normalise, strip_comments

__all__ = [
    "Block",
    "BlockCategory",
    "Category",
    "Detachment",
    "Finding",
    "Reason",
    "Verdict",
    "detaches",
    "exit_code_meaning",
    "inspect_command",
    "normalise",
    "simple_command_words",
    "strip_comments",
]
