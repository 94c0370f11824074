"""Programs that the tests with model servers run from beginning to end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from demo_common.model import OFFLINE, REPOSITORY

DEMO_TIMEOUT_S = 800
UNITS_TIMEOUT_S = 600


def output_of(command: Sequence[str], timeout_s: float, environment: Mapping[str, str]) -> str:
    """What the command says, from the repository's root; it must succeed."""
    finished = subprocess.run(
        command,
        cwd=REPOSITORY,
        check=False,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout_s,
        env={**os.environ, **environment},
    )
    assert finished.returncode == 0, finished.stdout[-8000:]
    return finished.stdout


def demo_report(module: str, result: Path, *options: str) -> dict[str, Any]:
    """What a demo left in its result file, after what every demo must show."""
    command = [sys.executable, "-m", module, "--result", str(result), *options]
    output_of(command, DEMO_TIMEOUT_S, {"PYTHONPATH": str(REPOSITORY / "examples")})
    report: dict[str, Any] = json.loads(result.read_text())
    assert report["identical"] is True
    assert report["requests"] >= 12
    assert report["provider"] not in ("", "shm")
    assert report["external_tokens"] == sum(
        request["external_tokens"] for request in report["requests_detail"]
    )
    return report


def run_units(python: Path, folder: str, environment: Mapping[str, str] | None = None) -> None:
    """Runs tests that need a model server's own classes, in that server's environment."""
    command = [str(python), "-m", "pytest", folder, "-q", "-p", "no:cacheprovider"]
    output = output_of(command, UNITS_TIMEOUT_S, {**OFFLINE, **(environment or {})})
    assert re.search(r"\d+ passed", output), output[-2000:]
