"""What is measured in which order: rounds of pairs that do not disturb each other.  Pure.

Hosts are numbered 0 to n - 1 in the order of their ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

import msgspec

Pair = tuple[int, int]


class Kind(StrEnum):
    """What the senders of a step do."""

    #: Small writes, one after the other, each until it has landed.
    LATENCY = "latency"
    #: As much as fits, from each sender to its one receiver.
    PAIR = "pair"
    #: Every host sends to every other one at the same time, as experts do.
    ALL_TO_ALL = "all-to-all"
    #: Every host sends to the next one, as a ring all-reduce does.
    RING = "ring"


class Step(msgspec.Struct, frozen=True):
    """Things that happen at the same time: ``targets`` by sender."""

    kind: Kind
    repeat: int
    targets: dict[int, tuple[int, ...]]


def rounds(hosts: int) -> list[list[Pair]]:
    """All ordered pairs, in rounds in which no host is in two pairs (the circle method)."""
    places: list[int | None] = [*range(hosts), *([None] if hosts % 2 else [])]
    found: list[list[Pair]] = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = [
            (one, other)
            for one, other in zip(places[:half], reversed(places[half:]), strict=True)
            if one is not None and other is not None
        ]
        found += [pairs, [(other, one) for one, other in pairs]]
        places = [places[0], places[-1], *places[1:-1]]
    return found


def steps(hosts: int, repeats: int) -> Iterator[Step]:
    """Every step of a run. Repeats lie far apart, so that a slow moment hits only one of them."""
    for repeat in range(repeats):
        for kind in (Kind.LATENCY, Kind.PAIR):
            for pairs in rounds(hosts):
                yield Step(kind, repeat, {source: (target,) for source, target in pairs})
        if hosts > 1:
            yield Step(Kind.ALL_TO_ALL, repeat, _everybody(hosts))
            yield Step(Kind.RING, repeat, {one: ((one + 1) % hosts,) for one in range(hosts)})


def step_count(hosts: int, repeats: int) -> int:
    """How many steps `steps` yields."""
    return repeats * (2 * len(rounds(hosts)) + (2 if hosts > 1 else 0))


def _everybody(hosts: int) -> dict[int, tuple[int, ...]]:
    # Each begins with its own neighbour, so that not all begin with the same receiver.
    return {
        one: tuple((one + distance) % hosts for distance in range(1, hosts)) for one in range(hosts)
    }
