"""One process's part in a run: as rank 0, which decides and judges, or as another host.

What is decided is in the pure modules beside this one; here they are put in order, with the bars
that show how far a run is.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from efa_kv.config import process_environment
from efa_kv.tools import host_read, output
from efa_kv.tools.validation import (
    meeting,
    member,
    outcome,
    outside,
    schedule,
    series,
    verdict,
)
from efa_kv.tools.validation.leader import Leader, RunError
from efa_kv.tools.validation.place import Place
from efa_kv.tools.validation.samples import Sample
from efa_kv.tools.validation.verdict import Fault, Problem


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
        answers = leader.run(exchange.tools)
        found = found.with_exchange(exchange, answers[exchange.client].output)
        bars.advance(bar)
    for collective in plan.collectives:
        bars.update(bar, description=collective.program)
        answers = leader.run(dict.fromkeys(range(len(leader.hosts)), collective))
        found = found.with_collective(collective, answers[0].output)
        bars.advance(bar)
    return found


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
