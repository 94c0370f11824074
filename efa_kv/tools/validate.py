"""`efa-kv validate`: the network between hosts, measured before a job relies on it.

The sequence is that of the guide to EFA networks, as far as software can run it: latency of every
pair, rate of every pair and of every device, all-to-all and ring among all, then the tools of
others where they are there. A baseline is kept and later runs are set against it. The parts are in
`efa_kv.tools.validation`; this module is the command: its flags, the order of things, the result.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from efa_kv.config import process_environment
from efa_kv.errors import ConfigError, EfaKvError
from efa_kv.tools import host_read, output
from efa_kv.tools.bench_load import size_bytes
from efa_kv.tools.validation import (
    fleet,
    flow,
    meeting,
    member,
    outcome,
    outside,
    schedule,
    series,
    verdict,
)
from efa_kv.tools.validation import place as places
from efa_kv.tools.validation.leader import Leader, RunError
from efa_kv.tools.validation.place import Place, PlaceError
from efa_kv.tools.validation.samples import Sample
from efa_kv.tools.validation.verdict import Fault, Problem

#: A measurement's seconds with --quick.
_QUICK_S = 0.2


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The command line, read and checked."""

    engine: dict[str, Any]
    host: str
    label: str
    block_size_bytes: int
    buffer_size_bytes: int
    duration_s: float
    repeats: int
    join_timeout_s: float
    run_outside: bool
    baseline: series.Baseline | None = None


# ---- rank 0 ---------------------------------------------------------------------------


def lead(request: Request, place: Place) -> outcome.Result:
    """Runs everything as rank 0. Raises `RunError`, `EfaKvError`, `flow.FlowError` or `PlaceError`
    when it cannot begin; what fails later is a problem of the result."""
    with _member(request, place) as here, _progress() as bars:
        leader = Leader(here, place.hosts)
        meeting.publish(place.rendezvous, here.engine.session)
        joining = bars.add_task("hosts", total=place.hosts)
        leader.gather(request.join_timeout_s, lambda count: bars.update(joining, completed=count))
        samples: list[Sample] = []
        stopped, findings = "", outcome.Outside()
        try:
            leader.meet()
            samples += _steps(request, leader, bars)
            if request.run_outside:
                findings = _outside(leader, place, bars)
        except RunError as problem:
            stopped = str(problem)
        finally:
            leader.end()
        return _result(request, leader, samples, findings, stopped)


def _steps(request: Request, leader: Leader, bars: Progress) -> Iterator[Sample]:
    hosts = len(leader.hosts)
    count = schedule.step_count(hosts, request.repeats)
    bar = bars.add_task("steps", total=count)
    for step in schedule.steps(hosts, request.repeats):
        bars.update(bar, description=f"{step.kind.value}, {step.repeat + 1} of {request.repeats}")
        yield from leader.step(step, request.duration_s)
        bars.advance(bar)


def _outside(leader: Leader, place: Place, bars: Progress) -> outcome.Outside:
    there = [program for program in outside.PROGRAMS if shutil.which(program)]
    plan = outside.plan(there, leader.hosts, place)
    bar = bars.add_task("tools of others", total=len(plan.exchanges) + len(plan.collectives))
    found = outcome.Outside(skipped=plan.skipped)
    for exchange in plan.exchanges:
        bars.update(bar, description=outside.PINGPONG)
        found = found.with_exchange(exchange, _pingpong(leader, exchange))
        bars.advance(bar)
    for collective in plan.collectives:
        bars.update(bar, description=collective.program)
        everywhere = range(len(leader.hosts))
        answers = leader.run(
            dict.fromkeys(everywhere, collective.arguments),
            outside.NCCL_TIMEOUT_S,
            tries={},
        )
        found = found.with_collective(collective, answers[0].output)
        bars.advance(bar)
    return found


def _pingpong(leader: Leader, exchange: outside.Exchange) -> str:
    """What the client printed."""
    address = leader.hosts[exchange.server].address
    answers = leader.run(
        {exchange.server: exchange.serving, exchange.client: exchange.calling(address)},
        outside.PINGPONG_TIMEOUT_S,
        tries={exchange.client: outside.CLIENT_TRIES},
    )
    return answers[exchange.client].output


