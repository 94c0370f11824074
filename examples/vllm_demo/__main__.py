"""Runs the demo: ``python -m vllm_demo --dialect nixl|mooncake``."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from vllm_demo.model import REPOSITORY, Model, ModelError, make_model
from vllm_demo.processes import ManagedProcess, ServerError
from vllm_demo.report import Outcome, Report, judge
from vllm_demo.servers import DIALECTS, Pair, require_alive
from vllm_demo.traffic import (
    Answer,
    Prompt,
    RequestError,
    complete,
    make_prompts,
    read_counters,
    settled_counters,
)

BUILD = REPOSITORY / "build" / "demo"
QUIET_INTERVAL_S = 15.0
ROUTER_NAME = "vllm-router --kv-connector"


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


def ask_alone(pair: Pair, prompts: Sequence[Prompt]) -> list[Answer]:
    """The answers of a server alone: the prefill server, asked without any transfer.

    It has the decode server's number of threads, so equal KV gives equal answers. The
    salt keeps this round's cached blocks apart: the pair's round computes afresh.
    """
    return [complete(pair.prefill, prompt, cache_salt="alone") for prompt in prompts]


def ask_pair(
    pair: Pair, prompts: Sequence[Prompt], alone: Sequence[Answer], model: Model
) -> tuple[list[Outcome], frozenset[str]]:
    outcomes: list[Outcome] = []
    providers: frozenset[str] = frozenset()
    for prompt, expected in zip(prompts, alone, strict=True):
        before = read_counters(pair.decode)
        answer = complete(pair.router, prompt)
        seen = settled_counters(pair.decode, before)
        providers |= seen.providers
        outcomes.append(judge(prompt, expected, answer, seen, model.kv_bytes_per_token))
    return outcomes, providers


def run_demo(model: Model, dialect: str, logs: Path, console: Console) -> Report:
    prompts = make_prompts(model)
    with ExitStack() as stack:
        with WaitingLine(console) as progress:
            pair = stack.enter_context(Pair(model, dialect, logs, progress=progress))
        stack.callback(console.print, "stopping the servers")
        try:
            console.print(f"asking a server alone, {len(prompts)} prompts")
            alone = ask_alone(pair, prompts)
            console.print(f"asking the pair through {ROUTER_NAME} {dialect}")
            outcomes, providers = ask_pair(pair, prompts, alone, model)
        except RequestError:
            require_alive(pair.servers)  # a dead server explains more than a broken request
            raise
    return Report(outcomes, ",".join(sorted(providers)), f"{ROUTER_NAME} {dialect}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="vllm_demo", description=__doc__)
    parser.add_argument("--dialect", choices=DIALECTS, default="nixl")
    parser.add_argument("--result", type=Path, default=BUILD / "result.json")
    options = parser.parse_args()

    # An ordinary exit runs the code that stops the servers; the default action of these
    # signals would leave them behind, and a shell starts background jobs deaf to SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(128 + signal.SIGHUP))

    console = Console()
    logs = options.result.parent / "logs"
    # What an earlier run found must not pass for the result of this one.
    options.result.unlink(missing_ok=True)
    try:
        report = run_demo(make_model(), options.dialect, logs, console)
    except (ModelError, ServerError, RequestError) as error:
        console.print(f"The demo stopped. {error}", style="red", markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted; every server is stopped.")
        return 130
    report.write(options.result)
    report.show(console)
    return 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main())
