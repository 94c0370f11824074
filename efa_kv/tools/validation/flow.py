"""Moving bytes for a while: what one host does in one step, timed and counted by device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Final

from efa_kv.errors import EfaKvError, FabricBusy, TransferTimeout
from efa_kv.runtime.engine import Peer, TransferEngine
from efa_kv.runtime.job import Job
from efa_kv.tools import bench_memory
from efa_kv.tools.bench_load import percentile_us
from efa_kv.tools.bench_run import remote_buffers
from efa_kv.tools.validation.samples import RailSample

#: Jobs in flight of a sender, over all its receivers; many, because a job that waits for its
#: last stripe on a slow device must not keep the others from getting new work.
_IN_FLIGHT: Final = 8
#: A job's stripes for each device.
_STRIPES_PER_NIC: Final = 2
_JOB_TIMEOUT_S: Final = 5.0
#: How long jobs may take to end after one of them has failed.
_GIVE_UP_S: Final = 2.0
#: A job that takes less than this may as well be larger.
_SHORT_JOB_S: Final = 0.01
_NAP_S: Final = 0.001
_LATENCY_BYTES: Final = 8


class FlowError(Exception):
    """A peer without memory to send to, or too little of it; the text says what to change."""


class Buffers:
    """This host's memory: what it sends from, what others write to, what comes back."""

    def __init__(
        self, engine: TransferEngine, length_bytes: int, block_size_bytes: int, seed: int
    ) -> None:
        self.span_bytes = len(engine.rails) * _STRIPES_PER_NIC * block_size_bytes
        if self.span_bytes > length_bytes:
            raise FlowError(
                f"found a buffer of {length_bytes} bytes; {len(engine.rails)} devices need "
                f"{self.span_bytes}: raise --buffer-size or lower --block-size"
            )
        self.sink = bench_memory.HostBuffer(length_bytes)
        self.source = bench_memory.HostBuffer(length_bytes)
        self.echo = bench_memory.HostBuffer(self.span_bytes)
        bench_memory.fill(self.sink, None)
        bench_memory.fill(self.source, seed)
        engine.register(self.sink.whole)
        # Registered for this host's own operations: peers may not touch them.
        engine.register(self.source.whole, access=0)
        engine.register(self.echo.whole, access=0)


class _Lane:
    """One receiver: the place to write to, and the jobs on their way there."""

    def __init__(self, peer: Peer, own: Buffers) -> None:
        span_bytes, own_bytes = own.span_bytes, own.source.length_bytes
        buffers = remote_buffers(peer)
        if not buffers or buffers[0].length_bytes < span_bytes:
            raise FlowError(f"{peer.session} offers too little memory; start all with equal flags")
        self.peer = peer
        self.address = buffers[0].address
        self.places = min(buffers[0].length_bytes, own_bytes) // span_bytes
        self.jobs: list[tuple[float, Job]] = []
        self.place = 0
        #: Spans of a job. Where the network is fast, few large jobs cost this host less.
        self.spans = 1


def stream(
    engine: TransferEngine, buffers: Buffers, peers: Sequence[Peer], duration_s: float
) -> tuple[float, tuple[RailSample, ...]]:
    """Writes to all peers at once; seconds, and what each device did in them.

    Raises the first job's error, and `FlowError`. [blocks]
    """
    lanes = [_Lane(peer, buffers) for peer in peers]
    before = engine.counters()
    start = time.perf_counter()
    try:
        _drive(engine, buffers, lanes, start + duration_s)
        wall_s = time.perf_counter() - start
        after = engine.counters()
        _drain(lanes)
    except EfaKvError:
        _give_up(lanes)
        raise
    # Failures come with the end of what was in flight, bytes after the clock do not count.
    failed = [rail.operations_failed for rail in engine.counters()]
    return wall_s, tuple(
        RailSample(new.bytes_written - old.bytes_written, errors - old.operations_failed)
        for old, new, errors in zip(before, after, failed, strict=True)
    )


