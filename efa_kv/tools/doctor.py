"""`efa-kv doctor`: is this host ready to move KV cache over EFA, and if not, what mends it.

The checks proper live in `efa_kv.tools.checks` and see only a `Host`. Checks that move real bytes
are given to `examine` as further callables, so that they can be left out for a recorded host; they
move them in a process of their own (`efa_kv.tools.trial`), which a provider may abort.
"""

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from efa_kv.tools import checks, host_read, output, trial
from efa_kv.tools import host as records
from efa_kv.tools.bench_load import size_bytes
from efa_kv.tools.checks import devices, live
from efa_kv.tools.checks.finding import Check, Finding, Severity

_MARKS = {
    Severity.GOOD: ("ok", "green"),
    Severity.NOTE: ("note", "cyan"),
    Severity.WARNING: ("warning", "yellow"),
    Severity.PROBLEM: ("PROBLEM", "bold red"),
}


#: Seconds a transfer may take, the start of its processes included.
TRIAL_TIMEOUT_S = 60.0
#: Written at a time in a loopback, and to a peer, whose line is far wider.
LOOPBACK_BYTES = 16 << 20
PEER_BYTES = 64 << 20


class Required(StrEnum):
    """What `--require` can demand."""

    EFA = "efa"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of the command. `counts` is by severity, `exit_code` as the process leaves."""

    instance_type: str
    container: str
    findings: tuple[Finding, ...]
    counts: dict[str, int]
    exit_code: int


def examine(
    host: records.Host, *, require_efa: bool = False, further: Iterable[Check] = ()
) -> Report:
    """Run every check on a host; `further` are checks that need more than the record."""
    wanted: list[Check] = [*checks.ALL, *further]
    if require_efa:
        wanted.append(devices.required)
    findings = tuple(finding for check in wanted for finding in check(host))
    counts = {one.value: sum(f.severity is one for f in findings) for one in Severity}
    failed = counts[Severity.PROBLEM.value] > 0
    return Report(
        instance_type=host.machine.instance_type,
        container=host.machine.container,
        findings=findings,
        counts=counts,
        exit_code=output.EXIT_PROBLEM if failed else output.EXIT_GOOD,
    )


def transfers(
    *, session: str, require: str, timeout_s: float, peer_bytes: int = PEER_BYTES
) -> list[Check]:
    """The checks that move bytes: within this host, and to the engine at ``session`` if one is
    named."""
    engine = {"require": require} if require else {}
    within = trial.Wish(engine=engine, length_bytes=LOOPBACK_BYTES)
    found = [live.loopback(lambda: trial.run(within, timeout_s))]
    if session:
        there = trial.Wish(engine=engine, session=session, length_bytes=peer_bytes)
        found.append(live.peer(session, lambda: trial.run(there, timeout_s)))
    return found


def show(report: Report, console: Console) -> None:
    """Print one line per good finding and the whole story of every other one."""
    for finding in report.findings:
        mark, style = _MARKS[finding.severity]
        console.print(Text(f"{mark:>8}  ", style=style) + Text(f"{finding.id}: {finding.found}"))
        if finding.severity is Severity.GOOD:
            continue
        parts = (("expected", finding.expected), ("why", finding.why), ("mend", finding.mend))
        for label, words in parts:
            console.print(Text(f"{label:>19}  ", style="dim") + Text(words))
    counts = ", ".join(f"{count} {name}" for name, count in report.counts.items())
    console.print(f"\n{counts}")


def command(
    container: Annotated[
        bool, typer.Option("--container", help="Judge as from inside a container.")
    ] = False,
    require: Annotated[
        Required | None, typer.Option(help="Fail unless this fabric is present.")
    ] = None,
    json_file: output.JsonOption = None,
    peer: Annotated[
        str,
        typer.Option(
            "--peer", metavar="HOST:PORT", help="Also move bytes to the running engine there."
        ),
    ] = "",
    peer_size: Annotated[
        str, typer.Option("--peer-size", help="Scratch memory to borrow from the peer.")
    ] = "64M",
    transfer: Annotated[
        bool,
        typer.Option("--transfer/--no-transfer", help="Really move bytes within this host."),
    ] = True,
    host_record: Annotated[
        Path | None,
        typer.Option("--host-record", metavar="FILE", help="Check a recorded host instead."),
    ] = None,
    save_host: Annotated[
        Path | None,
        typer.Option("--save-host", metavar="FILE", help="Save this host's record, to send it."),
    ] = None,
) -> None:
    """Check devices, versions, limits, settings and placement of this host, and move bytes.

    Ends with 0 when nothing is broken, 1 when a problem was found, 2 when the check could not run.
    """
    if host_record:
        host = _recorded(host_record)
    else:
        host = host_read.read_live(host_read.process_environment())
    if container and not host.machine.container:
        machine = msgspec.structs.replace(host.machine, container="container")
        host = msgspec.structs.replace(host, machine=machine)
    if save_host:
        _save(host, save_host)
    further = []
    if transfer and not host_record:
        further = transfers(
            session=peer,
            require=require.value if require else "",
            timeout_s=TRIAL_TIMEOUT_S,
            peer_bytes=_size(peer_size),
        )
    elif peer:
        output.could_not_run("--peer moves bytes: leave --host-record and --no-transfer away")
    report = examine(host, require_efa=require is Required.EFA, further=further)
    show(report, output.console())
    output.write_json(json_file, report)
    raise typer.Exit(report.exit_code)


def _size(text: str) -> int:
    try:
        size = size_bytes(text)
    except ValueError:
        size = 0
    if size <= 0:
        output.could_not_run(f"found --peer-size {text!r}; expected a size such as 64M")
    return size


def _recorded(path: Path) -> records.Host:
    try:
        return records.decode(output.read_text(path))
    except records.RecordError as error:
        output.could_not_run(f"{path}: {error}")


def _save(host: records.Host, path: Path) -> None:
    try:
        path.write_bytes(records.encode(host))
    except OSError as error:
        output.could_not_run(f"{path}: {error.strerror or error}")
