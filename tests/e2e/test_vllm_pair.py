"""Two real vLLM servers behind the stock router: what clients and other proxies do to them.

The router speaks Mooncake's dialect; requests in NIXL's are sent as its router would.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from demo_common.model import REPOSITORY
from demo_common.processes import ReservedPorts
from demo_common.servers import HttpServer
from prometheus_client.parser import text_string_to_metric_families
from vllm_demo.model import make_model
from vllm_demo.servers import SERVED_NAME, Pair

LOGS = REPOSITORY / "build" / "test-logs" / "pair"
TIMEOUT_S = 60.0
AT_ONCE_S = 5.0
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
PROMPT = "It was the best of times, it was the worst of times. " * 5


@pytest.fixture(scope="module")
def status_port() -> Iterator[int]:
    """Of the first server's endpoint; the other one takes the next."""
    with ReservedPorts() as ports:
        yield ports.take()


@pytest.fixture(scope="module")
def pair(status_port: int) -> Iterator[Pair]:
    extra = {"http_port": status_port}
    with Pair(make_model("llama"), "mooncake", LOGS, extra) as started:
        yield started


def post(server: HttpServer, body: dict[str, Any], path: str = "/v1/completions") -> Any:
    """The status and the decoded answer."""
    request = urllib.request.Request(
        server.url + path,
        json.dumps({"model": SERVED_NAME, "temperature": 0, "ignore_eos": True, **body}).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refusal:
        return refusal.code, json.loads(refusal.read() or b"null")


def text_of(answered: Any, choice: int = 0) -> str:
    status, answer = answered
    assert status == 200, answer
    return str(answer["choices"][choice]["text"])


def metric(server: HttpServer, name: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=TIMEOUT_S) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    values = [
        sample.value for family in families for sample in family.samples if sample.name == name
    ]
    assert values, f"{server.name} has no metric {name}"
    return sum(values)


def wait_for(server: HttpServer, name: str, expected: float, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while metric(server, name) != expected:
        assert time.monotonic() < deadline, f"{name} is {metric(server, name)}, not {expected}"
        time.sleep(0.2)


def at_rest(pair: Pair, timeout_s: float = 10.0) -> None:
    """No block is held on either side, by default long before any lease would end."""
    for server in (pair.prefill, pair.decode):
        wait_for(server, "vllm:kv_cache_usage_perc", 0.0, timeout_s=timeout_s)
        assert server.ready()


def prefill(pair: Pair, prompt: str, **options: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": PREFILL, **options}
    status, answer = post(pair.prefill, body)
    assert status == 200, answer
    return dict(answer["kv_transfer_params"])


def test_completion_and_chat_through_the_router(pair: Pair) -> None:
    body = {"prompt": PROMPT, "max_tokens": 16}
    assert text_of(post(pair.router, body)) == text_of(post(pair.prefill, body))
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 16}
    answers = [post(server, chat, "/v1/chat/completions") for server in (pair.router, pair.prefill)]
    contents = [answer["choices"][0]["message"]["content"] for _, answer in answers]
    assert contents[0] == contents[1]
    at_rest(pair)


def endpoints(first_port: int) -> list[str]:
    """Those at the port and at the few after it: a worker takes the next that is free."""
    found = []
    for port in range(first_port, first_port + 8):
        url = f"http://127.0.0.1:{port}"
        with contextlib.suppress(OSError):
            if b"control thread" in page(url, "healthz"):
                found.append(url)
    return found


def page(url: str, name: str) -> bytes:
    with urllib.request.urlopen(f"{url}/{name}", timeout=TIMEOUT_S) as answer:
        return bytes(answer.read())


def test_both_servers_tell_that_they_are_ready(pair: Pair, status_port: int) -> None:
    assert post(pair.router, {"prompt": "ready: " + PROMPT, "max_tokens": 2})[0] == 200
    found = endpoints(status_port)
    assert len(found) == 2
    spans = []
    for url in found:
        assert json.loads(page(url, "readyz"))["ready"]
        assert b"efa_kv_written_bytes_total" in page(url, "metrics")
        spans += json.loads(page(url, "trace"))["spans"]
    stages = {span["stage"] for span in spans if not span["request"].startswith("job ")}
    # The prefill server's, by the request's name, and the decode server's.
    assert {"compute", "wait", "queue", "move", "land", "pull"} <= stages


def test_two_samples_through_the_router(pair: Pair) -> None:
    body = {"prompt": "samples: " + PROMPT, "max_tokens": 8}
    expected = text_of(post(pair.prefill, body))
    # vLLM takes no greedy samples, but a choice among one token is the same.
    answered = post(pair.router, {**body, "n": 2, "temperature": 1, "top_k": 1})
    assert [text_of(answered, choice) for choice in (0, 1)] == [expected, expected]
    at_rest(pair)


def test_the_answer_of_prefill_is_what_decode_needs(pair: Pair) -> None:
    body = {"prompt": "verbatim: " + PROMPT, "max_tokens": 16}
    params = prefill(pair, body["prompt"])
    before = metric(pair.decode, "efa_kv_received_bytes_total")
    decoded = post(pair.decode, {**body, "kv_transfer_params": params})
    assert text_of(decoded) == text_of(post(pair.prefill, body))
    deadline = time.monotonic() + AT_ONCE_S
    while metric(pair.decode, "efa_kv_received_bytes_total") == before:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    at_rest(pair)


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_both_legs_at_once(pair: Pair, first: str) -> None:
    body = {"prompt": f"{first} first: " + PROMPT * 4, "max_tokens": 8}
    expected = text_of(post(pair.prefill, {**body, "prompt": body["prompt"]}))
    transfer_id = f"xfer-at-once-{first}"
    legs = {
        "prefill": (
            pair.prefill,
            {
                **body,
                "max_tokens": 1,
                "kv_transfer_params": {**PREFILL, "transfer_id": transfer_id},
            },
        ),
        "decode": (
            pair.decode,
            {
                **body,
                "kv_transfer_params": {
                    "do_remote_prefill": True,
                    "do_remote_decode": False,
                    "transfer_id": transfer_id,
                    "remote_bootstrap_addr": f"http://127.0.0.1:{pair.bootstrap_port}",
                },
            },
        ),
    }
    second = "decode" if first == "prefill" else "prefill"
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answers = {}
        for leg in (first, second):
            answers[leg] = pool.submit(post, *legs[leg])
            time.sleep(0.05)
        assert text_of(answers["decode"].result()) == expected
        assert answers["prefill"].result()[0] == 200
    at_rest(pair)


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True},
        {"do_remote_prefill": 1},
        {"do_remote_prefill": True, "do_remote_decode": True},
        {"made": "for another connector"},
        {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": "x"},
        {"do_remote_prefill": True, "remote_bootstrap_addr": "http://127.0.0.1:1"},
    ],
    ids=repr,
)
def test_nonsense_is_an_error_at_once(pair: Pair, params: dict[str, Any]) -> None:
    began = time.monotonic()
    status, _ = post(pair.decode, {"prompt": "nonsense " + PROMPT, "kv_transfer_params": params})
    assert status >= 400
    assert time.monotonic() - began < AT_ONCE_S
    at_rest(pair)


