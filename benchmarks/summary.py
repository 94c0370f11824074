"""From samples to figures: min, median and max, and ratios paired by round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

Sample = dict


@dataclass(frozen=True)
class Spread:
    """The least, the middle and the most of a few numbers."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(min(values), median(values), max(values))

    def text(self, scale: float = 1.0, digits: int = 2) -> str:
        low, middle, high = (value / scale for value in (self.low, self.middle, self.high))
        return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def value(sample: Sample, by: str) -> float:
    """A number of a sample: a field of it, or one computed from several."""
    if by == "descriptors_per_cpu_second":
        return sample["descriptors"] / max(sample["cpu_seconds"], 1e-9)
    return float(sample[by])


def cpu_per_byte_ns(sample: Sample) -> float:
    """CPU time of both sides for a byte moved, in nanoseconds."""
    cpu = sample["cpu_seconds"] + (sample["target_cpu_seconds"] or 0.0)
    return cpu * 1e9 / max(sample["bytes"], 1)


def cpu_per_descriptor_ns(sample: Sample) -> float:
    """CPU time of both sides for a block moved, in nanoseconds."""
    cpu = sample["cpu_seconds"] + (sample["target_cpu_seconds"] or 0.0)
    return cpu * 1e9 / max(sample["descriptors"], 1)


def ratios(
    rounds: Sequence[dict[str, Sample]], ours: str, rivals: Sequence[str], by: str
) -> list[float]:
    """Ours to the best rival, one ratio for each round in which both gave a result."""
    found = []
    for samples in rounds:
        best = max((value(samples[name], by) for name in rivals if name in samples), default=0.0)
        if ours in samples and best > 0:
            found.append(value(samples[ours], by) / best)
    return found


def best_rival(rounds: Sequence[dict[str, Sample]], rivals: Sequence[str], by: str) -> str | None:
    """The rival with the highest median."""
    medians = {
        name: median(value(samples[name], by) for samples in rounds if name in samples)
        for name in rivals
        if any(name in samples for samples in rounds)
    }
    return max(medians, key=lambda name: medians[name]) if medians else None
