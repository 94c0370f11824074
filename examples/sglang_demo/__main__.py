"""Runs the demo: ``python -m sglang_demo``."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from vllm_demo.__main__ import WaitingLine
from vllm_demo.model import REPOSITORY, Model, ModelError
from vllm_demo.processes import ServerError
from vllm_demo.report import Outcome, Report, judge
from vllm_demo.servers import require_alive
from vllm_demo.traffic import Answer, Prompt, RequestError, make_prompts

from sglang_demo.model import make_model
from sglang_demo.servers import Pair
from sglang_demo.traffic import generate, read_counters, sent_since

BUILD = REPOSITORY / "build" / "sglang-demo"
ROUTER_NAME = "sglang_router --pd-disaggregation"


def ask_pair(
    pair: Pair, prompts: Sequence[Prompt], alone: Sequence[Answer], model: Model
) -> tuple[list[Outcome], frozenset[str]]:
    outcomes: list[Outcome] = []
    providers: frozenset[str] = frozenset()
    for prompt, expected in zip(prompts, alone, strict=True):
        before = read_counters(pair.prefill)
        answer = generate(pair.router, prompt)
        seen = sent_since(pair.prefill, before, answer.prompt_tokens, model.kv_bytes_per_token)
        providers |= seen.providers
        outcomes.append(judge(prompt, expected, answer, seen, model.kv_bytes_per_token))
    return outcomes, providers


def run_demo(model: Model, logs: Path, console: Console) -> Report:
    prompts = make_prompts(model)
    with ExitStack() as stack:
        with WaitingLine(console) as progress:
            pair = stack.enter_context(Pair(model, logs, progress=progress))
        stack.callback(console.print, "stopping the servers")
        try:
            console.print(f"asking a server alone, {len(prompts)} prompts")
            alone = [generate(pair.alone, prompt) for prompt in prompts]
            console.print(f"asking the pair through {ROUTER_NAME}")
            outcomes, providers = ask_pair(pair, prompts, alone, model)
        except RequestError:
            require_alive(pair.servers)  # a dead server explains more than a broken request
            raise
    return Report(outcomes, ",".join(sorted(providers)), ROUTER_NAME)


def main() -> int:
    parser = argparse.ArgumentParser(prog="sglang_demo", description=__doc__)
    parser.add_argument("--result", type=Path, default=BUILD / "result.json")
    options = parser.parse_args()

    # An ordinary exit runs the code that stops the servers; the default action of these
    # signals would leave them behind, and a shell starts background jobs deaf to SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(128 + signal.SIGHUP))

    console = Console()
    # What an earlier run found must not pass for the result of this one.
    options.result.unlink(missing_ok=True)
    try:
        report = run_demo(make_model(), options.result.parent / "logs", console)
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
