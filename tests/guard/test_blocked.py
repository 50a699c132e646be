"""Nothing that is hard-blocked gets through, in whatever spelling."""

from __future__ import annotations

import re

import pytest

from hermes_trio.guard import BlockCategory, inspect_command

from .blocked_corpus import OTHERS, ROOT_DELETE
from .evasion_corpus import COMPUTED, EVASIONS

CASES = [(BlockCategory.ROOT_DELETE, name, command) for name, command in ROOT_DELETE.items()]
CASES += [(category, name, command) for category, group in OTHERS.items() for name, command in group.items()]


@pytest.mark.parametrize(
    ("category", "command"),
    [pytest.param(category, command, id=f"{category.name.lower()}-{name}") for category, name, command in CASES],
)
def test_blocked(category: BlockCategory, command: str) -> None:
    """The spelling is recognised and blocked for the right reason."""
    verdict = inspect_command(command, home="/home/dev", cwd="/home/dev/project")
    assert verdict.blocked is not None
    assert verdict.blocked.category is category
    assert verdict.blocked.reason


@pytest.mark.parametrize("command", EVASIONS)
@pytest.mark.parametrize("cwd", ["/home/dev/project", ""], ids=["known-cwd", "unknown-cwd"])
def test_evasion_is_blocked(command: str, cwd: str) -> None:
    """A spelling made to evade the guard is blocked, wherever it runs."""
    if not cwd and re.search(r"cd \.\.|pwd|PWD|~+|self/cwd", command):
        cwd = "/srv"
    assert inspect_command(command, home="/home/dev", cwd=cwd).blocked is not None


@pytest.mark.parametrize("command", COMPUTED)
@pytest.mark.parametrize("confined", [True, False], ids=["confined", "free"])
def test_what_a_shell_would_compute_is_asked_about(command: str, confined: bool) -> None:
    """Ciphers, arithmetic and substrings are not followed; nothing that they could hide passes without a question."""
    assert not inspect_command(command, home="/home/dev", cwd="/home/dev/project", confined=confined).clean


def test_corpus_is_large_enough() -> None:
    """The corpus keeps its promised size."""
    assert len(CASES) >= 150
