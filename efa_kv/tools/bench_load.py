"""What a benchmark moves: the places of its blocks, and the numbers drawn from its runs.  Pure.

Both sides own one buffer.  It is cut into batches; a batch is what one job moves.  The same
arithmetic on both sides gives every batch its own part of both buffers, so nothing about the
places has to travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from efa_kv.types import U64Array

#: More batches than this make a run no more honest, only its set-up longer.
MAX_BATCHES: Final = 64
#: Sizes that --sweep goes through.
SWEEP_BLOCK_BYTES: Final = (4096, 16384, 65536, 262144, 1048576, 4194304)
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)

#: --report_unit: (bytes per unit).  A small b counts bits.
UNITS: Final = {
    "GB": 1e9,
    "GiB": float(1 << 30),
    "Gb": 1e9 / 8,
    "MB": 1e6,
    "MiB": float(1 << 20),
    "Mb": 1e6 / 8,
    "KB": 1e3,
    "KiB": 1024.0,
    "Kb": 1e3 / 8,
}


class Pattern(StrEnum):
    """How the blocks of a batch lie in memory."""

    #: One after the other on both sides, as in a pool that was just allocated from.
    CONTIGUOUS = "contiguous"
    #: In random order on either side, no two of them neighbours, as in a pool in use.
    SCATTERED = "scattered"


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One load: ``in_flight`` jobs at a time, each of ``batch_size`` blocks."""

    block_size_bytes: int
    batch_size: int
    in_flight: int
    pattern: Pattern
    seed: int = 1

    @property
    def stride_bytes(self) -> int:
        """From one place for a block to the next; scattered blocks leave every other empty."""
        return self.block_size_bytes * (2 if self.pattern is Pattern.SCATTERED else 1)

    @property
    def batch_span_bytes(self) -> int:
        """The part of a buffer that one batch has to itself."""
        return self.stride_bytes * self.batch_size

    @property
    def least_buffer_bytes(self) -> int:
        """What all jobs in flight need, so that no two of them touch the same bytes."""
        return self.batch_span_bytes * self.in_flight

    def batch_count(self, buffer_bytes: int) -> int:
        """How many batches a buffer holds; jobs go through them in turn."""
        return max(self.in_flight, min(MAX_BATCHES, buffer_bytes // self.batch_span_bytes))

    def offsets(self, batch: int) -> tuple[U64Array, U64Array]:
        """Offsets of a batch's blocks in the local and in the remote buffer."""
        start = batch * self.batch_span_bytes
        places = start + np.arange(self.batch_size, dtype=np.uint64) * np.uint64(self.stride_bytes)
        if self.pattern is Pattern.CONTIGUOUS:
            return places, places.copy()
        draw = np.random.default_rng([self.seed, batch])
        return draw.permutation(places), draw.permutation(places)


def pattern_bytes(seed: int, start: int, length_bytes: int) -> NDArray[np.uint8]:
    """Bytes ``start`` to ``start + length_bytes`` of an endless text in which no place looks
    like another one, so that a block in a wrong place is seen."""
    skip = start % 8
    words = -(-(skip + length_bytes) // 8)
    index = np.arange(start // 8, start // 8 + words, dtype=np.uint64)
    mixed = (index + np.uint64(seed << 40)) * _GOLDEN
    mixed ^= mixed >> np.uint64(29)
    return mixed.view(np.uint8)[skip : skip + length_bytes]


def percentile_us(durations_s: Sequence[float], share: float) -> float:
    """The duration that ``share`` of them do not exceed (nearest rank); 0 for none."""
    if not durations_s:
        return 0.0
    ordered = sorted(durations_s)
    rank = max(1, -(-len(ordered) * round(share * 1000) // 1000))
    return ordered[min(rank, len(ordered)) - 1] * 1e6


def size_bytes(text: str) -> int:
    """Reads 65536, 64K, 64KiB, 1M or 2GiB; raises `ValueError`."""
    number = text.strip().upper().removesuffix("IB").removesuffix("B")
    shift = {"K": 10, "M": 20, "G": 30}.get(number[-1:], 0)
    return int(number[:-1] if shift else number) << shift