def test_a_prefill_that_is_refused_is_an_error_for_the_client(pair: Pair) -> None:
    began = time.monotonic()
    status, _ = post(pair.router, {"prompt": "too long " * 2000, "max_tokens": 4})
    assert status >= 400
    assert time.monotonic() - began < AT_ONCE_S
    at_rest(pair)


def test_a_request_that_decode_rejects_gives_prefill_its_blocks_back(pair: Pair) -> None:
    params = prefill(pair, "rejected: " + PROMPT)
    body = {"prompt": "rejected: " + PROMPT, "max_tokens": -5, "kv_transfer_params": params}
    assert post(pair.decode, body)[0] == 400
    # Without the release the lease would last 30 seconds; where vLLM does not pass a
    # rejection on, the lease ends the wait.
    wait_for(pair.prefill, "vllm:kv_cache_usage_perc", 0.0, timeout_s=45.0)


def test_clients_that_leave(pair: Pair) -> None:
    for pause_s in (0.0, 0.02, 0.1, 0.3):
        body = {"prompt": f"leaving after {pause_s}: " + PROMPT * 4, "max_tokens": 200}
        request = urllib.request.Request(
            pair.router.url + "/v1/completions",
            json.dumps({"model": SERVED_NAME, "stream": True, "ignore_eos": True, **body}).encode(),
            {"Content-Type": "application/json"},
        )
        answer = urllib.request.urlopen(request, timeout=TIMEOUT_S)
        time.sleep(pause_s)
        answer.close()
    # A client that leaves between the router's two legs leaves a hold that nobody can
    # release: its lease of 30 seconds ends it.
    at_rest(pair, timeout_s=45.0)
    body = {"prompt": "still here: " + PROMPT, "max_tokens": 8}
    assert text_of(post(pair.router, body)) == text_of(post(pair.prefill, body))


def test_metrics_have_their_names(pair: Pair) -> None:
    body = {"prompt": "counted: " + PROMPT, "max_tokens": 4}
    assert post(pair.router, body)[0] == 200
    for name in ("received_bytes", "received_requests", "transfer_failures"):
        assert metric(pair.decode, f"efa_kv_{name}_total") > 0
    assert metric(pair.decode, "efa_kv_transfer_seconds_count") > 0
