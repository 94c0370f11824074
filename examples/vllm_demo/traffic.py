"""Prompts to send, the requests that carry them, and the counters that show what happened."""

from __future__ import annotations

import http.client
import json
import random
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from vllm_demo.model import Model
from vllm_demo.processes import wait_until
from vllm_demo.servers import SERVED_NAME, HttpServer

REQUEST_TIMEOUT_S = 120.0
COUNTERS_TIMEOUT_S = 5.0
GENERATED_TOKENS = 24
ALPHABET = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ.,;:!?"

TOKENS_BY_SOURCE = "vllm:prompt_tokens_by_source"
RECEIVED_BYTES = "efa_kv_received_bytes"
RECEIVED_REQUESTS = "efa_kv_received_requests"
TRANSFER_FAILURES = "efa_kv_transfer_failures"
TRANSFER_SECONDS = "efa_kv_transfer_seconds"


class RequestError(Exception):
    """A server refused or broke off a request."""


@dataclass(frozen=True)
class Prompt:
    name: str
    text: str


@dataclass(frozen=True)
class Answer:
    text: str
    prompt_tokens: int
    first_token_s: float
    total_s: float


@dataclass(frozen=True)
class Counters:
    """What a decode server has counted since it started."""

    external_tokens: int
    local_tokens: int
    bytes: int
    requests: int
    failures: int
    transfer_s: float
    providers: frozenset[str]

    def since(self, earlier: Counters) -> Counters:
        return Counters(
            self.external_tokens - earlier.external_tokens,
            self.local_tokens - earlier.local_tokens,
            self.bytes - earlier.bytes,
            self.requests - earlier.requests,
            self.failures - earlier.failures,
            self.transfer_s - earlier.transfer_s,
            self.providers,
        )


def make_prompts(model: Model, seed: int = 1) -> list[Prompt]:
    """Prompts around every edge that a block of the KV cache has."""
    generator = random.Random(seed)

    def text(length: int) -> str:
        return "".join(generator.choice(ALPHABET) for _ in range(length))

    block = model.block_tokens
    shared, repeated = text(10 * block), text(6 * block + 8)
    return [
        Prompt("five tokens", text(5)),
        Prompt("a block less one", text(block - 1)),
        Prompt("exactly a block", text(block)),
        Prompt("a block and one", text(block + 1)),
        Prompt("exactly two blocks", text(2 * block)),
        Prompt("words, a few blocks", "The quick brown fox jumps over the lazy dog. " * 4),
        Prompt("six blocks and a bit", repeated),
        Prompt("the same again", repeated),
        Prompt("shared start, first", shared + text(7)),
        Prompt("shared start, second", shared + text(block)),
        Prompt("shared start, third", shared + text(3 * block + 1)),
        Prompt("many blocks", text(22 * block)),
        Prompt("a long one", text(47 * block - 4)),
    ]


def complete(server: HttpServer, prompt: Prompt, **options: Any) -> Answer:
    """Sends one greedy prompt and reads the answer as it is generated."""
    body = {
        "model": SERVED_NAME,
        "prompt": prompt.text,
        "max_tokens": GENERATED_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **options,
    }
    started = time.monotonic()
    pieces: list[str] = []
    prompt_tokens, first_token_s = 0, 0.0
    for event in _stream(server, body):
        if choices := event.get("choices"):
            if not pieces:
                first_token_s = time.monotonic() - started
            pieces.append(choices[0]["text"])
        if usage := event.get("usage"):
            prompt_tokens = usage["prompt_tokens"]
    if not pieces:
        raise RequestError(
            f"found: no token from {server.name} for the prompt '{prompt.name}'; "
            f"expected: {body['max_tokens']}; what to do: read its log, {server.log}"
        )
    return Answer("".join(pieces), prompt_tokens, first_token_s, time.monotonic() - started)


def _stream(server: HttpServer, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    address = urllib.parse.urlsplit(server.url)
    connection = http.client.HTTPConnection(
        address.hostname or "", address.port, timeout=REQUEST_TIMEOUT_S
    )
    try:
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        if answer.status != 200:
            raise RequestError(
                f"found: HTTP status {answer.status} from {server.name}: "
                f"{answer.read(2000).decode(errors='replace')}; expected: 200; "
                f"what to do: {server.last_words(15)}"
            )
        for line in answer:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    raise RequestError(
                        f"found: {event['error']} from {server.name}; expected: tokens; "
                        f"what to do: read its log, {server.log}"
                    )
                yield event
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise RequestError(
            f"found: {type(error).__name__}: {error} on the connection to {server.name}; "
            f"expected: tokens; what to do: read its log, {server.log}"
        ) from error
    finally:
        connection.close()


def read_counters(server: HttpServer) -> Counters:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=REQUEST_TIMEOUT_S) as answer:
        text = answer.read().decode()
    sums: dict[str, float] = {}
    tokens: dict[str, int] = {}
    providers: set[str] = set()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
            if sample.name == f"{TOKENS_BY_SOURCE}_total":
                source = sample.labels["source"]
                tokens[source] = tokens.get(source, 0) + int(sample.value)
            if sample.name == f"{RECEIVED_BYTES}_total" and sample.value > 0:
                providers.add(sample.labels["provider"])
    return Counters(
        external_tokens=tokens.get("external_kv_transfer", 0),
        local_tokens=tokens.get("local_cache_hit", 0),
        bytes=int(sums.get(f"{RECEIVED_BYTES}_total", 0)),
        requests=int(sums.get(f"{RECEIVED_REQUESTS}_total", 0)),
        failures=int(sums.get(f"{TRANSFER_FAILURES}_total", 0)),
        transfer_s=sums.get(f"{TRANSFER_SECONDS}_sum", 0.0),
        providers=frozenset(providers),
    )


def settled_counters(server: HttpServer, before: Counters) -> Counters:
    """The difference since ``before``, once the server has counted the request.

    Counters travel to the API server behind the tokens, so they may lag by a step.
    """
    latest = [read_counters(server).since(before)]

    def counted() -> bool:
        latest[0] = read_counters(server).since(before)
        return latest[0].external_tokens > 0 and latest[0].bytes > 0

    wait_until(counted, COUNTERS_TIMEOUT_S, poll_s=0.1)
    return latest[0]
