"""Stores to test against: every contract test runs on each backend and runner."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from hermes_trio.store import Retention, Runner, SqliteStore, Store, open_store

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

    def open(self, **settings: Any) -> AbstractAsyncContextManager[SqliteStore]:
        """Open the store."""
        settings.setdefault("clock", self.clock)
        settings.setdefault("maintenance", False)
        settings.setdefault("retention", Retention())
        return open_store(self.path, runner=self.runner, **settings)


@pytest.fixture
def clock() -> Clock:
    """A clock that a test sets."""
    return Clock()


@pytest.fixture(params=list(BACKENDS))
def backend(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Backend:
    """Each backend and runner in turn."""
    on_disk, runner = BACKENDS[request.param]
    return Backend(tmp_path / "store.db" if on_disk else None, runner, clock)


@pytest.fixture
async def store(backend: Backend) -> AsyncIterator[Store]:
    """An open store of each backend in turn, seen through the port alone."""
    async with backend.open() as opened:
        yield opened
