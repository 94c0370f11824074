"""`efa-kv top`: what is shown of two looks, and how it ends."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from engine_states import peer, rail, state
from rich.console import Console
from typer.testing import CliRunner

from efa_kv.observe.state import EngineState
from efa_kv.tools import top
from efa_kv.tools.endpoint import EndpointError, url_of
from efa_kv.tools.top import Look

app = typer.Typer()
app.command("top")(top.command)
runner = CliRunner()
URL = "http://127.0.0.1:18000"


def look(at_s: float, **changes: Any) -> Look:
    return Look(url=URL, at_s=at_s, state=state(**changes))


def test_rates_come_from_two_looks() -> None:
    line = {"speed_bits_per_second": 8_000_000_000}
    before = look(10.0, rails=(rail(bytes_written=1000, **line),))
    now = look(12.0, rails=(rail(bytes_written=500_001_000, bytes_read=40, **line),))
    (shown,) = top.view(now, before).rails
    assert (shown.write_bytes_per_s, shown.read_bytes_per_s) == (250e6, 20.0)
    assert shown.line_share == 0.25
    assert top.view(now, None).rails[0].write_bytes_per_s == 0


def test_an_engine_that_restarted_begins_again() -> None:
    before = look(10.0, rails=(rail(bytes_written=1 << 40),), process=1)
    (shown,) = top.view(look(11.0, rails=(rail(bytes_written=8),), process=2), before).rails
    assert shown.write_bytes_per_s == 0


def test_exit_codes() -> None:
    good, bad = top.view(look(1.0), None), top.view(look(1.0, regions=0), None)
    silent = top.view(Look(url=URL, at_s=1.0, problem="no answer"), None)
    assert top.exit_code([good, good]) == 0
    assert top.exit_code([good, bad]) == 1
    assert top.exit_code([good, silent]) == 1
    assert top.exit_code([silent]) == top.exit_code([]) == 2


def shown(views: list[top.EngineView]) -> str:
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    console.print(top.picture(views))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_picture_names_what_is_wrong() -> None:
    peers = tuple(peer("suspect") for _ in range(10))
    text = shown([top.view(look(1.0, peers=peers, rails=(rail(down=True), rail("b"))), None)])
    assert "not ready" in text
    assert "OUT" in text
    assert "Look at 10.0.0.9" in text
    assert "and 2 more" in text
    assert "no engine" in shown([])


def test_names_of_strangers_move_no_cursor() -> None:
    hostile = "10.0.0.1:5\x1b[2J\x07"
    text = shown([top.view(look(1.0, session=hostile, peers=()), None)])
    assert "\x1b" not in text
    assert "\x07" not in text


@pytest.mark.parametrize("text", ["", "host", "ftp://host:1", "host:port", "http://:1", "a:99999"])
def test_what_is_no_endpoint(text: str) -> None:
    with pytest.raises(EndpointError, match="host:port"):
        url_of(text)
    assert url_of("10.0.0.1:18000") == "http://10.0.0.1:18000"
    assert url_of("http://[::1]:18000/readyz") == "http://[::1]:18000"


def test_the_command_ends_by_what_it_saw(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers: list[EngineState] = []

    def ask(url: str, page: str, kind: type[EngineState]) -> EngineState:
        assert (url, page, kind) == (URL, "state", EngineState)
        if not answers:
            raise EndpointError(f"{url} does not answer: refused")
        return answers[-1]

    monkeypatch.setattr(top, "ask", ask)
    monkeypatch.setattr(top, "ONCE_S", 0.0)
    out = tmp_path / "top.json"
    words = ["127.0.0.1:18000", "--once", "--json", str(out)]
    assert runner.invoke(app, words).exit_code == 2
    assert "does not answer" in json.loads(out.read_text())["engines"][0]["problem"]
    answers.append(state())
    assert runner.invoke(app, words).exit_code == 0
    answers.append(state(regions=0))
    result = runner.invoke(app, words)
    assert result.exit_code == 1
    assert "registration" in result.output
    written = json.loads(out.read_text())
    assert written["exit_code"] == 1
    assert written["engines"][0]["wrong"][0]["name"] == "registration"
    assert runner.invoke(app, ["nonsense", "--once"]).exit_code == 2


def test_without_engines_it_says_how_to_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "find_notes", list)
    result = runner.invoke(app, ["--once"])
    assert result.exit_code == 2
    assert "http_port" in result.output
