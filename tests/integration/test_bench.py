"""`efa-kv bench` and `efa-kv probe` between two processes: right bytes and right counts.

Rates are never looked at: what a shared machine can move in a second says nothing.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from efa_kv.tools import sim
from efa_kv.tools.loopback import Target, TargetSettings, cpu_seconds

pytestmark = [pytest.mark.integration, pytest.mark.slow]

COMMAND = [sys.executable, "-m", "efa_kv.cli"]
SMALL = ["--buffer_size=16M", "--batch_size=32", "--duration=0.2", "--use_vram=false"]
STRIPE_BYTES = 1 << 20


def environment(**simulation: Any) -> dict[str, str]:
    """Without settings of the caller's; with keywords, on simulated NICs."""
    base = {name: value for name, value in os.environ.items() if not name.startswith("EFA_KV_")}
    if not simulation:
        return base
    provider = sim.find_provider(os.environ.get("EFA_KV_SIM_PROVIDER"))
    return sim.environment(base, sim.Simulation(**simulation), provider)


def run(*words: str, **simulation: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words],
        env=environment(**simulation),
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )


def bench(tmp_path: Path, *words: str, **simulation: Any) -> dict[str, Any]:
    path = tmp_path / "out.json"
    done = run("bench", "--loopback", *SMALL, *words, f"--json={path}", **simulation)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text())


@pytest.mark.parametrize("protocol", ["tcp", "shm"])
@pytest.mark.parametrize("operation", ["write", "read"])
@pytest.mark.parametrize("pattern", ["scattered", "contiguous"])
def test_every_byte_is_right(tmp_path: Path, protocol: str, operation: str, pattern: str) -> None:
    found = bench(
        tmp_path,
        "--verify",
        f"--protocol={protocol}",
        f"--operation={operation}",
        f"--pattern={pattern}",
        "--block_size=16384",
        "--threads=3",
    )
    assert found["verified"] is True
    assert found["descriptors"] == found["batches"] * 32
    assert found["bytes"] == found["descriptors"] * 16384
    assert sum(rail["bytes"] for rail in found["rails"]) == found["bytes"]
    assert found["cpu_seconds"] > 0
    assert found["target_cpu_seconds"] > 0
    assert 0 < found["p50_us"] <= found["p99_us"]


def test_the_json_has_the_promised_keys(tmp_path: Path) -> None:
    found = bench(tmp_path, "--protocol=shm")
    wanted = (
        "bytes_per_second descriptors_per_second cpu_seconds wall_seconds p50_us p99_us "
        "verified provider rails"
    )
    assert set(wanted.split()) <= set(found)
    assert {"name", "bytes", "operations"} <= set(found["rails"][0])
    assert found["verified"] is None


