"""Metrics for Prometheus: counters, and gauges that are read from the runtime on request.

All names begin with `hermes_`. Label values come from the route table, never from a client. Every request is counted here, so counting is a few
dictionary operations; the library that renders the text is imported on request (`exposition`).
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .core import ApiCore

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"

BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""Upper bounds, in seconds."""


class Metrics:
    """The counters of one server; two servers in one process do not share them."""

    def __init__(self, core: ApiCore) -> None:
        self.core = core
        self.answers: dict[tuple[str, int], int] = {}
        self.buckets: dict[str, list[int]] = {}
        self.seconds: dict[str, float] = {}
        self.refusals: dict[str, int] = {}
        self.disconnects: dict[str, int] = {}
        self.relayed: int = 0
        """Requests that were relayed to the node that has their session."""

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Count a response."""
        key = (route, status)
        self.answers[key] = self.answers.get(key, 0) + 1
        buckets = self.buckets.get(route)
        if buckets is None:
            buckets = self.buckets[route] = [0] * (len(BUCKETS) + 1)
            self.seconds[route] = 0.0
        buckets[bisect_left(BUCKETS, seconds)] += 1
        self.seconds[route] += seconds

    def refused(self, reason: str) -> None:
        """Count a request that was refused before any route."""
        self.refusals[reason] = self.refusals.get(reason, 0) + 1

    def left(self, route: str) -> None:
        """Count a client that disconnected before its response was complete."""
        self.disconnects[route] = self.disconnects.get(route, 0) + 1

    def render(self) -> bytes:
        """Return the text for Prometheus, taken in one step without a checkpoint."""
        from .exposition import exposition_of

        return exposition_of(self)
