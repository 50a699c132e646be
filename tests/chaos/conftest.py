"""Prints the figures of all scenarios at the end."""

from __future__ import annotations

from typing import Any

from .scenario import REPORTS


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print one line for each scenario."""
    if REPORTS:
        terminalreporter.section("chaos")
        for line in REPORTS:
            terminalreporter.write_line(line)
