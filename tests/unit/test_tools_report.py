"""`efa-kv report`: what it reads, what it says, and that it obeys nobody."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as some
from report_inputs import bench, doctor, document, validation
from typer.testing import CliRunner

from efa_kv.observe.trace import Span, TraceDocument
from efa_kv.tools import report
from efa_kv.tools.report import inputs, page
from efa_kv.tools.report.inputs import Bench, Doctor, InputError, Validate

app = typer.Typer()
app.command("report")(report.command)
runner = CliRunner()
HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(1)">'


class Page(html.parser.HTMLParser):
    """The tags of a page, and the texts of its scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self.policy = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._inside = tag if tag in self.texts else ""
        if ("http-equiv", "Content-Security-Policy") in attrs:
            self.policy = str(dict(attrs)["content"])

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts[self._inside].append(data)


def written(folder: Path, **files: Any) -> list[str]:
    paths = []
    for name, content in files.items():
        path = folder / f"{name}.json"
        path.write_bytes(msgspec.json.encode(content))
        paths.append(str(path))
    return paths


def rendered(**files: Any) -> str:
    named = [(name, inputs.read(name, msgspec.json.encode(one))) for name, one in files.items()]
    return page.render(inputs.gather(named), "2026-01-01", "0")


def test_kinds_are_told_apart() -> None:
    for content, kind in (
        (bench(), Bench),
        (validation(), Validate),
        (doctor(), Doctor),
        (document(), TraceDocument),
    ):
        assert type(inputs.read("x", msgspec.json.encode(content))) is kind


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "not the JSON"),
        (b"[1]", "not the JSON"),
        (b"{}", "found none of"),
        (b'{"bytes_per_second": "fast"}', "float"),
        (b'{"findings": 3}', "array"),
        (b"\xff", "not the JSON"),
        (b'{"bytes_per_second": ' + b"[" * 100_000, "x:"),
    ],
)
def test_what_is_of_no_kind_is_refused_with_the_reason(text: bytes, words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        inputs.read("x", text)


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "BYTES_MAX", 10)
    with pytest.raises(InputError, match="at most 10"):
        inputs.read("x", b"{" + b" " * 20 + b"}")
    monkeypatch.undo()
    monkeypatch.setattr(inputs, "SPANS_MAX", 3)
    spans = tuple(
        Span(request=f"r{n}", stage="land", begin_s=n, end_s=n + 1) for n in reversed(range(9))
    )
    many = msgspec.structs.replace(document(), spans=spans)
    read = inputs.read("x", msgspec.json.encode(many))
    assert isinstance(read, TraceDocument)
    assert sorted(span.request for span in read.spans) == ["r6", "r7", "r8"]


def test_the_page_holds_every_chart() -> None:
    text = rendered(fast=bench(), net=validation(), host=doctor(), engine=document())
    for title in (
        "Rates against the line rate",
        "Rate by block size",
        "Balance of the rails",
        "Timeline of requests",
        "What efa-kv doctor found",
        "What efa-kv validate measured",
    ):
        assert title in text
    assert text.count("<svg") == 4
    assert "busiest rail 1.200 of the mean" in text
    assert "50% of the line rate" in text
    assert "efa_installer.sh" in text
    assert "request req-1: move" in text or "req-1: move" in text


def test_parts_without_input_are_left_out() -> None:
    text = rendered(host=doctor())
    assert "<svg" not in text
    assert "Perfetto" not in Page(text).texts["script"][0].split("(() =>")[0]
    assert 'id="copy"' not in text


def test_the_page_needs_nothing_and_lets_nothing_else_run() -> None:
    shown = Page(rendered(fast=bench(), engine=document()))
    assert not {"link", "img", "iframe", "object"} & set(shown.tags)
    assert not [name for name, _ in shown.attributes if name.startswith("on") or name == "style"]
    assert not [value for name, value in shown.attributes if name in ("src", "href")]
    for kind in ("style", "script"):
        text = shown.texts[kind][-1]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in shown.policy
    assert "default-src 'none'" in shown.policy


def test_words_of_others_are_shown_and_never_obeyed() -> None:
    hostile = doctor(found=HOSTILE, mend=HOSTILE, why=HOSTILE)
    traced = document(request=HOSTILE, session=HOSTILE, rail=HOSTILE)
    text = rendered(**{HOSTILE: bench(operation=HOSTILE, rail=HOSTILE), "d": hostile, "t": traced})
    shown = Page(text)
    assert "img" not in shown.tags
    assert shown.tags.count("script") == 2
    assert json.loads(shown.texts["script"][0])["traceEvents"]


@given(some.text(max_size=40), some.floats(allow_nan=False, allow_infinity=False, min_value=0))
def test_any_name_and_any_rate_make_a_page(name: str, rate: float) -> None:
    text = rendered(**{name: bench(rate=min(rate, 1e18)), "t": document(request=name)})
    shown = Page(text)
    assert shown.tags.count("script") == 2
    assert "nan" not in "".join(str(value) for key, value in shown.attributes if key == "width")


def test_exit_codes_and_files(tmp_path: Path) -> None:
    good = written(tmp_path, fast=bench(), engine=document())
    out, perfetto, summary = (tmp_path / name for name in ("r.html", "p.json", "s.json"))
    words = ["--out", str(out), "--perfetto", str(perfetto), "--json", str(summary)]
    result = runner.invoke(app, [*good, *words])
    assert result.exit_code == 0, result.output
    assert out.read_text().startswith("<!doctype html>")
    assert {event["ph"] for event in json.loads(perfetto.read_text())["traceEvents"]} == {
        "X",
        "M",
        "i",
    }
    assert json.loads(summary.read_text())["inputs"] == {
        "benches": 1,
        "validations": 0,
        "doctors": 0,
        "traces": 1,
    }
    bad = written(tmp_path, host=doctor(severity="problem"), net=validation(problem="slow-nic"))
    result = runner.invoke(app, [*bad, *words])
    assert result.exit_code == 1
    assert "PROBLEM  net: slow-nic" in result.output
    assert len(json.loads(summary.read_text())["problems"]) == 2
    wrong = written(tmp_path, fast=bench(verified=False), engine=document(error=-14))
    assert runner.invoke(app, [*wrong, *words]).exit_code == 1


def test_what_cannot_run(tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_text("{}")
    for words, reason in (
        ([], "0 inputs"),
        ([str(tmp_path / "none.json")], "No such file"),
        ([str(tmp_path / "odd.json")], "found none of"),
        (["--live", "nowhere"], "host:port"),
        (["--live", "127.0.0.1:1"], "does not answer"),
    ):
        result = runner.invoke(app, [*words, "--out", str(tmp_path / "r.html")])
        assert result.exit_code == 2
        assert reason in result.output
    good = written(tmp_path, fast=bench())
    result = runner.invoke(app, [*good, "--out", str(tmp_path / "none/r.html")])
    assert result.exit_code == 2