def _result(
    request: Request,
    leader: Leader,
    samples: list[Sample],
    findings: outcome.Outside,
    stopped: str,
) -> outcome.Result:
    found = {**verdict.series(samples), **findings.series}
    changes = []
    if request.baseline is not None:
        changes = series.compare(request.baseline.series, found)
    problems = verdict.problems(samples, leader.hosts, changes)
    problems += [Problem(fault=Fault.OUTSIDE, suspects=(), text=text) for text in findings.problems]
    if stopped:
        problems.insert(0, Problem(fault=Fault.FAILED, suspects=(), text=stopped))
    return outcome.Result(
        hosts=tuple(leader.hosts),
        one_machine=verdict.share_machines(leader.hosts),
        block_size_bytes=request.block_size_bytes,
        duration_s=request.duration_s,
        repeats=request.repeats,
        series=found,
        changes=tuple(changes),
        problems=tuple(problems),
        notes=(*outcome.differences(leader.hosts, request.baseline), *findings.skipped),
        outside=findings.told,
        exit_code=output.EXIT_PROBLEM if problems else output.EXIT_GOOD,
    )


# ---- every rank -----------------------------------------------------------------------


def _member(request: Request, place: Place) -> member.Member:
    environment = process_environment()
    machine = host_read.read_live(environment)
    host, port = meeting.engine_address(place, request.host or environment.get("EFA_KV_HOST", ""))
    equipment = member.Equipment(
        engine=request.engine,
        block_size_bytes=request.block_size_bytes,
        buffer_size_bytes=request.buffer_size_bytes,
        label=request.label,
        container=machine.machine.container,
        gpus=len(machine.gpus),
    )
    return member.Member(place, equipment, host, port)


def follow(request: Request, place: Place) -> None:
    """Carries out rank 0's orders. Raises what `member.serve` raises."""
    with _member(request, place) as here:
        member.serve(here, place, request.join_timeout_s)


