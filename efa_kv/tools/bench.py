"""`efa-kv bench`: how fast this host and a peer move blocks, and whether the bytes are right.

The flags are those of Mooncake's transfer_engine_bench, so that a command line written for it
measures efa-kv; with --loopback one command starts both sides.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.table import Table

from efa_kv import EngineConfig, TransferEngine
from efa_kv.errors import ConfigError, EfaKvError
from efa_kv.observe.trace import TraceDocument
from efa_kv.tools import bench_flags as flags
from efa_kv.tools import bench_memory, loopback, output
from efa_kv.tools.bench_flags import Mode, Operation
from efa_kv.tools.bench_load import SWEEP_BLOCK_BYTES, UNITS, Load, Pattern, size_bytes
from efa_kv.tools.bench_run import (
    INITIATOR_SEED,
    TARGET_SEED,
    BenchError,
    Initiator,
    Outcome,
)
from efa_kv.tools.gflags import switch
from efa_kv.types import Address


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The command line, read and checked."""

    mode: Mode
    operation: Operation
    segment_id: str
    starts_target: bool
    engine: dict[str, Any]
    block_sizes_bytes: tuple[int, ...]
    batch_size: int
    in_flight: int
    buffer_size_bytes: int
    duration_s: float
    pattern: Pattern
    gpus: tuple[int, ...]
    zero: bool
    verify: bool
    warmup: bool
    unit: str
    precision: int

    def load(self, block_size_bytes: int) -> Load:
        """The load at one block size."""
        return Load(
            block_size_bytes=block_size_bytes,
            batch_size=self.batch_size,
            in_flight=self.in_flight,
            pattern=self.pattern,
        )

    @property
    def least_buffer_bytes(self) -> int:
        """What the largest load needs."""
        return self.load(max(self.block_sizes_bytes)).least_buffer_bytes

    def target(self) -> loopback.TargetSettings:
        """The settings of the target's side."""
        return loopback.TargetSettings(
            engine=self.engine,
            buffer_size_bytes=self.buffer_size_bytes,
            gpus=self.gpus,
            seed=TARGET_SEED if self.verify else None,
            touch=self.zero or self.verify,
        )


class Sweep(Outcome, frozen=True, kw_only=True):
    """The fastest of several outcomes, and all of them."""

    sweep: list[Outcome]


# ---- measuring ------------------------------------------------------------------------


def measure(request: Request) -> tuple[list[Outcome], TraceDocument]:
    """Runs the initiator, and in loopback the target beside it; what it measured, and the trace
    of its last transfers.

    Raises `BenchError` when it cannot start, another `EfaKvError` when a transfer failed.
    """
    with contextlib.ExitStack() as stack:
        try:
            initiator = _start(request, stack)
        except EfaKvError as problem:
            raise BenchError(str(problem)) from problem
        return list(_outcomes(request, initiator)), initiator.engine.trace()


def _start(request: Request, stack: contextlib.ExitStack) -> Initiator:
    target = None
    session = request.segment_id
    if request.starts_target:
        target = stack.enter_context(loopback.Target(request.target()))
        session = target.session
    settings = {name: value for name, value in request.engine.items() if name != "port"}
    engine = stack.enter_context(TransferEngine(EngineConfig.load(settings)))
    buffers = bench_memory.allocate(request.buffer_size_bytes, request.gpus)
    for buffer in buffers:
        engine.register(buffer.whole)
    peer = engine.connect(session)
    if request.warmup:
        engine.warmup(peer)
    return Initiator(engine, peer, buffers, request.operation.value, target.pid if target else 0)


def _outcomes(request: Request, initiator: Initiator) -> Iterator[Outcome]:
    is_write = request.operation is Operation.WRITE
    for size in request.block_sizes_bytes:
        load = request.load(size)
        batches = initiator.batches(load)
        if request.verify or request.zero:
            seed = INITIATOR_SEED if request.verify and is_write else None
            for buffer in initiator.buffers:
                bench_memory.fill(buffer, seed)
        # Later sizes of a sweep find what the first one wrote.
        if request.verify and is_write and size == request.block_sizes_bytes[0]:
            wrong = initiator.check_target_text(load, batches)
            if wrong:
                raise BenchError(
                    f"before the first write {wrong}: was the target started with --verify?"
                )
        if request.warmup or request.verify:
            initiator.run_once(batches, load.in_flight)
        yield initiator.measure(load, batches, request.duration_s, request.verify)


