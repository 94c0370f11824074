"""Pairing blocks by position, and every way in which a request is refused."""

from __future__ import annotations

import numpy as np
import pytest

from efa_kv.errors import LayoutMismatch, TransferRefused
from efa_kv.plan.block_map import blocks_for_tokens, pair_blocks
from efa_kv.plan.layout import Group, KvLayout, Row


def make_layout(kind: str = "full", size: int = 4, blocks: int = 100, window: int = 0) -> KvLayout:
    return KvLayout(
        block_size_tokens=size,
        num_blocks=blocks,
        groups=(Group(kind=kind, block_size_tokens=size, sliding_window_tokens=window),),  # type: ignore[arg-type]
        rows=(Row(layer="0", part="kv", group=0, base_address=64, stride_bytes=8, length_bytes=8),),
        regions=((64, 8 * blocks),),
        dtype="uint8",
        heads=1,
    )


FULL = make_layout()


def pair(
    theirs: list[int],
    ours: list[int],
    first: int,
    count: int,
    local: KvLayout = FULL,
    remote: KvLayout = FULL,
) -> list[tuple[int, int]]:
    source, target = pair_blocks(
        local, remote, 0, np.array(theirs, np.uint32), np.array(ours, np.uint32), first, count
    )
    assert source.dtype == target.dtype == np.uint32
    return list(zip(source.tolist(), target.tolist(), strict=True))


def test_blocks_for_tokens() -> None:
    assert [blocks_for_tokens(count, 4) for count in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


@pytest.mark.parametrize("hit", range(4))
def test_a_prefix_hit_takes_the_tail_never_the_front(hit: int) -> None:
    theirs, ours = [11, 12, 13, 14], [21, 22, 23, 24]
    wanted = list(zip(theirs, ours, strict=True))[hit:]
    assert pair(theirs, ours, 4 * hit, 16 - 4 * hit) == wanted


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2)])
def test_the_last_block_may_be_partly_filled(tokens: int, blocks: int) -> None:
    assert len(pair([1, 2, 3], [4, 5, 6], 0, tokens)) == blocks


def test_longer_tables_than_needed_are_cut() -> None:
    assert pair([1, 2, 3, 4], [5, 6, 7], 0, 8) == [(1, 5), (2, 6)]


def test_a_null_block_of_the_consumer_is_not_wanted() -> None:
    assert pair([1, 2, 3], [0, 6, 7], 0, 12) == [(2, 6), (3, 7)]


@pytest.mark.parametrize(
    ("theirs", "ours", "first", "count", "reason"),
    [
        ([1, 2], [3, 4], 2, 4, "bad_range"),
        ([1, 2], [3, 4], -4, 4, "bad_range"),
        ([1, 2], [3, 4], 0, 0, "bad_range"),
        ([1], [3, 4], 0, 8, "missing_blocks"),
        ([1, 2], [3], 0, 8, "missing_blocks"),
        ([1, 0], [3, 4], 0, 8, "missing_blocks"),
        ([1, 100], [3, 4], 0, 8, "bad_blocks"),
        ([1, 2], [3, 4_000_000_000], 0, 8, "bad_blocks"),
        ([1, 2], [3, 3], 0, 8, "bad_blocks"),
    ],
)
def test_refusals(theirs: list[int], ours: list[int], first: int, count: int, reason: str) -> None:
    with pytest.raises(TransferRefused) as refusal:
        pair(theirs, ours, first, count)
    assert refusal.value.reason == reason


@pytest.mark.parametrize(
    ("window", "nulls_allowed"), [(16, 0), (13, 0), (12, 1), (9, 1), (8, 2), (4, 3), (1, 3)]
)
def test_blocks_outside_the_window_may_be_gone(window: int, nulls_allowed: int) -> None:
    sliding = make_layout("sliding", window=window)
    ours = [21, 22, 23, 24]
    for nulls in range(5):
        theirs = [0] * nulls + [11, 12, 13, 14][nulls:]
        if nulls <= nulls_allowed:
            pairs = pair(theirs, ours, 0, 16, sliding, sliding)
            assert pairs == list(zip(theirs, ours, strict=True))[nulls:]
        else:
            with pytest.raises(TransferRefused):
                pair(theirs, ours, 0, 16, sliding, sliding)


def test_unequal_block_sizes_are_a_mismatch_with_both_values() -> None:
    with pytest.raises(LayoutMismatch) as mismatch:
        pair([1], [2], 0, 4, FULL, make_layout(size=8))
    assert (mismatch.value.local, mismatch.value.remote) == ("4", "8")
