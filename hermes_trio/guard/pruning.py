"""Keeps a set of possible values small without losing a dangerous one.

Loops and branches multiply what a variable may hold. Beyond a limit, harmless-looking values become one unknown, which
is asked about where it matters; values that could be part of something hard-blocked are all kept, and too many of
those is itself a block.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from .verdict import BlockCategory, Blocked

T = TypeVar("T")

_DANGEROUS = re.compile(
    r"(?:^|[^\w-])(?:rm|mkfs[\w.]*|mke2fs|dd|shred|reboot|halt|poweroff|shutdown|telinit|init|kill|killall5|systemctl|base64|eval"
    r"|sudo|find|xargs|sh|bash)(?:$|[^\w-])"
    r"|^[/.~*]+$|^/*(?:etc|usr|var|bin|sbin|boot|lib\w*|home|root)/*\**$|/dev/|^-\w{0,8}[rRS]\w{0,8}$|sysrq|\(\)\s*\{"
)


def prune(values: list[T], limit: int, text_of: Callable[[T], str], unknown: T) -> list[T]:
    """Return at most `limit` of the values: every dangerous one, and an unknown for the rest."""
    if len(values) <= limit:
        return values
    kept = [value for value in values if _DANGEROUS.search(text_of(value))]
    if len(kept) >= limit:
        raise Blocked(
            BlockCategory.OVER_LIMIT, "too many possible values to inspect; write the script to a file and run it"
        )
    return [*kept, unknown]
