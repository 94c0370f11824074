"""Requests in SGLang's own form, and what its servers count about them."""

from __future__ import annotations

import time
from dataclasses import replace

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

SENT_BYTES = "efa_kv_sent_bytes_total"
TRANSFERS = "efa_kv_transfers_total"
FAILURES = "efa_kv_transfer_failures_total"
SECONDS = "efa_kv_transfer_seconds_sum"


def generate(server: HttpServer, prompt: Prompt, tokens: int = GENERATED_TOKENS) -> Answer:
    """Sends one greedy prompt; the answer's text is its token ids, which hide nothing."""
    body = {
        "text": prompt.text,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        "stream": True,
    }
    started = time.monotonic()
    first_token_s, prompt_tokens = 0.0, 0
    ids: list[int] = []
    for event in stream_events(server, "/generate", body):
        if not ids:
            first_token_s = time.monotonic() - started
        prompt_tokens = event["meta_info"]["prompt_tokens"]
        # Events carry all ids so far, or only the new ones; the last id count says which.
        found = event["output_ids"]
        ids = found if len(found) == event["meta_info"]["completion_tokens"] else ids + found
    if len(ids) != tokens:
        raise RequestError(
            f"found: {len(ids)} tokens from {server.name} for the prompt '{prompt.name}'; "
            f"expected: {tokens}; what to do: read its log, {server.log}"
        )
    text = " ".join(str(one) for one in ids)
    return Answer(text, prompt_tokens, first_token_s, time.monotonic() - started)


def read_counters(prefill: HttpServer) -> Counters:
    """What the engine of a prefill server has sent, by its own count.

    SGLang sends every page of a prompt, also those that prefill had cached, so tokens are
    left out here and follow from the bytes.
    """
    metrics = read_metrics(prefill, "/metrics/")
    return Counters(
        external_tokens=0,
        local_tokens=0,
        bytes=int(metrics.total(SENT_BYTES)),
        requests=int(metrics.total(TRANSFERS)),
        failures=int(metrics.total(FAILURES)),
        transfer_s=metrics.total(SECONDS),
        providers=metrics.labels(SENT_BYTES, "provider"),
    )


def sent_since(
    prefill: HttpServer, before: Counters, prompt_tokens: int, kv_bytes_per_token: int
) -> Counters:
    """The difference since ``before``, with the tokens whose KV the bytes are enough for."""
    seen = settled_since(
        before,
        lambda: read_counters(prefill),
        lambda seen: seen.bytes >= prompt_tokens * kv_bytes_per_token,
    )
    return replace(seen, external_tokens=min(prompt_tokens, seen.bytes // kv_bytes_per_token))
