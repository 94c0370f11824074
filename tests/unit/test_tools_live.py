"""The checks that move bytes: how an outcome is judged, and that a dying child is a sentence."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from efa_kv.tools import doctor, trial
from efa_kv.tools import host as records
from efa_kv.tools.checks import live
from efa_kv.tools.checks.finding import Finding, Severity
from efa_kv.tools.trial import Outcome, Rail

HOST = records.decode((Path(__file__).parents[1] / "hosts" / "p5en.json").read_bytes())
LINE = 25e9
GOOD = Outcome(
    protocol="efa",
    provider="efa",
    bytes_per_second=46e9,
    length_bytes=16 << 20,
    rails=(
        Rail(name="rdmap0s0", line_rate_bytes_per_s=LINE, bytes=5),
        Rail(name="rdmap1s0", line_rate_bytes_per_s=LINE, bytes=5),
    ),
    peer_line_rate_bytes_per_s=2 * LINE,
)


def loopback(outcome: Outcome) -> list[Finding]:
    return live.loopback(lambda: outcome)(HOST)


def peer(outcome: Outcome) -> list[Finding]:
    return live.peer("10.0.0.5:9000", lambda: outcome)(HOST)


def altered(**values: object) -> Outcome:
    return msgspec.structs.replace(GOOD, **values)


def test_a_good_loopback_says_what_was_moved_and_over_what() -> None:
    (finding,) = loopback(GOOD)
    assert finding.severity is Severity.GOOD
    assert "16 MiB" in finding.found
    assert "2 devices of provider efa" in finding.found


@pytest.mark.parametrize("check", [loopback, peer])
@pytest.mark.parametrize("field", ["error", "mismatch"])
def test_errors_and_wrong_bytes_are_problems(check: object, field: str) -> None:
    (finding,) = check(altered(**{field: "byte 7 of 16 came back wrong"}))  # type: ignore[operator]
    assert finding.severity is Severity.PROBLEM
    assert "byte 7" in finding.found


def test_a_device_that_carried_nothing_is_named() -> None:
    idle = msgspec.structs.replace(GOOD.rails[1], bytes=0)
    (finding,) = loopback(altered(rails=(GOOD.rails[0], idle)))
    assert (finding.id, finding.severity) == ("live.rails", Severity.WARNING)
    assert "nothing went over rdmap1s0" in finding.found
    assert [one.id for one in peer(altered(rails=(GOOD.rails[0], idle)))] == [
        "live.rails",
        "live.peer",
    ]


@pytest.mark.parametrize(
    ("share", "severity"),
    [(0.9, Severity.GOOD), (0.7, Severity.WARNING), (0.3, Severity.PROBLEM)],
)
def test_the_rate_is_set_against_the_line_rate(share: float, severity: Severity) -> None:
    (finding,) = peer(altered(bytes_per_second=share * 2 * LINE))
    assert finding.severity is severity
    assert f"{share:.0%} of the line rate of 50 GB/s" in finding.found


def test_the_narrower_side_gives_the_line_rate() -> None:
    (finding,) = peer(altered(peer_line_rate_bytes_per_s=LINE, bytes_per_second=LINE))
    assert "100% of the line rate of 25 GB/s" in finding.found


def test_a_peer_on_this_machine_is_not_blamed_for_its_rate() -> None:
    (finding,) = peer(altered(bytes_per_second=1e9, same_machine=True))
    assert finding.severity is Severity.NOTE
    assert "on this machine" in finding.found


def test_unknown_line_rates_are_not_judged() -> None:
    (finding,) = peer(altered(peer_line_rate_bytes_per_s=0.0, bytes_per_second=1.0))
    assert finding.severity is Severity.GOOD


def test_a_peer_without_scratch_memory_is_only_a_warning() -> None:
    (finding,) = peer(Outcome(error="it lends none", nothing_lent=True))
    assert finding.severity is Severity.WARNING
    assert "EFA_KV_SCRATCH_BYTES" in finding.mend


# ---- the child ------------------------------------------------------------------------


def child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    """Puts a shell script in place of the interpreter that would run the child."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(trial.sys, "executable", str(program))


WISH = trial.Wish(engine={})


def test_an_abort_of_the_child_becomes_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    child(monkeypatch, tmp_path, "echo 'efa: assertion failed' >&2; kill -ABRT $$")
    error = trial.run(WISH, 30.0).error
    assert "SIGABRT" in error
    assert "assertion failed" in error


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_child_that_hangs_is_ended_with_all_it_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The grandchild holds the pipes open, as a target's process would.
    pid_file = tmp_path / "pid"
    child(monkeypatch, tmp_path, f"sleep 1000 & echo $! > {pid_file}; sleep 1000")
    assert "within 2 s" in trial.run(WISH, 2).error
    deadline = time.monotonic() + 10
    while running(int(pid_file.read_text())):
        assert time.monotonic() < deadline, "what the child started still runs"
        time.sleep(0.02)


@pytest.mark.parametrize("said", ["", "nonsense", '{"error": 5}'])
def test_a_child_that_says_nothing_of_use_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str
) -> None:
    child(monkeypatch, tmp_path, f"echo '{said}'; exit 3")
    assert "with status 3" in trial.run(WISH, 30.0).error


def test_what_libraries_print_before_the_outcome_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "said").write_bytes(b"a banner\n\n" + msgspec.json.encode(GOOD) + b"\n")
    child(monkeypatch, tmp_path, f"cat {tmp_path / 'said'}")
    assert trial.run(WISH, 30.0) == GOOD


# ---- the command ----------------------------------------------------------------------

app = typer.Typer()
app.command("doctor")(doctor.command)
HOST_FILE = str(Path(__file__).parents[1] / "hosts" / "p5en.json")


def test_a_recorded_host_is_not_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trial, "run", lambda *_: pytest.fail("a transfer was made"))
    report = tmp_path / "report.json"
    done = CliRunner().invoke(app, ["--host-record", HOST_FILE, "--json", str(report)])
    assert done.exit_code == 0
    ids = {one["id"] for one in json.loads(report.read_text())["findings"]}
    assert not any(one.startswith("live.") for one in ids)


def test_a_peer_cannot_be_tried_from_a_record() -> None:
    done = CliRunner().invoke(app, ["--host-record", HOST_FILE, "--peer", "127.0.0.1:1"])
    assert done.exit_code == 2


def test_a_failed_transfer_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "run", lambda *_: Outcome(error="no device"))
    done = CliRunner().invoke(app, [])
    assert done.exit_code == 1
    assert "no device" in done.output
