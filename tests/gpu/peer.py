"""The other process of the checks: an engine over TCP with memory on a GPU."""

from __future__ import annotations

import zlib

import numpy as np
from child_process import serve
from device import Driver, GpuArray

from efa_kv import EngineConfig, TransferEngine


class Peer:
    """The requests, one method each."""

    def __init__(self) -> None:
        self.engine: TransferEngine | None = None
        self.array: GpuArray | None = None

    def open(self, driver: str, length_bytes: int, device: int) -> dict[str, object]:
        self.array = GpuArray(Driver(driver), length_bytes, device)
        self.engine = TransferEngine(EngineConfig.load({"protocol": "tcp", "near": False})).start()
        self.engine.register(self.array)
        return {"session": self.engine.session, "address": self.array.address}

    def fill(self, seed: int) -> None:
        assert self.array is not None
        generator = np.random.default_rng(seed)
        self.array.put(generator.integers(0, 256, self.array.length_bytes, np.uint8))

    def checksum(self) -> int:
        assert self.array is not None
        return zlib.crc32(self.array.get().tobytes())


serve(Peer())
