"""The command ``efa-kv sim``: runs any command on simulated EFA NICs."""

from pathlib import Path
from typing import Annotated

import typer

from efa_kv.config import process_environment
from efa_kv.tools import sim


def command(
    words: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="What to run.")],
    nics: Annotated[int | None, typer.Option(min=1, help="NICs of a host.")] = None,
    instance: Annotated[
        str | None, typer.Option(help="Name and place the NICs as on p5en.48xlarge, …")
    ] = None,
    rate_gbps: Annotated[float | None, typer.Option(help="Line rate of a NIC, Gbit/s.")] = None,
    op_rate: Annotated[float | None, typer.Option(help="Operations a NIC does per second.")] = None,
    latency_us: Annotated[float | None, typer.Option(help="Latency of an operation.")] = None,
    transmit_depth: Annotated[int | None, typer.Option(help="Operations a NIC queues.")] = None,
    reorder: Annotated[
        int | None, typer.Option(help="Completions among which the order is random.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.")] = None,
    no_copy: Annotated[
        bool, typer.Option("--no-copy", help="Move no bytes: time the software alone.")
    ] = False,
    fault: Annotated[
        list[str] | None,
        typer.Option(help="A fault, such as nic=3,die_at_op=1000; repeat for more."),
    ] = None,
    sysfs: Annotated[
        Path | None, typer.Option(help="Folder in which to make the NICs' sysfs tree.")
    ] = None,
) -> None:
    """Run COMMAND, and whatever it starts, on simulated EFA NICs.

    Exits with COMMAND's status.  Every knob is explained in native/simnic/README.md.
    """
    simulation = sim.Simulation(
        nics=nics,
        instance=instance,
        rate_gbps=rate_gbps,
        op_rate=op_rate,
        latency_us=latency_us,
        transmit_depth=transmit_depth,
        reorder=reorder,
        seed=seed,
        no_copy=no_copy,
        faults=tuple(fault or ()),
        sysfs=sysfs,
    )
    raise typer.Exit(sim.run(words, simulation, process_environment()))
