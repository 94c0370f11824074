"""The agent's own books: each id once, whichever way the news comes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from efa_kv.config import EngineConfig
from efa_kv.errors import ConfigError, LocalProtocolError
from efa_kv.plan.layout import Group, KvLayout, Row
from efa_kv.runtime.agent import Agent, Hold, Pull
from efa_kv.runtime.outbox import Asked, Ended, Given, Lost
from efa_kv.types import Notice

BLOCKS = 8
BLOCK_BYTES = 64
PEER = 4711


def make_layout(memory: np.ndarray) -> KvLayout:
    return KvLayout(
        block_size_tokens=4,
        num_blocks=BLOCKS,
        groups=(Group(kind="full", block_size_tokens=4),),
        rows=(
            Row(
                layer="0",
                part="kv",
                group=0,
                base_address=memory.ctypes.data,
                stride_bytes=BLOCK_BYTES,
                length_bytes=BLOCK_BYTES,
            ),
        ),
        regions=((memory.ctypes.data, memory.nbytes),),
        dtype="uint8",
        heads=1,
    )


@pytest.fixture
def memory() -> np.ndarray:
    return np.zeros(BLOCKS * BLOCK_BYTES, np.uint8)


@pytest.fixture
def agent(memory: np.ndarray) -> Iterator[Agent]:
    opened = Agent(EngineConfig(protocol="tcp"), make_layout(memory), {"model": "m"}, "e")
    yield opened
    opened.close()


def pull(agent: Agent, request_id: str = "a", **fields: Any) -> int:
    """A pull from nobody: the discard port answers no greeting. Returns its number."""
    values = {
        "transfer_id": "t",
        "remote_request_id": "",
        "remote_engine_id": "",
        "generation": 3,
        "address": "127.0.0.1:9",
        "early": False,
        "first_token": 0,
        "token_count": 8,
        "block_ids": (np.array([1, 2], np.uint32),),
        **fields,
    }
    agent.pull(Pull(request_id=request_id, **values))
    return agent._pull_of.get(request_id, 0)


def notice(agent: Agent, pull_id: int, **fields: Any) -> Notice:
    values = {
        "transfer": (pull_id, agent.engine.incarnation),
        "generation": 3,
        "bytes": 64,
        "sender": PEER,
        **fields,
    }
    return Notice(**values)


def hear(agent: Agent, monkeypatch: pytest.MonkeyPatch, *notices: Notice) -> Any:
    monkeypatch.setattr(agent.engine, "notices", lambda: list(notices))
    return agent.poll()


def test_a_notice_reports_once_and_the_message_behind_it_does_not(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull_id = pull(agent)
    agent._outbox.put(Asked(pull_id, PEER))
    twice = notice(agent, pull_id)
    assert hear(agent, monkeypatch, twice, twice).received == {"a"}
    agent._outbox.put(Ended(pull_id, "", "", 64))
    report = hear(agent, monkeypatch, twice)
    assert (report.received, report.failed) == (set(), {})
    stats = agent.stats()
    assert (stats.received_requests, stats.received_bytes) == (1, 64)
    assert len(stats.transfer_seconds) == 1
    assert agent.stats().received_requests == 0


@pytest.mark.parametrize(
    "lie", [{"sender": 1}, {"generation": 4}, {"transfer": (2, 1)}, {"status": -13}]
)
def test_notices_of_others_do_not_count(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, lie: dict[str, Any]
) -> None:
    pull_id = pull(agent)
    agent._outbox.put(Asked(pull_id, PEER))
    report = hear(agent, monkeypatch, notice(agent, pull_id, **lie))
    assert (report.received, report.failed) == (set(), {})


def test_a_notice_before_anything_was_asked_does_not_count(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull_id = pull(agent)
    assert not hear(agent, monkeypatch, notice(agent, pull_id)).received


def test_what_was_aborted_or_doomed_ends_as_failed(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    aborted, doomed = pull(agent, "a"), pull(agent, "b")
    agent._outbox.put(Asked(aborted, PEER))
    agent._outbox.put(Asked(doomed, PEER))
    agent._outbox.put(Lost(doomed, "timeout", "silent"))
    agent._pending[aborted].lost = "aborted"
    report = hear(agent, monkeypatch, notice(agent, aborted))
    assert report.failed == {"a": "aborted"}
    assert report.doomed == {"b": "timeout: silent"}
    agent._outbox.put(Ended(doomed, "", "", 64))
    report = agent.poll()
    assert report.failed == {"b": "timeout"}
    assert report.received == set()


@pytest.mark.parametrize(
    "fields",
    [
        {"block_ids": ()},
        {"block_ids": (np.array([1], np.uint32),)},
        {"block_ids": (np.array([1, BLOCKS], np.uint32),)},
        {"first_token": 2},
        {"first_token": 4},
        {"token_count": 0},
    ],
)
def test_impossible_pulls_fail_without_a_word_to_anybody(
    agent: Agent, fields: dict[str, Any]
) -> None:
    assert pull(agent, **fields) == 0
    with pytest.raises(LocalProtocolError):
        pull(agent)
    assert agent.poll().failed["a"].startswith("bad_blocks")
    assert agent.poll().failed == {}


def test_a_second_pull_of_a_request_is_a_bug_of_the_caller(agent: Agent) -> None:
    pull(agent)
    with pytest.raises(LocalProtocolError):
        pull(agent)


def test_holds_are_reported_once_and_counted(agent: Agent) -> None:
    for word in (Given("a", "", 64), Given("b", "expired", 0), Given("c", "failed", 0)):
        agent._outbox.put(word)
    assert agent.poll().sent == {"a", "b", "c"}
    assert agent.poll().sent == set()
    stats = agent.stats()
    assert (stats.sent_requests, stats.sent_bytes, stats.expired) == (1, 64, 1)
    assert stats.failures == {"failed": 1}


def test_a_full_queue_delays_and_keeps_the_order(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    from efa_kv.errors import FabricBusy

    taken: list[Any] = []

    def later(call: Any) -> None:
        if len(taken) >= limit:
            raise FabricBusy("full")
        taken.append(call)

    limit = 1
    monkeypatch.setattr(agent.engine.control, "later", later)
    for index in range(3):
        agent.expect(f"t{index}", f"r{index}", 1)
    assert len(taken) == 1
    limit = 10
    agent.poll()
    assert len(taken) == 3


def test_a_hold_is_withdrawn(agent: Agent) -> None:
    blocks = (np.array([1], np.uint32),)
    agent.hold(Hold(transfer_id="t", request_id="r", generation=1, token_count=4, block_ids=blocks))
    agent.withdraw("r")
    deadline = time.monotonic() + 5
    sent: set[str] = set()
    while not sent:
        assert time.monotonic() < deadline
        sent = agent.poll().sent
        time.sleep(0.001)
    assert sent == {"r"}


def test_closing_twice_and_calling_after_it(agent: Agent) -> None:
    agent.close()
    agent.close()
    agent.withdraw("r")
    agent.abort("unknown")
    assert agent.poll().sent == set()


def test_a_layout_outside_its_regions_stops_the_start(memory: np.ndarray) -> None:
    layout = make_layout(memory[: -BLOCK_BYTES // 2])
    with pytest.raises(ConfigError):
        Agent(EngineConfig(protocol="tcp"), layout, {}, "e")
