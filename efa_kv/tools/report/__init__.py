"""`efa-kv report`: one page about a network and what it carried.

Reads what bench, validate and doctor wrote as JSON, and the traces of engines, from files or from
running ones; writes one HTML file that needs nothing else, and the traces for Perfetto.
"""

import datetime
import importlib.metadata
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from efa_kv.observe import trace
from efa_kv.observe.trace import TraceDocument
from efa_kv.tools import output
from efa_kv.tools.endpoint import EndpointError, ask, url_of
from efa_kv.tools.report import page
from efa_kv.tools.report.inputs import (
    BYTES_MAX,
    INPUTS_MAX,
    InputError,
    Kind,
    gather,
    problems,
    read,
)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of the command."""

    page: str
    inputs: dict[str, int]
    problems: tuple[str, ...]
    exit_code: int


def _read(path: Path) -> tuple[str, Kind]:
    try:
        with path.open("rb") as file:
            text = file.read(BYTES_MAX + 1)
    except OSError as problem:
        output.could_not_run(f"{path}: {problem.strerror or problem}")
    try:
        return path.stem, read(str(path), text)
    except InputError as problem:
        output.could_not_run(str(problem))


def _ask(text: str) -> tuple[str, Kind]:
    try:
        document = ask(url_of(text), "trace", TraceDocument)
    except EndpointError as problem:
        output.could_not_run(str(problem))
    return document.session, document


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as problem:
        output.could_not_run(f"{path}: {problem.strerror or problem}")


def command(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="JSON of bench, validate or doctor, or a trace; in any order."),
    ] = None,
    live: Annotated[
        list[str] | None,
        typer.Option(help="host:port of a running engine's endpoint (http_port); repeat for more."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    perfetto: Annotated[
        Path | None, typer.Option(help="Also write the traces for ui.perfetto.dev.", metavar="FILE")
    ] = None,
    json_file: output.JsonOption = None,
) -> None:
    """Make one HTML page from results and traces.

    Ends with 0, with 1 when an input tells of a problem (the page is written all the same), with 2
    when there is nothing to read or it cannot be understood.
    """
    wanted = len(files or []) + len(live or [])
    if not 0 < wanted <= INPUTS_MAX:
        output.could_not_run(f"found {wanted} inputs; expected 1 to {INPUTS_MAX}, files or --live")
    inputs = gather([*(_read(path) for path in files or []), *(_ask(one) for one in live or [])])
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    _write(out, page.render(inputs, now, importlib.metadata.version("efa-kv")))
    if perfetto is not None:
        events = trace.perfetto([document for _, document in inputs.traces])
        _write(perfetto, msgspec.json.encode(events).decode())
    wrong = tuple(problems(inputs))
    code = output.EXIT_PROBLEM if wrong else output.EXIT_GOOD
    console = output.console()
    console.print(f"written: {out}")
    for line in wrong:
        console.print(f"PROBLEM  {line}")
    counts = {name: len(getattr(inputs, name)) for name in inputs.__struct_fields__}
    output.write_json(
        json_file, Report(page=str(out), inputs=counts, problems=wrong, exit_code=code)
    )
    raise typer.Exit(code)
