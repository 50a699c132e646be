"""Repeats a call of the store that has failed, with growing pauses. Ends are repeated by `Ends`, which outlives the task that writes them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import trio

from .errors import OutcomeUnknown, Refused
from .tree import waiting

logger: Final = logging.getLogger("hermes_trio.runtime.retrying")

T = TypeVar("T")

ATTEMPTS: Final = 4
"""Refusals of a write after which it is given up, if the store accepts another one."""


async def retried(
    call: Callable[[], Awaitable[T]],
    what: str,
    *,
    first: float = 1.0,
    longest: float = 60.0,
    works: Callable[[], Awaitable[bool]] | None = None,
    over: Callable[[], bool] = lambda: False,
) -> T:
    """Return the result of `call`, which is repeated until it succeeds. The log gets one line for each pause that is longer than the last one.

    Raises `Refused`, any error if `over()`, and the fourth refusal if the store `works()` then; not an unknown outcome.
    """
    attempts, pause, longest_yet = 0, first, 0.0
    while True:
        try:
            return await call()
        except Exception as raised:
            error = raised
        attempts += 1
        final = isinstance(error, Refused) or over()
        if not final and works is not None and attempts >= ATTEMPTS and not isinstance(error, OutcomeUnknown):
            final = await works()
        if final:
            raise error
        if pause > longest_yet:
            logger.warning("could not %s; the next attempt is in %g s: %s", what, pause, error)
        with waiting(f"the store, to {what}"):
            await trio.sleep(pause)
        longest_yet, pause = pause, min(2 * pause, longest)
