"""Requests in SGLang's own form, and what its servers count about them."""

from __future__ import annotations

import http.client
import json
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from vllm_demo.processes import wait_until
from vllm_demo.servers import HttpServer
from vllm_demo.traffic import (
    COUNTERS_TIMEOUT_S,
    GENERATED_TOKENS,
    REQUEST_TIMEOUT_S,
    Answer,
    Counters,
    Prompt,
    RequestError,
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
    for event in _stream(server, body):
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


def _stream(server: HttpServer, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    address = urllib.parse.urlsplit(server.url)
    connection = http.client.HTTPConnection(
        address.hostname or "", address.port, timeout=REQUEST_TIMEOUT_S
    )
    try:
        connection.request(
            "POST", "/generate", json.dumps(body), {"Content-Type": "application/json"}
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


def read_counters(prefill: HttpServer) -> Counters:
    """What the engine of a prefill server has sent, by its own count.

    SGLang sends every page of a prompt, also those that prefill had cached, so tokens are
    left out here and follow from the bytes.
    """
    with urllib.request.urlopen(f"{prefill.url}/metrics/", timeout=REQUEST_TIMEOUT_S) as answer:
        text = answer.read().decode()
    sums: dict[str, float] = {}
    providers: set[str] = set()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
            if sample.name == SENT_BYTES and sample.value > 0:
                providers.add(sample.labels["provider"])
    return Counters(
        external_tokens=0,
        local_tokens=0,
        bytes=int(sums.get(SENT_BYTES, 0)),
        requests=int(sums.get(TRANSFERS, 0)),
        failures=int(sums.get(FAILURES, 0)),
        transfer_s=sums.get(SECONDS, 0.0),
        providers=frozenset(providers),
    )


def sent_since(
    prefill: HttpServer, before: Counters, prompt_tokens: int, kv_bytes_per_token: int
) -> Counters:
    """The difference since ``before``, with the tokens whose KV the bytes are enough for."""
    latest = [read_counters(prefill).since(before)]

    def counted() -> bool:
        latest[0] = read_counters(prefill).since(before)
        return latest[0].bytes >= prompt_tokens * kv_bytes_per_token

    wait_until(counted, COUNTERS_TIMEOUT_S, poll_s=0.1)
    seen = latest[0]
    return Counters(
        external_tokens=min(prompt_tokens, seen.bytes // kv_bytes_per_token),
        local_tokens=0,
        bytes=seen.bytes,
        requests=seen.requests,
        failures=seen.failures,
        transfer_s=seen.transfer_s,
        providers=seen.providers,
    )
