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

#: Subcommand: (module, what it does).  A module has a Typer application ``app``.
TOOLS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType({})

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
        app.add_typer(importlib.import_module(module).app, name=name, help=text)
    else:
        # Only its line in the list of commands; the module stays unloaded.
        app.command(name, help=text)(lambda: None)


def main() -> None:
    """Entry point; exit status 0 good, 1 a problem was found, 2 could not run."""
    words = sys.argv[1:]
    try:
        for name, (module, text) in TOOLS.items():
            _add_tool(name, module, text, wanted=name in words)
        app()
    except EfaKvError as problem:
        typer.echo(f"efa-kv: {problem}", err=True)
        sys.exit(COULD_NOT_RUN)


if __name__ == "__main__":
    main()
