"""One engine in a process of its own, driven by lines of JSON: a request on standard
input, an answer on standard output.  Tests start it; see the fixture ``child``."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np
from child_process import serve

from efa_kv import EngineConfig, TransferEngine
from efa_kv.types import ROW_DTYPE, Notice


class Child:
    """The requests, one method each."""

    def __init__(self) -> None:
        self.engine: TransferEngine | None = None
        self.buffers: dict[str, np.ndarray] = {}
        self.regions: dict[str, Any] = {}
        self.jobs: list[Any] = []

    def open(
        self, fingerprint: str = "", fields: dict[str, str] | None = None, **config: Any
    ) -> dict[str, Any]:
        self.engine = TransferEngine(EngineConfig(**config))
        self.engine.describe(fingerprint=fingerprint.encode(), fields=fields or {})
        self.engine.start()
        return {"session": self.engine.session, "incarnation": self.engine.incarnation}

    def register(self, name: str, size: int, seed: int | None = None) -> dict[str, int]:
        assert self.engine is not None
        buffer = np.zeros(size, np.uint8)
        if seed is not None:
            buffer[:] = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
        self.buffers[name] = buffer
        self.regions[name] = self.engine.register(buffer)
        return {"address": self.regions[name].address}

    def deregister(self, name: str) -> None:
        self.regions.pop(name).deregister()

    def matches(self, name: str, seed: int) -> bool:
        buffer = self.buffers[name]
        wanted = np.random.default_rng(seed).integers(0, 256, len(buffer), np.uint8)
        return bool(np.array_equal(buffer, wanted))

    def count(self, name: str, value: int) -> int:
        return int((self.buffers[name] == value).sum())

    def fill(self, name: str, value: int) -> None:
        self.buffers[name][:] = value

    def connect(self, session: str, timeout_s: float | None = None) -> dict[str, int]:
        assert self.engine is not None
        peer = self.engine.connect(session, timeout_s)
        return {"incarnation": peer.incarnation, "regions": len(peer.regions)}

    def knows(self, session: str, epoch: int) -> bool:
        """Whether the peer's change number ``epoch`` arrived, waiting a while for it."""
        assert self.engine is not None
        peer = self.engine.connect(session).handle.peer
        deadline = time.monotonic() + 10
        while peer is not None and peer.epoch < epoch and time.monotonic() < deadline:
            time.sleep(0.005)
        return peer is not None and peer.epoch >= epoch

    def write(
        self,
        session: str,
        local: list[int],
        remote: list[int],
        lengths: list[int],
        notice: list[int] | None = None,
        read: bool = False,
        timeout_s: float | None = None,
        wait: bool = True,
    ) -> dict[str, Any] | None:
        assert self.engine is not None
        move = self.engine.read if read else self.engine.write
        sent = None if notice is None else Notice((notice[0], notice[1]), notice[2])
        job = move(session, local, remote, lengths, timeout_s=timeout_s, notice=sent)
        self.jobs.append(job)
        return self.wait() if wait else None

    def write_paged(
        self, session: str, rows: list[list[int]], local: list[int], remote: list[int]
    ) -> dict[str, Any]:
        assert self.engine is not None
        table = np.array([tuple(row) for row in rows], ROW_DTYPE)
        self.jobs.append(self.engine.write_paged(session, table, local, remote))
        return self.wait()

    def wait(self) -> dict[str, Any]:
        result = self.jobs.pop().wait(30)
        error = result.error
        return {
            "bytes": result.bytes,
            "fenced": result.fenced,
            "error": None if error is None else type(error).__name__,
        }

    def notices(self) -> list[list[int]]:
        assert self.engine is not None
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            found = self.engine.notices()
            if found:
                return [[*n.transfer, n.generation, n.status, n.bytes, n.sender] for n in found]
            time.sleep(0.005)
        return []

    def stats(self) -> dict[str, Any]:
        assert self.engine is not None
        return {
            "threads": threading.active_count(),
            "fds": len(os.listdir("/proc/self/fd")),
            "sessions": len(self.engine.control.sessions),
            "provider": self.engine.rails[0].provider,
            "cpu_s": time.process_time(),
            "rss_pages": int(open("/proc/self/statm").read().split()[1]),
        }

    def close(self) -> float:
        assert self.engine is not None
        start = time.monotonic()
        self.engine.close()
        return time.monotonic() - start


if __name__ == "__main__":
    serve(Child())
