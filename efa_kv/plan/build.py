"""Two layouts and two block tables, glued into what the fabric takes.

``RowPlan`` depends only on the two caches, so it is built once per peer; ``pieces``
adds the block ids of one handoff.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from efa_kv.errors import LayoutMismatch, TransferRefused
from efa_kv.plan.block_map import REASON_BAD_BLOCKS, Blocks, pair_blocks
from efa_kv.plan.layout import KvLayout
from efa_kv.types import ROW_DTYPE, RowArray

__all__ = ["Piece", "RowPlan", "pieces", "rows"]


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Where the rows of both sides lie: one ``ROW_DTYPE`` array per group."""

    local: KvLayout
    remote: KvLayout
    groups: tuple[RowArray, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """One paged job: the same block pairs for every row of one group.

    ``rows`` is a ``ROW_DTYPE`` array, the blocks are uint32 and equally long.
    """

    rows: RowArray
    local_blocks: Blocks
    remote_blocks: Blocks

    @property
    def total_bytes(self) -> int:
        return int(self.rows["length_bytes"].sum()) * len(self.local_blocks)


def rows(local: KvLayout, remote: KvLayout) -> RowPlan:
    """Pairs the rows of two caches by layer and part; ``local`` is the one written from.

    ``LayoutMismatch`` when a row has no partner or another meaning on the other side:
    pairing by position would silently move a draft layer into a target layer.
    """
    if len(local.groups) != len(remote.groups):
        raise LayoutMismatch("groups", str(len(local.groups)), str(len(remote.groups)))
    for index, (ours, theirs) in enumerate(zip(local.groups, remote.groups, strict=True)):
        if ours != theirs:
            raise LayoutMismatch(f"groups[{index}]", str(ours), str(theirs))
    partners = {(row.layer, row.part): row for row in remote.rows}
    paired: list[list[tuple[int, int, int, int, int]]] = [[] for _ in local.groups]
    for row in local.rows:
        name = f"{row.layer}/{row.part}"
        partner = partners.pop((row.layer, row.part), None)
        if partner is None:
            raise LayoutMismatch(name, "present", "absent")
        if row.group != partner.group:
            raise LayoutMismatch(f"{name}.group", str(row.group), str(partner.group))
        if row.length_bytes != partner.length_bytes:
            raise LayoutMismatch(
                f"{name}.length_bytes", str(row.length_bytes), str(partner.length_bytes)
            )
        paired[row.group].append(
            (
                row.base_address,
                partner.base_address,
                row.stride_bytes,
                partner.stride_bytes,
                row.length_bytes,
            )
        )
    for layer, part in partners:
        raise LayoutMismatch(f"{layer}/{part}", "absent", "present")
    return RowPlan(local, remote, tuple(np.array(group, dtype=ROW_DTYPE) for group in paired))


def pieces(
    plan: RowPlan,
    producer_blocks: Sequence[Blocks],
    consumer_blocks: Sequence[Blocks],
    first_token: int,
    token_count: int,
) -> list[Piece]:
    """The paged jobs that move a token range; groups with nothing to move are left out.

    Block tables are per group and start at token 0. Raises as ``pair_blocks`` does.
    """
    groups = len(plan.groups)
    if len(producer_blocks) != groups or len(consumer_blocks) != groups:
        raise TransferRefused(
            f"found block tables for {len(producer_blocks)} and {len(consumer_blocks)} groups; "
            f"expected {groups}, one per group of the caches.",
            reason=REASON_BAD_BLOCKS,
        )
    jobs: list[Piece] = []
    for index, group_rows in enumerate(plan.groups):
        source, target = pair_blocks(
            plan.local,
            plan.remote,
            index,
            producer_blocks[index],
            consumer_blocks[index],
            first_token,
            token_count,
        )
        if len(source) and len(group_rows):
            jobs.append(Piece(group_rows, source, target))
    return jobs
