"""The HTTP endpoint of a running engine: pages, verdicts, limits, and who finds it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import efa_kv
from efa_kv import EngineConfig, TransferEngine
from efa_kv.errors import ConfigError, StaleHandle
from efa_kv.observe.trace import TraceDocument
from efa_kv.runtime import status
from efa_kv.tools import sim

Child = Callable[..., Any]
Wait = Callable[..., None]


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def config(**changes: Any) -> EngineConfig:
    return EngineConfig(**{"protocol": "tcp", "near": False, **changes})


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    with TransferEngine(config(http_port=free_port(), suspect_after_s=1.1)) as opened:
        yield opened


def get(engine: TransferEngine, page: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(f"{engine.status_url}/{page}", timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as refusal:
        return refusal.code, refusal.read()


def write(engine: TransferEngine, target: Any, **options: Any) -> Any:
    region = engine.register(np.zeros(4096, np.uint8))
    remote = target.ask("register", name="a", size=4096)["address"]
    return engine.write(target.session, [region.address], [remote], [4096], **options).wait(20)


def test_without_a_port_there_is_no_endpoint() -> None:
    with TransferEngine(config()) as engine:
        assert engine.status_url is None


def test_life_readiness_and_what_they_are_made_of(engine: TransferEngine, child: Child) -> None:
    assert get(engine, "healthz")[0] == 200
    code, body = get(engine, "readyz")  # nothing is registered yet
    assert code == 503
    assert [c["name"] for c in json.loads(body)["checks"] if not c["ok"]] == ["registration"]
    target = child(protocol="tcp")
    assert write(engine, target).error is None
    assert get(engine, "readyz")[0] == 200
    state = json.loads(get(engine, "state")[1])
    assert state["session"] == engine.session
    assert state["rails"][0]["bytes_written"] == 4096
    assert state["peers"] == [
        {"session": target.session, "state": "ready", "reason": "", "jobs": 0}
    ]
    assert state["transfers"]["landed"] == 1
    assert b'efa_kv_written_bytes_total{nic="' in get(engine, "metrics")[1]
    assert get(engine, "nonsense")[0] == 404
    assert engine.health().ready
    assert efa_kv.health()[engine.session].ready


def test_a_dead_peer_is_told_and_so_is_its_return(
    engine: TransferEngine, child: Child, wait_until: Wait
) -> None:
    target = child(protocol="tcp")
    assert write(engine, target).error is None
    target.kill()
    assert write_to_the_dead(engine, target.session) is not None
    wait_until(lambda: get(engine, "readyz")[0] == 503)
    code, body = get(engine, "healthz")
    assert code == 200
    names = {c["name"] for c in json.loads(body)["checks"] if not c["ok"]}
    assert names & {"peers", "last transfer"}
    again = child(protocol="tcp")
    assert write(engine, again).error is None
    wait_until(lambda: get(engine, "readyz")[0] == 200)


def write_to_the_dead(engine: TransferEngine, session: str) -> Any:
    peer = engine.connect(session)
    region = next(iter(peer.regions.values()))
    (local,) = engine.published.regions
    job = engine.write(peer, [local.address], [region.address], [64], timeout_s=3)
    return job.wait(20).error


def test_the_trace_tells_what_each_rail_carried(engine: TransferEngine, child: Child) -> None:
    assert write(engine, child(protocol="tcp")).error is None
    document = msgspec.json.decode(get(engine, "trace")[1], type=TraceDocument)
    moves = [span for span in document.spans if span.stage == "move"]
    assert [(span.bytes, span.operations, span.rail) for span in moves] == [(4096, 1, 0)]
    assert {"queue", "land"} <= {span.stage for span in document.spans}
    assert all(span.begin_s <= span.end_s for span in document.spans)
    assert document == msgspec.structs.replace(
        engine.trace(), wall_clock_offset_s=document.wall_clock_offset_s
    )
    assert [one.session for one in efa_kv.trace()] == [engine.session]


def test_workers_of_one_host_take_the_next_port_until_none_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port()
    with (
        TransferEngine(config(http_port=port)) as one,
        TransferEngine(config(http_port=port)) as two,
    ):
        assert one.status_url != two.status_url
        assert {note.url for note in status.find_notes()} == {one.status_url, two.status_url}
        monkeypatch.setattr(status, "_PORTS", 1)
        with pytest.raises(ConfigError, match="http_port"):
            TransferEngine(config(http_port=port))
    assert status.find_notes() == []


def test_more_connections_than_it_serves_are_turned_away(engine: TransferEngine) -> None:
    host, _, port = str(engine.status_url).removeprefix("http://").rpartition(":")
    idle = [socket.create_connection((host, int(port)), 5) for _ in range(status._CONNECTIONS_MAX)]
    with socket.create_connection((host, int(port)), 5) as refused:
        refused.settimeout(5)
        assert refused.recv(64).startswith(b"HTTP/1.1 503")
    for one in idle:
        one.close()
    assert get(engine, "healthz")[0] == 200


def test_a_closed_engine_has_no_state(engine: TransferEngine) -> None:
    url = engine.status_url
    engine.close()
    with pytest.raises(StaleHandle):
        engine.state()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{url}/healthz", timeout=2)


def test_notes_of_the_dead_and_of_others_are_not_believed(tmp_path: Path) -> None:
    folder = tmp_path / "efa-kv"
    folder.mkdir()
    done = subprocess.Popen([sys.executable, "-c", "pass"])
    done.wait()
    for name, note in {
        "dead.json": status.Note(done.pid, "127.0.0.1:1", "http://127.0.0.1:1"),
        "odd.json": status.Note(os.getpid(), "127.0.0.1:1", "file:///etc/passwd"),
    }.items():
        (folder / name).write_bytes(msgspec.json.encode(note))
    (folder / "broken.json").write_text("{")
    assert status.find_notes() == []
    assert not (folder / "dead.json").exists()
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert status.find_notes() == []


ON_A_DYING_NIC = """
import json, numpy, sys, urllib.request
from efa_kv import EngineConfig, TransferEngine
config = EngineConfig(protocol="efa", near=False, http_port=int(sys.argv[1]))
with TransferEngine(config) as one, TransferEngine(config) as two:
    local = one.register(numpy.ones(1 << 22, numpy.uint8))
    target = numpy.zeros(1 << 22, numpy.uint8)
    remote = two.register(target)
    for _ in range(40):
        one.write(two.session, [local.address], [remote.address], [1 << 22]).wait(20)
        state = one.state()
        if any(rail.down for rail in state.rails):
            break
    with urllib.request.urlopen(one.status_url + "/readyz") as answer:
        health = json.load(answer)
    print(json.dumps({"out": [rail.name for rail in state.rails if rail.down],
                      "checks": {c["name"]: c["found"] for c in health["checks"]},
                      "marks": [mark.text for mark in one.trace().marks]}))
"""


def test_a_nic_that_dies_is_named_while_the_others_serve(tmp_path: Path) -> None:
    simulation = sim.Simulation(nics=4, faults=("nic=1,die_at_op=20",), seed=3)
    provider = sim.find_provider(os.environ.get("EFA_KV_SIM_PROVIDER"))
    done = subprocess.run(
        [sys.executable, "-c", ON_A_DYING_NIC, str(free_port())],
        env=sim.environment(dict(os.environ), simulation, provider),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    (name,) = found["out"]
    assert found["checks"]["rails"] == f"out: {name}"
    assert found["checks"]["fabric"].startswith("3 of 4 rails are up")
    assert f"{name} is out" in found["marks"]
