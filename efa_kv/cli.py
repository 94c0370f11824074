"""The command ``efa-kv``.  Subcommands are loaded when they are called, so that
``efa-kv version`` works on a machine where nothing else does."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import typer

from efa_kv import __version__
from efa_kv.config import EngineConfig, settings_table
from efa_kv.errors import EfaKvError

GOOD: Final = 0
PROBLEM_FOUND: Final = 1
COULD_NOT_RUN: Final = 2

#: Subcommand: (module with a function ``command``, what it does).
TOOLS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "bench": ("efa_kv.tools.bench", "Measure transfers between two engines."),
        "probe": ("efa_kv.tools.probe", "Time the first transfer to a peer."),
        "doctor": ("efa_kv.tools.doctor", "Say plainly what is wrong with this host."),
        "plan": ("efa_kv.tools.model_plan", "Work out what a model asks of the network."),
        "validate": ("efa_kv.tools.validate", "Measure the network between hosts."),
        "topology": ("efa_kv.tools.topology", "Read which instances are close to each other."),
        "nccl-log": ("efa_kv.tools.nccl_log", "Read which network NCCL really chose."),
        "top": ("efa_kv.tools.top", "Watch the engines of this host."),
        "report": ("efa_kv.tools.report", "Make one page from results and traces."),
        "sim": ("efa_kv.tools.sim_command", "Run a command on simulated EFA NICs."),
    }
)

app = typer.Typer(
    name="efa-kv",
    help="Moves KV caches between model servers over AWS EFA.",
    no_args_is_help=True,
    add_completion=False,
)


@app.command()
def version() -> None:
    """Print the version of efa-kv and of the libfabric in use."""
    typer.echo(f"efa-kv {__version__}")
    try:
        from efa_kv.fabric import library_version

        typer.echo(f"libfabric {library_version(EngineConfig.load())}")
    except EfaKvError as problem:
        typer.echo(f"libfabric: {problem}", err=True)
        raise typer.Exit(PROBLEM_FOUND) from None


@app.command()
def config() -> None:
    """Print the table of all settings."""
    typer.echo(settings_table())


def _add_tool(name: str, module: str, text: str, wanted: bool) -> None:
    if wanted:
        app.command(name)(importlib.import_module(module).command)
    else:
        # Only its line in the list of commands; the module stays unloaded.
        app.command(name, help=text)(lambda: None)


def main() -> None:
    """Entry point; exit status 0 good, 1 a problem was found, 2 could not run."""
    words = sys.argv[1:]
    try:
        for name, (module, text) in TOOLS.items():
            _add_tool(name, module, text, wanted=words[:1] == [name])
        app()
    except EfaKvError as problem:
        typer.echo(f"efa-kv: {problem}", err=True)
        sys.exit(COULD_NOT_RUN)


if __name__ == "__main__":
    main()
