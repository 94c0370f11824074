"""Pairs of agents: the consumer here, the producer in a process of its own, or reversed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from child_process import ChildProcess, start_process

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from kv_caches import LAYERS, Cache, open_agent  # noqa: E402

from efa_kv.runtime.agent import Agent, Pull, Report  # noqa: E402


class ChildAgent(ChildProcess):
    """An agent there; see agent_child.py for its requests."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(start_process(HERE / "agent_child.py"))
        opened = self.ask("open", **settings)
        self.session, self.incarnation = opened["session"], opened["incarnation"]
        self.bootstrap = opened["bootstrap"]

    def hold(self, request_id: str, blocks: list[int] | list[list[int]], **fields: Any) -> None:
        """Holds whole blocks unless told otherwise; one group may be given bare."""
        tables: Any = blocks if blocks and isinstance(blocks[0], list) else [blocks]
        values = {
            "transfer_id": f"transfer-{request_id}",
            "generation": 1,
            "token_count": 16 * len(tables[0]),
            **fields,
        }
        self.ask("hold", request_id=request_id, blocks=tables, **values)


class Consumer:
    """An agent in this process, its cache, and everything it ever reported."""

    def __init__(self, blocks: int, hybrid: bool = False, **settings: Any) -> None:
        self.cache = Cache(blocks, hybrid, value=0xEE)
        self.agent: Agent = open_agent(self.cache, **settings)
        self.expected = self.cache.data.copy()
        self.received: list[str] = []
        self.failed: dict[str, str] = {}
        self.sent: list[str] = []
        self.doomed: dict[str, str] = {}
        self.slowest_poll_s = 0.0

    def pull(self, request_id: str, session: str, blocks: Any, **fields: Any) -> None:
        tables: Any = blocks if len(blocks) and isinstance(blocks[0], list) else [blocks]
        values = {
            "transfer_id": f"transfer-{request_id}",
            "remote_request_id": "",
            "remote_engine_id": "engine",
            "generation": 1,
            "early": False,
            "first_token": 0,
            "token_count": 16 * len(tables[0]),
            **fields,
        }
        self.agent.pull(
            Pull(
                request_id=request_id,
                address=session,
                block_ids=tuple(np.array(table, np.uint32) for table in tables),
                **values,
            )
        )

    def poll(self) -> Report:
        started = time.perf_counter()
        report = self.agent.poll()
        self.slowest_poll_s = max(self.slowest_poll_s, time.perf_counter() - started)
        self.received += report.received
        self.sent += report.sent
        for request_id, reason in report.failed.items():
            assert request_id not in self.failed
            self.failed[request_id] = reason
        self.doomed |= report.doomed
        return report

    def wait(self, count: int, timeout_s: float = 20.0) -> None:
        """Polls until so many pulls have ended."""
        deadline = time.monotonic() + timeout_s
        while len(self.received) + len(self.failed) < count:
            assert time.monotonic() < deadline, (self.received, self.failed)
            self.poll()
            time.sleep(0.0005)
        assert len(set(self.received)) == len(self.received)

    def expect_blocks(self, source: np.ndarray, pairs: list[tuple[int, int]]) -> None:
        """These blocks of the producer are now in those blocks here."""
        for theirs, ours in pairs:
            for layer in range(LAYERS):
                self.expected[layer, ours] = source[layer, theirs]

    def check_every_byte(self) -> None:
        assert np.array_equal(self.cache.data, self.expected)


@pytest.fixture
def child() -> Iterator[Callable[..., ChildAgent]]:
    """Starts an agent in a process of its own."""
    children: list[ChildAgent] = []

    def start(blocks: int = 64, **settings: Any) -> ChildAgent:
        children.append(ChildAgent(blocks=blocks, **settings))
        return children[-1]

    yield start
    for one in children:
        one.end()


@pytest.fixture
def consumer() -> Iterator[Callable[..., Consumer]]:
    """Starts an agent here."""
    consumers: list[Consumer] = []

    def start(blocks: int = 64, **settings: Any) -> Consumer:
        consumers.append(Consumer(blocks, **settings))
        return consumers[-1]

    yield start
    for one in consumers:
        one.agent.close()


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
