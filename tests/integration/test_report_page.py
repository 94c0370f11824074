"""The page of `efa-kv report` in a real browser: drawn, silent, in both themes, by keyboard."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from report_inputs import bench, doctor, document, validation

from efa_kv.tools.report import inputs, page

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
# Nothing of it asks anybody: tests stay on this machine.
QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium (scripts/system-browser.sh)"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as runner:
        started = runner.chromium.launch(executable_path=BROWSER, args=list(QUIET))
        yield started
        started.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = {"fast": bench(), "net": validation(), "host": doctor(), "engine": document()}
    named = [(name, inputs.read(name, msgspec.json.encode(one))) for name, one in given.items()]
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(page.render(inputs.gather(named), "2026-01-01 00:00 UTC", "0"))
    return path


@pytest.fixture(params=["light", "dark"])
def opened(request: pytest.FixtureRequest, browser: Any, file: Path) -> Iterator[Any]:
    """The page, which must not have complained by the end of the test."""
    context = browser.new_context(color_scheme=request.param, accept_downloads=True)
    tab = context.new_page()
    complaints: list[str] = []
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on(
        "request", lambda asked: complaints.append(asked.url) if asked.url[:4] == "http" else None
    )
    tab.goto(file.as_uri())
    tab.scheme = request.param
    yield tab
    context.close()
    assert complaints == []


def test_every_chart_is_drawn(opened: Any) -> None:
    tab = opened
    for kind, least in (("bars", 4), ("sweep", 2), ("timeline", 7)):
        chart = tab.locator(f"svg.{kind}").first
        box = chart.bounding_box()
        assert box["width"] > 300
        assert box["height"] > 50
        shapes = tab.locator(f"svg.{kind} [data-told]")
        assert shapes.count() >= least
        for index in range(shapes.count()):
            drawn = shapes.nth(index).bounding_box()
            assert drawn["width"] > 0
            assert drawn["height"] > 0
    assert tab.locator("tr.warning code").inner_text() == "sudo ./efa_installer.sh -y"


def test_themes_follow_the_system_and_the_button(opened: Any) -> None:
    tab = opened
    ground = "getComputedStyle(document.body).backgroundColor"
    assert tab.evaluate("document.documentElement.dataset.theme") == tab.scheme
    first, before = tab.evaluate(ground), tab.screenshot()
    tab.click("#theme")
    assert tab.evaluate(ground) != first
    assert tab.screenshot() != before
    assert tab.get_attribute("#theme", "aria-pressed") == str(tab.scheme == "light").lower()


def test_everything_is_reached_by_the_keyboard(opened: Any) -> None:
    tab = opened
    reached = []
    for _ in range(40):
        tab.keyboard.press("Tab")
        reached.append(
            tab.evaluate("document.activeElement.id || document.activeElement.dataset.told || ''")
        )
    assert reached[:3] == ["copy", "save", "theme"]
    assert any("of the line rate" in word for word in reached)
    assert any("req-1: move" in word and "rdmap0s0" in word for word in reached)
    tab.locator("[data-told]").first.focus()
    assert "GB/s" in tab.inner_text("#told")
    tab.keyboard.press("Escape")
    assert tab.inner_text("#told") == ""


def test_the_trace_is_copied_and_downloaded(opened: Any) -> None:
    tab = opened
    tab.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    tab.keyboard.press("Tab")
    tab.keyboard.press("Enter")
    tab.wait_for_function("document.getElementById('told').textContent.startsWith('Copied')")
    events = json.loads(tab.evaluate("window.copied"))["traceEvents"]
    assert {"X", "M", "i"} == {event["ph"] for event in events}
    with tab.expect_download() as waiting:
        tab.click("#save")
    assert json.loads(Path(waiting.value.path()).read_text())["traceEvents"] == events
