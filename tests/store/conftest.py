"""Stores to test against: every contract test runs on each backend and runner."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from hermes_trio.store import Retention, Runner, Store, open_store

BACKENDS = {
    "memory": (False, Runner.INLINE),
    "file-inline": (True, Runner.INLINE),
    "file-threaded": (True, Runner.THREADED),
}


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


class Backend:
    """One way to open a store; a second `open` of a file finds what the first one left."""

    def __init__(self, path: Path | None, runner: Runner, clock: Clock) -> None:
        self.path = path
        self.runner = runner
        self.clock = clock

    @property
    def durable(self) -> bool:
        """Whether closing and opening again keeps what was written."""
        return self.path is not None

    def open(self, **settings: Any) -> AbstractAsyncContextManager[Any]:
        """Open the store."""
        settings.setdefault("clock", self.clock)
        settings.setdefault("maintenance", False)
        settings.setdefault("retention", Retention())
        return open_store(self.path, runner=self.runner, **settings)


@pytest.fixture
def clock() -> Clock:
    """A clock that a test sets."""
    return Clock()


class PostgresBackend:
    """A PostgreSQL database of its own."""

    durable = True
    path: Path | None = None

    def __init__(self, url: str, clock: Clock) -> None:
        self.url = url
        self.clock = clock

    def open(self, **settings: Any) -> AbstractAsyncContextManager[Any]:
        """Open the store."""
        from hermes_trio.store.postgres.store import open_postgres

        settings.setdefault("clock", self.clock)
        settings.setdefault("maintenance", False)
        settings.setdefault("retention", Retention())
        settings.setdefault(
            "poll_seconds", 3600.0
        )  # a look at the rows is a second signal, which most tests do not want
        return open_postgres(self.url, **settings)


@pytest.fixture(params=[*BACKENDS, pytest.param("postgres", marks=pytest.mark.slow)])
def backend(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Backend | PostgresBackend:
    """Each backend and runner in turn."""
    if request.param == "postgres":
        return PostgresBackend(request.getfixturevalue("postgres_url"), clock)
    on_disk, runner = BACKENDS[request.param]
    return Backend(tmp_path / "store.db" if on_disk else None, runner, clock)


@pytest.fixture
async def store(backend: Backend) -> AsyncIterator[Store]:
    """An open store of each backend in turn, seen through the port alone."""
    async with backend.open() as opened:
        yield opened
