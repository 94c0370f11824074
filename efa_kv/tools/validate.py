"""`efa-kv validate`: the network between hosts, measured before a job relies on it.

The sequence is that of the guide to EFA networks, as far as software can run it: latency of every
pair, rate of every pair and of every device, all-to-all and ring among all, then the tools of
others where they are there. A baseline is kept and later runs are set against it. The parts are in
`efa_kv.tools.validation`; this module reads the command line and writes the result.
"""

from __future__ import annotations

import platform
from pathlib import Path

import typer

from efa_kv.config import process_environment
from efa_kv.errors import EfaKvError
from efa_kv.tools import output
from efa_kv.tools.bench_load import size_bytes
from efa_kv.tools.validation import flags, fleet, flow, member, outcome, run, series
from efa_kv.tools.validation import place as places
from efa_kv.tools.validation.leader import RunError
from efa_kv.tools.validation.place import Place, PlaceError

#: A measurement's seconds with --quick.
_QUICK_S = 0.2


def command(
    hosts: flags.HostsFlag = 0,
    rank: flags.RankFlag = -1,
    of: flags.OfFlag = 0,
    rendezvous: flags.RendezvousFlag = "",
    host: flags.HostFlag = "",
    label: flags.LabelFlag = "",
    protocol: flags.ProtocolFlag = "",
    block_size: flags.BlockSizeFlag = "1M",
    buffer_size: flags.BufferSizeFlag = "256M",
    duration: flags.DurationFlag = 1.0,
    repeats: flags.RepeatsFlag = 3,
    quick: flags.QuickFlag = False,
    run_outside: flags.OutsideFlag = None,
    baseline: flags.BaselineFlag = None,
    save_baseline: flags.SaveBaselineFlag = None,
    join_timeout: flags.JoinTimeoutFlag = 60.0,
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
        request = run.Request(
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
            run.follow(request, place)
            return
        result = run.lead(request, place)
    except (PlaceError, RunError, EfaKvError, flow.FlowError, member.LostError) as problem:
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
