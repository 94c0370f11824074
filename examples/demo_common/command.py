"""The command line of a demo: it starts a pair, asks it, and leaves what it found in a file."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from demo_common.model import Model, ModelError
from demo_common.processes import ManagedProcess, ServerError
from demo_common.report import Outcome, Report, judge
from demo_common.servers import RoutedServers, require_alive
from demo_common.traffic import Answer, Counters, Prompt, RequestError, make_prompts

QUIET_INTERVAL_S = 15.0


class WaitingLine:
    """Shows which servers are still starting: a spinner on a terminal, else a line at times."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        self._last_line = self._started
        self._bar = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console
        )
        self._task = self._bar.add_task("starting the servers", total=None)

    def __call__(
        self, servers: Sequence[ManagedProcess], waiting: Sequence[ManagedProcess]
    ) -> None:
        names = " and ".join(server.name for server in waiting) or "nobody"
        self._bar.update(self._task, description=f"waiting for {names}")
        now = time.monotonic()
        if not self._console.is_terminal and now - self._last_line > QUIET_INTERVAL_S:
            self._last_line = now
            self._console.print(f"  waiting for {names}, {now - self._started:.0f} s")

    def __enter__(self) -> WaitingLine:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


Pair = TypeVar("Pair", bound=RoutedServers)


@dataclass(frozen=True)
class Demo(Generic[Pair]):
    """What one model server's demo has of its own."""

    router_name: str
    make_model: Callable[[], Model]
    #: From the model, the folder for logs, and who is told about the waiting.
    make_pair: Callable[[Model, Path, WaitingLine], Pair]
    #: The answer of one server, without any transfer.
    ask_alone: Callable[[Pair, Prompt], Answer]
    #: The answer of the pair, and what it counted while it made it.
    ask_pair: Callable[[Pair, Prompt, Model], tuple[Answer, Counters]]

    def run(self, logs: Path, console: Console) -> Report:
        model = self.make_model()
        prompts = make_prompts(model)
        with ExitStack() as stack:
            with WaitingLine(console) as progress:
                pair = self.make_pair(model, logs, progress)
                stack.enter_context(pair)
            stack.callback(console.print, "stopping the servers")
            try:
                console.print(f"asking a server alone, {len(prompts)} prompts")
                alone = [self.ask_alone(pair, prompt) for prompt in prompts]
                console.print(f"asking the pair through {self.router_name}")
                return self._compare(pair, prompts, alone, model)
            except RequestError:
                require_alive(pair.servers)  # a dead server explains more than a broken request
                raise

    def _compare(
        self, pair: Pair, prompts: Sequence[Prompt], alone: Sequence[Answer], model: Model
    ) -> Report:
        outcomes: list[Outcome] = []
        providers: frozenset[str] = frozenset()
        for prompt, expected in zip(prompts, alone, strict=True):
            answer, seen = self.ask_pair(pair, prompt, model)
            providers |= seen.providers
            outcomes.append(judge(prompt, expected, answer, seen, model.kv_bytes_per_token))
        return Report(outcomes, ",".join(sorted(providers)), self.router_name)


def make_parser(program: str, description: str | None, result: Path) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--result", type=Path, default=result)
    return parser


def run_command(demo: Demo[Pair], result: Path) -> int:
    """Runs the demo and writes the result, the logs beside it; returns the exit status."""
    # An ordinary exit runs the code that stops the servers; the default action of these
    # signals would leave them behind, and a shell starts background jobs deaf to SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(128 + signal.SIGHUP))

    console = Console()
    # What an earlier run found must not pass for the result of this one.
    result.unlink(missing_ok=True)
    try:
        report = demo.run(result.parent / "logs", console)
    except (ModelError, ServerError, RequestError) as error:
        console.print(f"The demo stopped. {error}", style="red", markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted; every server is stopped.")
        return 130
    report.write(result)
    report.show(console)
    return 0 if report.good else 1
