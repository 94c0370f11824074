"""Two processes of a peer: the driver, and a target that it starts and asks.

A driver module calls `run_pair` with what its engine does; everything that must be the same for
all peers (clocks, warm-up, the check of the bytes, the result) is here.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from workload import Load, percentile_us

CPUCLOCK_SCHED = 2
IDLE_S = 0.001


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, all its threads; see clock_getcpuclockid(3)."""
    return time.clock_gettime(~pid << 3 | CPUCLOCK_SCHED)


def peak_memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


class Target(Protocol):
    """A peer's engine on the target's side."""

    def describe(self) -> dict[str, Any]:
        """What the driver must know, as JSON."""

    def answer(self, word: str, argument: str) -> Any:
        """Answers a question of the driver's that only this peer has."""


class Driver(Protocol):
    """A peer's engine on the driver's side."""

    def prepare(self, batches: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Takes the absolute addresses of every batch, local and remote."""

    def measure(self, until: float) -> list[float]:
        """Moves batches in turn until the clock says so; the duration of each."""

    def once(self) -> None:
        """Moves every batch once."""


def fill(buffer: np.ndarray, seed: int) -> None:
    words = buffer.view(np.uint64)
    words[:] = (np.arange(len(words), dtype=np.uint64) + np.uint64(seed << 40)) * np.uint64(
        0x9E3779B97F4A7C15
    )


def lines(idle: Callable[[], object] | None) -> Iterator[str]:
    """Lines of standard input; ``idle`` is called every millisecond while none comes."""
    while True:
        while idle and not select.select([sys.stdin], [], [], IDLE_S)[0]:
            idle()
        line = sys.stdin.readline()
        if not line:
            return
        yield line


def serve(buffer: np.ndarray, target: Target, idle: Callable[[], object] | None = None) -> None:
    """The target's side: answers lines until its standard input ends."""

    def say(value: Any) -> None:
        sys.stdout.write("\n@" + json.dumps(value) + "\n")
        sys.stdout.flush()

    say(target.describe())
    for line in lines(idle):
        word, _, argument = line.strip().partition(" ")
        if word == "digest":
            start, length = map(int, argument.split())
            say(hashlib.sha256(buffer[start : start + length]).hexdigest())
        elif word == "memory":
            say(peak_memory_bytes())
        else:
            say(target.answer(word, argument))
    # Peers' destructors are not part of the measurement, and some of them hang.
    os._exit(0)


class TargetProcess:
    """The target as the driver sees it."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, os.path.abspath(sys.argv[0]), *arguments, "--role", "target"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self.description = self._answer()

    def ask(self, question: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(question + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # peers print there too
            if line.startswith("@"):
                return json.loads(line[1:])
        raise SystemExit("the target ended")

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()


def run_pair(
    load: Load,
    local: np.ndarray,
    driver: Driver,
    target: TargetProcess,
    remote_address: int,
    check: bool = True,
) -> dict[str, Any]:
    """One measurement, in the form that `efa-kv bench --json` has."""
    pairs = [load.offsets(batch) for batch in range(load.batch_count)]
    base = local.ctypes.data
    driver.prepare(
        [(here + np.uint64(base), there + np.uint64(remote_address)) for here, there in pairs]
    )
    driver.once()
    cpu, target_cpu = cpu_seconds(os.getpid()), cpu_seconds(target.pid)
    start = time.perf_counter()
    durations = driver.measure(start + load.seconds)
    wall = time.perf_counter() - start
    cpu, target_cpu = cpu_seconds(os.getpid()) - cpu, cpu_seconds(target.pid) - target_cpu
    descriptors = len(durations) * load.batch
    return {
        "operation": load.operation,
        "block_size_bytes": load.size_bytes,
        "batch_size": load.batch,
        "in_flight": load.in_flight,
        "pattern": load.pattern,
        "bytes_per_second": descriptors * load.size_bytes / wall,
        "descriptors_per_second": descriptors / wall,
        "wall_seconds": wall,
        "cpu_seconds": cpu,
        "target_cpu_seconds": target_cpu,
        "p50_us": percentile_us(durations, 0.5),
        "p99_us": percentile_us(durations, 0.99),
        "batches": len(durations),
        "bytes": descriptors * load.size_bytes,
        "descriptors": descriptors,
        "verified": _verified(load, local, target, pairs) if check else None,
        "memory_bytes": peak_memory_bytes(),
        "target_memory_bytes": target.ask("memory"),
    }


def _verified(
    load: Load,
    local: np.ndarray,
    target: TargetProcess,
    pairs: Sequence[tuple[np.ndarray, np.ndarray]],
) -> bool:
    """Whether the first block of the first and of the last batch are equal on both sides.

    A write may be acknowledged before it is visible, so the comparison is given a moment.
    """
    for here, there in (pairs[0], pairs[-1]):
        start, size = int(here[0]), load.size_bytes
        wanted = hashlib.sha256(local[start : start + size]).hexdigest()
        question = f"digest {int(there[0])} {size}"
        if not _soon(lambda question=question, wanted=wanted: target.ask(question) == wanted):
            return False
    return True


def _soon(condition: Callable[[], bool]) -> bool:
    for _ in range(20):
        if condition():
            return True
        time.sleep(0.05)
    return False
