"""`efa-kv validate` on simulated NICs: which device it names, and how it ends.

NICs are slow on purpose, so that the processors of a busy machine have time to spare.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from efa_kv.tools import sim

pytestmark = [pytest.mark.integration, pytest.mark.slow]

COMMAND = [sys.executable, "-m", "efa_kv.cli", "validate"]
NICS = 4
RATE_GBPS = 0.1
OUTPUTS = Path(__file__).parents[1] / "outputs"


def environment(**simulation: Any) -> dict[str, str]:
    base = {name: value for name, value in os.environ.items() if not name.startswith("EFA_KV_")}
    provider = sim.find_provider(os.environ.get("EFA_KV_SIM_PROVIDER"))
    settings = {"nics": NICS, "rate_gbps": RATE_GBPS, **simulation}
    return sim.environment(base, sim.Simulation(**settings), provider)


def validate(
    tmp_path: Path, *words: str, path: str = "", **simulation: Any
) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON of a run on simulated NICs."""
    result = tmp_path / "result.json"
    variables = environment(**simulation)
    if path:
        variables["PATH"] = f"{path}:{variables['PATH']}"
    done = subprocess.run(
        [*COMMAND, "--quick", "--protocol=efa", f"--json={result}", *words],
        env=variables,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert result.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(result.read_text())


def suspects(result: dict[str, Any], fault: str) -> list[list[dict[str, str]]]:
    return [one["suspects"] for one in result["problems"] if one["fault"] == fault]


@pytest.mark.timeout(120)
def test_a_slow_nic_is_named_with_its_host(tmp_path: Path) -> None:
    status, result = validate(
        tmp_path, "--hosts=3", "--repeats=2", faults=("host=host-2,nic=1,slow=0.25",)
    )
    nic = result["hosts"][2]["nics"][1]
    assert suspects(result, "slow-nic") == [[{"host": "host-2", "nic": nic}]]
    assert status == 1


@pytest.mark.timeout(120)
def test_a_dead_nic_is_named_with_its_host(tmp_path: Path) -> None:
    status, result = validate(
        tmp_path, "--hosts=3", "--repeats=2", faults=("host=host-1,nic=2,die_at_op=1",)
    )
    nic = result["hosts"][1]["nics"][2]
    assert suspects(result, "dead-nic") == [[{"host": "host-1", "nic": nic}]]
    assert status == 1


@pytest.mark.timeout(120)
def test_bytes_that_do_not_arrive_are_found(tmp_path: Path) -> None:
    status, result = validate(tmp_path, "--hosts=2", "--repeats=1", no_copy=True)
    assert [one["fault"] for one in result["problems"]] == ["wrong-bytes", "wrong-bytes"]
    assert all("came back wrong" in one["text"] for one in result["problems"])
    assert status == 1


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_in_order_is_kept_and_a_slower_one_is_told_from_it(tmp_path: Path) -> None:
    kept = tmp_path / "baseline.json"
    words = ("--hosts=2", "--repeats=3")
    status, result = validate(tmp_path, *words, f"--save-baseline={kept}")
    assert (status, result["problems"]) == (0, [])
    assert [host["label"] for host in result["hosts"]] == ["host-0", "host-1"]
    assert len(result["series"]["pair 0>1"]["samples"]) == 3
    assert len(result["series"]["latency 1>0"]["samples"]) == 3
    assert result["one_machine"]
    status, slower = validate(tmp_path, *words, f"--baseline={kept}", rate_gbps=RATE_GBPS / 4)
    assert status == 1
    assert any("pair: 3 of 3 are worse" in one["text"] for one in slower["problems"])
    trends = {change["name"]: change["trend"] for change in slower["changes"]}
    assert trends["ring 1"] == "worse"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_tools_of_others_are_run_where_they_are(tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    tool = programs / "fi_pingpong"
    # The server is silent, the client, which has an address as its last word, has the table.
    tool.write_text(
        f"#!/bin/sh\nfor last; do :; done\ntest $last = 64 || cat {OUTPUTS}/fi_pingpong.txt\n"
    )
    tool.chmod(0o755)
    status, result = validate(tmp_path, "--hosts=2", "--repeats=1", "--outside", path=str(programs))
    assert [one["text"] for one in result["outside"]] == [
        "0>1: 240.0 us one way (64 bytes)",
        "1>0: 240.0 us one way (64 bytes)",
    ]
    assert result["series"]["fi_pingpong 1>0"]["samples"] == [240.02]
    assert any("all_reduce_perf" in note for note in result["notes"])
    assert status == 0


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.timeout(120)
def test_processes_of_mpirun_meet_at_rank_0(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    port = free_port()

    def start(rank: int) -> subprocess.Popen[str]:
        variables = environment() | {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % 2),
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        words = ["--quick", "--repeats=1", "--protocol=efa", f"--label=node{rank}"]
        return subprocess.Popen(
            [*COMMAND, *words, *([f"--json={result}"] if rank == 0 else [])],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    # Rank 0 last: the others wait for it.
    processes = [start(rank) for rank in (3, 2, 1, 0)]
    ended = [process.communicate(timeout=100)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0, 0], ended
    hosts = json.loads(result.read_text())["hosts"]
    assert [(host["rank"], host["label"]) for host in hosts] == [(0, "node0"), (2, "node2")]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--rank=0", "--of=2", "--rendezvous=file:{}", "--join-timeout=1"], "1 of 2 hosts came"),
        (["--rank=1", "--of=2", "--rendezvous=file:{}", "--join-timeout=1"], "did not write"),
        (["--hosts=2", "--protocol=nothing"], "expected one of"),
        (["--hosts=1"], "expected 2 to"),
        (["--rank=0", "--of=2"], "--rendezvous"),
        (["--rank=0", "--of=2", "--rendezvous=file:{}", "--buffer-size=4K"], "raise --buffer-size"),
        ([], "found no launcher"),
    ],
)
def test_what_cannot_run_ends_with_2(tmp_path: Path, words: list[str], text: str) -> None:
    known = ("OMPI_", "PMI_", "SLURM_")
    variables = {name: v for name, v in environment().items() if not name.startswith(known)}
    done = subprocess.run(
        [*COMMAND, *(word.format(tmp_path / "session") for word in words)],
        env=variables,
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert (done.returncode, text in done.stderr) == (2, True), done.stdout + done.stderr
