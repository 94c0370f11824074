"""One engine under Mooncake's names in a process of its own, driven by lines of JSON;
see `engine_child.py`, which it follows."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from child_process import serve

from efa_kv.mooncake import TransferEngine


class Child:
    """The requests, one method each."""

    def __init__(self) -> None:
        self.engine = TransferEngine()
        self.buffers: dict[str, np.ndarray] = {}

    def open(self, name: str, protocol: str) -> dict[str, Any]:
        code = self.engine.initialize(name, "P2PHANDSHAKE", protocol, "")
        return {"code": code, "session": self.engine.session if code == 0 else ""}

    def register(self, name: str, size: int) -> int:
        buffer = self.buffers[name] = np.zeros(size, np.uint8)
        assert self.engine.register_memory(buffer.ctypes.data, size) == 0
        return int(buffer.ctypes.data)

    def unregister(self, name: str) -> int:
        return self.engine.unregister_memory(self.buffers[name].ctypes.data)

    def content(self, name: str, offset: int, size: int) -> list[int]:
        return [int(value) for value in self.buffers[name][offset : offset + size]]

    def digest(self, name: str) -> int:
        values = self.buffers[name].astype(np.uint64)
        return int((values * np.arange(1, len(values) + 1, dtype=np.uint64)).sum())

    def break_connections(self, seconds: float) -> int:
        """New endpoints again and again for so long; how often."""
        fabric = self.engine._state.engine.fabric
        end, count = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            for rail in range(len(fabric.rails())):
                fabric.rail_reset(rail)
            count += 1
            time.sleep(0.3)
        return count

    def notifies(self) -> list[list[str]]:
        return [[note.name, note.msg] for note in self.engine.get_notifies()]

    def close(self) -> None:
        self.engine.close()


if __name__ == "__main__":
    serve(Child())
