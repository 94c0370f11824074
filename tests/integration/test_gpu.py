"""The checks for GPU machines, on GPUs that are not there, and where there is none at all."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECKS = ROOT / "tests/gpu/run.sh"
NO_GPU = 77


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [CHECKS, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=170,
    )


@pytest.mark.slow
def test_everything_on_gpus_that_are_not_there() -> None:
    done = run("--fake")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    assert lines["registers"].endswith("(to be staged)")
    assert "GB/s" in lines["stages between processes"]
    assert "all fenced" in lines["survives a killed peer"]
    # Said once by each engine, where it happens.
    assert "does not reach GPU memory" in done.stderr


def test_without_a_driver_there_is_nothing_to_check() -> None:
    done = run(EFA_KV_CUDA_LIBRARY="/nowhere/libcuda.so.1")
    assert done.returncode == NO_GPU, done.stdout + done.stderr
    assert "no GPU to check on" in done.stdout
