"""Many sessions in one process, first contacts that cross, and a stopped peer, on simulated EFA
NICs whose completions come in random order."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import child_process
import pytest

from efa_kv.tools import sim

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("session_cases.py")
SESSIONS = 200
ROUNDS = 25
TIMEOUT_S = 150


def outcome(case: str, count: int, **simulation: Any) -> dict[str, Any]:
    seed = int(os.environ.get("EFA_KV_TEST_SEED") or time.time_ns() % 100_000 + 1)
    print(f"seed {seed}; again with EFA_KV_TEST_SEED={seed}")
    base = {name: value for name, value in os.environ.items() if not name.startswith("EFA_KV_")}
    provider = sim.find_provider(os.environ.get("EFA_KV_SIM_PROVIDER"))
    variables = sim.environment(base, sim.Simulation(seed=seed, **simulation), provider)
    done = subprocess.run(
        [sys.executable, str(PROGRAM), case, str(count)],
        env=variables | {"PYTHONPATH": str(child_process.HERE)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(TIMEOUT_S + 10)
def test_two_hundred_sessions_in_one_process() -> None:
    found = outcome("many_sessions", SESSIONS, nics=2)
    assert found["right"] == found["ready"] == SESSIONS
    # Each session adds the same: the last fifty no more than the second fifty, and some air.
    steps = [after - before for before, after in itertools.pairwise(found["memory"])]
    assert steps[-1] < 2 * steps[0] + (32 << 20)


def test_first_contacts_that_cross() -> None:
    assert outcome("crossing_contacts", ROUNDS, nics=4, faults=("eagain=0.05",))["right"] == ROUNDS


def test_a_stopped_peer_holds_up_nobody() -> None:
    found = outcome("a_stopped_peer", 1, nics=4)
    assert found["landed"]  # a NIC needs no processor for a write
    assert found["meanwhile"]
    assert found["took_s"] < 5
    assert found["again"]
