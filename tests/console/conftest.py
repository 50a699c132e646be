"""What the tests of the console share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx2
import pytest

from tests.e2e.server_process import ServerProcess, server_process

from .browser import open_browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(params=[True, False], ids=["fast", "stock"])
def fast_path(request: pytest.FixtureRequest) -> bool:
    """Both ways in which a connection is served."""
    return request.param


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests of a module; each has a context of its own."""
    with open_browser() as one:
        yield one


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all tests of a module."""
    with server_process(tmp_path_factory.mktemp("home")) as one:
        yield one


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx2.Client]:
    """A client with the admin key."""
    with httpx2.Client(base_url=server.url, headers=server.headers, trust_env=False, timeout=30) as client:
        yield client
        for run in client.get("/v1/runs?status=running").json()["data"]:
            client.post(f"/v1/runs/{run['run_id']}/stop?wait=true")
