"""Runs the demo: ``python -m vllm_demo --dialect nixl|mooncake``."""

from __future__ import annotations

import sys

from demo_common.command import Demo, make_parser, run_command
from demo_common.model import REPOSITORY, Model
from demo_common.traffic import Answer, Counters, Prompt

from vllm_demo.model import make_model
from vllm_demo.servers import DIALECTS, Pair
from vllm_demo.traffic import complete, read_counters, received_since

RESULT = REPOSITORY / "build" / "demo" / "result.json"


def ask_alone(pair: Pair, prompt: Prompt) -> Answer:
    """The answer of a server alone: the prefill server, asked without any transfer.

    It has the decode server's number of threads, so equal KV gives equal answers. The
    salt keeps this round's cached blocks apart: the pair's round computes afresh.
    """
    return complete(pair.prefill, prompt, cache_salt="alone")


def ask_pair(pair: Pair, prompt: Prompt, _: Model) -> tuple[Answer, Counters]:
    before = read_counters(pair.decode)
    answer = complete(pair.router, prompt)
    return answer, received_since(pair.decode, before)


def main() -> int:
    parser = make_parser("vllm_demo", __doc__, RESULT)
    parser.add_argument("--dialect", choices=DIALECTS, default="nixl")
    options = parser.parse_args()
    demo = Demo(
        router_name=f"vllm-router --kv-connector {options.dialect}",
        make_model=make_model,
        make_pair=lambda model, logs, progress: Pair(
            model, options.dialect, logs, progress=progress
        ),
        ask_alone=ask_alone,
        ask_pair=ask_pair,
    )
    return run_command(demo, options.result)


if __name__ == "__main__":
    sys.exit(main())
