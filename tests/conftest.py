"""Every async test of this repository has a limit in real time, whether or not it uses a fixture of the plugin. A PostgreSQL server for those who ask."""

from __future__ import annotations

import inspect
import signal
import sys
from collections.abc import Iterator

import pytest
import trio

from tests.postgres_server import PostgresServer, postgres_server

SECONDS = 120.0
SLOW_SECONDS = 3600.0


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell lets the jobs in its background ignore SIGINT, and servers that a test starts and ends with it would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        function = getattr(item, "obj", None)
        inner = getattr(getattr(function, "hypothesis", None), "inner_test", function)
        if inspect.iscoroutinefunction(inner) and item.get_closest_marker("hermes_seconds") is None:
            slow = any(item.get_closest_marker(name) is not None for name in ("slow", "chaos"))
            item.add_marker(pytest.mark.hermes_seconds(SLOW_SECONDS if slow else SECONDS))


def pytest_collection_finish() -> None:
    """Let Hypothesis register its generator while no thread runs.

    It looks for the referrers of the generator, and warns if there are none; a garbage collection that a thread of an earlier test is in the middle of
    hides them.
    """
    if "hypothesis" in sys.modules:
        from hypothesis import given, settings
        from hypothesis.strategies import none

        settings(max_examples=1, database=None)(given(none())(lambda _: None))()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server for all tests of this process, with a store in the database `prepared`."""
    from hermes_trio.store.postgres.link import open_link
    from hermes_trio.store.postgres.schema import migrate_schema

    async def prepare(url: str) -> None:
        async with open_link(url, "prepared") as link:
            await migrate_schema(link, "prepared")

    with postgres_server() as server:
        server.execute("CREATE DATABASE prepared OWNER keeper")
        trio.run(prepare, server.url("prepared"))
        yield server


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> str:
    """A fresh store in a PostgreSQL database of its own."""
    return postgres.url(postgres.new_database("prepared"))
