"""Ends that the store has refused so far, and the task that retries them.

The end of a turn, a job, an attempt to send, a cron slot or a claim is written through `Ends.put`. If the store refuses it, this
task retries it with growing pauses until it is written or the runtime closes. Ends may be written twice: the store's verbs change nothing the
second time. An end that is refused while other writes succeed is reduced to its state and its error. An end that belongs to another owner by now
(`Fenced`) is dropped.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from .errors import Fenced, OutcomeUnknown
from .tree import waiting

if TYPE_CHECKING:
    from .core import RuntimeCore

__all__ = ["End", "Ends"]

logger: Final = logging.getLogger("hermes_trio.runtime.ends")

FIRST_SECONDS: Final = 0.1
LONGEST_SECONDS: Final = 10.0
FULL_ATTEMPTS: Final = 3
"""Attempts to write the whole end before it is reduced, if other writes succeed."""
UNCERTAIN_ATTEMPTS: Final = 12
"""The same if one attempt may have been written: a reduced end could then be reported differently from the stored one."""

Write = Callable[[], Awaitable[object]]


class End(msgspec.Struct, eq=False):
    """An end that must be written. `then` is called once, when it is written or given up.

    `reduced(end)` writes its state and error only; it gets the end as an argument, so that an end is not part of a reference cycle.
    `problem` is the reason why it is not written; empty once it is.
    """

    name: str
    write: Write
    reduced: Callable[[End], Awaitable[object]] | None = None
    then: Callable[[End], None] | None = None
    attempts: int = 0
    problem: str = ""
    error: Exception | None = None
    written: bool = False
    was_reduced: bool = False
    """Whether the reduced end is written, or may be (its outcome is unknown): then the whole one is not tried again."""
    uncertain: bool = False
    """Whether an attempt with an unknown outcome may have been written."""
    value: object = None
    """What `write` returned."""
    over: trio.Event | None = None
    """Made when the end has to wait for a retry; set when it is written or given up."""


class Ends:
    """The waiting ends of one runtime. `len` is their number."""

    def __init__(self, core: RuntimeCore) -> None:
        self._core = core
        self._waiting: dict[End, None] = {}
        self._wake = trio.Event()
        self._open = False

    def __len__(self) -> int:
        return len(self._waiting)

    def describe(self) -> list[str]:
        """Return the waiting ends with their reasons, for a health report."""
        return [f"{end.name}: attempt {end.attempts}, {end.problem}" for end in self._waiting]

    async def works(self) -> bool:
        """Return whether the store accepts a write now: if it does, a refused write is at fault itself."""
        try:
            await self._core.store.probe()
        except Exception:
            return False
        return True

    async def put(self, end: End) -> bool:
        """Write an end; return whether it is written. Shielded for `finish_seconds`; after that this object retries it and calls `end.then`."""
        until = trio.current_time() + self._core.settings.finish_seconds
        if not await self._attempt(end, until):
            if self._open:
                end.over = trio.Event()
                self._waiting[end] = None
                self._wake.set()
                with trio.CancelScope(shield=True, deadline=until):
                    await end.over.wait()
            else:
                self._give_up(end)
        return end.written

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Retry ends for the body of the `async with`. Leaving tries each once more, all within `finish_seconds`; the next start reaps the rest."""
        self._open = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run, name="ends")
            try:
                yield
            finally:
                self._open = False
                nursery.cancel_scope.cancel()
                until = trio.current_time() + self._core.settings.finish_seconds
                for end in list(self._waiting):
                    if not await self._attempt(end, until):  # noqa: ASYNC102 - bounded by finish_seconds
                        self._give_up(end)

    def _give_up(self, end: End) -> None:
        logger.error("%s is not written, the next start ends it: %s", end.name, end.problem)
        self._settle(end)

    async def _run(self) -> None:
        delay = FIRST_SECONDS
        while True:
            if not self._waiting:
                self._wake = trio.Event()
                await self._wake.wait()
                delay = FIRST_SECONDS
            with waiting(f"the store, to write {len(self._waiting)} ends"):
                await trio.sleep(delay)
            delay = min(2 * delay, LONGEST_SECONDS)
            for end in list(self._waiting):
                await trio.lowlevel.checkpoint_if_cancelled()
                if await self._attempt(end, math.inf):
                    delay = FIRST_SECONDS

    async def _attempt(self, end: End, until: float) -> bool:
        """Try once, for at most `finish_seconds`; return whether the end needs no further attempt (written, or fenced)."""
        seconds = self._core.settings.finish_seconds
        with trio.CancelScope(shield=True, deadline=min(until, trio.current_time() + seconds)):
            try:
                try:
                    if end.was_reduced and end.reduced is not None:
                        end.value = await end.reduced(end)
                    else:
                        end.value = await end.write()
                except Fenced:
                    raise
                except Exception as error:
                    self._note(end, error)
                    if not await self._reduce(end):
                        return False
                end.written, end.problem = True, ""
                if end.was_reduced:
                    logger.error(
                        "%s was refused by the store, and is reduced to its state and error: %s", end.name, end.error
                    )
            except Fenced as error:
                logger.warning("%s is not written: %s", end.name, error)
                end.problem, end.error = str(error), error
            except Exception as error:
                self._note(end, error)
                return False
            if end.then is not None or end.over is not None:
                self._settle(end)
            return True
        self._note(end, OutcomeUnknown(f"the store did not answer within {seconds:g} s"))
        return False

    async def _reduce(self, end: End) -> bool:
        """Write an end that a working store refused often enough: as it is, or its state and error only. Return whether it is written now."""
        enough = end.attempts > (UNCERTAIN_ATTEMPTS if end.uncertain else FULL_ATTEMPTS)
        if not enough or end.was_reduced or end.reduced is None or not await self.works():
            return False
        try:
            end.value = await end.write()
        except (Fenced, OutcomeUnknown):
            raise
        except Exception as error:
            end.error = error
            end.was_reduced = True
            try:
                await end.reduced(end)
            except OutcomeUnknown:
                raise
            except Exception:
                end.was_reduced = False
                raise
        return True

    def _note(self, end: End, error: Exception) -> None:
        end.attempts += 1
        end.uncertain = end.uncertain or isinstance(error, OutcomeUnknown)
        end.problem, end.error = str(error) or type(error).__name__, error
        if end.attempts in (1, FULL_ATTEMPTS):
            logger.error("%s is not written yet, it is tried again: %s", end.name, end.problem)

    def _settle(self, end: End) -> None:
        self._waiting.pop(end, None)
        then, end.then = end.then, None
        if then is not None:
            then(end)
        if end.over is not None:
            end.over.set()
