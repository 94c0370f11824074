"""The initiator of a benchmark: drives jobs, checks the bytes, and adds up what happened."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from efa_kv import TransferEngine
from efa_kv.errors import FabricBusy
from efa_kv.runtime.engine import Peer
from efa_kv.runtime.job import Job
from efa_kv.tools import bench_memory
from efa_kv.tools.bench_load import Load, pattern_bytes, percentile_us
from efa_kv.tools.loopback import cpu_seconds, peak_memory_bytes
from efa_kv.types import ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, RailCounters, U64Array

INITIATOR_SEED: Final = 0x1A
TARGET_SEED: Final = 0x7A
_SCRATCH_BYTES: Final = 64 << 20


class RailUse(msgspec.Struct, frozen=True, kw_only=True):
    """What one local device did while the clock ran; the peak is since the engine opened."""

    name: str
    bytes: int
    operations: int
    queue_depth: int
    in_flight_peak: int
    speed_bits_per_second: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement, as it is written to the JSON file.

    A descriptor is a block asked for, an operation what was posted after merging and cutting.
    CPU time is of whole processes; the target's is known only in loopback.
    """

    operation: str
    block_size_bytes: int
    batch_size: int
    in_flight: int
    pattern: str
    bytes_per_second: float
    descriptors_per_second: float
    wall_seconds: float
    cpu_seconds: float
    target_cpu_seconds: float | None
    p50_us: float
    p99_us: float
    batches: int
    bytes: int
    descriptors: int
    operations: int
    near_bytes: int
    verified: bool | None
    mismatch: str
    memory_bytes: int
    protocol: str
    provider: str
    rails: list[RailUse]


class Batch(msgspec.Struct, frozen=True):
    """One job's descriptors, ready to submit, and where they came from."""

    buffer: int
    index: int
    local: U64Array
    remote: U64Array
    lengths: U64Array


class Remote(msgspec.Struct, frozen=True):
    """A buffer of the target."""

    address: int
    length_bytes: int


class BenchError(Exception):
    """The measurement cannot be made; the text says why and what to change."""


def remote_buffers(peer: Peer) -> list[Remote]:
    """The target's buffers, in the same order for every caller."""
    open_to_all = ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ
    regions = [one for one in peer.regions.values() if one.access & open_to_all == open_to_all]
    return [
        Remote(one.address, one.length_bytes)
        for one in sorted(regions, key=lambda one: (one.kind, one.region))
    ]