def serve(request: Request) -> loopback.TargetReport:
    """Runs the target until it is interrupted."""
    console = output.console()

    def ready(session: str) -> None:
        console.print(f"target ready, listening on {session}")
        console.print(f"start the other side with: --mode=initiator --segment_id={session}")

    return loopback.serve_until_signal(request.target(), ready)


# ---- telling --------------------------------------------------------------------------


def show(outcomes: list[Outcome], request: Request) -> None:
    """Prints a table, a line per device, and the line that transfer_engine_bench ends with."""
    console = output.console()
    table = Table(title=f"{request.operation.value}, {outcomes[0].provider}", title_justify="left")
    for heading in ("block", "batch", f"{request.unit}/s", "blocks/s", "p50 us", "p99 us"):
        table.add_column(heading, justify="right")
    for heading in ("cores", "bytes"):
        table.add_column(heading, justify="right")
    for one in outcomes:
        checked = {None: "unchecked", True: "right", False: "WRONG"}[one.verified]
        table.add_row(
            output.gibibytes(one.block_size_bytes),
            str(one.batch_size),
            _rate(one, request),
            f"{one.descriptors_per_second:,.0f}",
            f"{one.p50_us:,.0f}",
            f"{one.p99_us:,.0f}",
            f"{one.cpu_seconds / one.wall_seconds:.2f}",
            checked,
        )
    console.print(table)
    last = outcomes[-1]
    for rail in last.rails:
        console.print(
            f"{rail.name}: {output.gigabytes(rail.bytes)} in {rail.operations} operations, "
            f"at most {rail.in_flight_peak} of {rail.queue_depth} in flight"
        )
    if last.near_bytes:
        console.print(f"without the provider: {output.gigabytes(last.near_bytes)}")
    for one in outcomes:
        if one.mismatch:
            console.print(f"WRONG BYTES at block size {one.block_size_bytes}: {one.mismatch}")
    console.print(
        f"Test completed: duration {last.wall_seconds:.2f}, batch count {last.batches}, "
        f"throughput {_rate(last, request)} {request.unit}/s"
    )


def _rate(outcome: Outcome, request: Request) -> str:
    return f"{outcome.bytes_per_second / UNITS[request.unit]:.{request.precision}f}"


def summary(outcomes: list[Outcome]) -> Outcome:
    """What goes to the JSON file: the outcome, or of several the fastest with all of them."""
    best = max(outcomes, key=lambda one: one.bytes_per_second)
    if len(outcomes) == 1:
        return best
    fields = {name: getattr(best, name) for name in Outcome.__struct_fields__}
    return Sweep(**fields, sweep=outcomes)


# ---- reading the command line ---------------------------------------------------------


def _engine_settings(
    protocol: str, local_server_name: str, devices: str, near: bool
) -> dict[str, Any]:
    settings: dict[str, Any] = {"protocol": protocol, "near": near}
    if local_server_name:
        if ":" in local_server_name:
            address = Address.parse(local_server_name)
            settings |= {"host": address.host, "port": address.port}
        else:
            settings["host"] = local_server_name
    if devices:
        settings["devices"] = tuple(devices.split(","))
    return settings


def _gpus(use_vram: str, gpu_id: int) -> tuple[int, ...]:
    if use_vram != "auto" and not switch(use_vram):
        return ()
    count = bench_memory.gpu_count()
    if count == 0 and use_vram != "auto":
        output.could_not_run("--use-vram was asked for, and no CUDA device can be used here")
    if gpu_id < 0 or count == 0:
        return tuple(range(count))
    if gpu_id >= count:
        output.could_not_run(f"found --gpu-id {gpu_id}; expected less than {count}")
    return (gpu_id,)


def _sizes(text: str, name: str) -> int:
    try:
        size = size_bytes(text)
    except ValueError:
        size = 0
    if size <= 0:
        output.could_not_run(f"found {name} {text!r}; expected bytes, as in 65536 or 64K")
    return size


