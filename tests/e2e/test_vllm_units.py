"""The tests of ``tests/vllm_unit``, in vLLM's environment: they need vLLM's own classes."""

from __future__ import annotations

import os
import re
import subprocess

from vllm_demo.model import OFFLINE, REPOSITORY, VLLM_BIN

TIMEOUT_S = 600


def test_the_connectors_halves_in_vllm() -> None:
    finished = subprocess.run(
        [
            *(str(VLLM_BIN / "python"), "-m", "pytest", "tests/vllm_unit"),
            *("-q", "-p", "no:cacheprovider"),
        ],
        cwd=REPOSITORY,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=TIMEOUT_S,
        env={**os.environ, **OFFLINE},
    )
    assert finished.returncode == 0, finished.stdout[-8000:]
    assert re.search(r"\d+ passed", finished.stdout), finished.stdout[-2000:]
