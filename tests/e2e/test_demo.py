"""The demo itself: the main job, in both dialects of the router."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import demo_report
from vllm_demo.servers import DIALECTS


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_pair_answers_like_a_server_alone(tmp_path: Path, dialect: str) -> None:
    report = demo_report("vllm_demo", tmp_path / "result.json", "--dialect", dialect)
    assert report["router"].endswith(dialect)
    assert all(request["external_tokens"] > 0 for request in report["requests_detail"])
    assert all(request["bytes"] > 0 for request in report["requests_detail"])
