"""Writes the document from the samples: tables, a plot beside it, and what was not measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import chart
import special
from contenders import CONTENDERS
from plan import BARS, Bar, Cell
from summary import (
    Sample,
    Spread,
    best_rival,
    cpu_per_byte_ns,
    cpu_per_descriptor_ns,
    ratios,
    value,
)

INTRODUCTION = """# Benchmarks

This file is written by `benchmarks/compare.py` from measured data; edit that, not this.

Everything runs on one machine, in two processes, so these figures compare programs with each
other. They say nothing about the speed of a network. Where a simulated NIC is named, it is
`native/simnic`, which every contender of the comparison uses in the same way; "without copying"
times software alone.

Each figure is the median of {rounds} rounds of {seconds:g} s, with the lowest and the highest in
brackets. Within a round the contenders run one after the other; a ratio is taken within a round
and against the fastest rival of that round. One job is outstanding at a time. CPU time is that of
both processes; it includes spinning.
"""


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    names = list(header)
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return [*lines, ""]


def _cells(bar: Bar, data: dict[str, Any]) -> Iterator[tuple[Cell, list[dict[str, Sample]]]]:
    return zip(bar.cells, data["bars"][bar.name]["cells"], strict=False)


def _figure(bar: Bar, samples: list[Sample]) -> str:
    if bar.by == "bytes_per_second":
        return Spread.of([value(one, bar.by) for one in samples]).text(1e9)
    rate = Spread.of([value(one, bar.by) for one in samples]).text(1e6)
    plain = median(one["descriptors_per_second"] for one in samples) / 1e6
    return f"{rate}; {plain:.2f} M/s"


def _wanted(bar: Bar, cell: Cell) -> float | None:
    return bar.least.get(cell.size_bytes)


def _bar_section(bar: Bar, data: dict[str, Any]) -> list[str]:
    found = data["bars"][bar.name]
    names = [
        name
        for name in bar.contenders
        if any(name in samples for cell in found["cells"] for samples in cell)
    ]
    unit = "GB/s" if bar.by == "bytes_per_second" else "M descriptors per CPU second"
    lines = [
        f"## {bar.title}",
        "",
        f"`compare.py --bar {bar.name}`. {unit}. {bar.note}".strip(),
        "",
    ]
    rows = []
    for cell, rounds in _cells(bar, data):
        row = [cell.title]
        for name in names:
            samples = [one[name] for one in rounds if name in one]
            row.append(_figure(bar, samples) if samples else "-")
        paired = ratios(rounds, bar.ours, bar.rivals, bar.by)
        row.append(Spread.of(paired).text() if paired else "-")
        wanted = _wanted(bar, cell)
        row.append(f"≥ {wanted:g}" if wanted else "-")
        rows.append(row)
    header = ["load", *(CONTENDERS[name].title for name in names), "ratio to the best", "wanted"]
    lines += _table(header, rows)
    lines += _costs(bar, names, data)
    for name, reason in found["missing"].items():
        lines += [f"Not measured: {CONTENDERS[name].title}: {reason}.", ""]
    return lines


def _costs(bar: Bar, names: list[str], data: dict[str, Any]) -> list[str]:
    rows = []
    for cell, rounds in _cells(bar, data):
        row = [cell.title]
        for name in names:
            samples = [one[name] for one in rounds if name in one]
            if not samples:
                row.append("-")
                continue
            per_byte = median(cpu_per_byte_ns(one) for one in samples)
            per_block = median(cpu_per_descriptor_ns(one) for one in samples)
            memory = median(one["memory_bytes"] for one in samples) / (1 << 20)
            row.append(f"{per_byte:.3f} · {per_block:,.0f} · {memory:,.0f}")
        rows.append(row)
    title = "CPU of both sides, ns per byte · ns per block · most memory of the driving side, MiB:"
    return [title, "", *_table(["load", *(CONTENDERS[name].title for name in names)], rows)]


def _special_section(name: str, data: dict[str, Any]) -> list[str]:
    title, function = special.MEASUREMENTS[name]
    lines = [
        f"## {title}",
        "",
        f"`compare.py --bar {name}`. {(function.__doc__ or '').strip()}",
        "",
    ]
    found = data["special"][name]
    if "missing" in found:
        return [*lines, f"Not measured: {found['missing']}.", ""]
    header: list[str] = []
    for row in found["rows"]:
        header += [key for key in row if key not in header]
    return lines + _table(header, ([row.get(key, "-") for key in header] for row in found["rows"]))


def _verdict_rows(data: dict[str, Any]) -> Iterator[tuple[str, str, str, bool | None]]:
    for bar in BARS:
        if bar.name not in data["bars"] or not (bar.least or bar.least_per_core):
            continue
        for cell, rounds in _cells(bar, data):
            wanted = _wanted(bar, cell)
            paired = ratios(rounds, bar.ours, bar.rivals, bar.by)
            what = f"{bar.name}: {cell.title}"
            if wanted and paired:
                rival = best_rival(rounds, bar.rivals, bar.by)
                against = CONTENDERS[rival].title if rival else ""
                text = f"{median(paired):.2f} x {against}"
                yield what, text, f"≥ {wanted:g} x", median(paired) >= wanted
            elif wanted:
                yield what, "no rival could be measured", f"≥ {wanted:g} x", None
            samples = [one[bar.ours] for one in rounds if bar.ours in one]
            if bar.least_per_core and samples:
                rate = median(value(one, bar.by) for one in samples)
                goal = f"≥ {bar.least_per_core / 1e6:g} M per core and second"
                yield what, f"{rate / 1e6:.2f} M", goal, rate >= bar.least_per_core
    for name in special.MEASUREMENTS:
        verdict = data["special"].get(name, {}).get("verdict")
        if verdict:
            yield verdict["what"], verdict["found"], verdict["wanted"], verdict["good"]


def verdicts(data: dict[str, Any]) -> Iterator[str]:
    """One line per bar, for the terminal."""
    for what, found, wanted, good in _verdict_rows(data):
        mark = {True: "reached", False: "MISSED", None: "open"}[good]
        yield f"{mark:8} {what}: {found} (wanted {wanted})"


def _plot(data: dict[str, Any]) -> str:
    """The bar over TCP, which has the most contenders."""
    bar = next((bar for bar in BARS if bar.name == "tcp-peers"), BARS[0])
    cells = [cell for cell in bar.cells if cell.operation == "write"]
    by_cell = dict(_cells(bar, data))
    series = []
    for name in bar.contenders:
        values: list[float | None] = []
        for cell in cells:
            samples = [one[name] for one in by_cell.get(cell, []) if name in one]
            values.append(
                median(one["bytes_per_second"] for one in samples) / 1e9 if samples else None
            )
        if any(values):
            series.append((CONTENDERS[name].title, values))
    sizes = [cell.title.split(",")[0] for cell in cells]
    return chart.grouped("Write over TCP, scattered blocks", "GB/s", sizes, series)


def write(data: dict[str, Any], path: Path) -> None:
    """Writes the document, and the plot beside it."""
    lines = [INTRODUCTION.format(rounds=data["rounds"], seconds=data["seconds"])]
    lines += [f"Measured on {data['when']} on this machine:", ""]
    lines += _table(("part", "what"), data["machine"].items())
    lines += ["## Bars", ""]
    marks = {True: "reached", False: "**missed**", None: "open"}
    rows = [(what, found, wanted, marks[good]) for what, found, wanted, good in _verdict_rows(data)]
    lines += _table(("what", "measured", "wanted", ""), rows)
    if "tcp-peers" in data["bars"]:
        path.with_suffix(".svg").write_text(_plot(data))
        lines += [f"![Write over TCP by block size]({path.with_suffix('.svg').name})", ""]
    for bar in BARS:
        if bar.name in data["bars"]:
            lines += _bar_section(bar, data)
    for name in special.MEASUREMENTS:
        if name in data["special"]:
            lines += _special_section(name, data)
    path.write_text("\n".join(lines).rstrip() + "\n")
