"""Ends that the store has refused so far, and the task that retries them.

The end of a turn, a job, an attempt to send, a cron slot or a claim is written through `Ends.put`. If the store refuses it, this
task retries it with growing pauses until it is written or the runtime closes. Ends may be written twice: the store's verbs change nothing the
second time. An end that is refused while other writes succeed is reduced to its state and its error. An end that now belongs to another owner
(`Fenced`) is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from .errors import Fenced, OutcomeUnknown
from .tree import split_cancelled, waiting

if TYPE_CHECKING:
    from .core import RuntimeCore

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


def _shield(until: float) -> trio.CancelScope:
    return trio.CancelScope(shield=True, deadline=until)


class _Borrowed:
    """Shields and bounds a scope of the caller for the body of the `with`, and then catches its cancellation: half the cost of a new scope."""

    __slots__ = ("_scope",)

    def __init__(self, scope: trio.CancelScope, until: float) -> None:
        self._scope = scope
        scope.deadline = until

    def __enter__(self) -> None:
        self._scope.shield = True

    def __exit__(self, kind: object, error: BaseException | None, tb: object) -> bool:
        self._scope.shield = False
        return error is not None and split_cancelled(error)[1] is None


class Ends:
    """The waiting ends of one runtime. `len` is their number."""

    def __init__(self, core: RuntimeCore) -> None:
        self._core = core
        self._waiting: dict[End, None] = {}
        self._wake = trio.Event()
        self._open = False
        self._nursery: trio.Nursery
        self._retry = trio.CancelScope()
        """The scope of the last attempt of `_run`."""

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

    async def put(self, end: End, scope: trio.CancelScope | None = None) -> bool:
        """Write an end; return whether it is written. Shielded for `finish_seconds`; after that this object retries it and calls `end.then`.

        A caller whose innermost scope serves nothing else any more lends it; the scope keeps the deadline of this wait.

        When the time of a drain is over, all calls share these seconds while the store does not answer (`StoreWaits`).
        """
        waits = self._core.waits
        until = waits.begin()
        error: Exception | None = None
        try:
            # A scope that is cancelled already, as by a deadline that came before this call, would cut the write.
            with _shield(until) if scope is None or scope.cancel_called else _Borrowed(scope, until):
                try:
                    end.value = await end.write()
                except Exception as raised:
                    error = raised
                else:
                    end.written = True
                    waits.answered()
                    if end.then is not None:
                        self._settle(end)
                    return True
            if isinstance(error, Fenced):
                self._drop(end, error)
                return False
            self._note(end, error or self._silence())
            if self._open:
                end.over = trio.Event()
                self._waiting[end] = None
                self._wake.set()
                with _shield(until):
                    await end.over.wait()
            else:
                self._give_up(end)
            return end.written
        finally:
            waits.end()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Retry ends for the body of the `async with`. Leaving tries each once more, all within one `finish_seconds`; the next start reaps the rest."""
        self._open = True
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._run, name="ends")
            try:
                yield
            finally:
                self._open = False
                nursery.cancel_scope.cancel()
                waits = self._core.waits
                until = waits.begin()
                self._retry.deadline = min(self._retry.deadline, until)
                for end in list(self._waiting):
                    if not await self._attempt(end, _shield(until)):  # noqa: ASYNC102 - bounded by finish_seconds
                        self._give_up(end)
                waits.end()

    def start_soon(self, function: Callable[[], Awaitable[None]]) -> None:
        """Start a task for an end that is written while this closes. It must shield itself, with a bound: the closing cancels it, and waits for it."""
        self._core.base_context.copy().run(self._nursery.start_soon, function)

    def _drop(self, end: End, error: Fenced) -> None:
        logger.warning("could not write %s; another owner has it: %s", end.name, error)
        end.problem, end.error = str(error), error
        self._settle(end)

    def _silence(self) -> OutcomeUnknown:
        return OutcomeUnknown(f"the store did not answer within {self._core.settings.finish_seconds:g} s")

    def _give_up(self, end: End) -> None:
        logger.error("could not write %s; the next start ends it: %s", end.name, end.problem)
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
                self._retry = _shield(trio.current_time() + self._core.settings.finish_seconds)
                if await self._attempt(end, self._retry):
                    delay = FIRST_SECONDS

    async def _attempt(self, end: End, scope: trio.CancelScope) -> bool:
        """Try once, in this scope; return whether the end needs no further attempt (written, or fenced)."""
        with scope:
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
                self._core.waits.answered()
                if end.was_reduced:
                    logger.error("the store refused %s; only its state and error are written: %s", end.name, end.error)
                self._settle(end)
            except Fenced as error:
                self._drop(end, error)
            except Exception as error:
                self._note(end, error)
                return False
            return True
        self._note(end, self._silence())
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
            logger.error("could not write %s; retrying: %s", end.name, end.problem)

    def _settle(self, end: End) -> None:
        self._waiting.pop(end, None)
        then, end.then = end.then, None
        if then is not None:
            then(end)
        if end.over is not None:
            end.over.set()
