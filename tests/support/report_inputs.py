"""What a report can be made from, small and known."""

from __future__ import annotations

from typing import Any

from efa_kv.observe.trace import Mark, Span, TraceDocument, TracedRail


def bench(
    *,
    rate: float = 25e9,
    operation: str = "write",
    rail: str = "rdmap0s0",
    verified: bool | None = True,
) -> dict[str, Any]:
    """Two rails of 200 Gbit/s, one with half as much again as the other; two block sizes."""
    one = {
        "bytes_per_second": rate,
        "block_size_bytes": 1 << 20,
        "operation": operation,
        "p99_us": 812.5,
        "verified": verified,
        "rails": [
            {"name": rail, "bytes": 600, "operations": 6, "speed_bits_per_second": 200_000_000_000},
            {"name": "rdmap1s0", "bytes": 400, "speed_bits_per_second": 200_000_000_000},
        ],
        "unknown": {"of": "another version"},
    }
    small = {**one, "block_size_bytes": 65536, "bytes_per_second": rate / 4}
    return {**one, "sweep": [small, one]}


def validation(problem: str = "") -> dict[str, Any]:
    hosts = [{"label": f"host-{n}", "nic_rates": [25e9, 25e9]} for n in range(2)]
    return {
        "hosts": hosts,
        "series": {
            "pair": {"unit": "bytes/s", "samples": [40e9, 41e9, 42e9]},
            "latency": {"unit": "us", "samples": [18.0, 19.0]},
        },
        "problems": [{"fault": problem, "text": "moves 24 %"}] if problem else [],
        "notes": ["the hosts differ in libfabric"],
    }


def doctor(
    *,
    severity: str = "warning",
    found: str = "libfabric 1.17.0",
    why: str = "older than the driver",
    mend: str = "sudo ./efa_installer.sh -y",
) -> dict[str, Any]:
    finding = {"id": "versions.libfabric", "severity": severity, "found": found, "why": why}
    return {
        "instance_type": "p5en.48xlarge",
        "findings": [{**finding, "expected": "1.18", "mend": mend}],
    }


def document(
    *,
    request: str = "req-1",
    session: str = "10.0.0.1:5000",
    rail: str = "rdmap0s0",
    error: int = 0,
) -> TraceDocument:
    stages = ("compute", "wait", "queue", "post", "land", "notice")
    spans = [
        Span(request=request, stage=stage, begin_s=n, end_s=n + 1, error=error)
        for n, stage in enumerate(stages)
    ]
    move = Span(request=request, stage="move", begin_s=2, end_s=4, rail=0, bytes=1 << 30)
    return TraceDocument(
        session=session,
        protocol="efa",
        process=42,
        wall_clock_offset_s=0.0,
        rails=(TracedRail(rail, 200_000_000_000),),
        spans=(*spans, move),
        marks=(Mark(3.0, f"{rail} is out", 0),),
    )
