"""What `tests/gpu/run.sh` runs; see there.  One line for each check, and an exit status."""

from __future__ import annotations

import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from child_process import ChildProcess, start_process
from device import Driver, GpuArray, NoDriverError

from efa_kv import EngineConfig, TransferEngine
from efa_kv.types import ROW_DTYPE

NO_GPU = 77
LENGTH_BYTES = 32 << 20
TIMEOUT_S = 60
DRIVER = os.environ.get("EFA_KV_CUDA_LIBRARY") or "libcuda.so.1"
HERE = Path(__file__).parent


def noise(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, LENGTH_BYTES, np.uint8)


def engine(*, near: bool) -> TransferEngine:
    return TransferEngine(EngineConfig.load({"protocol": "tcp", "near": near}))


@contextmanager
def peer() -> Iterator[tuple[ChildProcess, str, int]]:
    """Another process with memory on the last GPU: itself, its session, its address."""
    keep = {name: value for name, value in os.environ.items() if name.startswith("EFA_KV_")}
    child = ChildProcess(start_process(HERE / "peer.py", environment=keep))
    try:
        opened = child.ask(
            "open", driver=DRIVER, length_bytes=LENGTH_BYTES, device=driver.count - 1
        )
        yield child, opened["session"], opened["address"]
    finally:
        child.end()


def move(one: TransferEngine, read: bool, session: str, local: int, remote: int) -> str:
    """Moves everything, and says how fast."""
    call = one.read if read else one.write
    begun = time.monotonic()
    result = call(session, [local], [remote], [LENGTH_BYTES], timeout_s=TIMEOUT_S).wait(TIMEOUT_S)
    assert result.error is None, result.error
    return f"{LENGTH_BYTES / (time.monotonic() - begun) / 1e9:.2f} GB/s"


def registers() -> str:
    array = GpuArray(driver, LENGTH_BYTES, 0)
    with engine(near=False) as one:
        region = one.register(array)
        assert (region.address, region.length_bytes) == (array.address, LENGTH_BYTES)
        rail = one.rails[0]
        return f"with {rail.name} ({'directly' if rail.reaches_gpus else 'to be staged'})"


def exports() -> str:
    array = GpuArray(driver, LENGTH_BYTES, 0)
    offered = driver.exports(array.address, LENGTH_BYTES, 0)
    return "offered" if offered else "not offered by this driver or device"


def memory(device: int | None) -> np.ndarray | GpuArray:
    """On a GPU, or on the host."""
    if device is None:
        return np.zeros(LENGTH_BYTES, np.uint8)
    return GpuArray(driver, LENGTH_BYTES, device)


def copies_within_the_process() -> str:
    rates = []
    for own, other in ((0, driver.count - 1), (None, 0), (0, None)):
        arrays = [memory(device) for device in (own, other)]
        addresses = [a.address if isinstance(a, GpuArray) else a.ctypes.data for a in arrays]
        text = noise(3)
        if isinstance(arrays[0], GpuArray):
            arrays[0].put(text)
        else:
            arrays[0][:] = text
        with engine(near=True) as one, engine(near=True) as two:
            one.register(arrays[0])
            two.register(arrays[1])
            rates.append(move(one, False, two.session, *addresses))
            assert one.counters()[0].bytes_near == LENGTH_BYTES
        found = arrays[1].get() if isinstance(arrays[1], GpuArray) else arrays[1]
        assert np.array_equal(found, text)
    return "GPU to GPU, host to GPU, GPU to host: " + ", ".join(rates)


def stages_between_processes() -> str:
    array = GpuArray(driver, LENGTH_BYTES, 0)
    with peer() as (child, session, remote), engine(near=False) as one:
        one.register(array)
        text = noise(4)
        array.put(text)
        written = move(one, False, session, array.address, remote)
        assert child.ask("checksum") == zlib.crc32(text.tobytes())
        child.ask("fill", seed=5)
        read = move(one, True, session, array.address, remote)
        assert np.array_equal(array.get(), noise(5))
        assert one.counters()[0].bytes_staged == 2 * LENGTH_BYTES
        return f"write {written}, read {read}"


def stages_pages() -> str:
    block_bytes, blocks = 16 << 10, 512
    array = GpuArray(driver, LENGTH_BYTES, 0)
    with peer() as (child, session, remote), engine(near=False) as one:
        one.register(array)
        text = noise(6)
        array.put(text)
        child.ask("fill", seed=7)
        wanted = noise(7)
        there = np.random.default_rng(8).permutation(LENGTH_BYTES // block_bytes)[:blocks]
        row = np.array([(array.address, remote, block_bytes, block_bytes, block_bytes)], ROW_DTYPE)
        for here, to in enumerate(there):
            wanted[to * block_bytes : (to + 1) * block_bytes] = text[
                here * block_bytes : (here + 1) * block_bytes
            ]
        result = one.write_paged(session, row, np.arange(blocks), there).wait(TIMEOUT_S)
        assert result.error is None, result.error
        assert child.ask("checksum") == zlib.crc32(wanted.tobytes())
        return f"{blocks} blocks of {block_bytes >> 10} KiB"


def survives_a_killed_peer() -> str:
    array = GpuArray(driver, LENGTH_BYTES, 0)
    with peer() as (child, session, remote), engine(near=False) as one:
        one.register(array)
        jobs = [one.write(session, [array.address], [remote], [LENGTH_BYTES]) for _ in range(20)]
        child.kill()
        results = [job.wait(TIMEOUT_S, fenced=True) for job in jobs]
        failed = [result for result in results if result.error is not None]
        assert failed, "everything had arrived before the peer was killed"
        assert all(result.fenced for result in results)
        array.put(noise(9))  # the memory is ours again
        return f"{len(failed)} of {len(jobs)} transfers ended with an error, all fenced"


CHECKS: tuple[Callable[[], str], ...] = (
    registers,
    exports,
    copies_within_the_process,
    stages_between_processes,
    stages_pages,
    survives_a_killed_peer,
)
NAMES = {"exports": "dmabuf"}

try:
    driver = Driver(DRIVER)
except NoDriverError as problem:
    print(f"no GPU to check on: {problem}")
    sys.exit(NO_GPU)
print(f"{driver.count} GPUs by {DRIVER}")
for check in CHECKS:
    name = NAMES.get(check.__name__, check.__name__.replace("_", " "))
    print(f"{name}: {check()}", flush=True)
print("all checks passed")
