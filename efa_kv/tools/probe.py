"""`efa-kv probe`: what the first transfer to a new peer costs, and what a warm-up takes off it.

The flags and lines are those of Mooncake's efa_first_submit_probe.  Further lines say what that
program leaves out: the greeting, and with --loopback both sides come from one command.
"""

from __future__ import annotations

import contextlib
import platform
import time
from typing import Annotated, Any, Final

import msgspec
import typer

from efa_kv import EngineConfig, TransferEngine
from efa_kv.errors import ConfigError, EfaKvError
from efa_kv.runtime.engine import Peer
from efa_kv.tools import bench_flags as flags
from efa_kv.tools import bench_memory, loopback, output
from efa_kv.tools.bench_flags import Mode
from efa_kv.tools.bench_load import size_bytes
from efa_kv.tools.bench_run import BenchError, Remote, remote_buffers
from efa_kv.tools.gflags import option, switch
from efa_kv.types import Address

_TARGET_PORT: Final = 12345


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of the command.  ``warmup_ms`` is null when it was not asked for;
    ``first_contact_ms`` is the greeting, the warm-up and the first submit together."""

    provider: str
    local_nics: int
    handshake_ms: float
    warmup_ms: float | None
    submit_ms: list[float]
    first_contact_ms: float
    xfer_size_bytes: int


def _milliseconds(start: float) -> float:
    return (time.perf_counter() - start) * 1e3


def measure(
    engine: TransferEngine,
    session: str,
    buffer: bench_memory.Buffer,
    *,
    xfer_size_bytes: int,
    iterations: int,
    warmup: bool,
) -> Timings:
    """Meets a peer that this engine has not met yet and writes to it a few times."""
    start = time.perf_counter()
    peer = engine.connect(session)
    handshake_ms = _milliseconds(start)
    remote = _first_buffer(peer, xfer_size_bytes)
    warmup_ms = None
    if warmup:
        warmup_start = time.perf_counter()
        engine.warmup(peer)
        warmup_ms = _milliseconds(warmup_start)
    first_contact_ms = 0.0
    submit_ms = []
    for _ in range(iterations):
        submit_start = time.perf_counter()
        job = engine.write(peer, [buffer.address], [remote.address], [xfer_size_bytes])
        error = job.wait().error
        submit_ms.append(_milliseconds(submit_start))
        first_contact_ms = first_contact_ms or _milliseconds(start)
        if error is not None:
            raise error
    return Timings(
        provider=engine.rails[0].provider,
        local_nics=len(engine.rails),
        handshake_ms=handshake_ms,
        warmup_ms=warmup_ms,
        submit_ms=submit_ms,
        first_contact_ms=first_contact_ms,
        xfer_size_bytes=xfer_size_bytes,
    )


def _first_buffer(peer: Peer, least_bytes: int) -> Remote:
    for remote in remote_buffers(peer):
        if remote.length_bytes >= least_bytes:
            return remote
    raise BenchError(f"{peer.session} offers no buffer of {least_bytes} bytes: is it a target?")


def show(timings: Timings) -> None:
    """Prints the lines of efa_first_submit_probe, after the greeting and before the sum."""
    console = output.console()
    console.print(f"handshake: {timings.handshake_ms:7.2f} ms ({timings.local_nics} local NICs)")
    if timings.warmup_ms is not None:
        console.print(f"warmup:   {timings.warmup_ms:8.2f} ms (rc=0)")
    for number, duration_ms in enumerate(timings.submit_ms):
        console.print(f"submit #{number}: {duration_ms:6.2f} ms")
    console.print(
        f"first contact: {timings.first_contact_ms:.2f} ms, all of the above to submit #0"
    )


def _settings(protocol: str, local_server_name: str, device_name: str) -> dict[str, Any]:
    """Engine settings; an address without a port, or with a name that is this host's, is
    looked up by the engine."""
    settings: dict[str, Any] = {"protocol": protocol, "near": False}
    if local_server_name:
        if ":" not in local_server_name:
            local_server_name = f"{local_server_name}:{_TARGET_PORT}"
        address = Address.parse(local_server_name)
        settings |= {"host": address.host, "port": address.port}
    if device_name:
        settings["devices"] = tuple(device_name.split(","))
    return settings


def serve(settings: loopback.TargetSettings) -> None:
    """Runs the target until it is interrupted."""
    console = output.console()
    loopback.serve_until_signal(
        settings, lambda session: console.print(f"[target] ready, addr={session}")
    )


def initiate(
    settings: dict[str, Any],
    session: str,
    buffer_size_bytes: int,
    xfer_size_bytes: int,
    iterations: int,
    warmup: bool,
) -> Timings:
    """Runs the initiator, with a target of its own when no session is given.

    Raises `BenchError` when it cannot start, another `EfaKvError` when the contact failed.
    """
    with contextlib.ExitStack() as stack:
        try:
            if not session:
                target = loopback.TargetSettings(
                    engine=settings, buffer_size_bytes=buffer_size_bytes
                )
                session = stack.enter_context(loopback.Target(target)).session
                settings = {name: value for name, value in settings.items() if name != "port"}
            engine = stack.enter_context(TransferEngine(EngineConfig.load(settings)))
            buffer = bench_memory.HostBuffer(buffer_size_bytes)
            bench_memory.fill(buffer, None)
            engine.register(buffer.whole)
        except EfaKvError as problem:
            raise BenchError(str(problem)) from problem
        output.console().print(
            f"[initiator] peer={session} warmup={'ON' if warmup else 'OFF'} "
            f"iters={iterations} xfer_size={xfer_size_bytes}"
        )
        return measure(
            engine,
            session,
            buffer,
            xfer_size_bytes=xfer_size_bytes,
            iterations=iterations,
            warmup=warmup,
        )


def command(
    mode: flags.ModeFlag = Mode.INITIATOR,
    protocol: flags.ProtocolFlag = "auto",
    metadata_server: flags.MetadataServerFlag = flags.METADATA_SERVER,
    local_server_name: Annotated[
        str,
        option(
            "--local-server-name",
            help="Address to listen on, host or host:port; the target's default is "
            "this host's name with port 12345.",
        ),
    ] = "",
    segment_id: flags.SegmentIdFlag = "",
    device_name: flags.DeviceNameFlag = "",
    warmup: Annotated[
        str, option("--warmup", help="true|false: resolve all devices before the first submit.")
    ] = "true",
    iters: Annotated[int, option("--iters", min=1, help="Timed submits.")] = 5,
    xfer_size: Annotated[str, option("--xfer-size", help="Bytes per submit.")] = "1M",
    buffer_size: flags.BufferSizeFlag = "1G",
    in_loopback: flags.LoopbackFlag = False,
    json_file: output.JsonOption = None,
) -> None:
    """Time the first contact with a peer, with efa_first_submit_probe's flags and lines.

    Ends with 0 when all went well, 1 when a transfer failed, 2 when it could not start.
    """
    if metadata_server != flags.METADATA_SERVER:
        output.could_not_run(
            f"found --metadata-server {metadata_server!r}; expected {flags.METADATA_SERVER}"
        )
    if mode is Mode.TARGET and in_loopback:
        output.could_not_run("--loopback starts both sides; leave --mode target away")
    if mode is Mode.INITIATOR and bool(segment_id) == in_loopback:
        output.could_not_run("give --segment-id host:port of the target, or --loopback, not both")
    if mode is Mode.TARGET and not local_server_name:
        local_server_name = f"{platform.node()}:{_TARGET_PORT}"
    try:
        buffer_bytes, xfer_bytes = size_bytes(buffer_size), size_bytes(xfer_size)
        if not 0 < xfer_bytes <= buffer_bytes:
            output.could_not_run("expected 0 < --xfer-size <= --buffer-size")
        settings = _settings(protocol, local_server_name, device_name)
        if mode is Mode.TARGET:
            serve(loopback.TargetSettings(engine=settings, buffer_size_bytes=buffer_bytes))
            return
        timings = initiate(settings, segment_id, buffer_bytes, xfer_bytes, iters, switch(warmup))
    except (ConfigError, ValueError, BenchError) as problem:
        output.could_not_run(str(problem))
    except EfaKvError as problem:
        typer.echo(f"failed: {problem}", err=True)
        raise typer.Exit(output.EXIT_PROBLEM) from problem
    show(timings)
    output.write_json(json_file, timings)
