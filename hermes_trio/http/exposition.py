"""Renders the metrics in Prometheus' format. Imported on the first request for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from hermes_trio.runtime.outcome import RunStatus

from .metrics import BUCKETS, Metrics

if TYPE_CHECKING:
    from .core import ApiCore

_BOUNDS: Final = (*(str(float(bucket)) for bucket in BUCKETS), "+Inf")


class _Counted(Collector):
    """Collects the counters since the server started."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yield the counters and the histogram."""
        metrics = self._metrics
        answers = CounterMetricFamily(
            "hermes_http_requests", "Responses, by route and status.", labels=["route", "status"]
        )
        for (route, status), count in metrics.answers.items():
            answers.add_metric([route, str(status)], count)
        yield answers
        histogram = HistogramMetricFamily(
            "hermes_http_request_seconds",
            "Seconds until the response (or the end of a stream), by route.",
            labels=["route"],
        )
        for route, buckets in metrics.buckets.items():
            total = 0
            rows: list[tuple[str, float]] = []
            for bound, count in zip(_BOUNDS, buckets, strict=True):
                total += count
                rows.append((bound, total))
            histogram.add_metric([route], rows, metrics.seconds[route])
        yield histogram
        refused = CounterMetricFamily("hermes_http_refused", "Requests refused before routing.", labels=["reason"])
        for reason, count in metrics.refusals.items():
            refused.add_metric([reason], count)
        yield refused
        left = CounterMetricFamily(
            "hermes_http_client_left", "Requests whose client disconnected before the response.", labels=["route"]
        )
        for route, count in metrics.disconnects.items():
            left.add_metric([route], count)
        yield left
        yield CounterMetricFamily(
            "hermes_http_relayed", "Requests relayed to the node that has their session.", value=metrics.relayed
        )


class _Live(Collector):
    """Collects gauges of the current state."""

    def __init__(self, core: ApiCore) -> None:
        self._core = core

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges. They are read without a checkpoint, so they agree with each other."""
        host = self._core.runtime
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
        yield from self._nodes()

    def _nodes(self) -> Iterator[Metric]:
        """Yield the gauges of the nodes that share the store, as of the last heartbeat."""
        core = self._core
        rows = core.runtime.membership.nodes
        gauges = [
            GaugeMetricFamily(f"hermes_node_{name}", words, labels=["node", "incarnation"])
            for name, words in (
                ("lease_seconds", "Seconds until the lease of a node expires; negative if it has expired."),
                ("turns", "Running turns of a node."),
                ("jobs", "Jobs of a node."),
                ("sessions", "Sessions that are bound to a node by their shells and files."),
            )
        ]
        now = core.store.now()
        for row in rows:
            values = (row.expires_at - now, row.info.get("turns", 0), row.info.get("jobs", 0), row.hosted)
            for gauge, value in zip(gauges, values, strict=True):
                gauge.add_metric([row.name, row.incarnation[:8]], value)
        yield from gauges


def exposition_of(metrics: Metrics) -> bytes:
    """Return the metrics as text. Each call makes a new registry, so all values are current."""
    registry = CollectorRegistry()
    registry.register(_Counted(metrics))
    registry.register(_Live(metrics.core))
    return generate_latest(registry)