def _drive(engine: TransferEngine, buffers: Buffers, lanes: Sequence[_Lane], end: float) -> None:
    """Keeps jobs in flight on every lane until the clock says ``end``."""
    each = max(2, _IN_FLIGHT // len(lanes))
    while time.perf_counter() < end:
        moved = False
        for lane in lanes:
            moved = _reap(lane) or moved
            while len(lane.jobs) < each and _submit(engine, buffers, lane):
                moved = True
        if not moved:
            _nap(lanes)


def _give_up(lanes: Sequence[_Lane]) -> None:
    """Ends what is in flight after a failure, so that it does not disturb the next step; what does
    not end in time is a device that is stuck."""
    jobs = [job for lane in lanes for _start, job in lane.jobs]
    for job in jobs:
        job.cancel()
    deadline = time.perf_counter() + _GIVE_UP_S
    for job in jobs:
        with contextlib.suppress(EfaKvError):
            job.wait(max(0.0, deadline - time.perf_counter()), fenced=True)


def _submit(engine: TransferEngine, buffers: Buffers, lane: _Lane) -> bool:
    if lane.place + lane.spans > lane.places:
        lane.place = 0
    offset, length = lane.place * buffers.span_bytes, lane.spans * buffers.span_bytes
    source, target = buffers.source.address + offset, lane.address + offset
    start = time.perf_counter()
    try:
        job = engine.write(lane.peer, [source], [target], [length], timeout_s=_JOB_TIMEOUT_S)
    except FabricBusy:
        return False
    lane.jobs.append((start, job))
    lane.place += lane.spans
    return True


def _reap(lane: _Lane) -> bool:
    """Takes jobs that are done, in whatever order they end; whether there were any."""
    left = []
    for start, job in lane.jobs:
        result = job.result()
        if result is None:
            left.append((start, job))
        elif result.error is not None:
            raise result.error
        elif time.perf_counter() - start < _SHORT_JOB_S and lane.spans * 2 <= lane.places:
            lane.spans *= 2
    done = len(lane.jobs) - len(left)
    lane.jobs = left
    return done > 0


def _nap(lanes: Sequence[_Lane]) -> None:
    """Waits a moment for the job that was submitted first."""
    for lane in lanes:
        if lane.jobs:
            with contextlib.suppress(TransferTimeout):
                lane.jobs[0][1].wait(_NAP_S)
            return
    time.sleep(_NAP_S)


def _drain(lanes: Sequence[_Lane]) -> None:
    for lane in lanes:
        for _start, job in lane.jobs:
            error = job.wait().error
            if error is not None:
                raise error


def latencies(
    engine: TransferEngine, buffers: Buffers, peer: Peer, duration_s: float
) -> tuple[float, float]:
    """Median and 99th percentile in microseconds of a small write until it has landed, as a
    caller sees it. Raises the first job's error, and `FlowError`. [blocks]"""
    lane = _Lane(peer, buffers)
    durations: list[float] = []
    end = time.perf_counter() + duration_s
    while time.perf_counter() < end or not durations:
        start = time.perf_counter()
        job = engine.write(
            peer,
            [buffers.source.address],
            [lane.address],
            [_LATENCY_BYTES],
            timeout_s=_JOB_TIMEOUT_S,
        )
        error = job.wait().error
        durations.append(time.perf_counter() - start)
        if error is not None:
            raise error
    return percentile_us(durations, 0.5), percentile_us(durations, 0.99)


def mismatch(engine: TransferEngine, buffers: Buffers, peer: Peer) -> str:
    """Writes a stripe or two over every device, reads them back, and says which byte is wrong.

    Nobody else may write to the peer meanwhile. Raises as `stream` does. [blocks]
    """
    lane = _Lane(peer, buffers)
    length = buffers.span_bytes
    bench_memory.fill(buffers.echo, None)
    for move, local in ((engine.write, buffers.source), (engine.read, buffers.echo)):
        job = move(peer, [local.address], [lane.address], [length], timeout_s=_JOB_TIMEOUT_S)
        error = job.wait().error
        if error is not None:
            raise error
    return bench_memory.difference(buffers.source, buffers.echo, length)
