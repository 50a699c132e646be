"""Both ways of serving plain HTTP/1.1, for the tests that must hold on each."""

from __future__ import annotations

import pytest


@pytest.fixture(params=[True, False], ids=["fast", "stock"])
def fast(request: pytest.FixtureRequest) -> bool:
    """Whether the server under test uses the fast connection or Hypercorn's own."""
    return bool(request.param)
