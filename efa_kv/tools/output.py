"""What every tool shares on its way out: the exit codes, the JSON file and the error line."""

from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import typer
from rich.console import Console

EXIT_GOOD = 0
EXIT_PROBLEM = 1
EXIT_COULD_NOT_RUN = 2

JsonOption = Annotated[
    Path | None,
    typer.Option("--json", help="Also write the result as JSON to this file.", metavar="FILE"),
]


def console() -> Console:
    """A console on standard output that leaves words like [0] alone."""
    return Console(markup=False, highlight=False, soft_wrap=True)


def could_not_run(message: str) -> NoReturn:
    """Say on standard error why there is no result, and leave with the code for it."""
    typer.echo(f"could not run: {message}", err=True)
    raise typer.Exit(EXIT_COULD_NOT_RUN)


def read_text(path: Path) -> str:
    """The text of a file the user named, or the end of the command with the reason."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        could_not_run(f"{path}: {error.strerror or error}")


def write_json(path: Path | None, result: object) -> None:
    """Write a result for other programs; without a path nothing is written."""
    if path is None:
        return
    text = msgspec.json.format(msgspec.json.encode(result), indent=2)
    try:
        path.write_bytes(text + b"\n")
    except OSError as error:
        could_not_run(f"{path}: {error.strerror or error}")


def gibibytes(count_bytes: float) -> str:
    """Bytes for people, in binary units as memory is sold."""
    for unit, shift in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count_bytes >= 1 << shift:
            return f"{count_bytes / (1 << shift):.3g} {unit}"
    return f"{count_bytes:.0f} B"


def gigabytes(count_bytes: float) -> str:
    """Bytes for people, in decimal units as network rates are."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count_bytes >= size:
            return f"{count_bytes / size:.3g} {unit}"
    return f"{count_bytes:.0f} B"
