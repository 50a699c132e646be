"""What Prometheus reads: counters that the carriers raise, and gauges that are read off the runtime when somebody looks.

All names begin with `hermes_`. Label values come from the route table, never from a client.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from hermes_trio.runtime.run import RunStatus

if TYPE_CHECKING:
    from .front import Host

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"

_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_BOUNDS: Final = (*(str(float(bucket)) for bucket in _BUCKETS), "+Inf")


class _Live(Collector):
    """Gauges of what is alive now."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def collect(self) -> Iterator[Metric]:
        """The tree and the limiter, in one step without a checkpoint."""
        host = self._host
        yield GaugeMetricFamily("hermes_turns_active", "Turns that hold a limiter token.", value=host.stateless.active)
        yield GaugeMetricFamily("hermes_draining", "1 while new work is refused.", value=int(host.draining))
        kinds: dict[str, int] = {}
        for node in host.tree.root.walk():
            kinds[node.kind] = kinds.get(node.kind, 0) + 1
        nodes = GaugeMetricFamily("hermes_tree_nodes", "Nodes of the live task tree, by kind.", labels=["kind"])
        for kind, count in sorted(kinds.items()):
            nodes.add_metric([kind], count)
        yield nodes
        runs = GaugeMetricFamily("hermes_runs_live", "Runs that have not settled, by status.", labels=["status"])
        statuses = dict.fromkeys((status.value for status in RunStatus), 0)
        for run in host.stateless.runs.all():
            statuses[run.status.value] += 1
        for status, count in statuses.items():
            runs.add_metric([status], count)
        yield runs


class _Answers(Collector):
    """Answers and their seconds, counted without the locks and label look-ups of a library that serves threads: every request is counted here."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], int] = {}
        self._buckets: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def add(self, route: str, status: int, seconds: float) -> None:
        key = (route, status)
        self._counts[key] = self._counts.get(key, 0) + 1
        buckets = self._buckets.get(route)
        if buckets is None:
            buckets = self._buckets[route] = [0] * (len(_BUCKETS) + 1)
            self._sums[route] = 0.0
        buckets[bisect_left(_BUCKETS, seconds)] += 1
        self._sums[route] += seconds

    def collect(self) -> Iterator[Metric]:
        """The counter and the histogram."""
        counter = CounterMetricFamily(
            "hermes_http_requests", "Answers, by route and status.", labels=["route", "status"]
        )
        for (route, status), count in self._counts.items():
            counter.add_metric([route, str(status)], count)
        yield counter
        histogram = HistogramMetricFamily(
            "hermes_http_request_seconds",
            "Seconds until the answer (or the end of a stream), by route.",
            labels=["route"],
        )
        for route, buckets in self._buckets.items():
            total = 0
            rows: list[tuple[str, float]] = []
            for bound, count in zip(_BOUNDS, buckets, strict=True):
                total += count
                rows.append((bound, total))
            histogram.add_metric([route], rows, self._sums[route])
        yield histogram


class Metrics:
    """One registry a server, so that two servers in one process do not share counters."""

    def __init__(self, host: Host) -> None:
        self.registry = CollectorRegistry()
        self._answers = _Answers()
        self.registry.register(self._answers)
        self._refused = Counter(
            "hermes_http_refused_total", "Requests refused before a route saw them.", ["reason"], registry=self.registry
        )
        self._cut = Counter(
            "hermes_http_client_left_total", "Requests whose client left first.", ["route"], registry=self.registry
        )
        self.registry.register(_Live(host))

    def answered(self, route: str, status: int, seconds: float) -> None:
        """An answer was given."""
        self._answers.add(route, status, seconds)

    def refused(self, reason: str) -> None:
        """A request was refused before any route."""
        self._refused.labels(reason).inc()

    def left(self, route: str) -> None:
        """A client left before its answer was complete."""
        self._cut.labels(route).inc()

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)
