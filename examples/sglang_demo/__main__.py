"""Runs the demo: ``python -m sglang_demo``."""

from __future__ import annotations

import sys

from demo_common.command import Demo, make_parser, run_command
from demo_common.model import REPOSITORY, Model
from demo_common.traffic import Answer, Counters, Prompt

from sglang_demo.model import make_model
from sglang_demo.servers import Pair
from sglang_demo.traffic import generate, read_counters, sent_since

RESULT = REPOSITORY / "build" / "sglang-demo" / "result.json"


def ask_pair(pair: Pair, prompt: Prompt, model: Model) -> tuple[Answer, Counters]:
    before = read_counters(pair.prefill)
    answer = generate(pair.router, prompt)
    seen = sent_since(pair.prefill, before, answer.prompt_tokens, model.kv_bytes_per_token)
    return answer, seen


def main() -> int:
    options = make_parser("sglang_demo", __doc__, RESULT).parse_args()
    demo = Demo(
        router_name="sglang_router --pd-disaggregation",
        make_model=make_model,
        make_pair=lambda model, logs, progress: Pair(model, logs, progress=progress),
        ask_alone=lambda pair, prompt: generate(pair.alone, prompt),
        ask_pair=ask_pair,
    )
    return run_command(demo, options.result)


if __name__ == "__main__":
    sys.exit(main())
