"""Real SGLang servers behind the stock router: the demo, and what it does not show."""

from __future__ import annotations

import http.client
import json
import random
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from demo_common.processes import ReservedPorts, wait_until
from demo_common.servers import wait_until_ready
from demo_common.traffic import ALPHABET, Prompt, RequestError
from runs import demo_report
from sglang_demo.model import make_model
from sglang_demo.servers import Pair, SglangServer
from sglang_demo.traffic import generate, read_counters

START_TIMEOUT_S = 300
THREADS = 8


def test_the_pair_answers_like_a_server_alone(tmp_path: Path) -> None:
    report = demo_report("sglang_demo", tmp_path / "result.json")
    assert report["router"].startswith("sglang_router")
    details = report["requests_detail"]
    assert all(one["external_tokens"] == one["prompt_tokens"] for one in details)
    assert all(one["problem"] is None for one in details)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Without SGLang's own checksums over the pages, which it computes on GPUs only."""
    with Pair(make_model(), tmp_path_factory.mktemp("logs"), compared=False) as started:
        yield started


def some_prompts(count: int, shared: int = 0) -> list[Prompt]:
    generator = random.Random(count + shared)

    def text(length: int) -> str:
        return "".join(generator.choice(ALPHABET) for _ in range(length))

    start = text(shared)
    return [Prompt(f"prompt {n}", start + text(60 + 37 * n)) for n in range(count)]


def leave(pair: Pair, prompt: Prompt) -> None:
    """Asks for much, reads little and hangs up."""
    address = urllib.parse.urlsplit(pair.router.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    body = {
        "text": prompt.text,
        "sampling_params": {"temperature": 0, "max_new_tokens": 2000, "ignore_eos": True},
        "stream": True,
    }
    connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200
    answer.readline()
    connection.close()


def test_eight_at_once_answer_as_one_by_one(pair: Pair) -> None:
    prompts = [*some_prompts(6), *some_prompts(6, shared=200)]
    before = read_counters(pair.prefill)
    one_by_one = [generate(pair.router, prompt).text for prompt in prompts]
    with ThreadPoolExecutor(THREADS) as pool:
        at_once = [answer.text for answer in pool.map(lambda p: generate(pair.router, p), prompts)]
    assert at_once == one_by_one
    assert len(set(one_by_one)) == len(prompts)
    seen = read_counters(pair.prefill).since(before)
    assert seen.failures == 0
    assert seen.requests >= 2 * len(prompts)


def test_clients_that_hang_up_leave_nothing_behind(pair: Pair) -> None:
    prompts = some_prompts(4, shared=50)
    expected = [generate(pair.router, prompt).text for prompt in prompts]
    for prompt in prompts:
        leave(pair, prompt)
    assert [generate(pair.router, prompt).text for prompt in prompts] == expected


def test_the_engine_that_moved_it_was_ours(pair: Pair) -> None:
    for server in (pair.prefill, pair.decode):
        log = "\n".join(server.log_lines())
        assert "SGLang's mooncake backend runs on efa-kv, session 127.0.0.1:" in log


def answers(pair: Pair, prompts: list[Prompt]) -> list[str] | None:
    """What the pair says, or None while a request still fails."""
    try:
        return [generate(pair.router, prompt).text for prompt in prompts]
    except (OSError, http.client.HTTPException, RequestError, ValueError, KeyError):
        return None


def test_a_server_that_was_killed_serves_again_on_its_port(pair: Pair) -> None:
    prompts = some_prompts(2, shared=30)
    expected = answers(pair, prompts)
    assert expected is not None
    for server in (pair.decode, pair.prefill):
        server.kill()
        if server is pair.prefill:
            # SGLang's decode keeps the ports of a prefill server until two of its own
            # heartbeats are missed, so one that is back sooner would be asked in vain.
            assert wait_until(
                lambda: "Lost connection with prefill" in pair.decode.log.read_text(), 60
            )
        server.start()
        wait_until_ready([server])
        assert wait_until(pair.router.ready, START_TIMEOUT_S)
        # The other side shuns the former engine of that address until it is asked again.
        assert wait_until(lambda: answers(pair, prompts) == expected, 90)


def test_without_the_plugin_the_same_command_does_not_start(tmp_path: Path) -> None:
    """No other Mooncake is installed there, so what served the pair was this engine."""
    with ReservedPorts() as ports:
        server = SglangServer(
            "prefill",
            make_model(),
            ports.take(),
            tmp_path,
            "prefill",
            ports.take(),
            environment={"EFA_KV_SGLANG": "0"},
        )
        with server:
            cause = "Please install mooncake"
            assert wait_until(
                lambda: any(cause in line for line in server.log_lines()), START_TIMEOUT_S
            )
            assert not server.ready()
            server.kill()
