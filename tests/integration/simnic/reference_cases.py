"""The cases of the reference's unit-test table, one function each; a program that runs them all
on the NICs it finds and prints, by case, what went wrong ("" for nothing).

The test starts it on simulated NICs (see test_reference_cases.py)."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from child_process import ChildProcess, start_process

from efa_kv.mooncake import TransferEngine

PEER = Path(__file__).parents[1] / "mooncake_child.py"
MIB = 1 << 20


class Peer(ChildProcess):
    """An engine in a process of its own; see mooncake_child.py for the requests."""

    def __init__(self) -> None:
        super().__init__(start_process(PEER, without=()))
        opened = self.ask("open", name="127.0.0.1", protocol="efa")
        assert opened["code"] == 0
        self.session = str(opened["session"])


def random_bytes(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


class Cases:
    def __init__(self, engine: TransferEngine, peer: Peer, nics: int) -> None:
        self.engine = engine
        self.peer = peer
        self.nics = nics

    @contextmanager
    def registered(self, *buffers: np.ndarray) -> Iterator[list[int]]:
        addresses = [int(buffer.ctypes.data) for buffer in buffers]
        for address, buffer in zip(addresses, buffers, strict=True):
            assert self.engine.register_memory(address, buffer.nbytes) == 0
        yield addresses
        for address in addresses:
            assert self.engine.unregister_memory(address) == 0

    def written(self) -> int:
        return sum(rail.bytes_written for rail in self.engine.counters())

    def there(self, name: str, size: int) -> int:
        return int(self.peer.ask("register", name=name, size=size))

    def move(self, source: np.ndarray, remote: int, slices: int, session: str = "") -> None:
        """Writes in equal slices, and reads back into other memory: every byte is compared."""
        session = session or self.peer.session
        back = np.zeros_like(source)
        size = source.nbytes // slices
        steps = np.arange(slices) * size
        before = self.written()
        with self.registered(source, back) as (here, returned):
            lengths = [size] * slices
            for call, local in (
                (self.engine.batch_transfer_sync_write, here),
                (self.engine.batch_transfer_sync_read, returned),
            ):
                assert call(session, list(local + steps), list(remote + steps), lengths) == 0
        assert np.array_equal(source, back)
        assert self.written() - before == source.nbytes

    def install_transport(self) -> None:
        assert self.engine.protocol == "efa"
        assert len(self.engine.counters()) == self.nics

    def loopback_write(self) -> None:
        source, target = random_bytes(4 * MIB, 1), np.zeros(4 * MIB, np.uint8)
        before = self.written()
        with self.registered(source, target) as (here, there):
            own = self.engine.session
            assert self.engine.transfer_sync_write(own, here, there, source.nbytes) == 0
        assert np.array_equal(source, target)
        assert self.written() - before == source.nbytes

    def write_and_read(self) -> None:
        self.move(random_bytes(4 * MIB, 2), self.there("read", 4 * MIB), 1)

    def multi_write(self) -> None:
        self.move(random_bytes(MIB, 3), self.there("multi", MIB), 16)

    def stress_multiple_batches(self) -> None:
        remote = self.there("stress", MIB // 2)
        for batch in range(20):
            self.move(random_bytes(MIB // 2, 100 + batch), remote, 8)

    def warmup_segment_loopback(self) -> None:
        for session in (self.engine.session, self.peer.session):
            for _ in range(2):
                assert self.engine.warmup_efa_segment(session) == 0

    def warmup_segment_not_found(self) -> None:
        assert self.engine.warmup_efa_segment("127.0.0.1:1") != 0
        self.move(random_bytes(MIB, 4), self.there("after", MIB), 4)

    def register_memory_batch(self) -> None:
        buffers = [random_bytes(65536, 10 + i) for i in range(16)]
        addresses = [int(buffer.ctypes.data) for buffer in buffers]
        remote = self.there("batch", 16 * 65536)
        targets = [remote + i * 65536 for i in range(16)]
        lengths = [65536] * 16
        write = self.engine.batch_transfer_sync_write
        assert self.engine.batch_register_memory(addresses, lengths) == 0
        assert write(self.peer.session, addresses, targets, lengths) == 0
        assert self.engine.batch_unregister_memory(addresses) == 0
        assert write(self.peer.session, addresses, targets, lengths) != 0
        back = np.zeros(16 * 65536, np.uint8)
        with self.registered(back) as (here,):
            read = self.engine.transfer_sync_read
            assert read(self.peer.session, here, remote, back.nbytes) == 0
        assert np.array_equal(back, np.concatenate(buffers))

    def large_transfer(self) -> None:
        remote = self.there("large", 128 * MIB)
        self.move(random_bytes(64 * MIB, 5), remote + 64 * MIB, 64)

    def repeated_open_segment(self) -> None:
        remote = self.there("open", MIB)
        for seed in range(5):
            assert self.engine.send_probe(self.peer.session) == 0
            assert self.engine.warmup_efa_segment(self.peer.session) == 0
            self.move(random_bytes(MIB, 20 + seed), remote, 4)


NAMES = [name for name, value in vars(Cases).items() if callable(value) and name[0] != "_"]
NAMES = [name for name in NAMES if name not in ("registered", "written", "there", "move")]


def outcome(case: Callable[[], None]) -> str:
    try:
        case()
    except Exception:
        return traceback.format_exc()
    return ""


def main() -> None:
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "efa", "") == 0
    peer = Peer()
    cases = Cases(engine, peer, int(sys.argv[1]))
    print(json.dumps({name: outcome(getattr(cases, name)) for name in NAMES}))
    engine.close()
    peer.end()


if __name__ == "__main__":
    main()