class Initiator:
    """Moves one load at a time between this engine's buffers and a peer's."""

    def __init__(
        self,
        engine: TransferEngine,
        peer: Peer,
        buffers: Sequence[bench_memory.Buffer],
        operation: str,
        target_pid: int = 0,
    ) -> None:
        self.engine = engine
        self.peer = peer
        self.buffers = buffers
        self.operation = operation
        self.target_pid = target_pid
        self.remotes = remote_buffers(peer)
        self._move = engine.write if operation == "write" else engine.read
        if not self.remotes:
            raise BenchError(f"{peer.session} offers no memory: is it a bench target?")

    # ---- the load ---------------------------------------------------------------------

    def batches(self, load: Load) -> list[Batch]:
        """Every batch of a load, over all buffers in turn."""
        usable = min(
            *(buffer.length_bytes for buffer in self.buffers),
            *(remote.length_bytes for remote in self.remotes),
        )
        if usable < load.least_buffer_bytes:
            raise BenchError(
                f"the buffers share {usable} bytes and the load needs {load.least_buffer_bytes}: "
                "raise --buffer-size on both sides, or lower block size, batch size or threads"
            )
        lengths = np.full(load.batch_size, load.block_size_bytes, np.uint64)
        found = []
        for index in range(load.batch_count(usable)):
            local, remote = load.offsets(index)
            for number, buffer in enumerate(self.buffers):
                base = self.remotes[number % len(self.remotes)].address
                local_places = local + np.uint64(buffer.address)
                found.append(Batch(number, index, local_places, remote + np.uint64(base), lengths))
        return found

    def run_once(self, batches: Sequence[Batch], in_flight: int) -> None:
        """Moves every batch once, untimed."""
        self._drive(batches, in_flight, lambda submitted: submitted < len(batches))

    def measure(
        self, load: Load, batches: Sequence[Batch], duration_s: float, check: bool
    ) -> Outcome:
        """Moves batches for a while; with ``check`` the bytes are compared afterwards."""
        before = self.engine.counters()
        cpu_start, target_start = cpu_seconds(), self._target_cpu()
        start = time.perf_counter()
        end = start + duration_s
        durations, moved = self._drive(
            batches, load.in_flight, lambda _submitted: time.perf_counter() < end
        )
        wall = time.perf_counter() - start
        cpu, target_cpu = cpu_seconds() - cpu_start, self._target_cpu()
        after = self.engine.counters()
        mismatch = self._mismatch(load, batches) if check else ""
        descriptors = len(durations) * load.batch_size
        rails = self._rail_use(before, after)
        return Outcome(
            operation=self.operation,
            block_size_bytes=load.block_size_bytes,
            batch_size=load.batch_size,
            in_flight=load.in_flight,
            pattern=load.pattern.value,
            bytes_per_second=moved / wall,
            descriptors_per_second=descriptors / wall,
            wall_seconds=wall,
            cpu_seconds=cpu,
            target_cpu_seconds=target_cpu - target_start if self.target_pid else None,
            p50_us=percentile_us(durations, 0.5),
            p99_us=percentile_us(durations, 0.99),
            batches=len(durations),
            bytes=moved,
            descriptors=descriptors,
            operations=sum(rail.operations for rail in rails),
            near_bytes=_grown(before, after, "bytes_near"),
            verified=not mismatch if check else None,
            mismatch=mismatch,
            memory_bytes=peak_memory_bytes(),
            protocol=self.engine.protocol,
            provider=", ".join(sorted({rail.provider for rail in after})),
            rails=rails,
        )

    def _drive(
        self, batches: Sequence[Batch], in_flight: int, more: Callable[[int], bool]
    ) -> tuple[list[float], int]:
        """Keeps jobs in flight, the oldest waited for first; durations and bytes moved."""
        waiting: deque[tuple[float, Job]] = deque()
        durations: list[float] = []
        submitted = moved = 0
        going = True
        while going or waiting:
            going = going and more(submitted)
            if going and len(waiting) < in_flight:
                batch = batches[submitted % len(batches)]
                # A full ring is no failure: the oldest job makes room.
                with suppress(FabricBusy):
                    start = time.perf_counter()
                    job = self._move(self.peer, batch.local, batch.remote, batch.lengths)
                    waiting.append((start, job))
                    submitted += 1
                    continue
            if not waiting:
                if going:
                    raise BenchError("the engine takes no job although none is in flight")
                break
            start, job = waiting.popleft()
            result = job.wait()
            if result.error is not None:
                raise result.error
            durations.append(time.perf_counter() - start)
            moved += result.bytes
        return durations, moved

    def _rail_use(
        self, before: Sequence[RailCounters], after: Sequence[RailCounters]
    ) -> list[RailUse]:
        field = "bytes_written" if self.operation == "write" else "bytes_read"
        return [
            RailUse(
                name=new.name,
                bytes=getattr(new, field) - getattr(old, field),
                operations=new.operations_posted - old.operations_posted,
                queue_depth=nic.queue_depth,
                in_flight_peak=new.in_flight_peak,
                speed_bits_per_second=nic.speed_bits_per_second,
            )
            for old, new, nic in zip(before, after, self.engine.rails, strict=True)
        ]

    def _target_cpu(self) -> float:
        return cpu_seconds(self.target_pid) if self.target_pid else 0.0

    # ---- the check --------------------------------------------------------------------

    def check_target_text(self, load: Load, batches: Sequence[Batch]) -> str:
        """Whether reading brings the text that the target was filled with.

        Done before a write is measured: a read that is proven can then prove the writes.
        """
        return self._compare_remote(load, batches, lambda batch: _text(TARGET_SEED, load, batch))

    def _mismatch(self, load: Load, batches: Sequence[Batch]) -> str:
        if self.operation == "write":
            return self._compare_remote(
                load, batches, lambda batch: expected(load, batch, INITIATOR_SEED, TARGET_SEED)
            )
        for batch in batches:
            start = batch.index * load.batch_span_bytes
            found = self.buffers[batch.buffer].get(start, load.batch_span_bytes)
            wrong = _first_difference(found, expected(load, batch, TARGET_SEED, None))
            if wrong is not None:
                return f"the local buffer differs from byte {start + wrong}"
        return ""

    def _compare_remote(
        self, load: Load, batches: Sequence[Batch], text: Callable[[Batch], bench_memory.Bytes]
    ) -> str:
        span_bytes = load.batch_span_bytes
        scratch = bench_memory.HostBuffer(min(span_bytes, _SCRATCH_BYTES))
        region = self.engine.register(scratch.whole)
        try:
            for batch in batches:
                base = self.remotes[batch.buffer % len(self.remotes)].address
                start = batch.index * span_bytes
                wanted = text(batch)
                for offset in range(0, span_bytes, scratch.length_bytes):
                    size = min(scratch.length_bytes, span_bytes - offset)
                    self._fetch(scratch.address, base + start + offset, size)
                    found = scratch.get(0, size)
                    wrong = _first_difference(found, wanted[offset : offset + size])
                    if wrong is not None:
                        return f"the target's buffer differs from byte {start + offset + wrong}"
        finally:
            region.deregister()
        return ""

    def _fetch(self, local: int, remote: int, length_bytes: int) -> None:
        error = self.engine.read(self.peer, [local], [remote], [length_bytes]).wait().error
        if error is not None:
            raise error


def expected(load: Load, batch: Batch, source: int, ground: int | None) -> bench_memory.Bytes:
    """A batch's part of the buffer that was written to: the blocks of the ``source`` text in
    their places, and between them what was there, the ``ground`` text or zeros."""
    start = batch.index * load.batch_span_bytes
    local, remote = load.offsets(batch.index)
    from_places, to_places = (local, remote) if ground is not None else (remote, local)
    blocks = _text(source, load, batch).reshape(-1, load.block_size_bytes)
    if ground is None:
        result = np.zeros_like(blocks)
    else:
        result = _text(ground, load, batch).reshape(-1, load.block_size_bytes)
    result[_rows(to_places, start, load)] = blocks[_rows(from_places, start, load)]
    return result.reshape(-1)


def _rows(places: U64Array, start: int, load: Load) -> NDArray[np.int64]:
    return ((places - np.uint64(start)) // np.uint64(load.block_size_bytes)).astype(np.int64)


def _text(seed: int, load: Load, batch: Batch) -> bench_memory.Bytes:
    return pattern_bytes(seed, batch.index * load.batch_span_bytes, load.batch_span_bytes)


def _first_difference(found: bench_memory.Bytes, wanted: bench_memory.Bytes) -> int | None:
    different = np.flatnonzero(found != wanted)
    return int(different[0]) if len(different) else None


def _grown(before: Sequence[RailCounters], after: Sequence[RailCounters], field: str) -> int:
    totals = [sum(int(getattr(rail, field)) for rail in rails) for rails in (before, after)]
    return totals[1] - totals[0]
