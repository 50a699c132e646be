"""Faults that a test scripts for a fake platform's next calls.

A fault is consumed by the call that it hits, in the order in which it was scripted. `before=False` faults let the
platform do the work first: the message exists, and only its answer is lost.
"""

from __future__ import annotations

from collections import deque
from typing import final

import attrs

# Matches every method of the platform.
ANY = "*"


@final
@attrs.frozen
class RateLimited:
    """Answer 429 in the platform's own form. `everywhere` is Discord's global limit."""

    retry_after: float
    everywhere: bool = False


@final
@attrs.frozen
class ServerError:
    """Answer with a 5xx status and a body that is not JSON, as a failing reverse proxy does."""

    status: int = 502


@final
@attrs.frozen
class Drop:
    """End the connection without an answer: before the call is carried out, or after it."""

    before: bool = True


@final
@attrs.frozen
class Delay:
    """Carry the call out only after this many seconds."""

    seconds: float


Fault = RateLimited | ServerError | Drop | Delay


@final
class FaultScript:
    """The faults that are not used yet, by documented method name."""

    def __init__(self) -> None:
        self._pending: dict[str, deque[Fault]] = {}

    def add(self, method: str, fault: Fault, times: int = 1) -> None:
        self._pending.setdefault(method.lower(), deque()).extend([fault] * times)

    def take(self, method: str) -> Fault | None:
        """Return the fault for this call, and remove it."""
        for name in (method.lower(), ANY):
            pending = self._pending.get(name)
            if pending:
                return pending.popleft()
        return None

    def clear(self) -> None:
        """Forget every fault that has not been used."""
        self._pending.clear()
