"""Whether two engines may exchange KV at all.

The *fingerprint* is one hash over everything that must be equal before a byte may
move: model and revision, element types, layer and head counts, block size, cache
layout, wire version and whatever else the connector adds. It travels in the greeting
next to the fields it was made of, so that both sides can name the first difference
with both values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from efa_kv.errors import LayoutMismatch
from efa_kv.plan.layout import KvLayout

__all__ = ["check", "check_layouts", "fingerprint", "layout_fields"]

FINGERPRINT_BYTES = 32
ABSENT = "(absent)"


def fingerprint(fields: Mapping[str, str]) -> bytes:
    """SHA-256 over the sorted fields; 32 bytes.

    Names and values are length-prefixed, so no two different mappings give the same
    input to the hash.
    """
    digest = hashlib.sha256()
    for name in sorted(fields):
        for text in (name, fields[name]):
            data = text.encode()
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
    return digest.digest()


def check(local: Mapping[str, str], remote: Mapping[str, str]) -> LayoutMismatch | None:
    """The first difference between two sets of fields, or None."""
    for name in sorted({*local, *remote}):
        ours, theirs = local.get(name, ABSENT), remote.get(name, ABSENT)
        if ours != theirs:
            return LayoutMismatch(name, ours, theirs)
    return None


def layout_fields(layout: KvLayout) -> dict[str, str]:
    """The part of a layout that must be equal on both sides, as fingerprint fields.

    Addresses, strides and the number of blocks may differ; what a block means may not.
    """
    fields = {
        "layout.block_size_tokens": str(layout.block_size_tokens),
        "layout.dtype": layout.dtype,
        "layout.heads": str(layout.heads),
        "layout.tensor_parallel_size": str(layout.tp_size),
        "layout.groups": ";".join(
            f"{group.kind}/{group.block_size_tokens}/{group.sliding_window_tokens}"
            for group in layout.groups
        ),
    }
    rows = sorted(f"{row.layer}/{row.part}/{row.group}/{row.length_bytes}" for row in layout.rows)
    fields["layout.layers"] = str(len({row.layer for row in layout.rows}))
    fields["layout.rows"] = hashlib.sha256("\n".join(rows).encode()).hexdigest()
    return fields


def check_layouts(local: KvLayout, remote: KvLayout) -> LayoutMismatch | None:
    """The first difference that forbids moving KV between two caches, or None."""
    mismatch = check(layout_fields(local), layout_fields(remote))
    if mismatch is not None:
        return mismatch
    if local.tp_rank != remote.tp_rank:
        return LayoutMismatch("layout.tp_rank", str(local.tp_rank), str(remote.tp_rank))
    return None
