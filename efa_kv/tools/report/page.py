"""The page: one HTML file that needs nothing else, from what `inputs` read.  Pure."""

from __future__ import annotations

import base64
import hashlib
import statistics
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Final

import msgspec

from efa_kv.observe import trace
from efa_kv.tools.output import gibibytes, gigabytes
from efa_kv.tools.report import charts
from efa_kv.tools.report.charts import Bar, Point, words
from efa_kv.tools.report.inputs import Bench, Doctor, Finding, Inputs, Validate, problems

_ORDER: Final = ("problem", "warning", "note", "good")
_STAGES: Final = (
    (trace.COMPUTE, "the server computes the prompt"),
    (trace.WAIT, "waits for the other side"),
    (trace.QUEUE, "submitted, nothing posted yet"),
    (trace.POST, "from the first post to the last"),
    (trace.MOVE, "what one rail carried"),
    (trace.LAND, "until the last byte has landed"),
    (trace.NOTICE, "until the news is sent"),
    (trace.PULL, "the consumer's whole wait"),
)


def render(inputs: Inputs, made_at: str, version: str) -> str:
    """The whole file."""
    style = _part("page.css")
    script = _part("page.js")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    body = [*_head(inputs, made_at, version), *_rates(inputs), *_sweeps(inputs)]
    body += [*_balance(inputs), *_timelines(inputs), *_findings(inputs), *_validations(inputs)]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>efa-kv report</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f'<main>{"".join(body)}</main>\n<p id="told" role="status"></p>\n'
        f"{_data(inputs)}<script>{script}</script>\n</body>\n</html>\n"
    )


