"""Planned copies against a slow oracle that moves one token's bytes at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from efa_kv.errors import TransferRefused
from efa_kv.plan import build
from efa_kv.plan.layout import Group, KvLayout, Row, validate

TOKEN_BYTES = 2
UNTOUCHED = 0xEE


@dataclass
class Cache:
    """A cache in plain memory; addresses are offsets from 4096, so that 0 is nowhere."""

    layout: KvLayout
    memory: np.ndarray


def make_cache(groups: tuple[Group, ...], blocks: int, gap_bytes: int, order: list[int]) -> Cache:
    """Rows of all groups; ``gap_bytes`` between blocks, layers placed in ``order``."""
    rows: list[Row] = []
    address = 4096
    for place in order:
        index, layer = divmod(place, 2)
        length = groups[index].block_size_tokens * TOKEN_BYTES
        stride = length + gap_bytes
        rows.append(
            Row(
                layer=f"group{index}.layer{layer}",
                part="kv",
                group=index,
                base_address=address,
                stride_bytes=stride,
                length_bytes=length,
            )
        )
        address += stride * blocks
    layout = KvLayout(
        block_size_tokens=groups[0].block_size_tokens,
        num_blocks=blocks,
        groups=groups,
        rows=tuple(rows),
        regions=((4096, address - 4096),),
        dtype="uint8",
        heads=1,
    )
    validate(layout)
    return Cache(layout, np.full(address, UNTOUCHED, np.uint8))


def token_address(row: Row, table: np.ndarray, token: int, size: int) -> int | None:
    block = int(table[token // size])
    if block == 0:
        return None
    return row.base_address + block * row.stride_bytes + token % size * TOKEN_BYTES


def oracle(
    source: Cache, target: Cache, theirs: list[np.ndarray], ours: list[np.ndarray], span: range
) -> np.ndarray:
    """Every token of the range, layer by layer, where both sides have a block for it."""
    memory = target.memory.copy()
    partners = {row.layer: row for row in source.layout.rows}
    for row in target.layout.rows:
        size = target.layout.groups[row.group].block_size_tokens
        # Whole blocks travel: the tail behind the last token goes with it.
        end = -(-span.stop // size) * size
        for token in range(span.start, end):
            start = token_address(partners[row.layer], theirs[row.group], token, size)
            stop = token_address(row, ours[row.group], token, size)
            if start is not None and stop is not None:
                memory[stop : stop + TOKEN_BYTES] = source.memory[start : start + TOKEN_BYTES]
    return memory


def carry_out(source: Cache, target: Cache, pieces: list[build.Piece]) -> np.ndarray:
    """What the fabric does with the planned jobs."""
    memory = target.memory.copy()
    for piece in pieces:
        for row in piece.rows:
            for start, stop in zip(piece.local_blocks, piece.remote_blocks, strict=True):
                length = int(row["length_bytes"])
                local = int(row["local_address"]) + int(start) * int(row["local_stride_bytes"])
                remote = int(row["remote_address"]) + int(stop) * int(row["remote_stride_bytes"])
                memory[remote : remote + length] = source.memory[local : local + length]
    return memory


@st.composite
def handoffs(draw: st.DrawFn) -> tuple[Cache, Cache, list[np.ndarray], list[np.ndarray], range]:
    size = draw(st.sampled_from([1, 2, 4, 16]))
    groups = [Group(kind=draw(st.sampled_from(["full", "mla"])), block_size_tokens=size)]
    if draw(st.booleans()):
        window = draw(st.integers(1, 40))
        groups.append(Group(kind="sliding", block_size_tokens=size, sliding_window_tokens=window))
    blocks = draw(st.integers(2, 12))
    places = list(range(2 * len(groups)))
    caches = [
        make_cache(
            tuple(groups),
            draw(st.integers(blocks, 14)),
            draw(st.sampled_from([0, 3])),
            draw(st.permutations(places)),
        )
        for _ in range(2)
    ]
    caches[0].memory[:] = np.random.default_rng(draw(st.integers(0, 99))).integers(
        0, 200, len(caches[0].memory), np.uint8
    )
    used = draw(st.integers(1, blocks - 1))
    end = draw(st.integers((used - 1) * size + 1, used * size))
    first = draw(st.integers(0, used - 1)) * size
    tables: list[list[np.ndarray]] = []
    for cache in caches:
        side = []
        for group in groups:
            ids = np.array(
                draw(st.permutations(range(1, cache.layout.num_blocks)))[:used], np.uint32
            )
            if group.kind == "sliding":
                outside = max(0, (end - group.sliding_window_tokens) // size)
                ids[: draw(st.integers(0, min(outside, used)))] = 0
            side.append(ids)
        tables.append(side)
    return caches[0], caches[1], tables[0], tables[1], range(first, end)


@given(handoffs())
def test_planned_copies_equal_the_oracle(
    handoff: tuple[Cache, Cache, list[np.ndarray], list[np.ndarray], range],
) -> None:
    source, target, theirs, ours, span = handoff
    plan = build.rows(source.layout, target.layout)
    pieces = build.pieces(plan, theirs, ours, span.start, len(span))
    assert np.array_equal(
        carry_out(source, target, pieces), oracle(source, target, theirs, ours, span)
    )


@given(handoffs(), st.data())
def test_what_is_missing_is_refused_not_skipped(
    handoff: tuple[Cache, Cache, list[np.ndarray], list[np.ndarray], range], data: st.DataObject
) -> None:
    source, target, theirs, ours, span = handoff
    size = source.layout.groups[0].block_size_tokens
    position = data.draw(st.integers(span.start // size, (span.stop - 1) // size))
    theirs[0][position] = 0
    plan = build.rows(source.layout, target.layout)
    with pytest.raises(TransferRefused):
        build.pieces(plan, theirs, ours, span.start, len(span))
