"""The findings of one inspection so far, and its remaining budgets.

The base of `Shell`: it knows nothing of commands, only how findings are recorded and when an inspection has taken too
long. Going over a budget is a block, because what was not inspected must not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from .call import MAX_EXCERPT
from .marks import DECODED, REMOTE, shown
from .verdict import BlockCategory, Blocked, Category, Finding

MAX_STEPS: Final = 20_000
MAX_TEXT: Final = 400_000
"""The limit of characters of nested text and of array items that one inspection reads."""
MAX_WORDS: Final = 2_000_000
"""Characters of the words of all commands that one inspection judges: a wrapper is judged with the command inside it, so that nesting multiplies them."""
MAX_DEPTH: Final = 24
MAX_COMMANDS: Final = 4_096
_CONFINED_AWAY: Final = frozenset({Category.INLINE_CODE, Category.EXEC_OPTION})
"""Categories that need approval only if the kernel does not confine the command. The code itself is always judged."""


class Ledger:
    """Findings, the commands seen, and the budgets."""

    def __init__(self, *, confined: bool) -> None:
        self.confined = confined
        self.findings: dict[tuple[Category, str], Finding] = {}
        self.commands: dict[str, None] = {}
        self._steps = 0
        self._characters = 0
        self._judged = 0
        self._depth = 0
        self._muted = 0
        self._tentative = 0

    def flag(self, category: Category, description: str, excerpt: str) -> None:
        """Record a finding once. In a confined command, findings that confinement makes harmless are dropped."""
        dropped = (self.confined and category in _CONFINED_AWAY) or (
            self._tentative and category is Category.DYNAMIC_COMMAND
        )
        if not self._muted and not dropped:
            self.findings.setdefault((category, excerpt), Finding(category, description, excerpt))

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Drop findings, except hard blocks, in the body of the `with`: for text that may never be run."""
        self._muted += 1
        try:
            yield
        finally:
            self._muted -= 1

    @contextmanager
    def tentative(self) -> Iterator[None]:
        """Ignore text that is not shell text or has an unknown command, in the body of the `with`: for strings of other languages."""
        self._tentative += 1
        try:
            yield
        finally:
            self._tentative -= 1

    def step(self) -> None:
        """Count one unit of work. Raises `Blocked` when the budget is used up."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise Blocked(
                BlockCategory.OVER_LIMIT, "the command is too complex to inspect; write it to a file and run it"
            )

    def _judge(self, words: list[str]) -> None:
        """Count the words of one command that is about to be judged. Raises `Blocked` when there are too many."""
        self._judged += len(words) + sum(map(len, words))
        if self._judged > MAX_WORDS:
            raise Blocked(BlockCategory.OVER_LIMIT, "the command runs too many words through other commands to inspect")

    def _spend(self, characters: int) -> None:
        self._characters += characters
        if self._characters > MAX_TEXT:
            raise Blocked(BlockCategory.OVER_LIMIT, "the command holds too much nested text to inspect")

    def _record(self, name: str, arguments: list[str]) -> None:
        self.commands.setdefault(shown(" ".join([name, *arguments]))[:4_000])
        if len(self.commands) > MAX_COMMANDS:
            # A command that is not listed could not be denied.
            raise Blocked(BlockCategory.OVER_LIMIT, f"more than {MAX_COMMANDS} different commands in one text")

    def _origin(self, text: str, excerpt: str) -> None:
        """Flag text that is about to be executed if it was downloaded or decoded."""
        if text.isascii():
            return
        if REMOTE in text:
            self.flag(Category.REMOTE_CODE, "runs downloaded text", shown(excerpt)[:MAX_EXCERPT])
        if DECODED in text:
            self.flag(Category.DECODED_CODE, "runs decoded text", shown(excerpt)[:MAX_EXCERPT])

    @contextmanager
    def _deeper(self) -> Iterator[None]:
        self._depth += 1
        if self._depth > MAX_DEPTH * 4:
            self._depth -= 1
            raise Blocked(BlockCategory.OVER_LIMIT, "the command is nested too deep to inspect")
        try:
            yield
        finally:
            self._depth -= 1
