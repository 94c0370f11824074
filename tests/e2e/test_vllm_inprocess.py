"""Pairs of vLLM engines, one per process and without HTTP, through hard moments.

What arrives is compared block by block with what was held. Tokens are compared as well
where that is exact: for prompts of whole blocks and one token the producer, asked without
any transfer, computes from its cached blocks what the consumer computes. Elsewhere it
computes more of the prompt anew, in a batch of another shape, and a last bit may differ;
so it does for latent attention on processors without matrix tiles, where vLLM caches no
prefixes, and where its kernels for prompts and for single tokens round differently.
"""

from __future__ import annotations

import itertools
import json
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from demo_common.model import REPOSITORY, Model
from demo_common.processes import ReservedPorts
from vllm_demo.model import VLLM_BIN, caches_prefixes, make_model
from vllm_demo.servers import kv_transfer_config, pinned_processors, server_environment

SCRIPT = Path(__file__).resolve().with_name("engine_process.py")
LOGS = REPOSITORY / "build" / "test-logs"
START_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 60.0
BLOCK = 32
LEASE_S = 8.0
# Far less than what a request may take at worst, so that a hang is told from an error.
PROMPT_S = 20.0
SETTINGS = {
    "lease_s": LEASE_S,
    "transfer_timeout_s": 5.0,
    "handshake_timeout_s": 3.0,
    "unsolicited_s": 6.0,
}
# vLLM takes no greedy samples, but a choice among one token is the same.
SAMPLES = {"n": 3, "temperature": 1.0, "top_k": 1}
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
_names = itertools.count(1)


