"""Records the calls of a fake platform in order, and waits for the next one that matches.

A `CallLedger` only grows. Waiting is level-triggered: a wait first checks all existing entries, so
a test cannot miss an earlier call. A wait that finds nothing reports the entries instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar, final

import attrs
import trio

from .changes import Changes

WAIT_SECONDS = 5.0
SHOWN_ENTRIES = 12

T = TypeVar("T")


@final
class NothingArrived(AssertionError):
    """Raised if no matching entry arrived in time; the text lists those that did."""


@final
@attrs.frozen
class RecordedCall:
    """One call of the platform's API, as it was answered.

    `method` is the documented name (`sendMessage`, `create_message`, `chat.postMessage`). `status` is the HTTP status,
    or 0 if the connection was dropped instead of answered. `error` is the platform's error text. `at` is Trio's time of the answer.
    """

    number: int
    method: str
    params: Mapping[str, Any]
    status: int
    error: str | None = None
    at: float = 0.0


@final
class CallLedger(Generic[T]):
    """An append-only list that can be waited on."""

    def __init__(self, noun: str) -> None:
        self._noun = noun
        self._entries: list[T] = []
        self._changes = Changes()

    def __iter__(self) -> Iterator[T]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> T:
        return self._entries[index]

    def append(self, entry: T) -> None:
        self._entries.append(entry)
        self.touch()

    def touch(self) -> None:
        """Wake all waiting tasks after an entry has changed in place."""
        self._changes.tell()

    async def first(self, matches: Callable[[T], bool], *, wanted: str, timeout: float = WAIT_SECONDS) -> T:
        """Wait for the first entry that matches and return it. Raises `NothingArrived` after `timeout` seconds."""
        with trio.move_on_after(timeout):
            while True:
                for entry in self._entries:
                    if matches(entry):
                        await trio.lowlevel.checkpoint()
                        return entry
                await self._changes.wait()
        seen = "\n".join(f"  {entry!r}" for entry in self._entries[-SHOWN_ENTRIES:]) or "  nothing"
        raise NothingArrived(f"no {self._noun} {wanted} within {timeout:g} s; the last of {len(self)} were:\n{seen}")

    async def nth(self, count: int, matches: Callable[[T], bool], *, wanted: str, timeout: float = WAIT_SECONDS) -> T:
        """Wait for the `count`th entry that matches and return it. Raises `NothingArrived` after `timeout` seconds."""

        def is_it(entry: T) -> bool:
            fitting = [other for other in self._entries if matches(other)]
            return len(fitting) >= count and fitting[count - 1] is entry

        return await self.first(is_it, wanted=wanted, timeout=timeout)
