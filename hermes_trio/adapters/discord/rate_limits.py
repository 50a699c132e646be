"""Discord's rate limits: learns the buckets from responses, and waits instead of being refused.

Discord bans clients that collect refusals, so a call for an exhausted bucket waits for the bucket's reset. If that takes longer than the given limit,
the call fails with the time to wait, and its sender decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import attrs
import trio

from hermes_trio.messaging.errors import PlatformError, PlatformErrorKind


@final
@attrs.define
class _Bucket:
    remaining: int
    resets_at: float


@final
class RateLimits:
    """The known buckets of one bot. A bucket counts for each top-level resource separately."""

    def __init__(self, max_wait: float) -> None:
        self._max_wait = max_wait
        self._names: dict[str, str] = {}
        self._buckets: dict[tuple[str, str], _Bucket] = {}
        self._all_blocked_until = float("-inf")

    async def admit(self, operation: str, resource: str) -> None:
        """Wait until a call may be made. Raises RATE_LIMITED if that would take longer than the limit.

        Cancelling it has no effect on the buckets.
        """
        while True:
            now = trio.current_time()
            bucket = self._buckets.get(self._key(operation, resource))
            ready = self._all_blocked_until
            if bucket is not None:
                if bucket.resets_at <= now:
                    del self._buckets[self._key(operation, resource)]
                elif bucket.remaining <= 0:
                    ready = max(ready, bucket.resets_at)
                else:
                    bucket.remaining -= 1
            if ready <= now:
                await trio.lowlevel.checkpoint()
                return
            if ready - now > self._max_wait:
                message = f"{operation}: the rate limit resets in {ready - now:.1f} s"
                raise PlatformError(PlatformErrorKind.RATE_LIMITED, message, retry_after=ready - now, code=429)
            await trio.sleep_until(ready)

    def learn(self, operation: str, resource: str, headers: Mapping[str, str]) -> None:
        """Update a bucket from the headers of a response."""
        name, remaining = headers.get("x-ratelimit-bucket"), headers.get("x-ratelimit-remaining")
        reset_after = _number(headers.get("x-ratelimit-reset-after"))
        if name is None or remaining is None or reset_after is None:
            return
        self._names[operation] = name
        key, resets_at = (name, resource), trio.current_time() + reset_after
        known = self._buckets.get(key)
        left = int(remaining) if remaining.isdigit() else 0
        # Answers of concurrent calls arrive in any order: within one window the lowest count is the truth.
        if known is not None and known.resets_at > trio.current_time():
            left = min(left, known.remaining)
        self._buckets[key] = _Bucket(left, resets_at)

    def refused(self, operation: str, resource: str, retry_after: float, *, everywhere: bool) -> None:
        """Record a response of 429."""
        resets_at = trio.current_time() + retry_after
        if everywhere:
            self._all_blocked_until = max(self._all_blocked_until, resets_at)
        else:
            self._buckets[self._key(operation, resource)] = _Bucket(0, resets_at)

    def _key(self, operation: str, resource: str) -> tuple[str, str]:
        return self._names.get(operation, operation), resource


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
