"""Cases of many sessions, and of first contacts that cross, on the NICs that are there; a
program that runs the one named and prints what it saw as JSON.

The test starts it on simulated NICs (see test_session_cases.py)."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from child_process import ChildProcess, start_process

from efa_kv import EngineConfig, TransferEngine

ENGINE_CHILD = Path(__file__).parents[1] / "engine_child.py"
PIECE_BYTES = 64 << 10


def engine() -> TransferEngine:
    return TransferEngine(EngineConfig(protocol="efa", near=False, progress_threads=1)).start()


def text(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, PIECE_BYTES, np.uint8)


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def many_sessions(count: int) -> dict[str, Any]:
    """One engine and ``count`` others in this process, each written to and read back."""
    memory = []
    with ExitStack() as stack:
        hub = stack.enter_context(engine())
        source, back = text(0), np.zeros(PIECE_BYTES, np.uint8)
        local, into = hub.register(source), hub.register(back)
        buffers = []
        for number in range(count):
            other = stack.enter_context(engine())
            buffers.append(np.zeros(PIECE_BYTES, np.uint8))
            remote = other.register(buffers[-1])
            source[:] = text(number)
            write = hub.write(other.session, [local.address], [remote.address], [PIECE_BYTES])
            assert write.wait(20).error is None
            read = hub.read(other.session, [into.address], [remote.address], [PIECE_BYTES])
            assert read.wait(20).error is None
            assert np.array_equal(back, source)
            if number % 50 == 49:
                memory.append(resident_bytes())
        right = sum(np.array_equal(buffer, text(n)) for n, buffer in enumerate(buffers))
        states = [peer.state for peer in hub.state().peers]
    return {"right": right, "ready": states.count("ready"), "memory": memory}


def write_together(
    meet: threading.Barrier, one: TransferEngine, session: str, local: int, remote: int
) -> object:
    meet.wait(10)
    return one.write(session, [local], [remote], [PIECE_BYTES]).wait(20).error


def crossing_contacts(rounds: int) -> dict[str, Any]:
    """Two engines that greet each other in the same moment, and write at once; again and again."""
    right = 0
    for number in range(rounds):
        with engine() as left, engine() as there:
            sides = [left, there]
            buffers = [text(number), np.zeros(PIECE_BYTES, np.uint8)]
            buffers += [text(1000 + number), np.zeros(PIECE_BYTES, np.uint8)]
            regions = [sides[at // 2].register(buffer) for at, buffer in enumerate(buffers)]
            meet = threading.Barrier(2)
            with ThreadPoolExecutor(2) as pool:
                writes = [
                    pool.submit(
                        write_together,
                        meet,
                        sides[at],
                        sides[1 - at].session,
                        regions[2 * at].address,
                        regions[2 * (1 - at) + 1].address,
                    )
                    for at in range(2)
                ]
            good = all(write.result() is None for write in writes)
            good = good and all(len(one.state().peers) == 1 for one in sides)
            same = np.array_equal(buffers[0], buffers[3]) and np.array_equal(buffers[2], buffers[1])
            right += good and same
    return {"right": right}


def a_stopped_peer(_rounds: int) -> dict[str, Any]:
    """A peer that is stopped: memory of a NIC is written all the same, a notice is given up by
    the deadline, and nobody else waits; when it goes on everything works again."""
    child = ChildProcess(start_process(ENGINE_CHILD, without=()))
    opened = child.ask("open", protocol="efa", near=False)
    remote = child.ask("register", name="a", size=PIECE_BYTES)["address"]
    with engine() as one, engine() as other:
        source = text(5)
        local = one.register(source)
        target = np.zeros(PIECE_BYTES, np.uint8)
        elsewhere = other.register(target)
        peer = one.connect(opened["session"])
        one.warmup(peer)
        child.signal(signal.SIGSTOP)
        time.sleep(0.1)
        began = time.monotonic()
        landed = one.write(peer, [local.address], [remote], [PIECE_BYTES], timeout_s=5).wait(20)
        meanwhile = one.write(
            other.session, [local.address], [elsewhere.address], [PIECE_BYTES]
        ).wait(20)
        took_s = time.monotonic() - began
        child.signal(signal.SIGCONT)
        again = one.write(peer, [local.address], [remote], [PIECE_BYTES]).wait(20)
        seen = child.ask("matches", name="a", seed=5)
    child.end()
    return {
        "landed": landed.error is None,
        "meanwhile": meanwhile.error is None and bool(np.array_equal(target, source)),
        "took_s": took_s,
        "again": again.error is None and seen,
    }


CASES = {
    "many_sessions": many_sessions,
    "crossing_contacts": crossing_contacts,
    "a_stopped_peer": a_stopped_peer,
}

if __name__ == "__main__":
    print(json.dumps(CASES[sys.argv[1]](int(sys.argv[2]))))
