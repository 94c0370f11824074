"""The tests of ``tests/sglang_unit``, in SGLang's environment: they need its own classes."""

from __future__ import annotations

from runs import run_units
from sglang_demo.model import SGLANG_PYTHON, STUBS
from sglang_demo.servers import FABRIC, WITHOUT_GPU


def test_the_engine_under_sglangs_own_classes() -> None:
    run_units(
        SGLANG_PYTHON,
        "tests/sglang_unit",
        {**WITHOUT_GPU, **FABRIC, "SGLANG_HOST_IP": "127.0.0.1", "PYTHONPATH": str(STUBS)},
    )
