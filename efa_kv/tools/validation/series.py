"""Repeated measurements, their noise, and the comparison with an earlier run.  Pure.

The middle of a series is its median, its noise half the distance from the least to the greatest
sample: with three to ten samples that is the careful choice, because one of them can always be
disturbed. Two runs differ when their medians are further apart than both noises together and a
share that is never worth a word.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec

FORMAT: Final = "efa-kv baseline 1"
#: A change below this share of the earlier median is never reported.
IGNORED_SHARE: Final = 0.05


class BaselineError(ValueError):
    """A baseline that cannot be read; the text says why."""


class Series(msgspec.Struct, frozen=True):
    """Samples of one quantity, in ``unit``; ``less_is_better`` for times."""

    unit: str
    samples: tuple[float, ...]
    less_is_better: bool = False

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Half the distance from the least to the greatest sample."""
        return (max(self.samples) - min(self.samples)) / 2


class Trend(StrEnum):
    """What became of a quantity since the baseline."""

    SAME = "same"
    BETTER = "better"
    WORSE = "worse"


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One quantity before and now: medians, and how far apart they may be by noise alone."""

    name: str
    unit: str
    before: float
    now: float
    noise: float
    trend: Trend


class Baseline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file: how it was measured, and every series by name."""

    format: str
    protocol: str
    hosts: tuple[str, ...]
    containers: tuple[str, ...]
    block_size_bytes: int
    series: dict[str, Series]


def encode(baseline: Baseline) -> bytes:
    """The baseline as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(baseline), indent=2) + b"\n"


def decode(text: bytes | str) -> Baseline:
    """A baseline from its JSON; raises `BaselineError`."""
    try:
        baseline = msgspec.json.decode(text, type=Baseline)
    except msgspec.DecodeError as problem:
        raise BaselineError(f"not a baseline: {problem}") from problem
    if baseline.format != FORMAT:
        raise BaselineError(f"format {baseline.format!r}, this version reads {FORMAT!r}")
    empty = [name for name, series in baseline.series.items() if not series.samples]
    if empty:
        raise BaselineError(f"no samples of {empty[0]!r}")
    return baseline


def compare(before: Mapping[str, Series], now: Mapping[str, Series]) -> list[Change]:
    """Every quantity that both runs have, in the order of ``now``."""
    return [_change(name, before[name], series) for name, series in now.items() if name in before]


def _change(name: str, before: Series, now: Series) -> Change:
    noise = before.spread + now.spread + IGNORED_SHARE * abs(before.median)
    difference = now.median - before.median
    trend = Trend.SAME
    if abs(difference) > noise:
        trend = Trend.BETTER if (difference < 0) == now.less_is_better else Trend.WORSE
    return Change(
        name=name,
        unit=now.unit,
        before=before.median,
        now=now.median,
        noise=noise,
        trend=trend,
    )
