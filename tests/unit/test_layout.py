"""Layouts that travel, layouts that are impossible, and pairing their rows."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from efa_kv.errors import ConfigError, LayoutMismatch, RemoteProtocolError
from efa_kv.plan import build
from efa_kv.plan.layout import Group, KvLayout, Row, decode, encode, merge_ranges, validate

GROUP = Group(kind="full", block_size_tokens=16)


def row(layer: str = "a", **changes: Any) -> Row:
    values = {"part": "kv", "group": 0, "base_address": 4096, "stride_bytes": 64}
    return Row(layer=layer, **{**values, "length_bytes": 64, **changes})


def make(rows: tuple[Row, ...] = (), **changes: Any) -> KvLayout:
    values: dict[str, Any] = {
        "block_size_tokens": 16,
        "num_blocks": 10,
        "groups": (GROUP,),
        "regions": ((4096, 6400),),
        "dtype": "bfloat16",
        "heads": 8,
    }
    return KvLayout(rows=rows or (row(),), **{**values, **changes})


def test_a_layout_survives_the_journey() -> None:
    layout = make((row("a"), row("b", base_address=4736)))
    assert decode(encode(layout)) == layout
    assert layout.block_bytes() == 128


@pytest.mark.parametrize(
    "layout",
    [
        make(num_blocks=0),
        make(num_blocks=1 << 33),
        make(num_blocks=101),
        make(groups=()),
        make(groups=(Group(kind="full", block_size_tokens=0),)),
        make(groups=(Group(kind="full", block_size_tokens=16, sliding_window_tokens=8),)),
        make(groups=(Group(kind="sliding", block_size_tokens=16),)),
        make((row(group=1),)),
        make((row(), row())),
        make((row(length_bytes=0),)),
        make((row(stride_bytes=32),)),
        make((row(base_address=0),)),
        make((row(base_address=2**63 - 8),)),
        make(regions=()),
        make(tp_rank=1),
    ],
)
def test_impossible_layouts(layout: KvLayout) -> None:
    with pytest.raises(ConfigError):
        validate(layout)
    with pytest.raises(RemoteProtocolError):
        decode(encode(layout))


@pytest.mark.parametrize("data", [b"", b"\x00", b"\xff" * 40, msgspec.msgpack.encode({"rows": 1})])
def test_unreadable_layouts(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(data)


def test_ranges_are_merged() -> None:
    assert merge_ranges([(30, 10), (0, 10), (10, 5), (12, 4), (50, 0)]) == ((0, 16), (30, 10))
    assert merge_ranges([]) == ()


def test_rows_are_paired_by_name_not_by_position() -> None:
    local = make((row("a"), row("b", base_address=4736)))
    remote = make((row("b", stride_bytes=80), row("a", base_address=4896)))
    (rows,) = build.rows(local, remote).groups
    assert rows["local_address"].tolist() == [4096, 4736]
    assert rows["remote_address"].tolist() == [4896, 4096]
    assert rows["remote_stride_bytes"].tolist() == [64, 80]


@pytest.mark.parametrize(
    ("local", "remote", "field"),
    [
        ((row("a"), row("draft")), (row("a"),), "draft/kv"),
        ((row("a"),), (row("a"), row("draft")), "draft/kv"),
        ((row("a", part="k"),), (row("a", part="v"),), "a/k"),
        ((row("a"),), (row("a", length_bytes=32),), "a/kv.length_bytes"),
    ],
)
def test_rows_without_a_partner_are_refused(
    local: tuple[Row, ...], remote: tuple[Row, ...], field: str
) -> None:
    with pytest.raises(LayoutMismatch) as mismatch:
        build.rows(make(local), make(remote))
    assert mismatch.value.field == field


def test_groups_must_be_equal() -> None:
    sliding = Group(kind="sliding", block_size_tokens=16, sliding_window_tokens=32)
    with pytest.raises(LayoutMismatch):
        build.rows(make(), make(groups=(sliding,)))
    with pytest.raises(LayoutMismatch):
        build.rows(make(), make(groups=(GROUP, GROUP)))
