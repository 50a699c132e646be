"""Every test of the front end that takes `fast_path` runs on our own connections and on stock Hypercorn's."""

from __future__ import annotations

import pytest


@pytest.fixture(params=[True, False], ids=["fast", "stock"])
def fast_path(request: pytest.FixtureRequest) -> bool:
    """Which connections serve the test."""
    return request.param
