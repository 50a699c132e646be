"""Everyday commands pass without a question."""

from __future__ import annotations

import pytest

from hermes_trio.guard import inspect_command

from .everyday_corpus import EVERYDAY


@pytest.mark.parametrize("command", EVERYDAY)
@pytest.mark.parametrize("cwd", ["/home/dev/project", ""], ids=["known-cwd", "unknown-cwd"])
def test_passes(command: str, cwd: str) -> None:
    """Neither a block nor a finding."""
    verdict = inspect_command(command, home="/home/dev", cwd=cwd)
    assert verdict.blocked is None
    assert verdict.findings == ()
    assert verdict.clean


def test_corpus_is_large_enough() -> None:
    """The list keeps its promised size and says nothing twice."""
    assert len(EVERYDAY) >= 120
    assert len(set(EVERYDAY)) == len(EVERYDAY)
