"""The worker half with an agent that does what the test says."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from efa_kv.connectors.vllm import worker
from efa_kv.connectors.vllm.commands import (
    Abort,
    Expect,
    Fail,
    Hold,
    Pull,
    Queue,
    Release,
    Source,
    Withdraw,
)
from efa_kv.errors import ConfigError, FabricBusy, RegistrationError

SOURCE = Source("10.0.0.1:15001", "transfer", "request-p", "engine-p", 3, False)
BLOCKS = (np.array([4, 5, 6], dtype=np.uint32),)
DIGEST = b"prompt"


def report(**what: Any) -> SimpleNamespace:
    nothing = {"sent": set(), "received": set(), "failed": {}, "doomed": {}}
    return SimpleNamespace(**{**nothing, **what})


class FakeAgent:
    """Notes what it is told; `next` is what it reports."""

    session = "127.0.0.1:15001"
    bootstrap_address = None
    provider = "fake"

    def __init__(self, config: Any, layout: Any, fields: dict[str, str], engine_id: str) -> None:
        self.config, self.layout, self.fields, self.engine_id = config, layout, fields, engine_id
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.next = report()
        self.refuses: set[str] = set()
        self.closed = False

    def poll(self) -> SimpleNamespace:
        reported, self.next = self.next, report()
        return reported

    def close(self) -> None:
        self.closed = True

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> None:
            if name in self.refuses:
                raise FabricBusy("the queue is full")
            self.calls.append((name, arguments))

        return call


@pytest.fixture
def half(vllm_config: Any, cache_config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a worker half that has registered its caches."""
    monkeypatch.setattr(worker.runtime, "Agent", FakeAgent)

    def make(policy: str = "fail", role: str = "kv_both", **extra: Any) -> worker.WorkerHalf:
        made = worker.WorkerHalf(vllm_config(role, policy, **extra), cache_config(10))
        made.register({f"layer.{n}": torch.zeros(10, 2, 16, 8) for n in range(2)})
        return made

    return make


def pull(name: str = "request", first_token: int = 0) -> Pull:
    return Pull(name, SOURCE, first_token, 40 - first_token, BLOCKS, DIGEST)


def hold(name: str = "request") -> Hold:
    return Hold(name, "transfer", 3, 40, BLOCKS, DIGEST)


def test_start(half: Any) -> None:
    made = half()
    agent = made._agent
    assert agent.engine_id == "engine-kv_both"
    assert agent.layout.num_blocks == 10
    assert {"model.weights", "model.config", "cache.dtype", "server"} <= agent.fields.keys()
    assert all(isinstance(value, str) for value in agent.fields.values())
    assert made.handshake.session == agent.session
    made.close()
    made.close()
    assert agent.closed


def test_commands_reach_the_agent_in_order(half: Any) -> None:
    made = half()
    made.run(
        [
            Expect("request", "transfer", 3),
            hold(),
            Withdraw("other"),
            Queue("request-d", SOURCE),
            pull("request-d"),
            Release("request-e", SOURCE),
            Abort("request-d"),
        ]
    )
    names = [name for name, _ in made._agent.calls]
    assert names == ["expect", "hold", "withdraw", "queue", "pull", "release", "abort"]
    held = made._agent.calls[1][1][0]
    assert (held.request_id, held.token_count, held.prompt_digest) == ("request", 40, DIGEST)
    pulled = made._agent.calls[4][1][0]
    assert (pulled.request_id, pulled.remote_request_id) == ("request-d", "request-p")
    assert (pulled.address, pulled.generation, pulled.early) == ("10.0.0.1:15001", 3, False)


def test_each_id_is_reported_once(half: Any) -> None:
    made = half()
    made.run([pull("a"), pull("b"), hold("c")])
    made._agent.next = report(received={"a"}, failed={"b": "refused"}, sent={"c"})
    results = made.results()
    assert results.finished_recving == {"a", "b"}
    assert results.failed_recving == {"b"}
    assert results.finished_sending == {"c"}
    made._agent.next = report(received={"a"}, failed={"b": "again"}, sent={"c"})
    results = made.results()
    assert not (results.finished_recving | results.failed_recving | results.finished_sending)


def test_ids_that_were_never_handed_over_are_not_reported(half: Any) -> None:
    made = half()
    made._agent.next = report(received={"x"}, failed={"y": ""}, sent={"z"}, doomed={"x": ""})
    results = made.results()
    assert not (results.finished_recving | results.failed_recving | results.finished_sending)
    assert made.take_doomed_blocks() == set()


def test_a_request_that_cannot_be_served_is_reported_in_the_same_step(half: Any) -> None:
    made = half()
    made.run([Fail("request", "no address")])
    results = made.results()
    assert results.finished_recving == results.failed_recving == {"request"}
    assert made.results().finished_recving == set()
    assert made._agent.calls == []


def test_an_abort_after_the_report_is_not_passed_on(half: Any) -> None:
    made = half()
    made.run([pull()])
    made._agent.next = report(received={"request"})
    made.results()
    made.run([Abort("request")])
    assert [name for name, _ in made._agent.calls] == ["pull"]


def test_the_end_of_an_aborted_load_is_no_error(half: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: dict[str, int] = {}
    monkeypatch.setattr(
        worker.logger, "log", lambda level, _, name, why: logged.update({name: level})
    )
    made = half()
    made.run([pull("a"), pull("b"), Abort("a")])
    made._agent.next = report(failed={"a": "aborted", "b": "refused"})
    assert made.results().failed_recving == {"a", "b"}
    assert logged == {"a": logging.DEBUG, "b": logging.ERROR}


def test_a_doomed_load_names_its_own_blocks_only(half: Any) -> None:
    made = half()
    made.run([pull(first_token=16)])
    made._agent.next = report(doomed={"request": "the peer is silent"})
    assert made.results().finished_recving == set()
    assert made.take_doomed_blocks() == {5, 6}
    assert made.take_doomed_blocks() == set()
    made._agent.next = report(failed={"request": "keys changed"})
    assert made.results().failed_recving == {"request"}


def test_a_doomed_load_waits_where_it_is_recomputed(half: Any) -> None:
    made = half(policy="recompute")
    made.run([pull()])
    made._agent.next = report(doomed={"request": "the peer is silent"})
    made.results()
    assert made.take_doomed_blocks() == set()


def test_an_agent_that_takes_no_more_does_not_stop_the_server(half: Any) -> None:
    made = half()
    made._agent.refuses = {"pull", "hold", "expect", "queue", "release"}
    made.run([Expect("a", "t", 1), Queue("b", SOURCE), pull("b"), hold("c"), Release("d", SOURCE)])
    results = made.results()
    assert results.failed_recving == results.finished_recving == {"b"}
    assert results.finished_sending == {"c"}
    assert made._loading == {}
    assert made._lent == set()


def test_a_consumer_has_no_registry(half: Any) -> None:
    assert half(role="kv_consumer", bootstrap_port=8998)._agent.config.bootstrap_port == 0
    assert half(role="kv_producer", bootstrap_port=8998)._agent.config.bootstrap_port == 8998


def test_an_unknown_setting_stops_the_server(half: Any) -> None:
    with pytest.raises(ConfigError, match="protocol"):
        half(protokol="tcp")


def test_a_failure_to_register_stops_the_server(half: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RegistrationError("found a locked-memory limit of 64 KiB")

    monkeypatch.setattr(worker.runtime, "Agent", fail)
    with pytest.raises(RegistrationError, match="locked-memory"):
        half()


def test_caches_cannot_move(half: Any) -> None:
    with pytest.raises(ConfigError, match="second set"):
        half().register({})
