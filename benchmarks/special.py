"""Measurements that are no race over cells: each gives rows of figures and a verdict.

A measurement returns ``{"rows": [{...}], "verdict": {"what", "found", "wanted", "good"}}``; the
report prints the rows as a table under their keys.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from contenders import (
    CONTENDERS,
    FailedError,
    MissingError,
    efa_kv_command,
    mooncake_simulated,
    peer_command,
    run_json,
    simulated,
)
from plan import KIB, Cell
from summary import Spread

_FIRST_CONTACT_MS = 20.0
_RAILS = 16
_RAIL_GBPS = 10.0
_IDLE_S = 5.0

Finding = dict[str, Any]


def _verdict(what: str, found: str, wanted: str, good: bool) -> dict[str, Any]:
    return {"what": what, "found": found, "wanted": wanted, "good": good}


def _script(name: str, *arguments: str, **simulation: object) -> dict[str, Any]:
    """Runs a script beside this file with this interpreter on simulated NICs that copy nothing."""
    path = Path(__file__).resolve().parent / f"{name}.py"
    return run_json(
        [sys.executable, str(path), *arguments], simulated(_RAILS, no_copy=True, **simulation)
    )


# ---- first contact --------------------------------------------------------------------


def _probe(warm: bool) -> dict[str, Any]:
    words = [
        *efa_kv_command("probe"),
        "--loopback",
        "--protocol=efa",
        "--buffer-size=64M",
        f"--warmup={str(warm).lower()}",
        "--json=/dev/stdout",
    ]
    return run_json(words, simulated(_RAILS))


def _mooncake_contact(warm: bool) -> dict[str, Any]:
    command = peer_command(
        "drive_mooncake",
        *("--protocol", "efa", "--buffer", str(64 << 20)),
        *("--first-contact", "warm" if warm else "cold"),
    )
    return run_json(command, mooncake_simulated(_RAILS))


def first_contact(rounds: int, _seconds: float) -> Finding:
    """Meeting a peer, 16 NICs on either side: from nothing to the end of a first 1 MiB write."""
    rows, ours_cold = [], []
    for name, run in (("efa-kv", _probe), ("Mooncake's EFA transport", _mooncake_contact)):
        for warm in (False, True):
            try:
                found = [run(warm) for _ in range(rounds)]
            except (MissingError, FailedError) as problem:
                rows.append({"engine": name, "start": "", "first contact, ms": str(problem)})
                break
            whole = [one["first_contact_ms"] for one in found]
            if name == "efa-kv" and not warm:
                ours_cold = whole
            rows.append(
                {
                    "engine": name,
                    "start": "after warm-up" if warm else "cold",
                    "handshake, ms": _middle(found, "handshake_ms"),
                    "warm-up, ms": _middle(found, "warmup_ms"),
                    "first write, ms": f"{median(one['submit_ms'][0] for one in found):.2f}",
                    "later writes, ms": f"{median(one['submit_ms'][-1] for one in found):.2f}",
                    "first contact, ms": Spread.of(whole).text(),
                }
            )
    if not ours_cold:
        raise FailedError("efa-kv's probe gave no result")
    middle = median(ours_cold)
    return {
        "rows": rows,
        "verdict": _verdict(
            "handshake and first write, 16 x 16 NICs, cold",
            f"{middle:.1f} ms",
            f"< {_FIRST_CONTACT_MS:g} ms",
            middle < _FIRST_CONTACT_MS,
        ),
    }


def _middle(found: list[dict[str, Any]], key: str) -> str:
    values = [one[key] for one in found if one.get(key) is not None]
    return f"{median(values):.2f}" if values else "-"


# ---- sixteen rails --------------------------------------------------------------------


def rails(rounds: int, seconds: float) -> Finding:
    """16 NICs with a line rate: is all of it used, and evenly?"""
    ours = CONTENDERS[f"ours-simnic-{_RAILS}"]
    cell = Cell("write", 64 * KIB, 1024, "scattered", in_flight=2)
    line_rate = _RAILS * _RAIL_GBPS * 1e9 / 8
    shares, evenness, rows = [], [], []
    for copies in (False, True):
        settings = simulated(_RAILS, rate_gbps=_RAIL_GBPS, no_copy=not copies)
        found = [run_json(ours.command(cell, seconds), settings) for _ in range(rounds)]
        share = [one["bytes_per_second"] / line_rate for one in found]
        even = []
        for one in found:
            moved = [rail["bytes"] for rail in one["rails"]]
            even.append(max(moved) * len(moved) / max(sum(moved), 1))
        if not copies:
            shares, evenness = share, even
        rows.append(
            {
                "bytes": "copied" if copies else "not copied",
                "of the line rate": Spread.of(share).text(digits=3),
                "busiest rail to mean": Spread.of(even).text(digits=3),
                "GB/s": Spread.of([one["bytes_per_second"] for one in found]).text(1e9),
                "cores, initiator": Spread.of(
                    [one["cpu_seconds"] / one["wall_seconds"] for one in found]
                ).text(),
            }
        )
    good = median(shares) >= 0.97 and median(evenness) <= 1.05
    return {
        "rows": rows,
        "verdict": _verdict(
            f"16 rails of {_RAIL_GBPS:g} Gbit/s, 64 KiB pages",
            f"{median(shares):.3f} of the line rate, busiest {median(evenness):.3f} x mean",
            "≥ 0.97, ≤ 1.05 x mean",
            good,
        ),
    }


# ---- an idle engine -------------------------------------------------------------------


def idle(_rounds: int, _seconds: float) -> Finding:
    """CPU time of an engine that has nothing to do, in a process of its own."""
    from efa_kv.tools.loopback import Target, TargetSettings, cpu_seconds

    rows, worst = [], 0.0
    for protocol in ("tcp", "shm", "efa"):
        settings = simulated(_RAILS) if protocol == "efa" else {}
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            target = TargetSettings(
                engine={"protocol": protocol}, buffer_size_bytes=1 << 20, touch=False
            )
            with Target(target) as child:
                time.sleep(3.0)  # what is left of the start, and the first seconds of its rest
                start = cpu_seconds(child.pid)
                time.sleep(_IDLE_S)
                share = (cpu_seconds(child.pid) - start) / _IDLE_S
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
        worst = max(worst, share)
        title = f"efa, {_RAILS} simulated NICs" if protocol == "efa" else protocol
        rows.append({"provider": title, "share of a core": f"{100 * share:.2f} %"})
    return {
        "rows": rows,
        "verdict": _verdict(
            "an idle engine", f"{100 * worst:.2f} % of a core", "< 1 %", worst < 0.01
        ),
    }


# ---- from Python ----------------------------------------------------------------------


def handoff(rounds: int, _seconds: float) -> Finding:
    """A handoff of 128k tokens and 80 layers: planned and submitted from Python."""
    found = [_script("handoff") for _ in range(rounds)]
    rows = []
    verdicts = []
    for name, limit_ms in (("contiguous", 50.0), ("scattered", 1000.0)):
        whole = [one[name]["plan_ms"] + one[name]["submit_ms"] for one in found]
        rows.append(
            {
                "blocks": name,
                "plan, ms": Spread.of([one[name]["plan_ms"] for one in found]).text(),
                "submit, ms": Spread.of([one[name]["submit_ms"] for one in found]).text(),
                "together, ms": Spread.of(whole).text(),
                "descriptors": f"{found[0][name]['descriptors']:,}",
                "operations": f"{found[0][name]['operations']:,}",
                "moved after, ms": Spread.of([one[name]["move_ms"] for one in found]).text(),
            }
        )
        verdicts.append((median(whole), limit_ms))
    return {
        "rows": rows,
        "verdict": _verdict(
            "128k tokens x 80 layers x 2, planned and submitted",
            ", ".join(f"{value:.1f} ms" for value, _ in verdicts),
            "< 50 ms in runs, < 1 s scattered",
            all(value < limit for value, limit in verdicts),
        ),
    }


def overlap(rounds: int, _seconds: float) -> Finding:
    """How much of a transfer is left after the last token, when chunks leave as they are made."""
    found = [_script("overlap", rate_gbps=_RAIL_GBPS) for _ in range(rounds)]
    shares = [one["exposed_ms"] / one["whole_ms"] for one in found]
    rows = [
        {
            "chunks": str(found[0]["chunks"]),
            "whole transfer alone, ms": Spread.of([one["whole_ms"] for one in found]).text(),
            "left after the last chunk, ms": Spread.of([one["exposed_ms"] for one in found]).text(),
            "share": Spread.of(shares).text(digits=3),
        }
    ]
    return {
        "rows": rows,
        "verdict": _verdict(
            "exposed transfer with early decode",
            f"{100 * median(shares):.1f} %",
            "≤ 10 %",
            median(shares) <= 0.10,
        ),
    }


def sessions(_rounds: int, seconds: float) -> Finding:
    """One engine with many peers: memory, and the speed of a transfer beside them."""
    found = _script("sessions", "--seconds", str(seconds))
    rows = [
        {
            "peers": f"{one['peers']:,}",
            "memory of the process, MiB": f"{one['memory_bytes'] / (1 << 20):.1f}",
            "KiB per peer": f"{one['bytes_per_peer'] / 1024:.1f}",
            "blocks/s": f"{one['descriptors_per_second']:,.0f}",
            "share of a core, idle": f"{100 * one['idle_share']:.2f} %",
        }
        for one in found["steps"]
    ]
    first, last = found["steps"][0], found["steps"][-1]
    kept = last["descriptors_per_second"] / first["descriptors_per_second"]
    good = last["peers"] >= 1000 and kept >= 0.9 and last["bytes_per_peer"] < 1 << 20
    return {
        "rows": rows,
        "verdict": _verdict(
            "sessions of one engine",
            f"{last['peers']:,} peers, {last['bytes_per_peer'] / 1024:.0f} KiB each, "
            f"{kept:.2f} of the speed",
            "1,000, flat memory, no slowdown",
            good,
        ),
    }


MEASUREMENTS: dict[str, tuple[str, Callable[[int, float], Finding]]] = {
    "handoff": ("A long handoff, planned and submitted from Python", handoff),
    "rails-16": ("Sixteen rails with a line rate", rails),
    "first-contact": ("First contact, 16 x 16 NICs", first_contact),
    "idle": ("An idle engine", idle),
    "overlap": ("Chunks that leave while later ones are computed", overlap),
    "sessions": ("Many peers of one engine", sessions),
}
