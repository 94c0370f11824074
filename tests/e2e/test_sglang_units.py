"""The tests of ``tests/sglang_unit``, in SGLang's environment: they need its own classes."""

from __future__ import annotations

import os
import re
import subprocess

from sglang_demo.model import SGLANG_PYTHON, STUBS
from sglang_demo.servers import FABRIC, WITHOUT_GPU
from vllm_demo.model import OFFLINE, REPOSITORY

TIMEOUT_S = 600


def test_the_engine_under_sglangs_own_classes() -> None:
    finished = subprocess.run(
        [
            *(str(SGLANG_PYTHON), "-m", "pytest", "tests/sglang_unit"),
            *("-q", "-p", "no:cacheprovider"),
        ],
        cwd=REPOSITORY,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=TIMEOUT_S,
        env={
            **os.environ,
            **OFFLINE,
            **WITHOUT_GPU,
            **FABRIC,
            "SGLANG_HOST_IP": "127.0.0.1",
            "PYTHONPATH": str(STUBS),
        },
    )
    assert finished.returncode == 0, finished.stdout[-8000:]
    assert re.search(r"\d+ passed", finished.stdout), finished.stdout[-2000:]
