"""Peers that die, stop, restart or never answer: nobody else pays for it."""

from __future__ import annotations

import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from efa_kv import EngineConfig, TransferEngine
from efa_kv.errors import EfaKvError, PeerError, PeerRefused, PeerUnreachable
from efa_kv.wire.session import SessionState

Child = Callable[..., Any]
Wait = Callable[..., None]
SIZE = 1 << 20


def _config(**changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "protocol": "tcp",
        "near": False,
        "heartbeat_interval_s": 0.1,
        "suspect_after_s": 0.4,
    }
    return EngineConfig(**{**values, **changes})


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    with TransferEngine(_config()) as opened:
        yield opened


def _write(engine: TransferEngine, session: str, remote: int, timeout_s: float = 2.0) -> Any:
    region = engine.register(np.full(SIZE, 7, np.uint8))
    return engine.write(session, [region.address], [remote], [SIZE], timeout_s=timeout_s)


@pytest.fixture
def black_hole() -> Iterator[str]:
    """A port that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        kept: list[socket.socket] = []
        server.settimeout(0.1)
        stop = threading.Event()

        def accept() -> None:
            while not stop.is_set():
                try:
                    kept.append(server.accept()[0])
                except OSError:
                    continue

        thread = threading.Thread(target=accept)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        stop.set()
        thread.join()
        for connection in kept:
            connection.close()


@pytest.mark.parametrize("protocol", ["tcp", "shm"])
def test_target_killed(child: Child, protocol: str) -> None:
    with TransferEngine(_config(protocol=protocol)) as engine:
        target = child(protocol=protocol)
        remote = target.ask("register", name="a", size=SIZE)["address"]
        assert _write(engine, target.session, remote).wait(10).error is None
        target.kill()
        begun = time.monotonic()
        try:
            result = _write(engine, target.session, remote, 1.0).wait(10)
            assert result.error is not None
        except PeerError:
            pass
        assert time.monotonic() - begun < 4


def test_initiator_killed_in_the_middle(
    engine: TransferEngine, child: Child, wait_until: Wait
) -> None:
    buffer = np.zeros(64 << 20, np.uint8)
    region = engine.register(buffer)
    source = child(protocol="tcp")
    local = source.ask("register", name="a", size=len(buffer), seed=1)["address"]
    source.send(
        "write",
        session=engine.session,
        local=[local],
        remote=[region.address],
        lengths=[len(buffer)],
    )
    wait_until(lambda: buffer[:4096].any())
    source.kill()
    # The one that is left serves others as before.
    other = child(protocol="tcp")
    local = other.ask("register", name="a", size=4096, seed=2)["address"]
    arguments = {"local": [local], "remote": [region.address], "lengths": [4096]}
    assert other.ask("write", session=engine.session, **arguments)["error"] is None
    expected = np.random.default_rng(2).integers(0, 256, 4096, np.uint8)
    wait_until(lambda: np.array_equal(buffer[:4096], expected))


@pytest.mark.parametrize("protocol", ["tcp", "shm"])
def test_stopped_target_ends_at_the_deadline_and_comes_back(child: Child, protocol: str) -> None:
    with TransferEngine(_config(protocol=protocol)) as engine:
        target = child(protocol=protocol)
        remote = target.ask("register", name="a", size=SIZE)["address"]
        assert _write(engine, target.session, remote).wait(10).error is None
        target.signal(signal.SIGSTOP)
        begun = time.monotonic()
        region = engine.register(np.full(32 << 20, 9, np.uint8))
        count = 32
        job = engine.write(
            target.session,
            [region.address + index * SIZE for index in range(count)],
            [remote] * count,
            [SIZE] * count,
            timeout_s=0.5,
        )
        job.wait(10)
        assert time.monotonic() - begun < 3
        target.signal(signal.SIGCONT)
        for _ in range(50):
            try:
                if _write(engine, target.session, remote).wait(10).error is None:
                    break
            except EfaKvError:
                time.sleep(0.1)
        else:
            raise AssertionError("the peer that came back was not reachable")


def test_stopped_peer_costs_the_caller_nothing(
    engine: TransferEngine, child: Child, wait_until: Wait
) -> None:
    stopped, good = child(protocol="tcp"), child(protocol="tcp")
    remote = good.ask("register", name="a", size=SIZE)["address"]
    handle = engine.connect(stopped.session).handle
    engine.connect(good.session)
    stopped.signal(signal.SIGSTOP)
    took_s = []
    for _ in range(200):
        begun = time.monotonic()
        engine.control.call(lambda: engine.control.sessions.broadcast(_large_change()))
        took_s.append(time.monotonic() - begun)
    assert statistics.median(took_s) < 0.01
    assert _write(engine, good.session, remote).wait(5).error is None
    engine.control.later(lambda now: handle.machine.use(now))
    engine.control.later(lambda now: engine.control.sessions.send(handle, _ping(engine), now))
    wait_until(lambda: handle.state is SessionState.SUSPECT)
    stopped.signal(signal.SIGCONT)
    wait_until(lambda: handle.state is SessionState.READY)


def _large_change() -> Any:
    from efa_kv.memory import Change
    from efa_kv.types import KeyRecord, RegionRecord

    keys = tuple(KeyRecord(index, 1, 0, 0, 1) for index in range(1000))
    return Change(1, (RegionRecord(1, 4096, 1, 0, 3, keys),))


def _ping(engine: TransferEngine) -> Any:
    from efa_kv.wire.messages import Ping

    return Ping(incarnation=engine.incarnation)


@pytest.mark.slow
@pytest.mark.parametrize("restarted", ["target", "initiator"])
def test_restart_on_the_same_port_three_times(child: Child, restarted: str) -> None:
    """Whoever restarts, the next transfer works, after one failed request at most."""
    with TransferEngine(_config()) as stays:
        region = stays.register(np.zeros(SIZE, np.uint8))
        restarts = child(protocol="tcp")
        port = int(restarts.session.rpartition(":")[2])
        incarnations = {restarts.incarnation}
        for round_number in range(4):
            address = restarts.ask("register", name="a", size=SIZE)["address"]
            restarts.ask("fill", name="a", value=round_number + 1)
            failures = 0
            while True:
                try:
                    if restarted == "target":
                        job = _write(stays, restarts.session, address, 1.0)
                        assert job.wait(10).error is None
                    else:
                        answer = restarts.ask(
                            "write",
                            session=stays.session,
                            local=[address],
                            remote=[region.address],
                            lengths=[SIZE],
                        )
                        assert answer["error"] is None
                    break
                except (EfaKvError, AssertionError):
                    failures += 1
                    assert failures <= 1
            if round_number < 3:
                restarts.kill()
                restarts = child(protocol="tcp", port=port)
                assert restarts.incarnation not in incarnations
                incarnations.add(restarts.incarnation)


def test_crossing_greetings(child: Child) -> None:
    """Both sides connect at the same moment, many times, and always find each other."""
    for _ in range(10):
        with (
            TransferEngine(_config()) as one,
            TransferEngine(_config()) as two,
        ):
            barrier = threading.Barrier(2)
            found: dict[str, Any] = {}

            def meet(
                a: TransferEngine,
                b: TransferEngine,
                name: str,
                barrier: threading.Barrier = barrier,
                found: dict[str, Any] = found,
            ) -> None:
                barrier.wait()
                found[name] = a.connect(b.session)

            threads = [
                threading.Thread(target=meet, args=(one, two, "one")),
                threading.Thread(target=meet, args=(two, one, "two")),
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert found["one"].incarnation == two.incarnation
            assert found["two"].incarnation == one.incarnation
            assert len(one.control.sessions) == len(two.control.sessions) == 1


def test_black_hole_slows_nobody(engine: TransferEngine, child: Child, black_hole: str) -> None:
    target = child(protocol="tcp")
    remote = target.ask("register", name="a", size=SIZE)["address"]
    failures: list[EfaKvError] = []

    def knock() -> None:
        with pytest.raises(PeerUnreachable) as caught:
            engine.connect(black_hole, timeout_s=1.5)
        failures.append(caught.value)

    threads = [threading.Thread(target=knock) for _ in range(8)]
    for thread in threads:
        thread.start()
    took_s = []
    for _ in range(20):
        begun = time.monotonic()
        assert _write(engine, target.session, remote).wait(5).error is None
        took_s.append(time.monotonic() - begun)
    for thread in threads:
        thread.join()
    assert len(failures) == 8
    assert black_hole in str(failures[0])
    assert statistics.median(took_s) < 0.5


def test_nobody_there(engine: TransferEngine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        session = f"127.0.0.1:{server.getsockname()[1]}"
    begun = time.monotonic()
    with pytest.raises(PeerUnreachable, match=session):
        engine.connect(session, timeout_s=0.5)
    assert time.monotonic() - begun < 2


def test_a_name_without_an_address(engine: TransferEngine) -> None:
    with pytest.raises(PeerUnreachable, match="no_such_name"):
        engine.connect("no_such_name.invalid:5000", timeout_s=20)


def test_names_are_resolved(engine: TransferEngine, child: Child) -> None:
    target = child(protocol="tcp")
    port = target.session.rpartition(":")[2]
    assert engine.connect(f"localhost:{port}").incarnation == target.incarnation


def test_an_engine_that_closes_says_so(
    engine: TransferEngine, child: Child, wait_until: Wait
) -> None:
    target = child(protocol="tcp")
    peer = engine.connect(target.session)
    assert target.ask("close") < 2
    wait_until(lambda: not peer.ready)
    with pytest.raises(PeerUnreachable, match="closed by the peer"):
        engine.write(peer, [1], [1], [1])


def test_too_many_peers_are_refused(child: Child) -> None:
    with TransferEngine(_config(max_peers=2)) as engine:
        targets = [child(protocol="tcp") for _ in range(3)]
        for target in targets[:2]:
            assert target.ask("connect", session=engine.session)
        with TransferEngine(_config()) as third, pytest.raises(PeerRefused, match="max_peers"):
            third.connect(engine.session)
        targets[0].kill()
        handle = engine.control.sessions._by_address[targets[0].session]
        engine.control.later(lambda now: engine.control.sessions.send(handle, _ping(engine), now))
        time.sleep(1.0)
        # The place of the one that is gone can be taken.
        assert targets[2].ask("connect", session=engine.session)
