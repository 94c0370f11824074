"""Metric names in one table, and their export to Prometheus.

Numbers are pulled from the engine when somebody looks; nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from efa_kv.errors import EfaKvError
from efa_kv.types import RailCounters

PREFIX: Final = "efa_kv_"
_LABELS: Final = ("session", "nic", "provider")


class MetricRow(msgspec.Struct, frozen=True):
    """One metric: the counter's field, its name without prefix, kind and meaning."""

    field: str
    name: str
    kind: str
    text: str


RAIL_METRICS: Final = (
    MetricRow("bytes_written", "written_bytes", "counter", "Bytes written to peers."),
    MetricRow("bytes_read", "read_bytes", "counter", "Bytes read from peers."),
    MetricRow("bytes_near", "near_bytes", "counter", "Bytes moved without the provider."),
    MetricRow("operations_near", "near_operations", "counter", "Moves without the provider."),
    *(
        MetricRow(
            f"near_refused_{reason}",
            f"near_refused_{reason}",
            "counter",
            f"Peers and jobs of this host that took the provider: {text}.",
        )
        for reason, text in (
            ("namespace", "another pid namespace"),
            ("permission", "forbidden by the kernel"),
            ("identity", "another process behind the process id"),
            ("system", "not supported by the kernel or not offered"),
            ("memory", "memory of a device, or not offered"),
        )
    ),
    MetricRow("bytes_staged", "staged_bytes", "counter", "GPU memory sent through the host's."),
    MetricRow("operations_staged", "staged_operations", "counter", "Messages that carried it."),
    MetricRow("in_flight", "operations_in_flight", "gauge", "Operations in flight now."),
    MetricRow("in_flight_peak", "operations_in_flight_peak", "gauge", "Most in flight so far."),
    MetricRow("operations_posted", "operations_posted", "counter", "Operations posted."),
    MetricRow("operations_settled", "operations_settled", "counter", "Operations settled."),
    MetricRow("operations_failed", "operations_failed", "counter", "Operations that failed."),
    MetricRow("operations_resent", "operations_resent", "counter", "Operations sent again."),
    MetricRow("again", "posts_refused", "counter", "Posts refused for back-pressure."),
    MetricRow("failures", "rail_failures", "counter", "Times the device was taken out."),
    MetricRow("notices_sent", "notices_sent", "counter", "Notices sent behind a last byte."),
    MetricRow("notices_received", "notices_received", "counter", "Notices received."),
    MetricRow("notices_dropped", "notices_dropped", "counter", "Notices lost to a full table."),
    MetricRow(
        "stray_completions", "stray_completions", "counter", "Completions of unknown operations."
    ),
    MetricRow(
        "turned_ns",
        "progress_turned_nanoseconds",
        "gauge",
        "When the progress thread last looked around, on the clock CLOCK_MONOTONIC.",
    ),
    MetricRow("progress_wakeups", "progress_wakeups", "counter", "Times the core woke up."),
)


class CountedEngine(Protocol):
    """The part of the engine that is exported."""

    @property
    def session(self) -> str: ...
    @property
    def protocol(self) -> str: ...
    def counters(self) -> list[RailCounters]: ...


class EngineCollector(Collector):
    """Exports one engine; register it with a `prometheus_client.CollectorRegistry`.

    ``more`` may add the numbers of other parts, as finished metrics.
    """

    def __init__(
        self, engine: CountedEngine, more: Callable[[], Iterable[Metric]] | None = None
    ) -> None:
        self._engine = engine
        self._more = more

    def collect(self) -> Iterator[Metric]:
        """All metrics now; those of a closed engine are left out."""
        try:
            rails = self._engine.counters()
        except EfaKvError:
            return
        info = GaugeMetricFamily(
            PREFIX + "engine_info", "Protocol and providers in use.", labels=_INFO_LABELS
        )
        providers = ",".join(sorted({rail.provider for rail in rails}))
        info.add_metric([self._engine.session, self._engine.protocol, providers], 1)
        yield info
        for row in RAIL_METRICS:
            yield self._family(row, rails)
        if self._more is not None:
            yield from self._more()

    def _family(self, row: MetricRow, rails: list[RailCounters]) -> Metric:
        kind = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
        family = kind(PREFIX + row.name, row.text, labels=_LABELS)
        for rail in rails:
            labels = [self._engine.session, rail.name, rail.provider]
            family.add_metric(labels, getattr(rail, row.field))
        return family


_INFO_LABELS: Final = ("session", "protocol", "provider")
