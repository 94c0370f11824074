"""The tests of ``tests/vllm_unit``, in vLLM's environment: they need vLLM's own classes."""

from __future__ import annotations

from runs import run_units
from vllm_demo.model import VLLM_BIN


def test_the_connectors_halves_in_vllm() -> None:
    run_units(VLLM_BIN / "python", "tests/vllm_unit")
