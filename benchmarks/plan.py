"""What is compared with what: cells, and the bars that a set of cells is held to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, MIB)
_BUFFER_BYTES = 256 * MIB
#: Both sides hold this much, so that a cell fits a small machine.
_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class Cell:
    """One load; every contender of a bar runs it once per round."""

    operation: str
    size_bytes: int
    batch: int
    pattern: str
    in_flight: int = 1

    @property
    def span_bytes(self) -> int:
        return self.size_bytes * self.batch * (2 if self.pattern == "scattered" else 1)

    @property
    def buffer_bytes(self) -> int:
        """Enough for the cell, and more than the caches hold."""
        return max(_BUFFER_BYTES, self.span_bytes * self.in_flight)

    @property
    def fits(self) -> bool:
        return self.buffer_bytes <= _MOST_BYTES

    @property
    def title(self) -> str:
        size = (
            f"{self.size_bytes >> 20} MiB"
            if self.size_bytes >= MIB
            else (f"{self.size_bytes >> 10} KiB")
        )
        return f"{self.operation} {size} x {self.batch}, {self.pattern}"


@dataclass(frozen=True)
class Bar:
    """Cells, who runs them, and what ours is held to.

    ``ours`` is compared with the fastest of ``rivals`` in every round; ``least`` gives the
    ratio wanted for a cell.  ``by`` is the number compared: bytes per second, or descriptors
    per CPU second of the side that drives.
    """

    name: str
    title: str
    cells: tuple[Cell, ...]
    ours: str
    rivals: tuple[str, ...]
    least: dict[int, float]
    by: str = "bytes_per_second"
    #: Run and shown, but not part of the ratio.
    beside: tuple[str, ...] = ()
    #: Of ours alone: descriptors per CPU second of the driving side.
    least_per_core: float = 0.0
    note: str = ""

    @property
    def contenders(self) -> tuple[str, ...]:
        return (self.ours, *self.rivals, *self.beside)


def cells(
    sizes: Iterable[int] = SIZES,
    operations: Iterable[str] = ("write", "read"),
    batches: Iterable[int] = (128,),
    patterns: Iterable[str] = ("scattered",),
) -> tuple[Cell, ...]:
    """The product of all, less what does not fit a small machine."""
    every = product(operations, sizes, batches, patterns)
    found = (Cell(operation, size, batch, pattern) for operation, size, batch, pattern in every)
    return tuple(cell for cell in found if cell.fits)


def _same(ratio: float) -> dict[int, float]:
    return dict.fromkeys(SIZES, ratio)


LIMIT_CELLS = cells(sizes=SIZES[1:])
ALL_CELLS = cells(batches=(128, 4096), patterns=("scattered", "contiguous"))

BARS = (
    Bar(
        "limit-tcp",
        "One rail over TCP, against a bare loop over the same provider",
        LIMIT_CELLS,
        "ours-tcp",
        ("raw-tcp",),
        _same(0.95),
        beside=("raw-tcp-unplaced",),
        note="Both ask for completions that mean placed at the target. The bare loop without that "
        "promise is shown beside them.",
    ),
    Bar(
        "limit-shm",
        "One rail over shared memory, against a bare loop over the same provider",
        LIMIT_CELLS,
        "ours-shm",
        ("raw-shm",),
        _same(0.95),
    ),
    Bar(
        "same-host",
        "Two processes of one host, host memory",
        cells(),
        "ours-near",
        ("nixl-shm",),
        _same(1.0),
    ),
    Bar(
        "tcp-peers",
        "TCP, against the best peer",
        cells(),
        "ours-tcp",
        ("mooncake-efa-tcp", "nixl-tcp", "mooncake-tcp"),
        {4 * KIB: 1.5, 64 * KIB: 1.5, MIB: 1.1},
    ),
    Bar(
        "software-cost",
        "Software alone: simulated NICs that copy nothing, 4 KiB scattered",
        cells(sizes=(4 * KIB,), operations=("write",), batches=(128, 4096)),
        "ours-simnic-2",
        ("mooncake-simnic-2",),
        _same(5.0),
        by="descriptors_per_cpu_second",
        beside=("raw-simnic-2",),
        least_per_core=1.5e6,
    ),
    Bar(
        "software-cost-16",
        "Software alone, with 16 simulated NICs",
        cells(sizes=(4 * KIB,), operations=("write",), batches=(128, 4096)),
        "ours-simnic-16",
        ("mooncake-simnic-16",),
        _same(5.0),
        by="descriptors_per_cpu_second",
        beside=("raw-simnic-16",),
        least_per_core=1.5e6,
    ),
    Bar(
        "everything",
        "Every size, operation, batch and pattern, over TCP",
        ALL_CELLS,
        "ours-tcp",
        ("mooncake-efa-tcp", "nixl-tcp", "mooncake-tcp"),
        {},
        beside=("raw-tcp",),
    ),
)