class Engine:
    """The other end of an ``engine_process.py``."""

    def __init__(
        self, name: str, model: Model, processor: int, transfer: Any, **options: Any
    ) -> None:
        ours, theirs = socket.socketpair()
        self._channel = ours
        self._buffer = b""
        self._finished: dict[str, dict[str, Any]] = {}
        options = {
            "dtype": model.dtype,
            "block_size": model.block_tokens,
            "max_num_batched_tokens": 256,
            **options,
        }
        environment = server_environment(processor)
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        LOGS.mkdir(parents=True, exist_ok=True)
        self.log = LOGS / f"inprocess-{name}.log"
        with theirs, self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(str(VLLM_BIN / "python"), str(SCRIPT), str(theirs.fileno())),
                    *(str(model.path), json.dumps(transfer), json.dumps(options)),
                ],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=LOGS,
            )

    def tell(self, op: str, **arguments: Any) -> None:
        self._channel.sendall(json.dumps({"op": op, **arguments}).encode() + b"\n")

    def wait_for(self, event: str, name: str | None = None, timeout_s: float = 60.0) -> Any:
        deadline = time.monotonic() + timeout_s
        while True:
            if event == "finished" and name in self._finished:
                return self._finished.pop(name)
            told = self._next(deadline)
            if told["event"] == "error":
                raise AssertionError(f"engine: {told['text']}")
            if told["event"] == "finished":
                self._finished[told["id"]] = told
            elif told["event"] == event:
                return told

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            self._channel.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                data = self._channel.recv(1 << 20)
            except TimeoutError:
                raise AssertionError(f"no answer in time; the log is {self.log}") from None
            if not data:
                end = self.log.read_text(errors="replace")[-6000:]
                raise AssertionError(f"the engine ended; its log ends:\n{end}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def add(self, prompt: list[int], params: Any = None, **sampling: Any) -> str:
        name = f"r{next(_names)}"
        self.tell("add", id=name, prompt=prompt, params=params, sampling=sampling)
        return name

    def result(self, name: str, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        return self.wait_for("finished", name, timeout_s)

    def run(self, prompt: list[int], params: Any = None, **sampling: Any) -> dict[str, Any]:
        return self.result(self.add(prompt, params, **sampling))

    def look(self) -> dict[str, Any]:
        self.tell("look")
        return self.wait_for("look")

    def counts(self) -> dict[str, Any]:
        self.tell("counts")
        return {"received_bytes": 0, "failures": {}, **self.wait_for("counts")}

    def kv(self, name: str) -> list[str]:
        """A digest per block of what the request held, or had received, of the KV cache."""
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while True:
            self.tell("kv", id=name)
            if digests := self.wait_for("kv")["digests"]:
                return list(digests)
            assert time.monotonic() < deadline, f"no blocks of {name}; the log is {self.log}"
            time.sleep(0.02)

    def settle(self, timeout_s: float = PROMPT_S) -> None:
        """Waits until no request and no block is held."""
        deadline = time.monotonic() + timeout_s
        while True:
            seen = self.look()
            busy = seen["requests"] or seen["used_blocks"] or seen["incoming"] or seen["outgoing"]
            if not busy:
                return
            assert time.monotonic() < deadline, f"still held: {seen}; the log is {self.log}"
            time.sleep(0.05)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self._channel.close()  # the script ends with its test
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()


class Pair:
    """A producer and a consumer; ``registry`` is where Mooncake's dialect looks it up."""

    def __init__(self, model: Model, policy: str = "fail", name: str = "pair") -> None:
        self._ports = ReservedPorts()
        port = self._ports.take()
        self.registry = f"http://127.0.0.1:{port}"
        self.model = model
        self._held: dict[str, str] = {}
        first, second = pinned_processors()
        self.p = Engine(
            f"{name}-p", model, first,
            kv_transfer_config("kv_producer", {**SETTINGS, "bootstrap_port": port}),
        )  # fmt: skip
        self.d = Engine(
            f"{name}-d", model, second,
            {**kv_transfer_config("kv_consumer", SETTINGS), "kv_load_failure_policy": policy},
        )  # fmt: skip

    def __enter__(self) -> Pair:
        try:
            for engine in (self.p, self.d):
                engine.wait_for("ready", timeout_s=START_TIMEOUT_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for engine in (self.p, self.d):
            engine.stop()
        self._ports.__exit__(None, None, None)

    def prefill(self, prompt: list[int], **sampling: Any) -> dict[str, Any]:
        """The parameters for decode that the producer answers."""
        name = self.p.add(prompt, PREFILL, **{"max_tokens": 1, **sampling})
        params = self.p.result(name)["params"]
        assert params is not None
        self._held[params["transfer_id"]] = name
        return dict(params)

    def decode(self, prompt: list[int], params: dict[str, Any], **sampling: Any) -> Any:
        return self.check(prompt, params, self.d.add(prompt, params, **sampling))

    def check(
        self, prompt: list[int], params: dict[str, Any], decoding: str, prefill: str = ""
    ) -> dict[str, Any]:
        """Waits for the consumer's answer, and compares blocks and tokens."""
        answer = self.d.result(decoding)
        assert set(answer["reasons"]) == {"length"}, answer
        held = self.p.kv(prefill or self._held[params["transfer_id"]])
        received = self.d.kv(decoding)
        assert received == held[len(held) - len(received) :]
        if len(prompt) % self.model.block_tokens == 1 and len(received) == len(held):
            alone = self.p.run(prompt, max_tokens=len(answer["tokens"][0]))
            if caches_prefixes(self.model.kind):
                assert alone["cached"] == len(prompt) - 1
                assert answer["tokens"] == [tokens(alone)] * len(answer["tokens"])
        return answer

    def forget(self) -> None:
        """Empties the consumer's prefix cache."""
        self.d.tell("reset_cache")
        assert self.d.wait_for("reset_cache")["done"]

    def mooncake(self, transfer_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
        prefill = {**PREFILL, "transfer_id": transfer_id}
        decode = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer_id,
            "remote_bootstrap_addr": self.registry,
        }
        return prefill, decode

    def kv_bytes(self, tokens: int) -> int:
        blocks = -(-tokens // self.model.block_tokens)
        return blocks * self.model.block_tokens * self.model.kv_bytes_per_token


_random = random.Random(7)


def make_prompt(length: int) -> list[int]:
    """A prompt that no other test has a prefix of."""
    return [_random.randrange(3, 256) for _ in range(length)]


def tokens(answer: dict[str, Any]) -> list[int]:
    assert answer["reasons"] == ["length"], answer
    return answer["tokens"][0]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with Pair(make_model("llama")) as made:
        yield made


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test both engines have all their blocks back, and still answer."""
    yield
    if "pair" in request.fixturenames:
        pair: Pair = request.getfixturevalue("pair")
        for engine in (pair.p, pair.d):
            engine.tell("resume")
            engine.settle()


@pytest.mark.parametrize("length", [2, 5, 31, 32, 33, 64, 65, 200, 705, 1505])
def test_decode_continues_what_prefill_began(pair: Pair, length: int) -> None:
    prompt = make_prompt(length)
    before = pair.d.counts()["received_bytes"]
    pair.decode(prompt, pair.prefill(prompt))
    assert pair.d.counts()["received_bytes"] - before == pair.kv_bytes(length)


@pytest.mark.parametrize("order", ["prefill first", "decode first", "at once"])
def test_mooncake_dialect(pair: Pair, order: str) -> None:
    prompt = make_prompt(289)
    prefill, decode = pair.mooncake(f"xfer-{order}")
    if order == "prefill first":
        held = pair.p.add(prompt, prefill, max_tokens=1)
        pair.p.result(held)
        name = pair.d.add(prompt, decode)
    else:
        name = pair.d.add(prompt, decode)
        time.sleep(0.5 if order == "decode first" else 0.0)
        held = pair.p.add(prompt, prefill, max_tokens=1)
    pair.check(prompt, decode, name, held)


@pytest.mark.parametrize("cached", [1, 31, 32, 33, 64, 96, 127, 128])
@pytest.mark.parametrize("length", [128, 130])
def test_only_what_decode_has_not_cached_is_moved(pair: Pair, cached: int, length: int) -> None:
    prompt = make_prompt(length)
    pair.d.run(prompt[:cached], max_tokens=1)
    before = pair.d.counts()["received_bytes"]
    pair.decode(prompt, pair.prefill(prompt))
    hit = min(cached, length - 1) // BLOCK  # the last token is computed in any case
    assert pair.d.counts()["received_bytes"] - before == pair.kv_bytes(length - hit * BLOCK)


def test_a_prompt_that_decode_has_whole_gives_prefill_its_blocks_back(pair: Pair) -> None:
    prompt = make_prompt(97)  # three blocks, and the token that is computed in any case
    first = pair.d.run(prompt)
    before = pair.d.counts()["received_bytes"]
    params = pair.prefill(prompt)
    assert tokens(pair.d.run(prompt, params)) == tokens(first)
    assert pair.d.counts()["received_bytes"] == before
    pair.p.settle(LEASE_S / 2)


def test_parallel_samples(pair: Pair) -> None:
    prompt = make_prompt(161)
    answer = pair.decode(prompt, pair.prefill(prompt, **SAMPLES), **SAMPLES)
    assert len(answer["tokens"]) == 3


def test_parallel_samples_that_leave(pair: Pair) -> None:
    prompt = make_prompt(150)
    params = pair.prefill(prompt, **SAMPLES)
    pair.d.tell("abort", id=pair.d.add(prompt, params, **SAMPLES))
    pair.p.settle()
    pair.d.settle()


def test_the_first_token_is_a_stop_token(pair: Pair) -> None:
    prompt = make_prompt(97)
    first = tokens(pair.p.run(prompt, max_tokens=1))
    name = pair.p.add(prompt, PREFILL, max_tokens=4, stop_token_ids=first)
    answer = pair.p.result(name)
    assert answer["reasons"] == ["stop"]
    pair.check(prompt, answer["params"], pair.d.add(prompt, answer["params"]), name)


def test_prefill_that_goes_on_for_some_tokens(pair: Pair) -> None:
    prompt = make_prompt(65)
    pair.decode(prompt, pair.prefill(prompt, max_tokens=5))


@pytest.mark.parametrize("steps", range(6))
def test_decode_leaves(pair: Pair, steps: int) -> None:
    prompt = make_prompt(1200)
    params = pair.prefill(prompt)
    pair.d.tell("pause")
    name = pair.d.add(prompt, params)
    if steps:
        pair.d.tell("resume", steps=steps)
        time.sleep(0.02 * steps)
    pair.d.tell("abort", id=name)
    pair.d.tell("resume")
    pair.d.settle()
    pair.p.settle()
    fresh = make_prompt(97)
    pair.decode(fresh, pair.prefill(fresh))


@pytest.mark.parametrize("steps", range(4))
def test_prefill_leaves_while_decode_waits(pair: Pair, steps: int) -> None:
    prompt = make_prompt(1200)  # five chunks
    prefill, decode = pair.mooncake(f"xfer-leaves-{steps}")
    pair.p.tell("pause")
    leaving = pair.p.add(prompt, prefill, max_tokens=1)
    if steps:
        pair.p.tell("resume", steps=steps)
    waiting = pair.d.add(prompt, decode)
    time.sleep(0.5)
    pair.p.tell("abort", id=leaving)
    pair.p.tell("resume")
    began = time.monotonic()
    assert pair.d.result(waiting)["reasons"] == ["error"]
    assert time.monotonic() - began < PROMPT_S


def test_prefill_never_comes(pair: Pair) -> None:
    _, decode = pair.mooncake("xfer-never")
    assert pair.d.run(make_prompt(100), decode)["reasons"] == ["error"]


def refused(pair: Pair, prompt: list[int], params: Any) -> None:
    began = time.monotonic()
    assert pair.d.run(prompt, params)["reasons"] == ["error"]
    assert time.monotonic() - began < PROMPT_S


def test_references_that_are_not_good_any_more(pair: Pair) -> None:
    prompt, other = make_prompt(97), make_prompt(97)
    params = pair.prefill(prompt)
    pair.decode(prompt, params)
    pair.forget()
    refused(pair, prompt, params)  # consumed
    params = pair.prefill(prompt)
    refused(pair, prompt, {**params, "remote_engine_id": "somebody else"})
    refused(pair, prompt, {**params, "generation": params["generation"] + 1})
    refused(pair, prompt, {**params, "transfer_id": "unknown"})
    refused(pair, make_prompt(200), params)  # longer than what is held
    refused(pair, other, pair.prefill(prompt))  # made for another prompt
    params = pair.prefill(prompt)
    time.sleep(LEASE_S + 1)
    refused(pair, prompt, params)  # expired


def test_nobody_at_the_address(pair: Pair) -> None:
    prompt = make_prompt(100)
    params = pair.prefill(prompt)
    with ReservedPorts() as ports:
        refused(pair, prompt, {**params, "remote_port": ports.take()})
        _, decode = pair.mooncake("xfer-nobody")
        nowhere = f"http://127.0.0.1:{ports.take()}"
        refused(pair, prompt, {**decode, "remote_bootstrap_addr": nowhere})


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "do_remote_decode": True},
        {"do_remote_prefill": "yes"},
        {"somebody": "else"},
        {"do_remote_prefill": True, "transfer_id": 1, "remote_bootstrap_addr": "http://h:1"},
        {"do_remote_prefill": True, "remote_host": "h", "remote_port": "1"},
    ],
    ids=repr,
)
def test_nonsense_is_answered_at_once(pair: Pair, params: Any) -> None:
    began = time.monotonic()
    assert pair.d.run(make_prompt(50), params)["reasons"] == ["error"]
    assert time.monotonic() - began < 2
    assert pair.d.counts()["failures"]["invalid_params"] >= 1


def test_a_transfer_id_for_two_prefills(pair: Pair) -> None:
    prompt = make_prompt(97)
    prefill, decode = pair.mooncake("xfer-twice")
    held = pair.p.add(prompt, prefill, max_tokens=1)
    pair.p.result(held)
    assert pair.p.run(make_prompt(97), prefill, max_tokens=1)["reasons"] == ["error"]
    pair.check(prompt, decode, pair.d.add(prompt, decode), held)


def test_many_at_once(pair: Pair) -> None:
    prompts = [make_prompt(_random.randrange(2, 400)) for _ in range(12)]
    holding = [pair.p.add(prompt, PREFILL, max_tokens=1) for prompt in prompts]
    params = [pair.p.result(name)["params"] for name in holding]
    decoding = [pair.d.add(*pieces) for pieces in zip(prompts, params, strict=True)]
    for prompt, names in zip(prompts, zip(holding, decoding, strict=True), strict=True):
        pair.check(prompt, {}, names[1], names[0])


@pytest.mark.faults
def test_prefill_is_stopped_for_a_while(pair: Pair) -> None:
    """A producer that is silent and comes back: blocks return, nothing is delivered wrong."""
    prompt = make_prompt(1000)
    params = pair.prefill(prompt)
    pair.p.signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert pair.d.run(prompt, params)["reasons"] == ["error"]
        assert time.monotonic() - began < PROMPT_S
    finally:
        pair.p.signal(signal.SIGCONT)
    pair.d.settle()
    pair.p.settle()
    fresh = make_prompt(289)
    pair.decode(fresh, pair.prefill(fresh))


@pytest.mark.faults
def test_decode_is_killed() -> None:
    """The producer gets its blocks back from a consumer that is gone."""
    with Pair(make_model("llama"), name="killed-d") as pair:
        prompt = make_prompt(1000)
        pair.d.add(prompt, pair.prefill(prompt))
        params = pair.prefill(make_prompt(100))
        assert params
        pair.d.signal(signal.SIGKILL)
        pair.p.settle()
        assert len(tokens(pair.p.run(make_prompt(40)))) == 8


@pytest.mark.faults
def test_prefill_is_killed_and_decode_recomputes() -> None:
    with Pair(make_model("llama"), policy="recompute", name="killed-p") as pair:
        prompt = make_prompt(200)  # one chunk, computed alike on both sides
        params = pair.prefill(prompt)
        expected = tokens(pair.d.run(prompt))
        pair.forget()
        assert tokens(pair.d.run(prompt, {"do_remote_prefill": True})) == expected
        pair.forget()
        assert tokens(pair.d.run(prompt, {**params, "transfer_id": "unknown"})) == expected
        counts = pair.d.counts()
        assert (counts["recomputed"], counts["zero_byte_pulls"]) == (2, 2)
        pair.forget()
        params = pair.prefill(prompt)
        pair.p.signal(signal.SIGKILL)
        began = time.monotonic()
        assert tokens(pair.d.run(prompt, params)) == expected
        assert time.monotonic() - began < PROMPT_S
        pair.d.settle()


def test_latent_attention() -> None:
    with Pair(make_model("mla"), name="mla") as pair:
        for length in (5, 32, 33, 321):
            prompt = make_prompt(length)
            before = pair.d.counts()["received_bytes"]
            first = pair.decode(prompt, pair.prefill(prompt))
            assert pair.d.counts()["received_bytes"] - before == pair.kv_bytes(length)
            pair.forget()
            assert pair.decode(prompt, pair.prefill(prompt))["tokens"] == first["tokens"]


def test_servers_of_different_models_refuse_each_other() -> None:
    first, second = pinned_processors()
    transfer = kv_transfer_config("kv_both", SETTINGS)
    engines = [
        Engine("model-0", make_model("llama", 0), first, transfer),
        Engine("model-1", make_model("llama", 1), second, transfer),
    ]
    try:
        for engine in engines:
            engine.wait_for("ready", timeout_s=START_TIMEOUT_S)
        p, d = engines
        prompt = make_prompt(100)
        params = p.run(prompt, PREFILL, max_tokens=1)["params"]
        assert d.run(prompt, params)["reasons"] == ["error"]
        assert "model.weights" in d.log.read_text(errors="replace")
        p.settle()
    finally:
        for engine in engines:
            engine.stop()
