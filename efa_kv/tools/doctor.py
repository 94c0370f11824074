"""`efa-kv doctor`: is this host ready to move KV cache over EFA, and if not, what mends it.

The checks proper live in `efa_kv.tools.checks` and see only a `Host`. Checks that move real bytes
are given to `examine` as further callables, so that they can be left out for a recorded host.
"""

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from efa_kv.tools import checks, host_read, output
from efa_kv.tools import host as records
from efa_kv.tools.checks import devices
from efa_kv.tools.checks.finding import Check, Finding, Severity

_MARKS = {
    Severity.GOOD: ("ok", "green"),
    Severity.NOTE: ("note", "cyan"),
    Severity.WARNING: ("warning", "yellow"),
    Severity.PROBLEM: ("PROBLEM", "bold red"),
}


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
    host_record: Annotated[
        Path | None,
        typer.Option("--host-record", metavar="FILE", help="Check a recorded host instead."),
    ] = None,
    save_host: Annotated[
        Path | None,
        typer.Option("--save-host", metavar="FILE", help="Save this host's record, to send it."),
    ] = None,
) -> None:
    """Check devices, versions, limits, settings and placement of this host.

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
    report = examine(host, require_efa=require is Required.EFA)
    show(report, output.console())
    output.write_json(json_file, report)
    raise typer.Exit(report.exit_code)


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
