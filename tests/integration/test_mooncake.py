"""The engine under Mooncake's names: two processes, every byte checked."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from child_process import ChildProcess, start_process

from efa_kv.mooncake import TransferEngine, TransferNotify, TransferOpcode

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("mooncake_child.py")
PROTOCOLS = ["tcp", "shm"]
DELIBERATE = ("EFA_KV_", "MC_", "MOONCAKE_")


class ChildEngine(ChildProcess):
    """An engine there; any method name is a request (see mooncake_child.py)."""

    def __init__(self, protocol: str, name: str = "127.0.0.1") -> None:
        settings = {"EFA_KV_NEAR": "false"}
        super().__init__(
            start_process(PROGRAM, without=DELIBERATE, environment=settings, quiet=True)
        )
        opened = self.ask("open", name=name, protocol=protocol)
        assert opened["code"] == 0
        self.session = opened["session"]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(DELIBERATE):
            monkeypatch.delenv(name)
    monkeypatch.setenv("EFA_KV_NEAR", "false")


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def target() -> Iterator[Callable[..., ChildEngine]]:
    children: list[ChildEngine] = []

    def start(protocol: str, name: str = "127.0.0.1") -> ChildEngine:
        children.append(ChildEngine(protocol, name))
        return children[-1]

    yield start
    for child in children:
        child.end()


@pytest.fixture
def opened() -> Iterator[Callable[[str], TransferEngine]]:
    engines: list[TransferEngine] = []

    def start(protocol: str) -> TransferEngine:
        engine = TransferEngine()
        engines.append(engine)
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", protocol, "") == 0
        return engine

    yield start
    for engine in engines:
        engine.close()
    KEPT.clear()


def random_bytes(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def digest(values: np.ndarray) -> int:
    wide = values.astype(np.uint64)
    return int((wide * np.arange(1, len(wide) + 1, dtype=np.uint64)).sum())


KEPT: list[np.ndarray] = []


def registered(engine: TransferEngine, values: np.ndarray) -> int:
    KEPT.append(values)  # an address keeps nothing alive
    assert engine.register_memory(values.ctypes.data, values.nbytes) == 0
    return int(values.ctypes.data)


def test_write_and_read_back(opened: Any, target: Any, protocol: str) -> None:
    engine, child = opened(protocol), target(protocol)
    size = 1_000_003
    remote = child.ask("register", name="a", size=size)
    source, back = random_bytes(size, 1), np.zeros(size, np.uint8)
    here, returned = registered(engine, source), registered(engine, back)
    assert engine.transfer_sync_write(child.session, here, remote, size) == 0
    # Asked at once: 0 means landed, so there is nothing to wait for.
    assert child.ask("digest", name="a") == digest(source)
    assert engine.transfer_sync_read(child.session, returned, remote, size) == 0
    assert np.array_equal(source, back)


@pytest.mark.parametrize("kind", ["lists", "int64", "uint64", "mixed"])
def test_batches_of_every_kind_of_sequence(
    opened: Any, target: Any, protocol: str, kind: str
) -> None:
    engine, child = opened(protocol), target(protocol)
    count, page = 200, 1024
    remote = child.ask("register", name="a", size=count * page)
    source = random_bytes(count * page, 2)
    here = registered(engine, source)
    order = np.random.default_rng(3).permutation(count)
    local = here + np.arange(count) * page
    there = remote + order * page
    lengths = np.full(count, page)
    lengths[7] = 0  # nothing to move there
    columns: list[Any] = [local, there, lengths]
    if kind == "lists":
        columns = [column.tolist() for column in columns]
    elif kind == "uint64":
        columns = [column.astype(np.uint64) for column in columns]
    elif kind == "mixed":
        columns = [tuple(local.tolist()), there, lengths.astype(np.int32)]
    assert engine.batch_transfer_sync_write(child.session, *columns) == 0
    expected = np.zeros((count, page), np.uint8)
    expected[order] = source.reshape(count, page)
    expected[order[7]] = 0
    assert child.ask("digest", name="a") == digest(expected.reshape(-1))


def test_four_threads_at_once_from_the_first_contact_on(
    opened: Any, target: Any, protocol: str
) -> None:
    engine, child = opened(protocol), target(protocol)
    size, threads, rounds = 1 << 18, 4, 12
    remote = child.ask("register", name="a", size=size * threads)
    source = random_bytes(size * threads, 4)
    here = registered(engine, source)

    def work(thread: int) -> list[int]:
        offset = thread * size
        pieces = np.arange(offset, offset + size, 4096, dtype=np.uint64)
        order = np.random.default_rng(thread).permutation(len(pieces))
        return [
            engine.batch_transfer_sync_write(
                child.session,
                here + pieces[order],
                remote + pieces[order],
                np.full(len(pieces), 4096),
            )
            for _ in range(rounds)
        ]

    with ThreadPoolExecutor(threads) as pool:
        codes = list(pool.map(work, range(threads)))
    assert codes == [[0] * rounds] * threads
    assert child.ask("digest", name="a") == digest(source)


def test_other_threads_run_while_one_waits(opened: Any, target: Any) -> None:
    engine, child = opened("tcp"), target("tcp")
    size = 1 << 20
    remote = child.ask("register", name="a", size=size)
    here = registered(engine, random_bytes(size, 5))
    assert engine.transfer_sync_write(child.session, here, remote, size) == 0
    child.process.send_signal(signal.SIGSTOP)
    thread = threading.Thread(target=engine.send_probe, args=(child.session,), daemon=True)
    thread.start()
    begun, ticks = time.monotonic(), 0
    while thread.is_alive() and time.monotonic() - begun < 2:
        ticks += 1
        time.sleep(0.001)
    child.process.send_signal(signal.SIGCONT)
    thread.join(10)
    assert ticks > 300


def test_batch_ids(opened: Any, target: Any, protocol: str) -> None:
    engine, child = opened(protocol), target(protocol)
    size = 1 << 20
    remote = child.ask("register", name="a", size=size)
    source = random_bytes(size, 6)
    here = registered(engine, source)
    first = engine.batch_transfer_async_write(child.session, [here], [remote], [size // 2])
    half = size // 2
    second = engine.batch_transfer_async(
        child.session, [here + half], [remote + half], [half], TransferOpcode.Write
    )
    third = engine.transfer_submit_write(child.session, here, remote, 1)
    assert len({0, first, second, third}) == 4
    assert engine.get_batch_transfer_status([first, second]) == 0
    assert child.ask("digest", name="a") == digest(source)
    deadline = time.monotonic() + 10
    while (status := engine.transfer_check_status(third)) == 0:
        assert time.monotonic() < deadline
    assert status == 1
    # Used up, made up, and not even numbers of ours.
    assert engine.transfer_check_status(third) == -1
    assert engine.get_batch_transfer_status([first]) == -1
    assert engine.get_batch_transfer_status([12345, -1, 0]) == -1
    assert engine.batch_transfer_async_read(child.session, [here], [remote], [1, 2]) == 0


def test_a_failure_names_session_and_cause_and_moves_nothing(
    opened: Any, target: Any, protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine, child = opened(protocol), target(protocol)
    size = 4096
    remote = child.ask("register", name="a", size=size)
    here = registered(engine, random_bytes(size, 7))
    wrong: list[tuple[Any, Any, Any]] = [
        ([here, here], [remote, remote + size], [8, 8]),  # beyond the peer's memory
        ([here, here + size], [remote, remote], [8, 8]),  # beyond ours
        ([here, here], [remote], [8, 8]),
        ([here, -1], [remote, remote], [8, 8]),
        ([float(here)], [remote], [8]),
    ]
    for columns in wrong:
        caplog.clear()
        assert engine.batch_transfer_sync_write(child.session, *columns) == -1
        (record,) = (r for r in caplog.records if r.levelno >= logging.ERROR)
        assert child.session in record.getMessage()
    assert child.ask("content", name="a", offset=0, size=8) == [0] * 8
    assert engine.transfer_sync_write(child.session, here, remote, 8) == 0


def test_connections_that_break_are_nothing_a_caller_hears_of(
    opened: Any, target: Any, protocol: str
) -> None:
    engine, child = opened(protocol), target(protocol)
    size = 32 << 20
    source = random_bytes(size, 11)
    here = registered(engine, source)
    remote = child.ask("register", name="a", size=size)
    resets: list[int] = []
    breaker = threading.Thread(
        target=lambda: resets.append(child.ask("break_connections", seconds=2.0))
    )
    breaker.start()
    codes = []
    while breaker.is_alive():
        codes.append(engine.transfer_sync_write(child.session, here, remote, size))
    breaker.join()
    assert resets[0] > 1
    assert set(codes) == {0}
    assert child.ask("digest", name="a") == digest(source)


def test_memory_that_comes_later_and_goes(opened: Any, target: Any, protocol: str) -> None:
    engine, child = opened(protocol), target(protocol)
    source = random_bytes(4096, 8)
    here = registered(engine, source)
    assert engine.get_first_buffer_address(child.session) == 0
    remote = child.ask("register", name="a", size=4096)
    assert engine.transfer_sync_write(child.session, here, remote, 4096) == 0
    assert engine.get_first_buffer_address(child.session) == remote
    assert child.ask("unregister", name="a") == 0
    assert engine.transfer_sync_write(child.session, here, remote, 4096) == -1
    assert child.ask("unregister", name="a") == -3
    assert engine.unregister_memory(here) == 0
    assert engine.transfer_sync_write(child.session, here, remote, 4096) == -1


def test_all_or_nothing_of_a_batch_is_registered(opened: Any) -> None:
    engine = opened("tcp")
    one, two = np.zeros(4096, np.uint8), np.zeros(4096, np.uint8)
    addresses = [one.ctypes.data, two.ctypes.data]
    assert engine.batch_register_memory(addresses, [4096, 0]) != 0
    assert engine.unregister_memory(addresses[0]) == -3
    assert engine.batch_register_memory(np.array(addresses), [4096, 4096]) == 0
    assert engine.batch_register_memory(addresses, [4096]) == -1
    assert engine.batch_unregister_memory(addresses) == 0
    assert engine.batch_unregister_memory(addresses) == -3


def test_notes_come_behind_the_bytes_once(opened: Any, target: Any, protocol: str) -> None:
    engine, child = opened(protocol), target(protocol)
    remote = child.ask("register", name="a", size=64)
    here = registered(engine, random_bytes(64, 9))
    for number in range(3):
        note = TransferNotify("chunk", f"number {number}")
        code = engine.transfer_sync(child.session, here, remote, 64, TransferOpcode.Write, note)
        assert code == 0
    assert child.ask("notifies") == [["chunk", f"number {number}"] for number in range(3)]
    assert child.ask("notifies") == []
    too_long = TransferNotify("chunk", "x" * 100_000)
    assert (
        engine.batch_transfer_sync(
            child.session, [here], [remote], [64], TransferOpcode.Read, too_long
        )
        == -1
    )


def test_managed_buffers(opened: Any, target: Any) -> None:
    engine, child = opened("tcp"), target("tcp")
    remote = child.ask("register", name="a", size=64)
    buffer = engine.allocate_managed_buffer(64)
    assert buffer > 0
    assert engine.write_bytes_to_buffer(buffer, "efa-kv!", 7) == 0
    assert engine.transfer_sync_write(child.session, buffer, remote, 7) == 0
    assert bytes(child.ask("content", name="a", offset=0, size=7)) == b"efa-kv!"
    assert engine.read_bytes_from_buffer(buffer, 7) == b"efa-kv!"
    assert engine.write_bytes_to_buffer(buffer + 60, b"12345", 5) == -1
    with pytest.raises(Exception, match="registered host memory"):
        engine.read_bytes_from_buffer(buffer, 65)
    assert engine.free_managed_buffer(buffer, 64) == 0
    assert engine.free_managed_buffer(buffer, 64) == -1
    assert engine.allocate_managed_buffer(-1) == 0


def test_probe_and_warm_up(opened: Any, target: Any, protocol: str) -> None:
    engine, child = opened(protocol), target(protocol)
    assert engine.warmup_efa_segment(child.session) == 0
    assert engine.send_probe(child.session) == 0
    child.process.kill()
    child.process.wait()
    assert engine.send_probe(child.session) == -1
    assert engine.warmup_efa_segment("127.0.0.1:1") != 0
    assert engine.send_probe("no port in it") == -1


@pytest.mark.slow
def test_a_peer_that_dies_and_comes_back_on_its_port(opened: Any, target: Any) -> None:
    engine, child = opened("tcp"), target("tcp")
    size = 1 << 16
    source = random_bytes(size, 10)
    here = registered(engine, source)
    remote = child.ask("register", name="a", size=size)
    assert engine.transfer_sync_write(child.session, here, remote, size) == 0
    child.process.kill()
    child.process.wait()
    begun = time.monotonic()
    assert engine.transfer_sync_write(child.session, here, remote, size) == -1
    assert time.monotonic() - begun < 40
    again = target("tcp", child.session)
    assert again.session == child.session
    remote = again.ask("register", name="a", size=size)
    assert engine.transfer_sync_write(again.session, here, remote, size) == 0
    assert again.ask("digest", name="a") == digest(source)


def test_engines_of_one_host_differ_by_port_only(opened: Any, target: Any) -> None:
    engine = opened("tcp")
    children = [target("tcp") for _ in range(3)]
    here = registered(engine, np.arange(8, dtype=np.uint8))
    for number, child in enumerate(children):
        remote = child.ask("register", name="a", size=8)
        assert engine.transfer_sync_write(child.session, here + number, remote, 1) == 0
    for number, child in enumerate(children):
        assert child.ask("content", name="a", offset=0, size=2) == [number, 0]


class FakeMooncake(threading.Thread):
    """Answers like a Mooncake engine's daemon: length, kind, JSON."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.session = f"127.0.0.1:{self.listener.getsockname()[1]}"

    def run(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection:
                head = connection.recv(9)
                if len(head) < 9 or struct.unpack("<Q", head[:8])[0] > 1 << 20:
                    continue
                body = json.dumps({"name": "x", "protocol": "efa", "devices": [], "buffers": []})
                connection.sendall(struct.pack("<QB", len(body) + 1, 1) + body.encode())


def test_a_mooncake_peer_is_recognised_and_refused(
    opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = opened("tcp")
    here = registered(engine, np.zeros(64, np.uint8))
    stranger = FakeMooncake()
    stranger.start()
    try:
        assert engine.transfer_sync_write(stranger.session, here, here, 8) == -1
    finally:
        stranger.listener.close()
    text = caplog.text
    assert "Mooncake transfer engine listens there" in text
    assert "efa-kv on both sides" in text


def test_waiting_out_back_pressure(
    opened: Any, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EFA_KV_MAX_JOBS", "4")
    monkeypatch.setenv("EFA_KV_MAX_IN_FLIGHT", "1")
    engine, child = opened("tcp"), target("tcp")
    size, threads = 1 << 16, 16
    remote = child.ask("register", name="a", size=size * threads)
    source = random_bytes(size * threads, 11)
    here = registered(engine, source)

    def work(thread: int) -> int:
        offset = thread * size
        return engine.transfer_sync_write(child.session, here + offset, remote + offset, size)

    with ThreadPoolExecutor(threads) as pool:
        assert list(pool.map(work, range(threads))) == [0] * threads
    assert child.ask("digest", name="a") == digest(source)


def test_a_stopped_peer_leaves_nothing_in_flight_behind_a_failure(
    opened: Any, target: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be fenced is refused until it is, and says so."""
    monkeypatch.setenv("EFA_KV_TRANSFER_TIMEOUT_S", "2")
    engine, child = opened("tcp"), target("tcp")
    size = 64 << 20
    source = np.full(size, 1, np.uint8)
    here = registered(engine, source)
    remote = child.ask("register", name="a", size=size)
    assert engine.transfer_sync_write(child.session, here, remote, 8) == 0
    child.process.send_signal(signal.SIGSTOP)
    assert engine.transfer_sync_write(child.session, here, remote, size) == -1
    assert "could not be fenced" in caplog.text
    begun = time.monotonic()
    assert engine.transfer_sync_write(child.session, here, remote, 8) == -1
    assert engine.send_probe(child.session) == -1
    assert time.monotonic() - begun < 1
    assert "is refused while" in caplog.text
    child.process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + 20
    while engine.send_probe(child.session) != 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert engine.transfer_sync_write(child.session, here, remote, 8) == 0


def test_calls_before_initialize_and_after_close() -> None:
    engine = TransferEngine()
    assert engine.transfer_sync_write("127.0.0.1:1", 1, 1, 1) == -1
    assert engine.batch_transfer_async_write("127.0.0.1:1", [1], [1], [1]) == 0
    assert engine.register_memory(1, 1) == -1
    assert engine.allocate_managed_buffer(1) == 0
    assert engine.send_probe("127.0.0.1:1") == -1
    with pytest.raises(RuntimeError, match="initialize"):
        engine.get_rpc_port()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == -1
    engine.close()
    engine.close()
    assert engine.transfer_sync_write("127.0.0.1:1", 1, 1, 1) == -1


@pytest.mark.parametrize(
    ("name", "metadata", "protocol", "words"),
    [
        ("127.0.0.1", "etcd://1.2.3.4:2379", "tcp", "metadata server"),
        ("127.0.0.1", "P2PHANDSHAKE", "rdma", "MOONCAKE_PROTOCOL=efa"),
        ("0.0.0.0", "P2PHANDSHAKE", "tcp", "host"),
        ("127.0.0.1:99999", "P2PHANDSHAKE", "tcp", "port"),
        ("192.0.2.1", "P2PHANDSHAKE", "tcp", "192.0.2.1"),
    ],
)
def test_what_cannot_be_opened_says_why(
    name: str, metadata: str, protocol: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert TransferEngine().initialize(name, metadata, protocol, "") == -1
    assert words in caplog.text


def test_the_port_is_taken_from_the_range_or_from_the_name(
    monkeypatch: pytest.MonkeyPatch, opened: Any
) -> None:
    assert 15000 <= opened("tcp").get_rpc_port() <= 17000
    monkeypatch.setenv("MC_MIN_RPC_PORT", "23450")
    monkeypatch.setenv("MC_MAX_RPC_PORT", "23459")
    first, second = opened("tcp"), opened("tcp")
    ports = {first.get_rpc_port(), second.get_rpc_port()}
    assert len(ports) == 2
    assert all(23450 <= port <= 23459 for port in ports)
    free = next(port for port in range(23450, 23460) if port not in ports)
    named = TransferEngine()
    assert named.initialize(f"127.0.0.1:{free}", "P2PHANDSHAKE", "tcp", "") == 0
    assert named.get_rpc_port() == free
    assert TransferEngine().initialize(f"127.0.0.1:{free}", "P2PHANDSHAKE", "tcp", "") == -1
    named.close()
