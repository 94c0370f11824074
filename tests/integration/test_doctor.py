"""`efa-kv doctor` moves real bytes: within a host, and to a running engine of somebody else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from efa_kv import EngineConfig, TransferEngine
from efa_kv.errors import PeerRefused, TransferTimeout
from efa_kv.runtime.borrower import Borrower
from efa_kv.tools import sim
from efa_kv.wire.notes import Note

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SIZE = 1 << 20


def doctor(tmp_path: Path, *words: str, variables: dict[str, str] | None = None) -> dict[str, Any]:
    """The findings by id; the command on simulated NICs when the test's engine is too."""
    base = {name: value for name, value in os.environ.items() if not name.startswith("EFA_KV_")}
    path = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "efa_kv.cli", "doctor", *words, f"--json={path}"],
        env={**base, **(variables or {})},
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert path.exists(), done.stdout + done.stderr
    return {one["id"]: one for one in json.loads(path.read_text())["findings"]}


def simulated(**more: Any) -> dict[str, str]:
    provider = sim.find_provider(os.environ.get("EFA_KV_SIM_PROVIDER"))
    return sim.environment({}, sim.Simulation(nics=3, **more), provider)


def test_bytes_move_within_the_host_over_every_simulated_nic(tmp_path: Path) -> None:
    found = doctor(tmp_path, "--require=efa", variables=simulated())["live.loopback"]
    assert found["severity"] == "good"
    assert "every byte right" in found["found"]
    assert "3 devices of provider efa" in found["found"]


def test_bytes_that_do_not_arrive_are_a_problem(tmp_path: Path) -> None:
    found = doctor(tmp_path, variables=simulated(no_copy=True))["live.loopback"]
    assert found["severity"] == "problem"
    assert "of 16777216 came back wrong" in found["found"]


def test_a_setting_that_stops_the_engine_is_found(tmp_path: Path) -> None:
    found = doctor(tmp_path, variables={"EFA_KV_DEVICES": "nothing*"})["live.loopback"]
    assert found["severity"] == "problem"
    assert "nothing*" in found["found"]


def test_a_running_engine_with_another_cache_is_tried_and_left_untouched(
    child: Callable[..., Any], tmp_path: Path
) -> None:
    server = child(
        protocol="tcp", scratch_bytes=SIZE, fingerprint="a model", fields={"model": "llama"}
    )
    server.ask("register", name="cache", size=SIZE, seed=7)
    found = doctor(
        tmp_path,
        f"--peer={server.session}",
        f"--peer-size={SIZE}",
        variables={"EFA_KV_PROTOCOL": "tcp"},
    )["live.peer"]
    assert found["severity"] in ("good", "note")
    assert "1 MiB with every byte right" in found["found"]
    assert server.ask("matches", name="cache", seed=7)


@pytest.fixture
def visitor() -> Any:
    with_borrower: list[TransferEngine] = []

    def start() -> tuple[TransferEngine, Borrower]:
        engine = TransferEngine(EngineConfig(protocol="tcp", near=False))
        borrower = Borrower(engine)
        with_borrower.append(engine)
        engine.start()
        return engine, borrower

    yield start
    for engine in with_borrower:
        engine.close()


def test_what_was_lent_is_of_no_use_after_its_return(
    child: Callable[..., Any], visitor: Any, wait_until: Callable[..., None]
) -> None:
    server = child(protocol="tcp", scratch_bytes=SIZE, fingerprint="a model")
    engine, borrower = visitor()
    source = np.full(SIZE, 9, np.uint8)
    engine.register(source)
    peer = engine.connect(server.session)
    with borrower.borrow(peer, SIZE, 30.0, 20.0) as region:
        job = engine.write(peer, [source.ctypes.data], [region.address], [SIZE])
        assert job.wait(20).error is None
        with pytest.raises(PeerRefused, match="at most"), borrower.borrow(peer, 2 * SIZE, 9, 20):
            pass
        with pytest.raises(PeerRefused, match="somebody else"), borrower.borrow(peer, 1, 9, 20):
            pass
    wait_until(lambda: region.region not in peer.regions)
    late = engine.write(peer, [source.ctypes.data], [region.address], [SIZE]).wait(20)
    assert late.error is not None
    # The next one gets a region again.
    with borrower.borrow(peer, SIZE, 30.0, 20.0) as again:
        assert again.region != region.region


def test_a_loan_that_is_not_returned_ends_by_itself(
    child: Callable[..., Any], visitor: Any, wait_until: Callable[..., None]
) -> None:
    server = child(protocol="tcp", scratch_bytes=SIZE)
    engine, borrower = visitor()
    peer = engine.connect(server.session)
    with borrower.borrow(peer, SIZE, 0.5, 20.0) as region:
        wait_until(lambda: region.region in peer.regions)
        wait_until(lambda: region.region not in peer.regions, timeout_s=20.0)


def test_a_server_that_lends_nothing_says_so(child: Callable[..., Any], visitor: Any) -> None:
    server = child(protocol="tcp", scratch_bytes=0)
    engine, borrower = visitor()
    peer = engine.connect(server.session)
    with pytest.raises(PeerRefused, match="at most 0"), borrower.borrow(peer, SIZE, 9.0, 20.0):
        pass


def test_a_visitor_is_heard_on_scratch_memory_alone(visitor: Any) -> None:
    heard = []

    class Listener:
        message_types = (Note,)

        def on_message(self, *_: object) -> None:
            heard.append("message")

        def on_session(self, *_: object) -> None:
            heard.append("session")

        def on_job(self, *_: object) -> None:
            heard.append("job")

        def on_timer(self, _now: float) -> None:
            return None

    server = TransferEngine(EngineConfig(protocol="tcp", near=False, scratch_bytes=SIZE))
    server.add_handler(Listener())  # type: ignore[arg-type]
    server.describe(fingerprint=b"a model", fields={"model": "llama"})
    with server:
        engine, borrower = visitor()
        peer = engine.connect(server.session)
        note = Note(number=1, name="n", text="t")
        engine.control.later(lambda _now: engine.control.send(peer.handle, note) and None)
        # Answered after the note, on the same connection.
        with borrower.borrow(peer, SIZE, 9.0, 20.0):
            assert heard == []


def test_an_engine_that_knows_no_scratch_memory_is_a_timeout(
    child: Callable[..., Any], visitor: Any
) -> None:
    server = child(protocol="tcp")
    engine, borrower = visitor()
    peer = engine.connect(server.session)
    server.kill()
    with pytest.raises(TransferTimeout, match="older"), borrower.borrow(peer, SIZE, 9.0, 0.8):
        pass
