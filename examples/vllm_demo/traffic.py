"""Requests in vLLM's form, and what its servers count about them."""

from __future__ import annotations

import time
from typing import Any

from demo_common.servers import HttpServer
from demo_common.traffic import (
    GENERATED_TOKENS,
    Answer,
    Counters,
    Prompt,
    RequestError,
    read_metrics,
    settled_since,
    stream_events,
)

from vllm_demo.servers import SERVED_NAME

TOKENS_BY_SOURCE = "vllm:prompt_tokens_by_source_total"
RECEIVED_BYTES = "efa_kv_received_bytes_total"
RECEIVED_REQUESTS = "efa_kv_received_requests_total"
TRANSFER_FAILURES = "efa_kv_transfer_failures_total"
TRANSFER_SECONDS = "efa_kv_transfer_seconds_sum"


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
    for event in stream_events(server, "/v1/completions", body):
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


def read_counters(server: HttpServer) -> Counters:
    """What a decode server has taken from the other side and from its own cache."""
    metrics = read_metrics(server)
    return Counters(
        external_tokens=int(metrics.total(TOKENS_BY_SOURCE, source="external_kv_transfer")),
        local_tokens=int(metrics.total(TOKENS_BY_SOURCE, source="local_cache_hit")),
        bytes=int(metrics.total(RECEIVED_BYTES)),
        requests=int(metrics.total(RECEIVED_REQUESTS)),
        failures=int(metrics.total(TRANSFER_FAILURES)),
        transfer_s=metrics.total(TRANSFER_SECONDS),
        providers=metrics.labels(RECEIVED_BYTES, "provider"),
    )


def received_since(server: HttpServer, before: Counters) -> Counters:
    """The difference since ``before``, once the server has counted the request."""
    return settled_since(
        before,
        lambda: read_counters(server),
        lambda seen: seen.external_tokens > 0 and seen.bytes > 0,
    )
