"""Which block of the producer goes to which block of the consumer.

Both block tables start at token 0: entry ``i`` of a table holds the tokens
``[i * block_size, (i + 1) * block_size)``. Pairing by that position, and never by the
place in a shortened list, is what keeps a consumer with a prefix hit from receiving
the first blocks of the prompt where it asked for the last ones.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import numpy.typing as npt

from efa_kv.errors import LayoutMismatch, TransferRefused
from efa_kv.plan.layout import NULL_BLOCK, Group, KvLayout
from efa_kv.types import U32Array

__all__ = [
    "REASON_BAD_BLOCKS",
    "REASON_BAD_RANGE",
    "REASON_MISSING_BLOCKS",
    "Blocks",
    "blocks_for_tokens",
    "pair_blocks",
]

Blocks = U32Array

REASON_BAD_RANGE = "bad_range"
REASON_BAD_BLOCKS = "bad_blocks"
REASON_MISSING_BLOCKS = "missing_blocks"


def blocks_for_tokens(token_count: int, block_size_tokens: int) -> int:
    """How many blocks hold ``token_count`` tokens; the last one may be partly filled."""
    return -(-token_count // block_size_tokens)


def pair_blocks(
    local_layout: KvLayout,
    remote_layout: KvLayout,
    group_index: int,
    producer_blocks: Blocks,
    consumer_blocks: Blocks,
    first_token: int,
    token_count: int,
) -> tuple[Blocks, Blocks]:
    """Pairs of block ids that move the tokens ``[first_token, first_token + token_count)``.

    ``local`` is the producer. Both tables are uint32 and start at token 0. Pairs with
    a null block on either side are left out where the group allows it: the consumer
    does not want the block, or it lies wholly outside a sliding window. The last block
    is moved whole even where it is partly filled: what lies behind its last token is
    never read before it is written.

    Returns two uint32 arrays of equal length. ``TransferRefused`` when the request
    cannot be served exactly, ``LayoutMismatch`` when the block sizes differ.
    """
    local = local_layout.groups[group_index]
    remote = remote_layout.groups[group_index]
    if local.block_size_tokens != remote.block_size_tokens:
        raise LayoutMismatch(
            f"groups[{group_index}].block_size_tokens",
            str(local.block_size_tokens),
            str(remote.block_size_tokens),
        )
    size = local.block_size_tokens
    if first_token < 0 or token_count < 1 or first_token % size:
        _refuse(
            REASON_BAD_RANGE,
            f"tokens {first_token}+{token_count} do not start on a block of {size} tokens",
        )
    begin = first_token // size
    end = blocks_for_tokens(first_token + token_count, size)
    if len(producer_blocks) < end or len(consumer_blocks) < end:
        _refuse(
            REASON_MISSING_BLOCKS,
            f"group {group_index} needs {end} blocks: the producer has "
            f"{len(producer_blocks)}, the consumer {len(consumer_blocks)}",
        )
    source = np.ascontiguousarray(producer_blocks[begin:end], dtype=np.uint32)
    target = np.ascontiguousarray(consumer_blocks[begin:end], dtype=np.uint32)
    _check_ids(source, local_layout.num_blocks, "producer")
    _check_ids(target, remote_layout.num_blocks, "consumer")
    wanted = target != NULL_BLOCK
    present = source != NULL_BLOCK
    needed = wanted & _inside_window(local, begin, end, first_token + token_count)
    if bool(np.any(needed & ~present)):
        position = begin + int(np.argmax(needed & ~present))
        _refuse(
            REASON_MISSING_BLOCKS,
            f"group {group_index}: the producer no longer holds block {position}",
        )
    chosen = wanted & present
    target = target[chosen]
    if len(np.unique(target)) != len(target):
        _refuse(REASON_BAD_BLOCKS, f"group {group_index}: the consumer names a block twice")
    return source[chosen], target


def _inside_window(group: Group, begin: int, end: int, end_token: int) -> npt.NDArray[np.bool_]:
    """Which blocks of ``[begin, end)`` hold a token that may still be attended to."""
    if group.kind != "sliding":
        return np.ones(end - begin, dtype=np.bool_)
    block_ends = np.arange(begin + 1, end + 1, dtype=np.int64) * group.block_size_tokens
    # The next token computed is end_token, or the one before it where the consumer
    # computes the last prompt token itself: that one looks back the furthest.
    return block_ends > end_token - group.sliding_window_tokens


def _check_ids(blocks: Blocks, num_blocks: int, side: str) -> None:
    if len(blocks) and int(blocks.max()) >= num_blocks:
        _refuse(
            REASON_BAD_BLOCKS,
            f"the {side} names block {int(blocks.max())} of a cache of {num_blocks}",
        )


def _refuse(reason: str, text: str) -> NoReturn:
    raise TransferRefused(text, reason=reason)