def test_a_run_is_merged_and_cut_into_stripes(tmp_path: Path) -> None:
    found = bench(
        tmp_path, "--protocol=shm", "--pattern=contiguous", "--block_size=65536", "--threads=1"
    )
    stripes = -(-32 * 65536 // STRIPE_BYTES)
    assert found["operations"] == found["batches"] * stripes


def test_scattered_blocks_are_operations_of_their_own(tmp_path: Path) -> None:
    found = bench(tmp_path, "--protocol=shm", "--block_size=4096", "--threads=1")
    assert found["operations"] == found["descriptors"]


def test_a_sweep_goes_through_the_sizes(tmp_path: Path) -> None:
    found = bench(tmp_path, "--protocol=shm", "--sweep", "--batch_size=2", "--threads=1")
    sizes = [one["block_size_bytes"] for one in found["sweep"]]
    assert sizes == sorted(sizes)
    assert len(sizes) > 4
    assert found["bytes_per_second"] == max(one["bytes_per_second"] for one in found["sweep"])


def test_a_small_buffer_is_raised_and_said(tmp_path: Path) -> None:
    done = run("bench", "--loopback", *SMALL, "--protocol=shm", "--buffer_size=4K", "--threads=2")
    assert done.returncode == 0, done.stderr
    assert "--buffer-size raised from 4096" in done.stderr
    assert re.search(r"Test completed: duration [\d.]+, batch count \d+, throughput ", done.stdout)


def test_two_commands_make_a_pair() -> None:
    words = ["bench", "--mode=target", "--protocol=shm", "--buffer_size=16M", "--use_vram=false"]
    target = subprocess.Popen(
        [*COMMAND, *words, "--verify"], env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert target.stdout is not None
        line = target.stdout.readline()
        session = line.rpartition(" ")[2].strip()
        arguments = ["--mode=initiator", f"--segment_id={session}", "--verify", "--threads=1"]
        done = run("bench", *SMALL, "--protocol=shm", "--operation=write", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        target.send_signal(signal.SIGTERM)
        assert target.wait(10) == 0
    finally:
        target.kill()
        target.communicate()


def test_a_target_that_is_not_there_cannot_be_measured() -> None:
    done = run("bench", *SMALL, "--protocol=shm", "--segment_id=127.0.0.1:9")
    assert done.returncode == 2, done.stdout + done.stderr


def test_sixteen_simulated_nics_share_the_load(tmp_path: Path) -> None:
    found = bench(
        tmp_path,
        "--protocol=efa",
        "--operation=write",
        "--verify",
        "--batch_size=64",
        "--buffer_size=64M",
        "--threads=2",
        nics=16,
    )
    assert found["verified"] is True
    moved = [rail["bytes"] for rail in found["rails"]]
    assert len(moved) == 16
    assert max(moved) <= 1.05 * sum(moved) / len(moved)


def test_the_queue_of_a_device_is_never_overrun(tmp_path: Path) -> None:
    found = bench(tmp_path, "--protocol=efa", "--threads=4", "--verify", nics=4, transmit_depth=8)
    for rail in found["rails"]:
        assert rail["queue_depth"] == 8
        assert 0 < rail["in_flight_peak"] <= 8


def test_bytes_that_never_moved_are_noticed(tmp_path: Path) -> None:
    words = ["--protocol=efa", "--operation=read", "--verify", "--threads=1"]
    done = run("bench", "--loopback", *SMALL, *words, nics=1, no_copy=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "WRONG BYTES" in done.stdout


@pytest.mark.parametrize("warmup", ["true", "false"])
def test_the_probe_prints_the_lines_it_is_known_for(tmp_path: Path, warmup: str) -> None:
    path = tmp_path / "probe.json"
    words = ["probe", "--loopback", "--protocol=efa", "--buffer_size=8M", "--iters=3"]
    done = run(*words, f"--warmup={warmup}", f"--json={path}", nics=16)
    assert done.returncode == 0, done.stdout + done.stderr
    number = r" +[\d.]+ ms"
    assert re.search(r"\[initiator\] peer=127\.0\.0\.1:\d+ warmup=(ON|OFF) iters=3", done.stdout)
    assert bool(re.search(rf"^warmup:{number} \(rc=0\)$", done.stdout, re.M)) is (warmup == "true")
    assert re.findall(rf"^submit #(\d):{number}$", done.stdout, re.M) == ["0", "1", "2"]
    found = json.loads(path.read_text())
    assert found["local_nics"] == 16
    assert len(found["submit_ms"]) == 3
    assert (found["warmup_ms"] is None) is (warmup == "false")


@pytest.mark.parametrize("protocol", ["tcp", "shm"])
def test_an_idle_engine_leaves_the_machine_alone(protocol: str) -> None:
    settings = TargetSettings(engine={"protocol": protocol}, buffer_size_bytes=1 << 20)
    with Target(settings) as target:
        time.sleep(1.0)  # what is left of the start
        start = cpu_seconds(target.pid)
        time.sleep(5.0)
        assert cpu_seconds(target.pid) - start < 0.25
