"""Measures Mooncake's transfer engine through its Python interface, as servers use it.

Runs in the environment for benchmarks; `peers.mooncake` gives it the right surroundings.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pair
import workload

HOST = "127.0.0.1"


def open_engine(protocol: str) -> Any:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    code = engine.initialize(HOST, "P2PHANDSHAKE", protocol, "")
    if code != 0:
        raise SystemExit(f"mooncake: initialize gave {code} for {protocol}")
    return engine


def register(engine: Any, buffer: np.ndarray) -> None:
    code = engine.register_memory(buffer.ctypes.data, buffer.nbytes)
    if code != 0:
        raise SystemExit(f"mooncake: register_memory gave {code}")


class Target:
    def __init__(self, engine: Any, buffer: np.ndarray) -> None:
        self._engine, self._buffer = engine, buffer

    def describe(self) -> dict[str, Any]:
        return {
            "session": f"{HOST}:{self._engine.get_rpc_port()}",
            "address": self._buffer.ctypes.data,
        }

    def answer(self, word: str, argument: str) -> Any:
        raise SystemExit(f"unknown question {word} {argument}")


class Driver:
    """``in_flight`` threads, each with one synchronous call; the calls give up the lock."""

    def __init__(self, engine: Any, session: str, load: workload.Load) -> None:
        self._session = session
        self._in_flight = load.in_flight
        self._lengths = [load.size_bytes] * load.batch
        write = load.operation == "write"
        self._call = engine.batch_transfer_sync_write if write else engine.batch_transfer_sync_read
        self._batches: list[tuple[list[int], list[int]]] = []

    def prepare(self, batches: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        self._batches = [(here.tolist(), there.tolist()) for here, there in batches]

    def _move(self, number: int) -> float:
        here, there = self._batches[number % len(self._batches)]
        start = time.perf_counter()
        code = self._call(self._session, here, there, self._lengths)
        if code != 0:
            raise SystemExit(f"mooncake: a transfer gave {code}")
        return time.perf_counter() - start

    def once(self) -> None:
        for number in range(len(self._batches)):
            self._move(number)

    def measure(self, until: float) -> list[float]:
        if self._in_flight == 1:
            return self._work(0, until)
        found: list[list[float]] = []
        threads = [
            threading.Thread(target=lambda first=first: found.append(self._work(first, until)))
            for first in range(self._in_flight)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(found) != len(threads):
            raise SystemExit("mooncake: a thread failed")
        return [duration for durations in found for duration in durations]

    def _work(self, first: int, until: float) -> list[float]:
        durations = []
        number = first
        while time.perf_counter() < until:
            durations.append(self._move(number))
            number += self._in_flight
        return durations


def first_contact(engine: Any, target: pair.TargetProcess, local: np.ndarray, warm: bool) -> Any:
    """The cost of meeting a peer, as `efa-kv probe` reports it."""
    session, address = target.description["session"], target.description["address"]
    start = time.perf_counter()
    warmup_ms = None
    if warm:
        code = engine.warmup_efa_segment(session)
        if code != 0:
            raise SystemExit(f"mooncake: warmup_efa_segment gave {code}")
        warmup_ms = (time.perf_counter() - start) * 1e3
    submits, first = [], 0.0
    for _ in range(5):
        before = time.perf_counter()
        if engine.batch_transfer_sync_write(session, [local.ctypes.data], [address], [1 << 20]):
            raise SystemExit("mooncake: a transfer failed")
        submits.append((time.perf_counter() - before) * 1e3)
        first = first or (time.perf_counter() - start) * 1e3
    return {"warmup_ms": warmup_ms, "submit_ms": submits, "first_contact_ms": first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    workload.add_options(parser)
    parser.add_argument("--protocol", choices=("efa", "tcp"), default="tcp")
    parser.add_argument("--role", choices=("driver", "target"), default="driver")
    parser.add_argument("--first-contact", choices=("cold", "warm"))
    parser.add_argument("--no-check", action="store_true", help="where nothing is copied")
    options = parser.parse_args()
    load = workload.load_of(options)
    buffer = np.empty(max(load.buffer_bytes, load.batch_span_bytes * load.batch_count), np.uint8)
    pair.fill(buffer, 1 if options.role == "driver" else 2)
    engine = open_engine(options.protocol)
    register(engine, buffer)
    if options.role == "target":
        pair.serve(buffer, Target(engine, buffer))
    target = pair.TargetProcess(sys.argv[1:])
    if options.first_contact:
        result = first_contact(engine, target, buffer, options.first_contact == "warm")
    else:
        driver = Driver(engine, target.description["session"], load)
        address = target.description["address"]
        result = pair.run_pair(load, buffer, driver, target, address, not options.no_check)
    target.end()
    print("\n@" + json.dumps(result), flush=True)
    # Its destructors log and, after some errors, hang.
    os._exit(0)


if __name__ == "__main__":
    main()
