"""Plans and submits one long handoff from Python, in blocks that form runs and in blocks that do
not, and prints what each step took as JSON.  Started by `compare.py --bar handoff`."""

from __future__ import annotations

import json
import time

import numpy as np

from efa_kv import EngineConfig, TransferEngine
from efa_kv.plan import build
from efa_kv.plan.layout import Group, KvLayout, Row
from efa_kv.tools.bench_memory import HostBuffer
from efa_kv.tools.bench_run import remote_buffers
from efa_kv.tools.loopback import Target, TargetSettings

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
    settings = {"protocol": "efa", "near": False}
    memory = TargetSettings(engine=settings, buffer_size_bytes=POOL_BYTES, touch=False)
    with Target(memory) as target, TransferEngine(EngineConfig.load(settings)) as engine:
        pool = HostBuffer(POOL_BYTES)
        engine.register(pool.whole)
        peer = engine.connect(target.session)
        engine.warmup(peer)
        result = {}
        for pattern in ("contiguous", "scattered"):
            here, there = tables(pattern)
            local, remote = layout(pool.address), layout(remote_buffers(peer)[0].address)
            start = time.perf_counter()
            plan = build.rows(local, remote)
            (piece,) = build.pieces(plan, (here,), (there,), 0, TOKENS)
            planned = time.perf_counter()
            job = engine.write_paged(peer, piece.rows, piece.local_blocks, piece.remote_blocks)
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
