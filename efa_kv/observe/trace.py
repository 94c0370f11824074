"""A trace: what happened to requests and transfers, and when; and its Perfetto form.

Times are seconds on the host's monotonic clock, so that traces of several processes of one
host fit together.  A span belongs to a request where the engine was told of one, else to a
job alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from efa_kv.types import TraceRecord

# ekv_trace_record.event, see native/include/efa_kv.h.
SUBMITTED: Final = 1
FIRST_POST: Final = 2
LAST_POST: Final = 3
LANDED: Final = 4
NOTICED: Final = 5
FAILED: Final = 6
RAIL_DOWN: Final = 7
RAIL_UP: Final = 8
RAIL_MOVED: Final = 9

COMPUTE: Final = "compute"
WAIT: Final = "wait"
QUEUE: Final = "queue"
POST: Final = "post"
MOVE: Final = "move"
LAND: Final = "land"
NOTICE: Final = "notice"
PULL: Final = "pull"


class TracedRail(msgspec.Struct, frozen=True):
    """A network device, by its index in spans."""

    name: str
    speed_bits_per_second: int = 0


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Something that took time.

    ``stage``: "compute" (the server computes the prompt), "wait" (for the other side to ask,
    or for the transfer to begin), "queue" (submitted and nothing posted yet), "post" (first
    to last post of all rails), "move" (one rail, its first post to its last completion),
    "land" (last post to last byte), "notice" (until the news is sent), "pull" (a consumer's
    whole wait).  ``rail`` is -1 where none is meant; ``error`` is a code's number.
    """

    request: str
    stage: str
    begin_s: float
    end_s: float
    job: int = 0
    rail: int = -1
    bytes: int = 0
    operations: int = 0
    error: int = 0


class Mark(msgspec.Struct, frozen=True):
    """Something that happened at once: a rail went out, or came back."""

    at_s: float
    text: str
    rail: int = -1


class Milestone(msgspec.Struct, frozen=True):
    """What the server's side of the engine notes of a request: "computing", "held", "job",
    "sent", "asked", "received" or "lost"; ``job`` where one begins."""

    request: str
    what: str
    at_s: float
    job: int = 0


class TraceDocument(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="efa-kv-trace"
):
    """One engine's trace: the newest of what happened, since older records are overwritten.
    ``wall_clock_offset_s`` added to a time gives the time of day."""

    session: str
    protocol: str
    process: int
    wall_clock_offset_s: float
    rails: tuple[TracedRail, ...]
    spans: tuple[Span, ...]
    marks: tuple[Mark, ...] = ()


def build_spans(
    records: Sequence[TraceRecord], milestones: Iterable[Milestone] = ()
) -> tuple[Span, ...]:
    """Spans out of the core's records and the requests' milestones, by their begin."""
    told = sorted(milestones, key=lambda one: one.at_s)
    requests = {one.job: one.request for one in told if one.job}
    jobs: dict[int, list[TraceRecord]] = {}
    for record in records:
        if record.job:
            jobs.setdefault(record.job, []).append(record)
    spans = [span for job, own in jobs.items() for span in _job(job, requests.get(job, ""), own)]
    spans += _requests(told)
    return tuple(sorted(spans, key=lambda span: (span.begin_s, span.end_s)))


def _job(job: int, request: str, records: Sequence[TraceRecord]) -> Iterable[Span]:
    name = request or f"job {job & 0xFFFFFFFF:#x}"
    at = {record.event: record for record in records if record.event != RAIL_MOVED}

    def span(stage: str, first: int, last: int) -> Iterable[Span]:
        if first in at and last in at:
            begin, end = at[first].time_ns, at[last].time_ns
            yield Span(
                request=name,
                stage=stage,
                begin_s=begin / 1e9,
                end_s=max(begin, end) / 1e9,
                job=job,
                bytes=at[last].bytes,
                error=at[last].status,
            )

    end = FAILED if FAILED in at else LANDED
    yield from span(QUEUE, SUBMITTED, FIRST_POST)
    yield from span(POST, FIRST_POST, LAST_POST)
    yield from span(LAND, LAST_POST if LAST_POST in at else FIRST_POST, end)
    yield from span(NOTICE, LANDED, NOTICED)
    for record in records:
        if record.event == RAIL_MOVED:
            yield Span(
                request=name,
                stage=MOVE,
                begin_s=record.begun_ns / 1e9,
                end_s=max(record.begun_ns, record.time_ns) / 1e9,
                job=job,
                rail=record.rail,
                bytes=record.bytes,
                operations=record.operations,
            )


#: From which milestone to which a stage goes.
_STAGES: Final[Mapping[tuple[str, str], str]] = {
    ("computing", "held"): COMPUTE,
    ("held", "job"): WAIT,
    ("asked", "received"): PULL,
    ("asked", "lost"): PULL,
}


def _requests(milestones: Sequence[Milestone]) -> Iterable[Span]:
    last: dict[str, Milestone] = {}
    for one in milestones:
        before = last.get(one.request)
        stage = _STAGES.get((before.what, one.what)) if before else None
        if before and stage:
            lost = int(one.what == "lost")
            yield Span(
                request=one.request,
                stage=stage,
                begin_s=before.at_s,
                end_s=one.at_s,
                job=one.job,
                error=-lost,
            )
        last[one.request] = one


def build_marks(records: Iterable[TraceRecord], rails: Sequence[TracedRail]) -> tuple[Mark, ...]:
    """What happened to rails."""
    words = {RAIL_DOWN: "is out", RAIL_UP: "is back"}
    return tuple(
        Mark(record.time_ns / 1e9, f"{rails[record.rail].name} {words[record.event]}", record.rail)
        for record in records
        if record.event in words and record.rail < len(rails)
    )


def perfetto(documents: Sequence[TraceDocument]) -> dict[str, Any]:
    """The traces in the form that ui.perfetto.dev opens (Chrome's Trace Event Format): a
    process for each engine, a thread for each request and for each rail."""
    events: list[dict[str, Any]] = []
    for document in documents:
        events += _perfetto_engine(document)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _perfetto_engine(document: TraceDocument) -> list[dict[str, Any]]:
    process = document.process
    threads: dict[str, int] = {}
    events: list[dict[str, Any]] = [
        _named(process, 0, "process_name", f"efa-kv {document.session}"),
    ]

    def thread(name: str) -> int:
        if name not in threads:
            threads[name] = len(threads) + 1
            events.append(_named(process, threads[name], "thread_name", name))
        return threads[name]

    for span in document.spans:
        rail = document.rails[span.rail].name if 0 <= span.rail < len(document.rails) else ""
        events.append(
            {
                "ph": "X",
                "pid": process,
                "tid": thread(f"rail {rail}" if rail else f"request {span.request}"),
                "name": span.request if rail else span.stage,
                "cat": span.stage,
                "ts": span.begin_s * 1e6,
                "dur": (span.end_s - span.begin_s) * 1e6,
                "args": {
                    "request": span.request,
                    "bytes": span.bytes,
                    "operations": span.operations,
                    "error": span.error,
                },
            }
        )
    events += [
        {"ph": "i", "s": "p", "pid": process, "tid": 0, "name": mark.text, "ts": mark.at_s * 1e6}
        for mark in document.marks
    ]
    return events


def _named(process: int, thread: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": {"name": name}}
