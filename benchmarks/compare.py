"""Measures efa-kv beside the bare provider and beside other engines, and writes docs/benchmarks.md.

    .venv/bin/python benchmarks/compare.py                     everything, and the document
    .venv/bin/python benchmarks/compare.py --bar software-cost one bar
    .venv/bin/python benchmarks/compare.py --list              the bars
    .venv/bin/python benchmarks/compare.py --report-only       the document again, from the data

In every round each contender of a cell runs once, one after the other (A B A B), and ratios are
taken within a round: what the machine does besides then hits both sides of a ratio.  All samples
are kept in build/benchmarks/samples.json; a contender that cannot run is skipped with a reason.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import machine
import report
import special
from contenders import CONTENDERS, FailedError, MissingError
from plan import BARS, Bar
from summary import Sample

SAMPLES = machine.BUILD / "samples.json"
DOCUMENT = machine.REPOSITORY / "docs" / "benchmarks.md"


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def available(bar: Bar) -> tuple[list[str], dict[str, str]]:
    """The contenders that can run, and why the others cannot."""
    names, missing = [], {}
    for name in bar.contenders:
        contender = CONTENDERS[name]
        try:
            contender.variables()
            contender.command(bar.cells[0], 1.0)
            names.append(name)
        except (MissingError, FailedError) as problem:
            missing[name] = str(problem)
    return names, missing


def measure_bar(bar: Bar, rounds: int, seconds: float) -> dict[str, Any]:
    """All cells of a bar; see `report` for what becomes of them."""
    names, missing = available(bar)
    for name, reason in missing.items():
        say(f"{bar.name}: without {name}: {reason}")
    cells = []
    for cell in bar.cells:
        found: list[dict[str, Sample]] = [{} for _ in range(rounds)]
        for number, samples in enumerate(found):
            for name in names:
                try:
                    samples[name] = CONTENDERS[name].run(cell, seconds)
                except FailedError as problem:
                    missing[name] = f"failed at {cell.title}: {problem}"
                    say(f"{bar.name}: {name} {missing[name]}")
                    continue
                rate = samples[name]["bytes_per_second"] / 1e9
                say(f"{bar.name}: {cell.title}: round {number + 1}: {name} {rate:.3f} GB/s")
        cells.append(found)
    return {"missing": missing, "cells": cells}


def keep(data: dict[str, Any]) -> None:
    machine.BUILD.mkdir(parents=True, exist_ok=True)
    SAMPLES.write_text(json.dumps(data))


def load() -> dict[str, Any]:
    try:
        return json.loads(SAMPLES.read_text())
    except OSError:
        return {"bars": {}, "special": {}}


def measure(names: Sequence[str], rounds: int, seconds: float) -> dict[str, Any]:
    """Measures the named bars, the bars' samples replacing earlier ones."""
    machine.build_programs()
    data = load()
    data["machine"] = machine.describe()
    data["when"] = time.strftime("%Y-%m-%d", time.gmtime())
    data["rounds"], data["seconds"] = rounds, seconds
    for bar in BARS:
        if bar.name in names:
            data["bars"][bar.name] = measure_bar(bar, rounds, seconds)
            keep(data)
    for name, (_title, function) in special.MEASUREMENTS.items():
        if name in names:
            say(f"{name}: measuring")
            try:
                data["special"][name] = function(rounds, seconds)
            except (MissingError, FailedError) as problem:
                data["special"][name] = {"missing": str(problem)}
                say(f"{name}: {problem}")
            keep(data)
    return data


def main() -> int:
    known = [bar.name for bar in BARS] + list(special.MEASUREMENTS)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bar", action="append", choices=known, help="only this; may be repeated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each run")
    parser.add_argument("--list", action="store_true", help="list the bars and leave")
    parser.add_argument("--report-only", action="store_true", help="measure nothing")
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    options = parser.parse_args()
    if options.list:
        for bar in BARS:
            print(f"{bar.name:20} {bar.title} ({len(bar.cells)} cells)")
        for name, (title, _function) in special.MEASUREMENTS.items():
            print(f"{name:20} {title}")
        return 0
    if options.report_only:
        data = load()
    else:
        data = measure(options.bar or known, max(1, options.rounds), options.seconds)
    if not data["bars"] and not data["special"]:
        say("there is nothing to report")
        return 2
    options.document.parent.mkdir(parents=True, exist_ok=True)
    report.write(data, options.document)
    say(f"wrote {options.document}")
    for line in report.verdicts(data):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
