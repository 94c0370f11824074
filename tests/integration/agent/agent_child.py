"""One agent in a process of its own, driven by lines of JSON: a request on standard
input, an answer on standard output.  See the fixture ``child``."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from child_process import serve
from kv_caches import Cache, open_agent

from efa_kv.runtime.agent import Agent, Hold, Pull


def tables(blocks: list[list[int]]) -> tuple[np.ndarray, ...]:
    return tuple(np.array(table, dtype=np.uint32) for table in blocks)


class Child:
    """The requests, one method each."""

    def __init__(self) -> None:
        self.agent: Agent | None = None
        self.cache: Cache | None = None
        self.ready: set[str] = set()

    def open(
        self, blocks: int, hybrid: bool = False, engine_id: str = "engine", **settings: Any
    ) -> dict[str, Any]:
        self.cache = Cache(blocks, hybrid)
        self.agent = open_agent(self.cache, engine_id, **settings)
        return {
            "session": self.agent.session,
            "incarnation": self.agent.engine.incarnation,
            "bootstrap": self.agent.bootstrap_address,
        }

    def fill(self, seed: int) -> None:
        assert self.cache is not None
        self.cache.fill(seed)

    def hold(self, blocks: list[list[int]], wait_for_compute: bool = False, **fields: Any) -> None:
        assert self.agent is not None
        request_id = fields["request_id"]
        computed = (lambda: request_id in self.ready) if wait_for_compute else None
        self.agent.hold(Hold(block_ids=tables(blocks), computed=computed, **fields))

    def extend(self, blocks: list[list[int]], **fields: Any) -> None:
        assert self.agent is not None
        self.agent.extend(Hold(block_ids=tables(blocks), **fields))

    def compute(self, request_id: str) -> None:
        self.ready.add(request_id)

    def expect(self, transfer_id: str, request_id: str, generation: int = 1) -> None:
        assert self.agent is not None
        self.agent.expect(transfer_id, request_id, generation)

    def withdraw(self, request_id: str) -> None:
        assert self.agent is not None
        self.agent.withdraw(request_id)

    def pull(self, blocks: list[list[int]], **fields: Any) -> None:
        assert self.agent is not None
        self.agent.pull(Pull(block_ids=tables(blocks), **fields))

    def poll(self, seconds: float = 0.0, until: int = 0) -> dict[str, Any]:
        """Polls for some time, or until so many ids were reported."""
        assert self.agent is not None
        sent: list[str] = []
        received: list[str] = []
        failed: dict[str, str] = {}
        deadline = time.monotonic() + seconds
        while True:
            report = self.agent.poll()
            sent += report.sent
            received += report.received
            failed |= report.failed
            enough = until and len(sent) + len(received) + len(failed) >= until
            if enough or time.monotonic() >= deadline:
                return {"sent": sent, "received": received, "failed": failed}
            time.sleep(0.001)

    def stats(self) -> dict[str, Any]:
        assert self.agent is not None
        stats = self.agent.stats()
        return {"expired": stats.expired, "sent_bytes": stats.sent_bytes}

    def close(self) -> float:
        assert self.agent is not None
        started = time.monotonic()
        self.agent.close()
        return time.monotonic() - started


def main() -> None:
    child = Child()
    serve(child)
    if child.agent is not None:
        child.agent.close()


if __name__ == "__main__":
    main()
