"""`efa-kv top`: the engines of this host, their peers, rates, rails and failures, live.

Asks the endpoints that engines open when ``http_port`` is set.  Those of this user's engines on
this host are found by themselves; others are named.  Rates come from the differences of
counters between two looks.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from efa_kv.observe.state import Check, EngineState, PeerView, RailState, judge
from efa_kv.runtime.status import find_notes
from efa_kv.tools import output
from efa_kv.tools.endpoint import EndpointError, ask, url_of

ENGINES_MAX = 64
PEERS_SHOWN = 8
#: Between the two looks of --once, so that there are rates.
ONCE_S = 0.5


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What one endpoint answered at a time, or why it did not."""

    url: str
    at_s: float
    state: EngineState | None = None
    problem: str = ""


class RailRate(msgspec.Struct, frozen=True, kw_only=True):
    """One rail now: bytes per second in both directions, and the share of its line rate."""

    name: str
    provider: str
    down: bool
    write_bytes_per_s: float
    read_bytes_per_s: float
    line_share: float | None
    in_flight: int
    failed: int


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """One engine as it is shown, and as it goes into the JSON."""

    url: str
    problem: str = ""
    session: str = ""
    protocol: str = ""
    process: int = 0
    live: bool = False
    ready: bool = False
    wrong: tuple[Check, ...] = ()
    rails: tuple[RailRate, ...] = ()
    peers: tuple[PeerView, ...] = ()
    landed: int = 0
    failed: int = 0


class Report(msgspec.Struct, frozen=True):
    """The JSON of the command."""

    engines: tuple[EngineView, ...]
    exit_code: int


def view(now: Look, before: Look | None) -> EngineView:
    """What to show of an engine, from this look and the one before.  Pure."""
    state = now.state
    if state is None:
        return EngineView(url=now.url, problem=now.problem)
    health = judge(state)
    old = before.state if before and before.state and _same(before.state, state) else None
    seconds = now.at_s - before.at_s if before and old else 0.0
    earlier = {rail.name: rail for rail in old.rails} if old else {}
    return EngineView(
        url=now.url,
        session=state.session,
        protocol=state.protocol,
        process=state.process,
        live=health.live,
        ready=health.ready,
        wrong=tuple(check for check in health.checks if not check.ok),
        rails=tuple(_rate(rail, earlier.get(rail.name), seconds) for rail in state.rails),
        peers=state.peers,
        landed=state.transfers.landed,
        failed=state.transfers.failed,
    )


def _same(one: EngineState, other: EngineState) -> bool:
    return (one.session, one.process) == (other.session, other.process)


def _rate(rail: RailState, before: RailState | None, seconds: float) -> RailRate:
    write = read = 0.0
    if before is not None and seconds > 0:
        write = max(0, rail.bytes_written - before.bytes_written) / seconds
        read = max(0, rail.bytes_read - before.bytes_read) / seconds
    line = rail.speed_bits_per_second / 8
    return RailRate(
        name=rail.name,
        provider=rail.provider,
        down=rail.down,
        write_bytes_per_s=write,
        read_bytes_per_s=read,
        line_share=max(write, read) / line if line else None,
        in_flight=rail.in_flight,
        failed=rail.operations_failed,
    )


def exit_code(engines: Sequence[EngineView]) -> int:
    """0: all are ready; 1: one is not; 2: nobody answered."""
    if not any(not engine.problem for engine in engines):
        return output.EXIT_COULD_NOT_RUN
    good = all(engine.ready for engine in engines)
    return output.EXIT_GOOD if good else output.EXIT_PROBLEM


# ---- looking --------------------------------------------------------------------------


def look(urls: Iterable[str]) -> list[Look]:
    """Asks every endpoint."""
    looks = []
    for url in list(urls)[:ENGINES_MAX]:
        try:
            state = ask(url, "state", EngineState)
            looks.append(Look(url=url, at_s=time.monotonic(), state=state))
        except EndpointError as problem:
            looks.append(Look(url=url, at_s=time.monotonic(), problem=str(problem)))
    return looks


def _urls(named: Sequence[str]) -> list[str]:
    return [url_of(text) for text in named] or [note.url for note in find_notes()]


