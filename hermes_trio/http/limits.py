"""Limits of one API key: requests a minute, shared by all nodes of a store, and concurrent streams of run events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec
import trio

from hermes_trio.runtime.membership import Membership
from hermes_trio.runtime.shares import SharedSpending

from .errors import ApiError, retry_after

KEYS_REMEMBERED: Final = 10_000
"""The number of rate-limited callers that are remembered, LRU; a dropped one starts with a full bucket."""


class _Bucket(msgspec.Struct):
    tokens: float
    at: float


class ReaderLimit:
    """Limits the streams of run events that a key reads at once. Each uses memory while its reader stalls."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._reading: Counter[str] = Counter()
        self.paging = trio.Lock()
        """Held while a page of stored events is read and encoded: readers that catch up take turns with other requests."""

    @contextmanager
    def reading(self, key_id: str) -> Iterator[None]:
        """Count one reader of this key for the body of the `with`. Raises 429 beyond the limit."""
        if self._reading[key_id] >= self._most:
            raise ApiError(
                429,
                f"This key follows {self._most} streams of run events already; close one of them first.",
                code="too_many_readers",
                headers=retry_after(1),
            )
        self._reading[key_id] += 1
        try:
            yield
        finally:
            self._reading[key_id] -= 1
            if not self._reading[key_id]:
                del self._reading[key_id]


class RateLimiter:
    """A token bucket for each key: `per_minute` requests in the long run, `burst` at once. 0 means no limit.

    With a `membership` the buckets of all nodes are one, as far as they know of each other: what the others have taken is taken here, too, and may leave
    a bucket in debt. In any t seconds N nodes let at most N bursts, the requests of t seconds, and those of two heartbeats for each other node through.
    """

    def __init__(self, per_minute: int, burst: int, membership: Membership | None = None) -> None:
        self._rate = per_minute / 60
        self._burst = float(max(1, burst or per_minute))
        self._buckets: dict[str, _Bucket] = {}
        self._shared: SharedSpending | None = None
        if membership is not None and per_minute:
            self._shared = membership.share("requests", self._taken_elsewhere)

    def check(self, key_id: str) -> None:
        """Take one token, or raise 429 with the time until there is one."""
        if not self._rate:
            return
        bucket = self._bucket(key_id)
        if bucket.tokens < 1:
            wait = (1 - bucket.tokens) / self._rate
            raise ApiError(
                429,
                f"This key may make {self._rate * 60:g} requests a minute; try again in {wait:.1f} s.",
                code="rate_limit_exceeded",
                headers=retry_after(wait),
            )
        bucket.tokens -= 1
        if self._shared is not None:
            self._shared.spend(key_id)

    def _bucket(self, key_id: str) -> _Bucket:
        """Return the bucket of a key, filled up to now."""
        now = trio.current_time()
        bucket = self._buckets.pop(key_id, None)
        if bucket is None:
            bucket = _Bucket(self._burst, now)
        # Re-inserted at the end: the dictionary is in order of use.
        self._buckets[key_id] = bucket
        while len(self._buckets) > KEYS_REMEMBERED:
            del self._buckets[next(iter(self._buckets))]
        bucket.tokens = min(self._burst, bucket.tokens + (now - bucket.at) * self._rate)
        bucket.at = now
        return bucket

    def _taken_elsewhere(self, key_id: str, amount: int) -> None:
        self._bucket(key_id).tokens -= amount
