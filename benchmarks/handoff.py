"""Plans and submits one long handoff from Python, in blocks that form runs and in blocks that do
not, and prints what each step took as JSON.  Started by `compare.py --bar handoff`."""

from __future__ import annotations

import json
import time

import numpy as np
from loopback import pools

from efa_kv.plan import build
from efa_kv.plan.layout import Group, KvLayout, Row

TOKENS = 131072
LAYERS = 80
BLOCK_TOKENS = 16
BLOCK_BYTES = 4096
BLOCKS = TOKENS // BLOCK_TOKENS
#: Block 0 means "no block" in servers.
POOL_BLOCKS = BLOCKS + 1
RUN_BLOCKS = 64
POOL_BYTES = POOL_BLOCKS * BLOCK_BYTES * LAYERS * 2


def layout(base: int) -> KvLayout:
    """Keys and values of every layer, one after the other in memory."""
    part_bytes = POOL_BLOCKS * BLOCK_BYTES
    rows = tuple(
        Row(
            layer=f"layer.{layer}",
            part=part,
            group=0,
            base_address=base + (2 * layer + index) * part_bytes,
            stride_bytes=BLOCK_BYTES,
            length_bytes=BLOCK_BYTES,
        )
        for layer in range(LAYERS)
        for index, part in enumerate(("k", "v"))
    )
    return KvLayout(
        block_size_tokens=BLOCK_TOKENS,
        num_blocks=POOL_BLOCKS,
        groups=(Group(kind="full", block_size_tokens=BLOCK_TOKENS),),
        rows=rows,
        regions=((base, POOL_BYTES),),
        dtype="bfloat16",
        heads=8,
    )


def tables(pattern: str) -> tuple[np.ndarray, np.ndarray]:
    """Block tables of the two sides."""
    draw = np.random.default_rng(7)
    if pattern == "scattered":
        return tuple(draw.permutation(BLOCKS).astype(np.uint32) + 1 for _ in range(2))
    runs = np.arange(BLOCKS, dtype=np.uint32).reshape(-1, RUN_BLOCKS) + 1
    return tuple(draw.permutation(runs).reshape(-1) for _ in range(2))


def main() -> None:
    with pools(POOL_BYTES) as made:
        result = {}
        for pattern in ("contiguous", "scattered"):
            here, there = tables(pattern)
            local, remote = layout(made.local_address), layout(made.remote_address)
            start = time.perf_counter()
            plan = build.rows(local, remote)
            (piece,) = build.pieces(plan, (here,), (there,), 0, TOKENS)
            planned = time.perf_counter()
            job = made.engine.write_paged(
                made.peer, piece.rows, piece.local_blocks, piece.remote_blocks
            )
            submitted = time.perf_counter()
            done = job.wait()
            if done.error is not None:
                raise done.error
            result[pattern] = {
                "plan_ms": (planned - start) * 1e3,
                "submit_ms": (submitted - planned) * 1e3,
                "move_ms": (time.perf_counter() - submitted) * 1e3,
                "descriptors": BLOCKS * LAYERS * 2,
                "operations": done.descriptors,
            }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
