"""The flags of `efa-kv validate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HostsFlag = Annotated[
    int, typer.Option("--hosts", min=0, help="Run so many hosts as processes of this machine.")
]
RankFlag = Annotated[int, typer.Option("--rank", help="Which host this is, without a launcher.")]
OfFlag = Annotated[int, typer.Option("--of", help="How many there are, beside --rank.")]
RendezvousFlag = Annotated[
    str,
    typer.Option(
        "--rendezvous",
        metavar="HOST:PORT|file:PATH",
        help="Where rank 0 is found; the launcher says so for torchrun and srun.",
    ),
]
HostFlag = Annotated[
    str, typer.Option("--host", help="This host's address that the others can reach.")
]
LabelFlag = Annotated[str, typer.Option("--label", help="What to call this host.")]
ProtocolFlag = Annotated[
    str, typer.Option("--protocol", help="efa, tcp, shm, auto, or a libfabric provider.")
]
BlockSizeFlag = Annotated[str, typer.Option("--block-size", help="Bytes per operation.")]
BufferSizeFlag = Annotated[
    str, typer.Option("--buffer-size", help="Bytes of each host's two buffers.")
]
DurationFlag = Annotated[
    float, typer.Option("--duration", help="Seconds of each measurement.", min=0.01, max=600)
]
RepeatsFlag = Annotated[
    int, typer.Option("--repeats", help="Times that everything is measured.", min=1, max=100)
]
QuickFlag = Annotated[
    bool,
    typer.Option("--quick", help="Short, small, and without other people's tools."),
]
OutsideFlag = Annotated[
    bool | None,
    typer.Option("--outside/--no-outside", help="Run fi_pingpong and nccl-tests if found."),
]
BaselineFlag = Annotated[
    Path | None, typer.Option("--baseline", metavar="FILE", help="Compare with this run.")
]
SaveBaselineFlag = Annotated[
    Path | None, typer.Option("--save-baseline", metavar="FILE", help="Keep this run.")
]
JoinTimeoutFlag = Annotated[
    float, typer.Option("--join-timeout", help="Seconds to wait for all hosts.", min=1)
]
