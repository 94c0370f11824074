"""How one side's paged KV cache lies in memory.

A cache is described by *rows*. A row is one tensor part of one layer (packed K|V,
or a latent, or a scale tensor); block ``b`` of the row lies at
``base_address + b * stride_bytes`` and is ``length_bytes`` long. Layers that share
block tables form a *group*; within a group block ``b`` means the same tokens in
every row.

A layout travels to the peer as msgpack, so ``decode`` trusts nothing it reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from efa_kv.errors import ConfigError, RemoteProtocolError

__all__ = [
    "BLOCKS_LIMIT",
    "GROUPS_LIMIT",
    "NULL_BLOCK",
    "ROWS_LIMIT",
    "Group",
    "GroupKind",
    "KvLayout",
    "Row",
    "decode",
    "encode",
    "merge_ranges",
    "validate",
]

GroupKind = Literal["full", "sliding", "mla"]

NULL_BLOCK = 0
"""The block id that stands for "no block" in the tables of vLLM and SGLang."""

BLOCKS_LIMIT = 2**32 - 1
GROUPS_LIMIT = 64
ROWS_LIMIT = 8192
_ADDRESS_LIMIT = 2**63


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share one block table.

    ``sliding_window_tokens`` is 0 unless ``kind`` is ``"sliding"``: a token attends
    to itself and the ``sliding_window_tokens - 1`` tokens before it.
    """

    kind: GroupKind
    block_size_tokens: int
    sliding_window_tokens: int = 0


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor part of one layer; addresses are virtual, sizes are bytes."""

    layer: str
    part: str
    group: int
    base_address: int
    stride_bytes: int
    length_bytes: int


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The whole cache of one worker.

    ``num_blocks`` counts every block, the null block 0 included. ``regions`` are the
    (address, length in bytes) ranges to register; every row lies inside one of them.
    ``heads`` is the model's total number of KV heads, not this worker's share.
    """

    block_size_tokens: int
    num_blocks: int
    groups: tuple[Group, ...]
    rows: tuple[Row, ...]
    regions: tuple[tuple[int, int], ...]
    dtype: str
    heads: int
    tp_rank: int = 0
    tp_size: int = 1

    def block_bytes(self) -> int:
        """Bytes that one block holds over all rows of all groups."""
        return sum(row.length_bytes for row in self.rows)


_decoder = msgspec.msgpack.Decoder(KvLayout)
_encoder = msgspec.msgpack.Encoder()


def encode(layout: KvLayout) -> bytes:
    """The form in which a layout travels in a greeting."""
    return _encoder.encode(layout)


def decode(data: bytes) -> KvLayout:
    """The peer's layout; ``RemoteProtocolError`` when it is malformed or impossible."""
    try:
        layout = _decoder.decode(data)
    except msgspec.MsgspecError as cause:
        raise RemoteProtocolError(f"the peer's cache layout cannot be read: {cause}") from cause
    try:
        validate(layout)
    except ConfigError as cause:
        raise RemoteProtocolError(f"the peer's cache layout is impossible: {cause}") from cause
    return layout


def validate(layout: KvLayout) -> None:
    """Raises ``ConfigError`` unless every row of the layout lies inside a region."""
    if not 1 <= layout.num_blocks <= BLOCKS_LIMIT:
        raise ConfigError(f"a cache of {layout.num_blocks} blocks; 1 to {BLOCKS_LIMIT} can be used")
    if not 1 <= len(layout.groups) <= GROUPS_LIMIT:
        raise ConfigError(f"{len(layout.groups)} groups of layers; 1 to {GROUPS_LIMIT} can be used")
    if not 1 <= len(layout.rows) <= ROWS_LIMIT:
        raise ConfigError(f"{len(layout.rows)} rows; 1 to {ROWS_LIMIT} can be used")
    if not 0 <= layout.tp_rank < layout.tp_size:
        raise ConfigError(f"tensor-parallel rank {layout.tp_rank} of {layout.tp_size}")
    for index, group in enumerate(layout.groups):
        _validate_group(index, group)
    seen: set[tuple[str, str]] = set()
    regions = sorted(layout.regions)
    for row in layout.rows:
        if (row.layer, row.part) in seen:
            raise ConfigError(f"layer {row.layer!r} has two rows named {row.part!r}")
        seen.add((row.layer, row.part))
        _validate_row(layout, row, regions)


def _validate_group(index: int, group: Group) -> None:
    if group.block_size_tokens < 1:
        raise ConfigError(f"group {index} has a block size of {group.block_size_tokens} tokens")
    if (group.kind == "sliding") != (group.sliding_window_tokens > 0):
        raise ConfigError(
            f"group {index} is {group.kind!r} with a window of "
            f"{group.sliding_window_tokens} tokens; only sliding groups have one"
        )


def _validate_row(layout: KvLayout, row: Row, regions: Sequence[tuple[int, int]]) -> None:
    name = f"row {row.part!r} of layer {row.layer!r}"
    if not 0 <= row.group < len(layout.groups):
        raise ConfigError(f"{name} is in group {row.group} of {len(layout.groups)}")
    if row.length_bytes < 1 or row.stride_bytes < row.length_bytes or row.base_address < 1:
        raise ConfigError(
            f"{name}: blocks of {row.length_bytes} bytes every {row.stride_bytes} bytes "
            f"from {row.base_address:#x} would overlap or lie nowhere"
        )
    end = row.base_address + row.stride_bytes * (layout.num_blocks - 1) + row.length_bytes
    if end > _ADDRESS_LIMIT:
        raise ConfigError(f"{name} ends beyond the address space")
    if not any(
        address <= row.base_address and end <= address + length for address, length in regions
    ):
        raise ConfigError(f"{name} is not inside a registered region")


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The union of (address, length) ranges, sorted, touching ones joined.

    Layers are usually views of one allocation and hybrid groups alias it; registering
    each view would pin the same pages many times.
    """
    merged: list[list[int]] = []
    for address, length in sorted(ranges):
        if length <= 0:
            continue
        if merged and address <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], address + length)
        else:
            merged.append([address, address + length])
    return tuple((start, end - start) for start, end in merged)
