"""The result of a run: its parts, what it says about the hosts, and how it is shown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from efa_kv.tools.output import gigabytes
from efa_kv.tools.validation import outside
from efa_kv.tools.validation.samples import HostFacts
from efa_kv.tools.validation.schedule import Kind
from efa_kv.tools.validation.series import Baseline, Change, Series, Trend
from efa_kv.tools.validation.verdict import Problem, quantity

#: Changes shown one by one; the JSON holds all.
_SHOWN_CHANGES: Final = 12


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """One run of another tool, in a line."""

    program: str
    text: str


class Outside(msgspec.Struct, frozen=True, kw_only=True):
    """What other people's tools said: series, problems, a line each, and what was not run."""

    series: dict[str, Series] = {}
    problems: tuple[str, ...] = ()
    told: tuple[Told, ...] = ()
    skipped: tuple[str, ...] = ()

    def with_exchange(self, exchange: outside.Exchange, text: str) -> Outside:
        """And a run of fi_pingpong with this output."""
        try:
            rows = outside.read_pingpong(text)
        except outside.OutputError as problem:
            return self._failed(f"{exchange.client}>{exchange.server}: {problem}")
        row = rows[0]
        line = f"{exchange.client}>{exchange.server}: {row.transfer_us:.1f} us one way"
        told = Told(program=outside.PINGPONG, text=f"{line} ({row.size_bytes} bytes)")
        return msgspec.structs.replace(
            self,
            series={**self.series, **outside.pingpong_series(exchange, rows)},
            told=(*self.told, told),
        )

    def with_collective(self, collective: outside.Collective, text: str) -> Outside:
        """And a run of nccl-tests with this output of rank 0."""
        program = collective.program
        try:
            found = outside.read_nccl_tests(text)
        except outside.OutputError as problem:
            return self._failed(str(problem))
        row = found.rows[-1]
        line = (
            f"algbw {row.algorithm_gb_per_s:g} GB/s, busbw {row.bus_gb_per_s:g} GB/s at "
            f"{row.size_bytes} bytes; {found.log.verdict}"
        )
        return msgspec.structs.replace(
            self,
            series={**self.series, **outside.nccl_series(program, found)},
            problems=(*self.problems, *outside.nccl_problems(program, found)),
            told=(*self.told, Told(program=program, text=line)),
        )

    def _failed(self, text: str) -> Outside:
        return msgspec.structs.replace(self, problems=(*self.problems, text))


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of the command.

    ``series`` by name: a kind alone for all hosts, ``pair 0>3`` for ranks as ``hosts`` lists them;
    bytes per second, or microseconds for ``latency``. ``one_machine``: several hosts are processes
    of one machine, which take each other's processors: devices are judged, rates are not.
    """

    hosts: tuple[HostFacts, ...]
    one_machine: bool
    block_size_bytes: int
    duration_s: float
    repeats: int
    series: dict[str, Series]
    changes: tuple[Change, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    outside: tuple[Told, ...]
    exit_code: int


def differences(hosts: Sequence[HostFacts], baseline: Baseline | None) -> list[str]:
    """What is not alike among the hosts, or between this run and its baseline, and may matter."""
    notes = []
    for what, values in (
        ("libfabric", {host.libfabric for host in hosts}),
        ("provider", {host.provider for host in hosts}),
        ("container", {host.container or "none" for host in hosts}),
    ):
        if len(values) > 1:
            notes.append(f"the hosts differ in {what}: {', '.join(sorted(values))}")
    if baseline is None:
        return notes
    here = (hosts[0].protocol, tuple(host.container for host in hosts))
    if baseline.protocol != here[0]:
        notes.append(f"the baseline was measured over {baseline.protocol}, this run over {here[0]}")
    if baseline.containers != here[1]:
        before = ", ".join(sorted({one or "hosts" for one in baseline.containers}))
        now = ", ".join(sorted({one or "hosts" for one in here[1]}))
        notes.append(f"the baseline was measured on {before}, this run on {now}")
    if len(baseline.hosts) != len(hosts):
        notes.append(f"the baseline has {len(baseline.hosts)} hosts, this run {len(hosts)}")
    return notes


def show(result: Result, console: Console) -> None:
    """Hosts and their rates, the tools of others, changes, and at last what is wrong."""
    console.print(_host_table(result))
    for kind in Kind:
        if kind.value in result.series:
            one = result.series[kind.value]
            noise = quantity(one.spread, one.unit)
            console.print(f"{kind.value:>12}: {quantity(one.median, one.unit)} ± {noise}")
    _show_all_reduce(result, console)
    for told in result.outside:
        console.print(f"{told.program:>12}: {told.text}")
    if result.one_machine:
        console.print("hosts are processes of one machine: only devices are judged, not rates")
    for note in result.notes:
        console.print(f"note: {note}")
    _show_changes(result, console)
    for problem in result.problems:
        console.print(f"PROBLEM  {problem.fault.value}: {problem.text}")
    console.print(
        f"{len(result.problems)} problems" if result.problems else "nothing wrong was found"
    )


def _host_table(result: Result) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("rank", justify="right")
    table.add_column("host")
    for name in ("devices", "line rate", "pair", "ring", "all-to-all", "latency"):
        table.add_column(name, justify="right")
    for position, host in enumerate(result.hosts):
        line = host.line_rate_bytes_per_s
        table.add_row(
            str(position),
            host.label,
            str(len(host.nics)),
            f"{gigabytes(line)}/s" if line else "?",
            *(_of_sender(result, kind, position) for kind in (Kind.PAIR, Kind.RING)),
            _of_sender(result, Kind.ALL_TO_ALL, position),
            _of_sender(result, Kind.LATENCY, position),
        )
    return table


def _of_sender(result: Result, kind: Kind, position: int) -> str:
    """The median over everything of a kind that one host sent."""
    found = [
        one
        for name, one in result.series.items()
        if name == f"{kind.value} {position}" or name.startswith(f"{kind.value} {position}>")
    ]
    if not found:
        return "-"
    return quantity(statistics.median(one.median for one in found), found[0].unit)


def _show_all_reduce(result: Result, console: Console) -> None:
    """A ring all-reduce sends each byte 2 (n - 1) / n times over every link."""
    senders = [
        one.median for name, one in result.series.items() if name.startswith(f"{Kind.RING.value} ")
    ]
    if senders:
        count = len(result.hosts)
        rate = min(senders) * count / (2 * (count - 1))
        console.print(f"  all-reduce: {gigabytes(rate)}/s at most, by the slowest link of the ring")


def _show_changes(result: Result, console: Console) -> None:
    if not result.changes:
        return
    moved = [change for change in result.changes if change.trend is not Trend.SAME]
    console.print(f"against the baseline: {len(moved)} of {len(result.changes)} have changed")
    for change in moved[:_SHOWN_CHANGES]:
        before, now = quantity(change.before, change.unit), quantity(change.now, change.unit)
        noise = quantity(change.noise, change.unit)
        console.print(f"  {change.trend.value}: {change.name} {now}, before {before} (± {noise})")
    if len(moved) > _SHOWN_CHANGES:
        console.print(f"  and {len(moved) - _SHOWN_CHANGES} more, in the JSON")