@contextmanager
def _progress() -> Iterator[Progress]:
    """Bars on standard error, where it is a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:24}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        yield bars


# ---- the command ----------------------------------------------------------------------


def command(
    hosts: Annotated[
        int, typer.Option("--hosts", min=0, help="Run so many hosts as processes of this machine.")
    ] = 0,
    rank: Annotated[
        int, typer.Option("--rank", help="Which host this is, without a launcher.")
    ] = -1,
    of: Annotated[int, typer.Option("--of", help="How many there are, beside --rank.")] = 0,
    rendezvous: Annotated[
        str,
        typer.Option(
            "--rendezvous",
            metavar="HOST:PORT|file:PATH",
            help="Where rank 0 is found; the launcher says so for torchrun and srun.",
        ),
    ] = "",
    host: Annotated[
        str, typer.Option("--host", help="This host's address that the others can reach.")
    ] = "",
    label: Annotated[str, typer.Option("--label", help="What to call this host.")] = "",
    protocol: Annotated[
        str, typer.Option("--protocol", help="efa, tcp, shm, auto, or a libfabric provider.")
    ] = "",
    block_size: Annotated[str, typer.Option("--block-size", help="Bytes per operation.")] = "1M",
    buffer_size: Annotated[
        str, typer.Option("--buffer-size", help="Bytes of each host's two buffers.")
    ] = "256M",
    duration: Annotated[
        float, typer.Option("--duration", help="Seconds of each measurement.", min=0.01, max=600)
    ] = 1.0,
    repeats: Annotated[
        int, typer.Option("--repeats", help="Times that everything is measured.", min=1, max=100)
    ] = 3,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Short, small, and without other people's tools."),
    ] = False,
    run_outside: Annotated[
        bool | None,
        typer.Option("--outside/--no-outside", help="Run fi_pingpong and nccl-tests if found."),
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option("--baseline", metavar="FILE", help="Compare with this run.")
    ] = None,
    save_baseline: Annotated[
        Path | None, typer.Option("--save-baseline", metavar="FILE", help="Keep this run.")
    ] = None,
    join_timeout: Annotated[
        float, typer.Option("--join-timeout", help="Seconds to wait for all hosts.", min=1)
    ] = 60.0,
    json_file: output.JsonOption = None,
) -> None:
    """Measure the network between hosts: latency, pairs, devices, all-to-all, ring.

    Start it on every host with torchrun, srun or mpirun, or here with --hosts. Ends with 0 when
    all is well, 1 when something is wrong or slow, 2 when it could not run.
    """
    if quick:
        block_size, buffer_size, duration = "64K", "16M", min(duration, _QUICK_S)
    run_outside = not quick if run_outside is None else run_outside
    words = [f"--block-size={block_size}", f"--buffer-size={buffer_size}", f"--host={host}"]
    words += [f"--duration={duration}", f"--repeats={repeats}", f"--join-timeout={join_timeout}"]
    words += [f"--protocol={protocol}", "--outside" if run_outside else "--no-outside"]
    if hosts:
        files = {"baseline": baseline, "save-baseline": save_baseline, "json": json_file}
        _run_fleet(hosts, words, [f"--{name}={path}" for name, path in files.items() if path])
    try:
        place = _place(rank, of, rendezvous)
        if not place.takes_part:
            return
        request = Request(
            engine={"protocol": protocol} if protocol else {},
            host=host,
            label=label or platform.node(),
            block_size_bytes=_size(block_size, "--block-size"),
            buffer_size_bytes=_size(buffer_size, "--buffer-size"),
            duration_s=duration,
            repeats=repeats,
            join_timeout_s=join_timeout,
            run_outside=run_outside,
            baseline=_baseline(baseline) if place.leads else None,
        )
        if not place.leads:
            follow(request, place)
            return
        result = lead(request, place)
    except (PlaceError, RunError, ConfigError, flow.FlowError, member.LostError) as problem:
        output.could_not_run(str(problem))
    except EfaKvError as problem:
        output.could_not_run(str(problem))
    outcome.show(result, output.console())
    output.write_json(json_file, result)
    _save(save_baseline, result)
    raise typer.Exit(result.exit_code)


def _place(rank: int, of: int, rendezvous: str) -> Place:
    place: Place | None
    if rank >= 0 or of:
        place = places.by_flags(rank, of, rendezvous)
    else:
        place = places.by_launcher(process_environment(), rendezvous)
    if place is None:
        raise PlaceError(
            "found no launcher; start it on every host by torchrun, srun or mpirun, or by "
            "--rank, --of and --rendezvous, or several hosts on this machine by --hosts"
        )
    if place.hosts < 2:
        raise PlaceError("found one host; expected at least two")
    return place


def _run_fleet(hosts: int, words: list[str], leader_words: list[str]) -> None:
    if not 2 <= hosts <= places.MAX_HOSTS:
        output.could_not_run(f"found --hosts {hosts}; expected 2 to {places.MAX_HOSTS}")
    status, complaint = fleet.run(hosts, words, leader_words, process_environment())
    if complaint:
        typer.echo(complaint, err=True)
    raise typer.Exit(status if status >= 0 else output.EXIT_COULD_NOT_RUN)


def _size(text: str, flag: str) -> int:
    try:
        size = size_bytes(text)
    except ValueError:
        size = 0
    if size <= 0:
        raise PlaceError(f"found {flag} {text!r}; expected a size such as 1M")
    return size


def _baseline(path: Path | None) -> series.Baseline | None:
    if path is None:
        return None
    try:
        return series.decode(output.read_text(path))
    except series.BaselineError as problem:
        output.could_not_run(f"{path}: {problem}")


def _save(path: Path | None, result: outcome.Result) -> None:
    if path is None:
        return
    kept = series.Baseline(
        format=series.FORMAT,
        protocol=result.hosts[0].protocol,
        hosts=tuple(host.label for host in result.hosts),
        containers=tuple(host.container for host in result.hosts),
        block_size_bytes=result.block_size_bytes,
        series=result.series,
    )
    try:
        path.write_bytes(series.encode(kept))
    except OSError as problem:
        output.could_not_run(f"{path}: {problem.strerror or problem}")
