"""`efa-kv bench`: how fast this host and a peer move blocks, and whether the bytes are right.

The flags are those of Mooncake's transfer_engine_bench, so that a command line written for it
measures efa-kv; with --loopback one command starts both sides.
"""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.table import Table

from efa_kv import EngineConfig, TransferEngine
from efa_kv.errors import ConfigError, EfaKvError
from efa_kv.tools import bench_memory, loopback, output
from efa_kv.tools.bench_load import SWEEP_BLOCK_BYTES, UNITS, Load, Pattern, size_bytes
from efa_kv.tools.bench_run import (
    INITIATOR_SEED,
    TARGET_SEED,
    BenchError,
    Initiator,
    Outcome,
)
from efa_kv.tools.gflags import option, switch
from efa_kv.types import Address

_METADATA_SERVER: Final = "P2PHANDSHAKE"


class Mode(StrEnum):
    """Which side this is."""

    INITIATOR = "initiator"
    TARGET = "target"


class Operation(StrEnum):
    """What the initiator does with the target's memory."""

    READ = "read"
    WRITE = "write"


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


def measure(request: Request) -> list[Outcome]:
    """Runs the initiator, and in loopback the target beside it."""
    with contextlib.ExitStack() as stack:
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
        initiator = Initiator(
            engine, peer, buffers, request.operation.value, target.pid if target else 0
        )
        return list(_outcomes(request, initiator, buffers))


def _outcomes(
    request: Request, initiator: Initiator, buffers: list[bench_memory.Buffer]
) -> Iterator[Outcome]:
    is_write = request.operation is Operation.WRITE
    for size in request.block_sizes_bytes:
        load = request.load(size)
        batches = initiator.batches(load)
        if request.verify or request.zero:
            seed = INITIATOR_SEED if request.verify and is_write else None
            for buffer in buffers:
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

    def leave(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, leave)
    console = output.console()

    def ready(session: str) -> None:
        console.print(f"target ready, listening on {session}")
        console.print(f"start the other side with: --mode=initiator --segment_id={session}")

    return loopback.serve(request.target(), ready, signal.pause)


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
    mode: Annotated[Mode, option("--mode", help="Which side this is.")] = Mode.INITIATOR,
    protocol: Annotated[
        str, option("--protocol", help="efa, tcp, shm, auto, or a libfabric provider.")
    ] = "auto",
    metadata_server: Annotated[
        str, option("--metadata-server", help="Only P2PHANDSHAKE: there is no metadata server.")
    ] = _METADATA_SERVER,
    segment_id: Annotated[
        str, option("--segment-id", help="The target's host:port, as it printed it.")
    ] = "",
    local_server_name: Annotated[
        str,
        option(
            "--local-server-name",
            help="Address to listen on, host or host:port, that the other side can reach.",
        ),
    ] = "",
    device_name: Annotated[
        str, option("--device-name", help="Devices to use, names or globs with commas between.")
    ] = "",
    operation: Annotated[Operation, option("--operation")] = Operation.READ,
    block_size: Annotated[str, option("--block-size", help="Bytes per block.")] = "65536",
    batch_size: Annotated[int, option("--batch-size", min=1, help="Blocks per job.")] = 128,
    threads: Annotated[int, option("--threads", min=1, help="Jobs in flight.")] = 12,
    buffer_size: Annotated[
        str, option("--buffer-size", help="Bytes of the buffer, per GPU with --gpu-id=-1.")
    ] = "1G",
    duration: Annotated[float, option("--duration", help="Seconds to measure.")] = 10.0,
    report_unit: Annotated[str, option("--report-unit", help="|".join(UNITS))] = "GB",
    report_precision: Annotated[int, option("--report-precision", min=0, max=9)] = 2,
    use_vram: Annotated[
        str,
        option("--use-vram", help="true|false: buffers in GPU memory; auto where there is a GPU."),
    ] = "auto",
    gpu_id: Annotated[int, option("--gpu-id", help="The GPU; -1 for one buffer on each.")] = 0,
    init_mem: Annotated[
        str, option("--init-mem", help="true|false: fill the buffers before the start.")
    ] = "true",
    auto_discovery: Annotated[
        str, option("--auto-discovery", help="true|false: accepted; the topology is always read.")
    ] = "false",
    in_loopback: Annotated[
        bool, typer.Option("--loopback", help="Start the target here too, as a second process.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare every byte; give it to both sides.")
    ] = False,
    warmup: Annotated[
        bool, typer.Option(help="Resolve all devices and run every batch once, untimed.")
    ] = True,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Go through block sizes from 4 KiB to 4 MiB.")
    ] = False,
    pattern: Annotated[
        Pattern, typer.Option(help="How the blocks of a job lie in memory.")
    ] = Pattern.SCATTERED,
    near: Annotated[
        bool, typer.Option(help="Allow ways within one host that pass by the provider.")
    ] = False,
    json_file: output.JsonOption = None,
) -> None:
    """Measure transfers between two engines, with transfer_engine_bench's flags.

    Ends with 0 when all went well, 1 when bytes were wrong or a transfer failed, 2 when the
    measurement could not start.
    """
    if metadata_server != _METADATA_SERVER:
        output.could_not_run(
            f"found --metadata-server {metadata_server!r}; expected {_METADATA_SERVER}: "
            "engines find each other by --segment-id alone"
        )
    switch(auto_discovery)
    try:
        request = _checked(
            Request(
                mode=mode,
                operation=operation,
                segment_id=segment_id,
                starts_target=in_loopback,
                engine=_engine_settings(protocol, local_server_name, device_name, near),
                block_sizes_bytes=SWEEP_BLOCK_BYTES
                if sweep
                else (_sizes(block_size, "--block-size"),),
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
    run(request, json_file)


def run(request: Request, json_file: Path | None) -> None:
    """Carries a request out and leaves with the exit code for it."""
    if request.mode is Mode.TARGET:
        try:
            output.write_json(json_file, serve(request))
        except EfaKvError as problem:
            output.could_not_run(str(problem))
        return
    try:
        outcomes = measure(request)
    except (BenchError, ConfigError) as problem:
        output.could_not_run(str(problem))
    except EfaKvError as problem:
        typer.echo(f"failed: {problem}", err=True)
        raise typer.Exit(output.EXIT_PROBLEM) from problem
    show(outcomes, request)
    output.write_json(json_file, summary(outcomes))
    good = all(one.verified is not False for one in outcomes)
    raise typer.Exit(output.EXIT_GOOD if good else output.EXIT_PROBLEM)