def _views(now: Sequence[Look], before: Mapping[str, Look]) -> list[EngineView]:
    return [view(one, before.get(one.url)) for one in now]


# ---- showing --------------------------------------------------------------------------


def plain(text: str) -> str:
    """Text of a stranger without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:200]


def picture(engines: Sequence[EngineView]) -> RenderableType:
    """All engines, one below the other."""
    parts: list[RenderableType] = []
    for engine in engines:
        parts += [*_engine(engine), Text()]
    return Group(*parts) if parts else Text("no engine with an endpoint (set http_port)")


def _engine(engine: EngineView) -> list[RenderableType]:
    if engine.problem:
        return [Text(plain(engine.problem), style="red")]
    word, style = ("ready", "green") if engine.ready else ("not ready", "yellow")
    if not engine.live:
        word, style = "stuck", "red"
    head = Text(plain(f"{engine.session}  {engine.protocol}  process {engine.process}  "))
    head.append(word, style=f"bold {style}")
    head.append(f"  transfers {engine.landed} landed, {engine.failed} failed")
    lines: list[RenderableType] = [head]
    for check in engine.wrong:
        words = f"  {check.name}: {check.found}. {check.advice}"
        lines.append(Text(plain(words), style="yellow"))
    return [*lines, _rails(engine.rails), _peers(engine.peers)]


def _rails(rails: Sequence[RailRate]) -> Table:
    table = Table("rail", "provider", "write", "read", "of line", "in flight", "failed", box=None)
    for rail in rails:
        share = "-" if rail.line_share is None else f"{rail.line_share:.0%}"
        table.add_row(
            plain(rail.name),
            plain(rail.provider),
            f"{output.gigabytes(rail.write_bytes_per_s)}/s",
            f"{output.gigabytes(rail.read_bytes_per_s)}/s",
            "OUT" if rail.down else share,
            str(rail.in_flight),
            str(rail.failed),
            style="red" if rail.down else None,
        )
    return table


def _peers(peers: Sequence[PeerView]) -> Text:
    shown = ", ".join(f"{peer.session} {peer.state}" for peer in peers[:PEERS_SHOWN])
    more = f" and {len(peers) - PEERS_SHOWN} more" if len(peers) > PEERS_SHOWN else ""
    return Text(plain(f"peers ({len(peers)}): {shown}{more}") if peers else "no peers")


def command(
    engines: Annotated[
        list[str] | None,
        typer.Argument(help="host:port of endpoints (http_port); without, those of this host."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
    interval: Annotated[
        float, typer.Option(min=0.2, max=60, help="Seconds between two looks.")
    ] = 1.0,
    json_file: output.JsonOption = None,
) -> None:
    """Show the engines of this host: peers, rates, rails, failures. Ctrl-C ends it.

    Engines are seen when http_port is set for them. Ends with 0 when all of them are ready, 1
    when one is not, 2 when none answers. --json writes the last picture.
    """
    try:
        urls = _urls(engines or [])
    except EndpointError as problem:
        output.could_not_run(str(problem))
    if not urls:
        output.could_not_run("no engine of this user has an endpoint here; set http_port for it")
    console = output.console()
    views = _once(urls, console) if once else _live(urls, engines or [], interval)
    code = exit_code(views)
    output.write_json(json_file, Report(tuple(views), code))
    raise typer.Exit(code)


def _once(urls: Sequence[str], console: Console) -> list[EngineView]:
    before = {one.url: one for one in look(urls)}
    time.sleep(ONCE_S)
    views = _views(look(urls), before)
    console.print(picture(views))
    return views


def _live(urls: Sequence[str], named: Sequence[str], interval_s: float) -> list[EngineView]:
    before: dict[str, Look] = {}
    views: list[EngineView] = []
    try:
        with Live(console=Console(), screen=True, auto_refresh=False) as live:
            while True:
                looks = look(urls)
                views = _views(looks, before)
                before = {one.url: one for one in looks}
                live.update(picture(views), refresh=True)
                time.sleep(interval_s)
                urls = _urls(named) or urls  # engines come and go
    except KeyboardInterrupt:
        return views
