"""Spans out of the core's records and the requests' milestones, and Perfetto's form."""

from __future__ import annotations

import msgspec

from efa_kv.observe import trace
from efa_kv.observe.trace import Mark, Milestone, Span, TraceDocument, TracedRail
from efa_kv.types import TraceRecord

RAILS = (TracedRail("rdmap0", 200_000_000_000), TracedRail("rdmap1", 200_000_000_000))


def record(event: int, at_ms: float, job: int = 5, **changes: int) -> TraceRecord:
    values = dict.fromkeys(TraceRecord.__struct_fields__, 0)
    return TraceRecord(
        **{**values, "event": event, "time_ns": int(at_ms * 1e6), "job": job, **changes}
    )


LANDED_JOB = (
    record(trace.SUBMITTED, 1),
    record(trace.FIRST_POST, 2),
    record(trace.LAST_POST, 5),
    record(trace.RAIL_MOVED, 7, rail=0, bytes=60, operations=6, begun_ns=2_000_000),
    record(trace.RAIL_MOVED, 8, rail=1, bytes=40, operations=4, begun_ns=3_000_000),
    record(trace.LANDED, 8, bytes=100),
    record(trace.NOTICED, 9),
)


def stages(spans: tuple[Span, ...]) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for span in spans:
        found.setdefault(span.stage, []).append((span.begin_s * 1e3, span.end_s * 1e3))
    return found


def test_a_job_is_cut_into_its_stages() -> None:
    spans = trace.build_spans(LANDED_JOB)
    assert stages(spans) == {
        "queue": [(1, 2)],
        "post": [(2, 5)],
        "move": [(2, 7), (3, 8)],
        "land": [(5, 8)],
        "notice": [(8, 9)],
    }
    moves = [span for span in spans if span.stage == "move"]
    assert [(span.rail, span.bytes, span.operations) for span in moves] == [(0, 60, 6), (1, 40, 4)]
    assert {span.request for span in spans} == {"job 0x5"}


def test_a_request_gives_its_name_to_its_job_and_has_stages_of_its_own() -> None:
    milestones = (
        Milestone("req-1", "computing", 0.0005),
        Milestone("req-1", "held", 0.0008),
        Milestone("req-1", "job", 0.001, 5),
        Milestone("req-2", "asked", 0.002),
        Milestone("req-2", "lost", 0.003),
        Milestone("req-3", "held", 0.004),
    )
    spans = trace.build_spans(LANDED_JOB, milestones)
    own = {(span.request, span.stage): span for span in spans}
    assert own["req-1", "compute"].end_s == 0.0008
    assert own["req-1", "wait"].begin_s == 0.0008
    assert own["req-1", "land"].bytes == 100
    assert own["req-2", "pull"].error == -1
    assert not any(span.request == "req-3" for span in spans)


def test_a_job_whose_begin_is_gone_or_that_failed_keeps_what_is_known() -> None:
    assert trace.build_spans(LANDED_JOB[5:]) == trace.build_spans([LANDED_JOB[5], LANDED_JOB[6]])
    failed = [*LANDED_JOB[:2], record(trace.FAILED, 6, status=-14)]
    (land,) = [span for span in trace.build_spans(failed) if span.stage == "land"]
    assert (land.error, land.end_s) == (-14, 0.006)


def test_rails_that_come_and_go_are_marks() -> None:
    records = [
        record(trace.RAIL_DOWN, 1, 0, rail=1),
        record(trace.RAIL_UP, 2, 0, rail=1),
        record(trace.RAIL_UP, 2, 0, rail=9),
    ]
    assert trace.build_marks(records, RAILS) == (
        Mark(0.001, "rdmap1 is out", 1),
        Mark(0.002, "rdmap1 is back", 1),
    )


def document() -> TraceDocument:
    return TraceDocument(
        session="10.0.0.1:5000",
        protocol="efa",
        process=42,
        wall_clock_offset_s=1e9,
        rails=RAILS,
        spans=trace.build_spans(LANDED_JOB),
        marks=(Mark(0.001, "rdmap1 is out", 1),),
    )


def test_a_document_survives_the_wire() -> None:
    text = msgspec.json.encode(document())
    assert b'"kind":"efa-kv-trace"' in text
    assert msgspec.json.decode(text, type=TraceDocument) == document()


def test_perfetto_opens_it() -> None:
    """As its Trace Event Format asks: known phases, times in microseconds, named threads."""
    events = trace.perfetto([document()])["traceEvents"]
    assert {event["ph"] for event in events} == {"X", "M", "i"}
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(names.values()) == {"request job 0x5", "rail rdmap0", "rail rdmap1"}
    for event in events:
        assert event["pid"] == 42
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert (event["pid"], event["tid"]) in names
    (queue,) = [event for event in events if event["name"] == "queue"]
    assert (queue["ts"], queue["dur"]) == (1000.0, 1000.0)
    msgspec.json.encode(events)
