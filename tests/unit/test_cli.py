"""The command line loads quickly and prints what it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import efa_kv
from efa_kv import cli

DOCS = Path(__file__).parents[2] / "docs/tools"


def test_config_prints_every_setting() -> None:
    result = CliRunner().invoke(cli.app, ["config"])
    assert result.exit_code == 0
    assert "`lease_s` | `EFA_KV_LEASE_S` | `30.0` (s)" in result.output


def test_version() -> None:
    result = CliRunner().invoke(cli.app, ["version"])
    assert f"efa-kv {efa_kv.__version__}" in result.output


def test_unknown_commands_are_refused() -> None:
    assert CliRunner().invoke(cli.app, ["nonsense"]).exit_code == 2


@pytest.mark.parametrize("tool", cli.TOOLS)
def test_every_tool_explains_itself(
    tool: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _status([tool, "--help"], monkeypatch) == 0
    output = capsys.readouterr().out
    # sim runs another command, and ends with its status: it has nothing of its own to tell.
    assert ("--json" in output) is (tool != "sim")
    assert (DOCS / f"{tool}.md").is_file()
    assert _status([tool, "--no-such-flag"], monkeypatch) == 2


def _status(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["efa-kv", *words])
    monkeypatch.setattr(cli, "app", typer.Typer())
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


@pytest.mark.parametrize("module", ["efa_kv", "efa_kv.cli", "efa_kv.config"])
def test_imports_are_cheap(module: str) -> None:
    program = (
        f"import sys, {module}; "
        "print([name for name in ('zmq', 'efa_kv._native', 'torch', 'asyncio', 'aiohttp') "
        "if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_public_names() -> None:
    assert efa_kv.EngineConfig.__name__ == "EngineConfig"
    assert efa_kv.TransferEngine.__name__ == "TransferEngine"
    assert efa_kv.Job.__name__ == "Job"
    assert efa_kv.JobResult.__name__ == "JobResult"
    assert set(efa_kv.__all__) <= set(dir(efa_kv))
    with pytest.raises(AttributeError, match="nonsense"):
        efa_kv.nonsense  # noqa: B018