def _checked(request: Request) -> Request:
    """The request with a buffer that is large enough, or the end of the command."""
    if not 0 < request.duration_s < math.inf:
        output.could_not_run(f"found --duration {request.duration_s}; expected seconds")
    if request.unit not in UNITS:
        output.could_not_run(
            f"found --report-unit {request.unit!r}; expected one of {', '.join(UNITS)}"
        )
    if request.mode is Mode.INITIATOR and bool(request.segment_id) == request.starts_target:
        output.could_not_run("give --segment-id host:port of the target, or --loopback, not both")
    if request.starts_target and request.mode is Mode.TARGET:
        output.could_not_run("--loopback starts both sides; leave --mode target away")
    if request.buffer_size_bytes < request.least_buffer_bytes:
        typer.echo(
            f"--buffer-size raised from {request.buffer_size_bytes} to "
            f"{request.least_buffer_bytes} bytes, which the load needs",
            err=True,
        )
        return msgspec.structs.replace(request, buffer_size_bytes=request.least_buffer_bytes)
    return request


def command(
    mode: flags.ModeFlag = Mode.INITIATOR,
    protocol: flags.ProtocolFlag = "auto",
    metadata_server: flags.MetadataServerFlag = flags.METADATA_SERVER,
    segment_id: flags.SegmentIdFlag = "",
    local_server_name: flags.LocalServerNameFlag = "",
    device_name: flags.DeviceNameFlag = "",
    operation: flags.OperationFlag = Operation.READ,
    block_size: flags.BlockSizeFlag = "65536",
    batch_size: flags.BatchSizeFlag = 128,
    threads: flags.ThreadsFlag = 12,
    buffer_size: flags.BufferSizeFlag = "1G",
    duration: flags.DurationFlag = 10.0,
    report_unit: flags.ReportUnitFlag = "GB",
    report_precision: flags.ReportPrecisionFlag = 2,
    use_vram: flags.UseVramFlag = "auto",
    gpu_id: flags.GpuIdFlag = 0,
    init_mem: flags.InitMemFlag = "true",
    auto_discovery: flags.AutoDiscoveryFlag = "false",
    in_loopback: flags.LoopbackFlag = False,
    verify: flags.VerifyFlag = False,
    warmup: flags.WarmupFlag = True,
    sweep: flags.SweepFlag = False,
    pattern: flags.PatternFlag = Pattern.SCATTERED,
    near: flags.NearFlag = False,
    trace_file: flags.TraceFlag = None,
    json_file: output.JsonOption = None,
) -> None:
    """Measure transfers between two engines, with transfer_engine_bench's flags.

    Ends with 0 when all went well, 1 when bytes were wrong or a transfer failed, 2 when the
    measurement could not start.
    """
    if metadata_server != flags.METADATA_SERVER:
        output.could_not_run(
            f"found --metadata-server {metadata_server!r}; expected {flags.METADATA_SERVER}: "
            "engines find each other by --segment-id alone"
        )
    switch(auto_discovery)
    sizes = SWEEP_BLOCK_BYTES if sweep else (_sizes(block_size, "--block-size"),)
    try:
        request = _checked(
            Request(
                mode=mode,
                operation=operation,
                segment_id=segment_id,
                starts_target=in_loopback,
                engine=_engine_settings(protocol, local_server_name, device_name, near),
                block_sizes_bytes=sizes,
                batch_size=batch_size,
                in_flight=threads,
                buffer_size_bytes=_sizes(buffer_size, "--buffer-size"),
                duration_s=duration,
                pattern=pattern,
                gpus=_gpus(use_vram, gpu_id),
                zero=switch(init_mem),
                verify=verify,
                warmup=warmup,
                unit=report_unit,
                precision=report_precision,
            )
        )
    except ConfigError as problem:
        output.could_not_run(str(problem))
    run(request, json_file, trace_file)


def run(request: Request, json_file: Path | None, trace_file: Path | None = None) -> None:
    """Carries a request out and leaves with the exit code for it."""
    if request.mode is Mode.TARGET:
        try:
            output.write_json(json_file, serve(request))
        except EfaKvError as problem:
            output.could_not_run(str(problem))
        return
    try:
        outcomes, trace = measure(request)
    except BenchError as problem:
        output.could_not_run(str(problem))
    except EfaKvError as problem:
        typer.echo(f"failed: {problem}", err=True)
        raise typer.Exit(output.EXIT_PROBLEM) from problem
    show(outcomes, request)
    output.write_json(json_file, summary(outcomes))
    output.write_json(trace_file, trace)
    good = all(one.verified is not False for one in outcomes)
    raise typer.Exit(output.EXIT_GOOD if good else output.EXIT_PROBLEM)
