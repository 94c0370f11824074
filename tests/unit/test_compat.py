"""Fingerprints: equal exactly when everything that matters is equal."""

from __future__ import annotations

from typing import Any

import pytest

from efa_kv.plan import compat
from efa_kv.plan.layout import Group, KvLayout, Row


def make(**changes: Any) -> KvLayout:
    values: dict[str, Any] = {
        "block_size_tokens": 16,
        "num_blocks": 10,
        "groups": (Group(kind="full", block_size_tokens=16),),
        "rows": tuple(
            Row(
                layer=name,
                part="kv",
                group=0,
                base_address=4096,
                stride_bytes=64,
                length_bytes=64,
            )
            for name in ("a", "b")
        ),
        "regions": ((4096, 6400),),
        "dtype": "bfloat16",
        "heads": 8,
    }
    return KvLayout(**{**values, **changes})


def test_the_order_of_fields_does_not_matter() -> None:
    one = compat.fingerprint({"a": "1", "b": "2"})
    assert one == compat.fingerprint({"b": "2", "a": "1"})
    assert len(one) == compat.FINGERPRINT_BYTES


@pytest.mark.parametrize(
    "other", [{"a": "1"}, {"a": "1", "b": "3"}, {"a": "1b", "": "2"}, {"a": "1", "b": "2", "c": ""}]
)
def test_every_difference_shows(other: dict[str, str]) -> None:
    fields = {"a": "1", "b": "2"}
    assert compat.fingerprint(other) != compat.fingerprint(fields)
    assert compat.check(fields, other) is not None


def test_a_mismatch_names_field_and_both_values() -> None:
    mismatch = compat.check({"model": "x", "revision": "1"}, {"model": "x", "revision": "2"})
    assert mismatch is not None
    assert (mismatch.field, mismatch.local, mismatch.remote) == ("revision", "1", "2")
    absent = compat.check({}, {"draft": "eagle"})
    assert absent is not None
    assert (absent.local, absent.remote) == (compat.ABSENT, "eagle")
    assert compat.check({"a": "1"}, {"a": "1"}) is None


def test_places_may_differ_and_meanings_may_not() -> None:
    local = make()
    rows = tuple(
        Row(
            layer=row.layer,
            part=row.part,
            group=0,
            base_address=8192,
            stride_bytes=128,
            length_bytes=64,
        )
        for row in reversed(local.rows)
    )
    moved = make(rows=rows, num_blocks=99, regions=((8192, 1 << 20),))
    assert compat.check_layouts(local, moved) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float16"},
        {"heads": 4},
        {"block_size_tokens": 32},
        {"groups": (Group(kind="mla", block_size_tokens=16),)},
        {"rows": make().rows[:1]},
        {"tp_size": 2},
        {"tp_size": 2, "tp_rank": 1},
    ],
)
def test_differences_that_forbid(changes: dict[str, Any]) -> None:
    assert compat.check_layouts(make(), make(**changes)) is not None


def test_ranks_are_paired() -> None:
    assert compat.check_layouts(make(tp_size=2), make(tp_size=2, tp_rank=1)) is not None
