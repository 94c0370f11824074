"""The demo itself: the main job, in both dialects of the router."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_demo.model import REPOSITORY
from vllm_demo.servers import DIALECTS

DEMO_TIMEOUT_S = 800


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_pair_answers_like_a_server_alone(tmp_path: Path, dialect: str) -> None:
    result = tmp_path / "result.json"
    finished = subprocess.run(
        [
            *(sys.executable, "-m", "vllm_demo", "--dialect", dialect),
            *("--result", str(result)),
        ],
        check=False,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=DEMO_TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "examples")},
    )
    assert finished.returncode == 0, finished.stdout[-6000:]
    report = json.loads(result.read_text())
    assert report["identical"] is True
    assert report["requests"] >= 12
    assert report["provider"] not in ("", "shm")
    assert report["router"].endswith(dialect)
    assert report["external_tokens"] == sum(
        request["external_tokens"] for request in report["requests_detail"]
    )
    assert all(request["external_tokens"] > 0 for request in report["requests_detail"])
    assert all(request["bytes"] > 0 for request in report["requests_detail"])
