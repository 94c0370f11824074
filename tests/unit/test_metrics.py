"""Every counter is exported once, under a name that says its unit."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from efa_kv.errors import StaleHandle
from efa_kv.metrics import PREFIX, RAIL_METRICS, EngineCollector
from efa_kv.types import RailCounters

NUMBERS = [name for name in RailCounters.__struct_fields__ if name not in ("name", "provider")]


class FakeEngine:
    session = "127.0.0.1:5000"
    protocol = "tcp"
    closed = False

    def counters(self) -> list[RailCounters]:
        if self.closed:
            raise StaleHandle("closed")
        values = dict(zip(NUMBERS, range(100, 200), strict=False))
        return [RailCounters(name=f"eth{i}", provider="net", **values) for i in range(2)]


def test_every_counter_has_a_row() -> None:
    assert sorted(row.field for row in RAIL_METRICS) == sorted(NUMBERS)
    assert len({row.name for row in RAIL_METRICS}) == len(RAIL_METRICS)


def test_export() -> None:
    registry = CollectorRegistry()
    registry.register(EngineCollector(FakeEngine()))
    text = generate_latest(registry).decode()
    labels = 'nic="eth1",provider="net",session="127.0.0.1:5000"'
    assert f"{PREFIX}written_bytes_total{{{labels}}}" in text
    assert f"{PREFIX}operations_in_flight{{{labels}}} 100.0" in text
    assert 'efa_kv_engine_info{protocol="tcp",provider="net",session="127.0.0.1:5000"} 1.0' in text


def test_a_closed_engine_exports_nothing() -> None:
    engine = FakeEngine()
    engine.closed = True
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))
    assert generate_latest(registry) == b""
