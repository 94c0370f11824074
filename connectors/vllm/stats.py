"""The connector's numbers on their way to vLLM's log and to Prometheus.

They start in both halves, are added up by vLLM, cross a process boundary as a plain
dictionary and are observed in the API server, which has no native core.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import REGISTRY, Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["EfaPromMetrics", "EfaStats"]

_BUCKETS_S: Final = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
    30.0,
)
_NO_PROVIDER: Final = "none"

# data key -> (metric name without "_total", what it counts)
_COUNTERS: Final = {
    "received_bytes": ("efa_kv_received_bytes", "Bytes of KV cache received from producers."),
    "received_requests": ("efa_kv_received_requests", "Requests whose KV cache was received."),
    "sent_bytes": ("efa_kv_sent_bytes", "Bytes of KV cache sent to consumers."),
    "sent_requests": ("efa_kv_sent_requests", "Requests whose KV cache was sent."),
    "expired": ("efa_kv_expired", "Handoffs whose lease ended before a consumer asked."),
    "recomputed": ("efa_kv_recomputed", "Requests computed here because their KV did not come."),
    "zero_byte_pulls": (
        "efa_kv_zero_byte_pulls",
        "Requests for remote KV that were answered without a byte of it.",
    ),
}


class EfaStats(KVConnectorStats):
    """Counts since the last time they were taken; ``data`` holds plain values only."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data or {})
        if not self.data:
            self.data = self._zeros(_NO_PROVIDER)

    @staticmethod
    def _zeros(provider: str) -> dict[str, Any]:
        return {
            "provider": provider,
            "transfer_seconds": [],
            "failures": {},
            **dict.fromkeys(_COUNTERS, 0),
        }

    def set_provider(self, provider: str) -> None:
        self.data["provider"] = provider

    def record(self, name: str, count: int = 1) -> None:
        """Adds to one of the counters."""
        self.data[name] += count

    def record_transfer(self, seconds: float) -> None:
        self.data["transfer_seconds"].append(seconds)

    def record_failure(self, cause: str, count: int = 1) -> None:
        failures = self.data["failures"]
        failures[cause] = failures.get(cause, 0) + count

    def record_zero_byte_pull(self) -> None:
        self.record("zero_byte_pulls")

    def record_recomputed(self) -> None:
        """A request for remote KV was computed here, so not a byte of it came."""
        self.record("recomputed")
        self.record("zero_byte_pulls")

    def take(self) -> EfaStats | None:
        """What was counted so far, and starts over; None if there is nothing to say."""
        if self.is_empty():
            return None
        taken = EfaStats(self.data)
        self.data = self._zeros(taken.data["provider"])
        return taken

    def reset(self) -> None:
        self.data = self._zeros(self.data["provider"])

    def is_empty(self) -> bool:
        return not (
            self.data["transfer_seconds"]
            or self.data["failures"]
            or any(self.data[name] for name in _COUNTERS)
        )

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds the other's counts to these."""
        theirs = other.data
        for name in _COUNTERS:
            self.data[name] += theirs[name]
        self.data["transfer_seconds"].extend(theirs["transfer_seconds"])
        for cause, count in theirs["failures"].items():
            self.record_failure(cause, count)
        if self.data["provider"] == _NO_PROVIDER:
            self.data["provider"] = theirs["provider"]
        return self

    def reduce(self) -> dict[str, int | float]:
        """The summary that vLLM logs."""
        seconds = self.data["transfer_seconds"]
        total_s = sum(seconds)
        received = self.data["received_bytes"]
        return {
            "Received requests": self.data["received_requests"],
            "Received MB": round(received / 1e6, 3),
            "Average transfer (ms)": round(1e3 * total_s / len(seconds), 3) if seconds else 0,
            "GB/s": round(received / total_s / 1e9, 3) if total_s else 0,
            "Failed": sum(self.data["failures"].values()),
            "Expired": self.data["expired"],
            "Recomputed": self.data["recomputed"],
        }


class EfaPromMetrics(KVConnectorPromMetrics):
    """The Prometheus metrics, with vLLM's labels and the provider's name."""

    # vLLM drops its own metrics before it registers them again, for a second engine
    # in one process; it doesn't know ours.
    _registered: list[Any] = []  # noqa: RUF012 - shared by all instances on purpose

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._drop_registered()
        labels = [*labelnames, "provider"]
        self._counters = {
            key: self._keep(self._counter_cls(name=name, documentation=text, labelnames=labels))
            for key, (name, text) in _COUNTERS.items()
        }
        self._failures = self._keep(
            self._counter_cls(
                name="efa_kv_transfer_failures",
                documentation="Handoffs that failed, by cause.",
                labelnames=[*labels, "cause"],
            )
        )
        self._seconds = self._keep(
            self._histogram_cls(
                name="efa_kv_transfer_seconds",
                documentation="From the request for a transfer until its last byte had landed.",
                buckets=list(_BUCKETS_S),
                labelnames=labels,
            )
        )

    @classmethod
    def _drop_registered(cls) -> None:
        while cls._registered:
            REGISTRY.unregister(cls._registered.pop())

    @classmethod
    def _keep(cls, metric: Any) -> Any:
        if isinstance(metric, Counter | Histogram):  # others register themselves elsewhere
            cls._registered.append(metric)
        return metric

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Adds one interval's counts."""
        labels = [*self.per_engine_labelvalues[engine_idx], transfer_stats_data["provider"]]
        for key, counter in self._counters.items():
            counter.labels(*labels).inc(transfer_stats_data[key])
        for cause, count in transfer_stats_data["failures"].items():
            self._failures.labels(*labels, cause).inc(count)
        for seconds in transfer_stats_data["transfer_seconds"]:
            self._seconds.labels(*labels).observe(seconds)
