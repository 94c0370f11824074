"""Measures NIXL with its UCX backend through its Python interface.

Transfer requests are prepared once and posted again, which is the fastest way it offers.  UCX
takes its transports from UCX_TLS, which `peers.nixl` sets.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pair
import workload

DRAM = "DRAM"


def open_agent(name: str, progress_thread: bool, buffer: np.ndarray) -> Any:
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(
        name, nixl_agent_config(enable_prog_thread=progress_thread, backends=["UCX"])
    )
    agent.register_memory([(buffer.ctypes.data, buffer.nbytes, 0, "")], DRAM)
    return agent


class Target:
    def __init__(self, agent: Any, buffer: np.ndarray) -> None:
        self._agent, self._buffer = agent, buffer

    def describe(self) -> dict[str, Any]:
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"metadata": metadata, "address": self._buffer.ctypes.data}

    def answer(self, word: str, argument: str) -> Any:
        if word != "meet":
            raise SystemExit(f"unknown question {word}")
        return self._agent.add_remote_agent(base64.b64decode(argument)).decode()


class Driver:
    """``in_flight`` requests at a time, the oldest looked at first."""

    def __init__(self, agent: Any, peer: str, load: workload.Load) -> None:
        self._agent, self._peer, self._load = agent, peer, load
        self._handles: list[Any] = []

    def prepare(self, batches: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        size = self._load.size_bytes
        indices = list(range(self._load.batch))
        for here, there in batches:
            local = self._agent.prep_xfer_dlist(
                "NIXL_INIT_AGENT", [(address, size, 0) for address in here.tolist()], DRAM
            )
            remote = self._agent.prep_xfer_dlist(
                self._peer, [(address, size, 0) for address in there.tolist()], DRAM
            )
            self._handles.append(
                self._agent.make_prepped_xfer(
                    self._load.operation.upper(), local, indices, remote, indices, b""
                )
            )

    def _post(self, number: int) -> tuple[float, Any]:
        handle = self._handles[number % len(self._handles)]
        start = time.perf_counter()
        if self._agent.transfer(handle) == "ERR":
            raise SystemExit("nixl: a transfer failed")
        return start, handle

    def _wait(self, start: float, handle: Any) -> float:
        while (state := self._agent.check_xfer_state(handle)) != "DONE":
            if state == "ERR":
                raise SystemExit("nixl: a transfer failed")
        return time.perf_counter() - start

    def once(self) -> None:
        for number in range(len(self._handles)):
            self._wait(*self._post(number))

    def measure(self, until: float) -> list[float]:
        waiting: deque[tuple[float, Any]] = deque()
        durations: list[float] = []
        number = 0
        while True:
            going = time.perf_counter() < until
            while going and len(waiting) < self._load.in_flight:
                waiting.append(self._post(number))
                number += 1
            if not waiting:
                return durations
            durations.append(self._wait(*waiting.popleft()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    workload.add_options(parser)
    parser.add_argument("--role", choices=("driver", "target"), default="driver")
    parser.add_argument("--target-progress-thread", type=int, default=1)
    parser.add_argument("--driver-progress-thread", type=int, default=0)
    options = parser.parse_args()
    load = workload.load_of(options)
    buffer = np.empty(max(load.buffer_bytes, load.batch_span_bytes * load.batch_count), np.uint8)
    pair.fill(buffer, 1 if options.role == "driver" else 2)
    if options.role == "target":
        agent = open_agent("target", bool(options.target_progress_thread), buffer)
        # Without a thread of its own it answers a new peer only while it is called.
        idle = None if options.target_progress_thread else agent.get_new_notifs
        pair.serve(buffer, Target(agent, buffer), idle)
    agent = open_agent("driver", bool(options.driver_progress_thread), buffer)
    target = pair.TargetProcess(sys.argv[1:])
    peer = agent.add_remote_agent(base64.b64decode(target.description["metadata"]))
    peer = peer.decode() if isinstance(peer, bytes) else peer
    result = pair.run_pair(
        load, buffer, Driver(agent, peer, load), target, target.description["address"]
    )
    target.end()
    print("\n@" + json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