def _part(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _data(inputs: Inputs) -> str:
    """The traces in Perfetto's form, for the buttons."""
    if not inputs.traces:
        return ""
    found = trace.perfetto([document for _, document in inputs.traces])
    text = msgspec.json.encode(found).decode().replace("<", "\\u003c")
    return f'<script type="application/json" id="perfetto">{text}</script>\n'


def _section(title: str, about: str, body: Sequence[str]) -> Iterator[str]:
    if body:
        yield f"<section><h2>{words(title)}</h2>"
        if about:
            yield f'<p class="about">{words(about)}</p>'
        yield from body
        yield "</section>"


# ---- the head -------------------------------------------------------------------------


def _head(inputs: Inputs, made_at: str, version: str) -> Iterator[str]:
    wrong = problems(inputs)
    yield '<header><div><h1>efa-kv report</h1><p class="about">'
    yield f"{words(made_at)} · version {words(version)}</p></div>"
    yield '<div class="buttons">'
    if inputs.traces:
        yield '<button type="button" id="copy">Copy as Perfetto JSON</button>'
        yield '<button type="button" id="save">Download trace</button>'
    yield '<button type="button" id="theme" aria-pressed="false">Dark</button></div></header>'
    yield '<div class="cards">'
    verdict = f"{len(wrong)} problem{'s' * (len(wrong) > 1)}" if wrong else "in order"
    yield _card("verdict", verdict, bool(wrong))
    yield from _numbers(inputs)
    yield "</div>"
    if wrong:
        lines = "".join(f"<li>{words(line)}</li>" for line in wrong[:20])
        yield f'<ul class="problems">{lines}</ul>'


def _card(name: str, value: str, wrong: bool = False) -> str:
    kind = "card wrong" if wrong else "card"
    return f'<div class="{kind}"><span>{words(name)}</span><strong>{words(value)}</strong></div>'


def _numbers(inputs: Inputs) -> Iterator[str]:
    benches = [bench for _, bench in inputs.benches]
    if benches:
        best = max(benches, key=lambda one: one.bytes_per_second)
        yield _card("best rate", f"{gigabytes(best.bytes_per_second)}/s")
        if best.line_rate_bytes_per_s:
            share = best.bytes_per_second / best.line_rate_bytes_per_s
            yield _card("of line rate", f"{share:.0%}")
        yield _card("p99 of a job", f"{best.p99_us:.0f} µs")
    spans = [span for _, document in inputs.traces for span in document.spans]
    if spans:
        yield _card("requests traced", str(len({span.request for span in spans})))
        moved = sum(span.bytes for span in spans if span.stage == trace.MOVE)
        yield _card("bytes traced", gibibytes(moved))


# ---- charts ---------------------------------------------------------------------------


def _rates(inputs: Inputs) -> Iterator[str]:
    rows = [
        Bar(
            f"{name}: {bench.operation} {gibibytes(bench.block_size_bytes)}",
            bench.bytes_per_second,
            bench.line_rate_bytes_per_s,
            bench.verified is False,
        )
        for name, bench in inputs.benches
    ]
    for name, validation in inputs.validations:
        rows += _validated(name, validation)
    chart = [charts.bars("rates", rows)] if rows else []
    yield from _section("Rates against the line rate", "The mark is the line rate.", chart)


def _validated(name: str, validation: Validate) -> Iterator[Bar]:
    rates = [sum(host.nic_rates) for host in validation.hosts if all(host.nic_rates)]
    line = statistics.median(rates) if rates else 0.0
    for kind in ("pair", "all-to-all", "ring"):
        series = validation.series.get(kind)
        if series and series.samples and "B/s" in series.unit.replace("bytes", "B"):
            yield Bar(f"{name}: {kind}", statistics.median(series.samples), line)


def _sweeps(inputs: Inputs) -> Iterator[str]:
    swept = [(name, bench) for name, bench in inputs.benches if len(bench.sweep) > 1]
    lines = [
        (
            f"{name}, {bench.operation}",
            [Point(one.block_size_bytes, one.bytes_per_second) for one in bench.sweep],
        )
        for name, bench in swept
    ]
    mark = max((bench.line_rate_bytes_per_s for _, bench in swept), default=0.0)
    chart = [charts.sweep("rate by block size", lines, mark)] if lines else []
    if len(lines) > 1:
        names = "".join(
            f'<li class="key series-{at % 4}">{words(name)}</li>'
            for at, (name, _) in enumerate(lines)
        )
        chart.append(f'<ul class="legend">{names}</ul>')
    yield from _section("Rate by block size", "", chart)


def _balance(inputs: Inputs) -> Iterator[str]:
    body: list[str] = []
    for name, bench in inputs.benches:
        if len(bench.rails) > 1:
            body += _rails(name, bench)
    yield from _section("Balance of the rails", "The mark is the mean of all rails.", body)


def _rails(name: str, bench: Bench) -> Iterator[str]:
    mean = sum(rail.bytes for rail in bench.rails) / len(bench.rails)
    busiest = max(rail.bytes for rail in bench.rails) / mean if mean else 0.0
    yield f"<h3>{words(name)}: busiest rail {busiest:.3f} of the mean</h3>"
    whole = sum(rail.bytes for rail in bench.rails)
    rate = bench.bytes_per_second / whole if whole else 0.0  # of each byte counted
    rows = [Bar(rail.name, rail.bytes * rate, mean * rate, rail.bytes == 0) for rail in bench.rails]
    yield charts.bars(f"rails of {name}", rows, "mean")


def _timelines(inputs: Inputs) -> Iterator[str]:
    body = []
    for name, document in inputs.traces:
        drawn = charts.timeline(document)
        heading = f"{name}: {document.session}, {document.protocol}"
        body.append(f"<h3>{words(heading)}</h3>{drawn or '<p>No transfer yet.</p>'}")
    if body:
        keys = "".join(
            f'<li class="key stage-{stage}"><b>{stage}</b> {words(text)}</li>'
            for stage, text in _STAGES
        )
        body.append(f'<ul class="legend">{keys}</ul>')
    yield from _section(
        "Timeline of requests", f"The newest {charts.REQUESTS_SHOWN} requests of each engine.", body
    )


# ---- tables ---------------------------------------------------------------------------


def _findings(inputs: Inputs) -> Iterator[str]:
    body: list[str] = []
    for name, doctor in inputs.doctors:
        body += _doctor(name, doctor)
    yield from _section("What efa-kv doctor found", "", body)


def _doctor(name: str, doctor: Doctor) -> Iterator[str]:
    place = ", ".join(filter(None, (doctor.instance_type, doctor.container)))
    yield f"<h3>{words(name)}{f' ({words(place)})' if place else ''}</h3>"
    ordered = sorted(doctor.findings, key=_rank)
    rows = "".join(_finding(one) for one in ordered)
    yield (
        "<table><thead><tr><th>severity</th><th>check</th><th>found</th><th>expected</th>"
        f"<th>why, and what mends it</th></tr></thead><tbody>{rows}</tbody></table>"
    )


def _rank(finding: Finding) -> int:
    return _ORDER.index(finding.severity) if finding.severity in _ORDER else len(_ORDER)


def _finding(one: Finding) -> str:
    severity = one.severity if one.severity in _ORDER else "note"
    mend = f"<code>{words(one.mend)}</code>" if one.mend else ""
    return (
        f'<tr class="{severity}"><td><span class="tag">{words(one.severity)}</span></td>'
        f"<td>{words(one.id)}</td><td>{words(one.found)}</td><td>{words(one.expected)}</td>"
        f"<td>{words(one.why)}{mend}</td></tr>"
    )


def _validations(inputs: Inputs) -> Iterator[str]:
    body = []
    for name, validation in inputs.validations:
        body.append(f"<h3>{words(name)}: {len(validation.hosts)} hosts</h3>")
        rows = "".join(
            f"<tr><td>{words(kind)}</td><td>{words(_middle(series.samples, series.unit))}</td>"
            f"<td>{len(series.samples)}</td></tr>"
            for kind, series in validation.series.items()
            if series.samples
        )
        body.append(
            "<table><thead><tr><th>series</th><th>median</th><th>samples</th></tr></thead>"
            f"<tbody>{rows}</tbody></table>"
        )
        body += [f'<p class="about">{words(note)}</p>' for note in validation.notes]
    yield from _section("What efa-kv validate measured", "", body)


def _middle(samples: Sequence[float], unit: str) -> str:
    middle = statistics.median(samples)
    return f"{gigabytes(middle)}/s" if "/s" in unit else f"{middle:.2f} {unit}"
