"""The ten cases of the reference's unit-test table on simulated EFA NICs, every byte compared.

All cases of one number of NICs run in one program, since the simulation is read once per process.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import child_process
import pytest

from efa_kv.tools import sim

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("reference_cases.py")
TIMEOUT_S = 100
CASES = [
    "install_transport",
    "loopback_write",
    "write_and_read",
    "multi_write",
    "stress_multiple_batches",
    "warmup_segment_loopback",
    "warmup_segment_not_found",
    "register_memory_batch",
    "large_transfer",
    "repeated_open_segment",
]


@functools.cache
def outcomes(nics: int) -> dict[str, str]:
    deliberate = ("EFA_KV_", "MC_", "MOONCAKE_")
    base = {name: value for name, value in os.environ.items() if not name.startswith(deliberate)}
    provider = sim.find_provider(os.environ.get("EFA_KV_SIM_PROVIDER"))
    variables = sim.environment(base, sim.Simulation(nics=nics), provider)
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(nics)],
        env=variables | {"EFA_KV_NEAR": "false", "PYTHONPATH": str(child_process.HERE)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("nics", [1, 4, 16, 32])
@pytest.mark.parametrize("case", CASES)
def test_case_of_the_reference(case: str, nics: int) -> None:
    assert outcomes(nics)[case] == ""
