"""The flags of `efa-kv bench`, a type each; what they mean together is in `efa_kv.tools.bench`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from efa_kv.tools.bench_load import UNITS, Pattern
from efa_kv.tools.gflags import option

METADATA_SERVER: Final = "P2PHANDSHAKE"
#: Flags that transfer_engine_bench does not have; they are spelt with dashes only.
OWN_FLAGS: Final = (
    "--loopback",
    "--verify",
    "--warmup",
    "--no-warmup",
    "--sweep",
    "--pattern",
    "--trace",
)


class Mode(StrEnum):
    """Which side this is."""

    INITIATOR = "initiator"
    TARGET = "target"


class Operation(StrEnum):
    """What the initiator does with the target's memory."""

    READ = "read"
    WRITE = "write"


ModeFlag = Annotated[Mode, option("--mode", help="Which side this is.")]
ProtocolFlag = Annotated[
    str, option("--protocol", help="efa, tcp, shm, auto, or a libfabric provider.")
]
MetadataServerFlag = Annotated[
    str,
    option("--metadata-server", help=f"Only {METADATA_SERVER}: there is no metadata server."),
]
SegmentIdFlag = Annotated[
    str, option("--segment-id", help="The target's host:port, as it printed it.")
]
LocalServerNameFlag = Annotated[
    str,
    option(
        "--local-server-name",
        help="Address to listen on, host or host:port, that the other side can reach.",
    ),
]
DeviceNameFlag = Annotated[
    str, option("--device-name", help="Devices to use, names or globs with commas between.")
]
OperationFlag = Annotated[Operation, option("--operation", help="What the initiator does.")]
BlockSizeFlag = Annotated[str, option("--block-size", help="Bytes per block.")]
BatchSizeFlag = Annotated[int, option("--batch-size", min=1, help="Blocks per job.")]
ThreadsFlag = Annotated[int, option("--threads", min=1, help="Jobs in flight.")]
BufferSizeFlag = Annotated[
    str, option("--buffer-size", help="Bytes of the buffer, per GPU with --gpu-id=-1.")
]
DurationFlag = Annotated[float, option("--duration", help="Seconds to measure.")]
ReportUnitFlag = Annotated[str, option("--report-unit", help="|".join(UNITS))]
ReportPrecisionFlag = Annotated[
    int, option("--report-precision", min=0, max=9, help="Digits after the point.")
]
UseVramFlag = Annotated[
    str,
    option("--use-vram", help="true|false: buffers in GPU memory; auto where there is a GPU."),
]
GpuIdFlag = Annotated[int, option("--gpu-id", help="The GPU; -1 for one buffer on each.")]
InitMemFlag = Annotated[
    str, option("--init-mem", help="true|false: fill the buffers before the start.")
]
AutoDiscoveryFlag = Annotated[
    str, option("--auto-discovery", help="true|false: accepted; the topology is always read.")
]
LoopbackFlag = Annotated[
    bool, typer.Option("--loopback", help="Start the target here too, as a second process.")
]
VerifyFlag = Annotated[
    bool, typer.Option("--verify", help="Compare every byte; give it to both sides.")
]
WarmupFlag = Annotated[
    bool,
    typer.Option(
        "--warmup/--no-warmup", help="Resolve all devices and run every batch once, untimed."
    ),
]
SweepFlag = Annotated[
    bool, typer.Option("--sweep", help="Go through block sizes from 4 KiB to 4 MiB.")
]
PatternFlag = Annotated[Pattern, typer.Option(help="How the blocks of a job lie in memory.")]
TraceFlag = Annotated[
    Path | None,
    typer.Option("--trace", help="Also write what the last transfers did, for efa-kv report."),
]
NearFlag = Annotated[
    bool, typer.Option("--near/--no-near", help="Allow ways within one host without the provider.")
]
