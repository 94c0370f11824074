"""The load that every contender moves, and the numbers drawn from a run.

The same blocks in the same places as `efa-kv bench` uses, written again here because peers run
in an environment without efa-kv; tests compare the two.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_BATCHES = 64


@dataclass(frozen=True)
class Load:
    """One cell of the comparison."""

    operation: str
    size_bytes: int
    batch: int
    in_flight: int
    pattern: str
    buffer_bytes: int
    seconds: float
    seed: int = 1

    @property
    def stride_bytes(self) -> int:
        """Scattered blocks leave every other place empty."""
        return self.size_bytes * (2 if self.pattern == "scattered" else 1)

    @property
    def batch_span_bytes(self) -> int:
        return self.stride_bytes * self.batch

    @property
    def batch_count(self) -> int:
        """Batches that a run goes through in turn."""
        return max(self.in_flight, min(MAX_BATCHES, self.buffer_bytes // self.batch_span_bytes))

    def offsets(self, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Offsets of a batch's blocks in the local and in the remote buffer."""
        start = batch * self.batch_span_bytes
        places = start + np.arange(self.batch, dtype=np.uint64) * np.uint64(self.stride_bytes)
        if self.pattern == "contiguous":
            return places, places.copy()
        draw = np.random.default_rng([self.seed, batch])
        return draw.permutation(places), draw.permutation(places)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of a driver."""
    parser.add_argument("--operation", choices=("write", "read"), default="write")
    parser.add_argument("--size", type=int, default=65536)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--in-flight", type=int, default=1)
    parser.add_argument("--pattern", choices=("scattered", "contiguous"), default="scattered")
    parser.add_argument("--buffer", type=int, default=256 << 20)
    parser.add_argument("--seconds", type=float, default=2.0)


def load_of(options: argparse.Namespace) -> Load:
    """The load that a driver's options name."""
    return Load(
        operation=options.operation,
        size_bytes=options.size,
        batch=options.batch,
        in_flight=options.in_flight,
        pattern=options.pattern,
        buffer_bytes=options.buffer,
        seconds=options.seconds,
    )


def percentile_us(durations_s: Sequence[float], share: float) -> float:
    """The duration that ``share`` of them do not exceed (nearest rank); 0 for none."""
    if not durations_s:
        return 0.0
    ordered = sorted(durations_s)
    rank = max(1, -(-len(ordered) * round(share * 1000) // 1000))
    return ordered[min(rank, len(ordered)) - 1] * 1e6
