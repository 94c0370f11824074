"""Paged caches made of numpy memory, with contents that both sides can compute."""

from __future__ import annotations

from typing import Any

import numpy as np

from efa_kv.config import EngineConfig
from efa_kv.plan.layout import Group, KvLayout, Row, merge_ranges
from efa_kv.runtime.agent import Agent

LAYERS = 3
BLOCK_TOKENS = 16
BLOCK_BYTES = 2048
WINDOW_TOKENS = 32

TIMES = {
    "heartbeat_interval_s": 0.1,
    "suspect_after_s": 0.4,
    "forget_after_s": 60.0,
    "handshake_timeout_s": 2.0,
}


class Cache:
    """Three layers of blocks in one allocation; ``hybrid`` adds a sliding group that
    aliases the same memory, as servers with several kinds of layers do."""

    def __init__(self, blocks: int, hybrid: bool = False, value: int = 0) -> None:
        self.data = np.full((LAYERS, blocks, BLOCK_BYTES), value, np.uint8)
        groups = [Group(kind="full", block_size_tokens=BLOCK_TOKENS)]
        rows = [self._row(layer, 0) for layer in range(LAYERS)]
        if hybrid:
            groups.append(
                Group(
                    kind="sliding",
                    block_size_tokens=BLOCK_TOKENS,
                    sliding_window_tokens=WINDOW_TOKENS,
                )
            )
            rows += [self._row(layer, 1) for layer in range(LAYERS)]
        self.layout = KvLayout(
            block_size_tokens=BLOCK_TOKENS,
            num_blocks=blocks,
            groups=tuple(groups),
            rows=tuple(rows),
            regions=merge_ranges([(self.data.ctypes.data, self.data.nbytes)]),
            dtype="uint8",
            heads=2,
        )

    def _row(self, layer: int, group: int) -> Row:
        return Row(
            layer=f"layers.{layer}.{'sliding' if group else 'full'}",
            part="kv",
            group=group,
            base_address=self.data[layer].ctypes.data,
            stride_bytes=BLOCK_BYTES,
            length_bytes=BLOCK_BYTES,
        )

    def fill(self, seed: int) -> None:
        self.data[:] = contents(self.data.shape[1], seed)


def contents(blocks: int, seed: int) -> np.ndarray:
    """What a cache holds after ``fill(seed)``."""
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (LAYERS, blocks, BLOCK_BYTES), np.uint8)


def open_agent(cache: Cache, engine_id: str = "engine", **settings: Any) -> Agent:
    values: dict[str, Any] = {"protocol": "tcp", "near": False, **TIMES, **settings}
    fields = {"model": values.pop("model", "tiny")}
    return Agent(EngineConfig(**values), cache.layout, fields, engine_id)
