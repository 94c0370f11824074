"""Prompts to send, the answers to them, and the counters that show what happened."""

from __future__ import annotations

import http.client
import json
import random
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from demo_common.model import Model
from demo_common.processes import wait_until
from demo_common.servers import HttpServer

REQUEST_TIMEOUT_S = 120.0
COUNTERS_TIMEOUT_S = 5.0
GENERATED_TOKENS = 24
ALPHABET = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ.,;:!?"


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
    """What a server has counted since it started, or between two moments."""

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


def stream_events(
    server: HttpServer, path: str, body: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Posts the body and yields the events of the answer as they are generated.

    Raises `RequestError` for a refusal, an error event and a broken connection.
    """
    address = urllib.parse.urlsplit(server.url)
    connection = http.client.HTTPConnection(
        address.hostname or "", address.port, timeout=REQUEST_TIMEOUT_S
    )
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
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


class Metrics:
    """What a server's metrics page says at one moment."""

    def __init__(self, families: list[Metric]) -> None:
        self._samples = [sample for family in families for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples of this name that carry these labels, 0 for none."""
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def labels(self, name: str, label: str) -> frozenset[str]:
        """The values of the label for which something has been counted."""
        return frozenset(
            sample.labels[label]
            for sample in self._samples
            if sample.name == name and sample.value > 0
        )


def read_metrics(server: HttpServer, path: str = "/metrics") -> Metrics:
    with urllib.request.urlopen(f"{server.url}{path}", timeout=REQUEST_TIMEOUT_S) as answer:
        return Metrics(list(text_string_to_metric_families(answer.read().decode())))


def settled_since(
    before: Counters, read: Callable[[], Counters], counted: Callable[[Counters], bool]
) -> Counters:
    """The difference since ``before``, once ``counted`` says that it is whole.

    Counters travel behind the tokens, so they may lag by a step; what they say in the end
    is returned as it is.
    """
    latest = read().since(before)

    def settled() -> bool:
        nonlocal latest
        latest = read().since(before)
        return counted(latest)

    wait_until(settled, COUNTERS_TIMEOUT_S, poll_s=0.1)
    return latest
