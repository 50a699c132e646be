"""Every async test of this repository has a limit in real time, whether or not it uses a fixture of the plugin."""

from __future__ import annotations

import inspect

import pytest

SECONDS = 120.0
SLOW_SECONDS = 3600.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        function = getattr(item, "obj", None)
        inner = getattr(getattr(function, "hypothesis", None), "inner_test", function)
        if inspect.iscoroutinefunction(inner) and item.get_closest_marker("hermes_seconds") is None:
            slow = item.get_closest_marker("slow") is not None
            item.add_marker(pytest.mark.hermes_seconds(SLOW_SECONDS if slow else SECONDS))
