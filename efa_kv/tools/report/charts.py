"""Charts as SVG text.  Pure: numbers in, text out; all words of others are escaped.

Colours are classes, so that the page's style sheet decides them for light and dark; what can be
pointed at can be reached by the keyboard too, and says the same.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Final

import msgspec

from efa_kv.observe.trace import Span, TraceDocument
from efa_kv.tools.output import gibibytes, gigabytes

WIDTH: Final = 920
_LABEL: Final = 230
_RIGHT: Final = 150
_ROW: Final = 30
_LANE: Final = 22
REQUESTS_SHOWN: Final = 40


class Bar(msgspec.Struct, frozen=True):
    """A labelled value, and the mark it is to be held against (0: none)."""

    label: str
    value: float
    mark: float = 0.0
    wrong: bool = False


class Point(msgspec.Struct, frozen=True):
    """A block size in bytes and a rate in bytes per second."""

    size: int
    rate: float


def words(text: object) -> str:
    """Anything as text that a page shows and never obeys."""
    return html.escape(str(text), quote=True)


def _svg(kind: str, height: float, title: str, body: Sequence[str], width: float = WIDTH) -> str:
    return (
        f'<svg class="chart {kind}" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{words(title)}">{"".join(body)}</svg>'
    )


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{words(text)}</text>'
    )


def _shape(shape: str, kind: str, told: str) -> str:
    """A shape that can be pointed at and tabbed to."""
    return (
        f'<g class="{kind}" tabindex="0" role="img" aria-label="{words(told)}" '
        f'data-told="{words(told)}">{shape}<title>{words(told)}</title></g>'
    )


def _shortened(text: str, most: int = 34) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def bars(title: str, rows: Sequence[Bar], mark: str = "line rate") -> str:
    """Rates as bars, each against its mark."""
    top = max((max(row.value, row.mark) for row in rows), default=0.0) or 1.0
    room = WIDTH - _LABEL - _RIGHT
    body = []
    for at, row in enumerate(rows):
        y = at * _ROW
        length = max(1.0, room * row.value / top)
        share = f", {row.value / row.mark:.0%} of the {mark}" if row.mark else ""
        told = f"{row.label}: {gigabytes(row.value)}/s{share}"
        kind = "bar wrong" if row.wrong else "bar"
        body.append(_text(_LABEL - 10, y + 19, _shortened(row.label), "label", "end"))
        track = f'<rect class="track" x="{_LABEL}" y="{y + 6}" width="{room}" height="18" rx="4"/>'
        filled = (
            f'<rect class="fill" x="{_LABEL}" y="{y + 6}" width="{length:.1f}" height="18" rx="4"/>'
        )
        body.append(_shape(track + filled, kind, told))
        if row.mark:
            x = _LABEL + room * row.mark / top
            body.append(
                f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{y + 2}" y2="{y + 28}"/>'
            )
        value = f"{gigabytes(row.value)}/s" + (f" · {row.value / row.mark:.0%}" if row.mark else "")
        body.append(_text(_LABEL + room + 12, y + 19, value, "value"))
    return _svg("bars", len(rows) * _ROW, title, body)


def sweep(title: str, lines: Sequence[tuple[str, Sequence[Point]]], mark: float = 0.0) -> str:
    """Rate over block size, on a logarithmic axis of sizes."""
    height, left, foot, top_room = 300, 80, 40, 16
    sizes = sorted({point.size for _, points in lines for point in points if point.size > 0})
    if not sizes:
        return ""
    top = max([mark, *(point.rate for _, points in lines for point in points)]) or 1.0
    low, high = math.log2(sizes[0]), math.log2(sizes[-1])
    wide = WIDTH - left - 30
    tall = height - foot - top_room

    def x(size: int) -> float:
        return left + (wide * (math.log2(size) - low) / (high - low) if high > low else wide / 2)

    def y(rate: float) -> float:
        return top_room + tall * (1 - rate / top)

    def level(kind: str, rate: float) -> str:
        at = f"{y(rate):.1f}"
        return f'<line class="{kind}" x1="{left}" x2="{WIDTH - 30}" y1="{at}" y2="{at}"/>'

    body = []
    for step in range(5):
        rate = top * step / 4
        body.append(level("grid", rate))
        body.append(_text(left - 10, y(rate) + 4, f"{gigabytes(rate)}/s", "axis", "end"))
    for size in sizes:
        body.append(_text(x(size), height - 14, gibibytes(size), "axis", "middle"))
    if mark:
        body.append(level("mark", mark))
        body.append(_text(WIDTH - 34, y(mark) - 6, "line rate", "axis", "end"))
    for at, (name, points) in enumerate(lines):
        told = sorted((point for point in points if point.size > 0), key=lambda one: one.size)
        path = " ".join(f"{x(one.size):.1f},{y(one.rate):.1f}" for one in told)
        body.append(f'<polyline class="line series-{at % 4}" points="{path}"/>')
        for one in told:
            place = f'cx="{x(one.size):.1f}" cy="{y(one.rate):.1f}"'
            dot = f'<circle class="dot series-{at % 4}" {place} r="5"/>'
            body.append(
                _shape(dot, "point", f"{name}, {gibibytes(one.size)}: {gigabytes(one.rate)}/s")
            )
    return _svg("sweep", height, title, body)


def timeline(document: TraceDocument) -> str:
    """A lane for each request and for each rail, and what happened in it."""
    lanes = _lanes(document)
    if not lanes:
        return ""
    begin = min(span.begin_s for _, spans in lanes for span in spans)
    end = max(span.end_s for _, spans in lanes for span in spans)
    scale = (WIDTH - _LABEL - 20) / ((end - begin) or 1e-6)
    height = len(lanes) * _LANE + 34
    body = [*_seconds(begin, end, scale, height)]
    for at, (name, spans) in enumerate(lanes):
        y = at * _LANE + 6
        body.append(_text(_LABEL - 10, y + 12, _shortened(name), "label", "end"))
        for span in spans:
            x = _LABEL + (span.begin_s - begin) * scale
            wide = max(1.5, (span.end_s - span.begin_s) * scale)
            box = f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{_LANE - 6}" rx="2"/>'
            kind = f"span stage-{span.stage}" + (" wrong" if span.error else "")
            body.append(_shape(box, kind, _told(document, span)))
    for mark in document.marks:
        if begin <= mark.at_s <= end:
            x = _LABEL + (mark.at_s - begin) * scale
            line = f'<rect x="{x - 1:.1f}" y="0" width="2" height="{height - 26}"/>'
            body.append(_shape(line, "event", mark.text))
    return _svg("timeline", height, f"timeline of {document.session}", body)


def _lanes(document: TraceDocument) -> list[tuple[str, list[Span]]]:
    """The newest requests, and the rails they used."""
    newest: dict[str, float] = {}
    for span in document.spans:
        newest[span.request] = max(newest.get(span.request, 0.0), span.end_s)
    shown = set(sorted(newest, key=lambda name: newest[name])[-REQUESTS_SHOWN:])
    requests: dict[str, list[Span]] = {}
    rails: dict[int, list[Span]] = {}
    for span in document.spans:
        if span.request not in shown:
            continue
        if span.rail >= 0:
            rails.setdefault(span.rail, []).append(span)
        else:
            requests.setdefault(span.request, []).append(span)
    lanes = list(requests.items())
    for index in sorted(rails):
        known = index < len(document.rails)
        lanes.append((f"rail {document.rails[index].name if known else index}", rails[index]))
    return lanes


def _told(document: TraceDocument, span: Span) -> str:
    took = f"{(span.end_s - span.begin_s) * 1e3:.3f} ms"
    parts = [f"{span.request}: {span.stage}, {took}"]
    if span.bytes:
        parts.append(gibibytes(span.bytes))
        if span.stage == "move" and span.end_s > span.begin_s:
            parts.append(f"{gigabytes(span.bytes / (span.end_s - span.begin_s))}/s")
    if 0 <= span.rail < len(document.rails):
        parts.append(document.rails[span.rail].name)
    if span.error:
        parts.append(f"failed ({span.error})")
    return ", ".join(parts)


def _seconds(begin: float, end: float, scale: float, height: float) -> list[str]:
    """The axis of time, in five steps."""
    lines = []
    for step in range(6):
        x = _LABEL + (end - begin) * scale * step / 5
        lines.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - 26}"/>')
        anchor = "end" if step == 5 else "middle" if step else "start"
        label = f"{(end - begin) * step / 5 * 1e3:.2f} ms"
        lines.append(_text(x, height - 8, label, "axis", anchor))
    return lines
