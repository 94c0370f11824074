"""Counts on their way to vLLM's log and to Prometheus."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from efa_kv.connectors.vllm import EfaConnector
from efa_kv.connectors.vllm.stats import EfaStats


def sample() -> EfaStats:
    stats = EfaStats()
    stats.set_provider("tcp")
    stats.record("received_bytes", 3_000_000)
    stats.record("received_requests", 2)
    stats.record("expired")
    stats.record_recomputed()
    stats.record_transfer(0.001)
    stats.record_transfer(0.002)
    stats.record_failure("expired", 2)
    return stats


def test_nothing_to_say() -> None:
    stats = EfaStats()
    assert stats.is_empty()
    assert stats.take() is None


def test_taken_once() -> None:
    stats = sample()
    taken = stats.take()
    assert taken is not None
    assert taken.data["received_bytes"] == 3_000_000
    assert stats.take() is None
    assert stats.data["provider"] == "tcp"


def test_halves_add_up() -> None:
    scheduler = EfaStats()
    scheduler.record_failure("expired")
    scheduler.record_failure("invalid_params")
    total = scheduler.aggregate(pickle.loads(pickle.dumps(sample())))
    assert total.data["failures"] == {"expired": 3, "invalid_params": 1}
    assert total.data["received_requests"] == 2
    assert total.data["provider"] == "tcp"


def test_survives_the_way_to_the_api_server() -> None:
    rebuilt = EfaConnector.build_kv_connector_stats(sample().to_dict())
    assert isinstance(rebuilt, EfaStats)
    assert rebuilt.reduce() == {
        "Received requests": 2,
        "Received MB": 3.0,
        "Average transfer (ms)": 1.5,
        "GB/s": 1.0,
        "Failed": 2,
        "Expired": 1,
        "Recomputed": 1,
    }
    assert EfaConnector.build_kv_connector_stats().is_empty()


@pytest.fixture
def metrics(vllm_config: Any) -> Any:
    def make() -> Any:
        return EfaConnector.build_prom_metrics(
            vllm_config(),
            {Gauge: Gauge, Counter: Counter, Histogram: Histogram},
            ["model_name", "engine"],
            {0: ["tiny", "0"]},
        )

    return make


def value(name: str, **labels: str) -> float | None:
    labels = {"model_name": "tiny", "engine": "0", "provider": "tcp", **labels}
    return REGISTRY.get_sample_value(name, labels)


def test_prometheus(metrics: Any) -> None:
    metrics()  # a second engine in one process registers the same names
    exported = metrics()
    exported.observe(sample().to_dict(), engine_idx=0)
    exported.observe(sample().to_dict(), engine_idx=0)
    assert value("efa_kv_received_bytes_total") == 6_000_000
    assert value("efa_kv_received_requests_total") == 4
    assert value("efa_kv_expired_total") == 2
    assert value("efa_kv_recomputed_total") == 2
    assert value("efa_kv_zero_byte_pulls_total") == 2
    assert value("efa_kv_transfer_failures_total", cause="expired") == 4
    assert value("efa_kv_transfer_seconds_count") == 4
    assert value("efa_kv_transfer_seconds_sum") == pytest.approx(0.006)
