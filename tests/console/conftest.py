"""What the tests of the console share."""

from __future__ import annotations

import pytest


@pytest.fixture(params=[True, False], ids=["fast", "stock"])
def fast_path(request: pytest.FixtureRequest) -> bool:
    """Both ways in which a connection is served."""
    return request.param
