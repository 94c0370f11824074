"""Counters of what the engine moved, among the server's own at ``/metrics``.

SGLang's processes share metrics through files (``--enable-metrics``); without them there
is nothing to count into, and nothing is counted.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, Final

from efa_kv.config_mooncake import metrics_folder
from efa_kv.types import WRITE

_log = logging.getLogger(__name__)

_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30)


class _Counters:
    """One set for the process; each engine counts under its provider's name."""

    def __init__(self) -> None:
        # Only now: what kind of counters it makes is decided when it is first imported.
        import prometheus_client as prometheus

        labels = ("provider",)
        self.bytes = {
            operation: prometheus.Counter(f"efa_kv_{name}_bytes", text, labels)
            for operation, name, text in (
                (True, "sent", "Bytes that have landed in a peer's memory."),
                (False, "fetched", "Bytes read from a peer's memory."),
            )
        }
        self.transfers = prometheus.Counter(
            "efa_kv_transfers", "Transfers whose bytes have all landed.", labels
        )
        self.failures = prometheus.Counter(
            "efa_kv_transfer_failures", "Transfers that failed.", (*labels, "cause")
        )
        self.seconds = prometheus.Histogram(
            "efa_kv_transfer_seconds",
            "From the call to the last byte's landing.",
            labels,
            buckets=_SECONDS,
        )


@cache
def _counters() -> _Counters:
    return _Counters()


def observer(engine: Any) -> Any:
    """What an engine calls after every transfer, or None where nobody looks."""
    if not metrics_folder():
        return None
    counters = _counters()
    providers = ",".join(sorted({rail.provider for rail in engine.counters()}))

    def count(
        session: str, operation: int, size_bytes: int, seconds: float, problem: Exception | None
    ) -> None:
        if problem is not None:
            counters.failures.labels(providers, type(problem).__name__).inc()
            return
        counters.bytes[operation == WRITE].labels(providers).inc(size_bytes)
        counters.transfers.labels(providers).inc()
        counters.seconds.labels(providers).observe(seconds)

    return count
