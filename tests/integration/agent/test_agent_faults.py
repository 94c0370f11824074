"""Aborts, deaths, pauses, expiry and lies: blocks come back in time and stay what they are."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kv_caches import BLOCK_TOKENS, contents

from efa_kv.runtime.agent import Hold

Child = Callable[..., Any]
Consumer = Callable[..., Any]

MANY = 12_000
TIMEOUT_S = 1.5


def begin_large(producer: Any, decode: Any) -> None:
    """Starts a transfer of many blocks and returns while it is under way."""
    blocks = list(range(1, MANY))
    producer.hold("big", blocks)
    decode.pull("big", producer.session, blocks)
    deadline = time.monotonic() + 10
    while decode.cache.data[0, 1, 0] == 0xEE and not decode.poll().received:
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def test_an_abort_before_anything_was_asked(consumer: Consumer, unused_port: int) -> None:
    decode = consumer()
    decode.pull("a", f"127.0.0.1:{unused_port}", [1, 2])
    decode.agent.abort("a")
    decode.agent.abort("a")
    decode.agent.abort("unknown")
    decode.wait(1, timeout_s=1.0)
    assert decode.failed["a"].startswith("aborted")


def test_an_abort_while_the_ask_is_parked(child: Child, consumer: Consumer) -> None:
    producer, decode = child(), consumer()
    decode.pull("a", producer.session, [1, 2], early=True)
    time.sleep(0.3)
    decode.agent.abort("a")
    decode.wait(1)
    assert decode.failed["a"].startswith("aborted")
    # The late hold is nobody's: the next pull may have it, into other blocks.
    producer.ask("fill", seed=1)
    producer.hold("a", [8, 9])
    decode.pull("a", producer.session, [3, 4])
    decode.wait(2)
    decode.expect_blocks(contents(64, 1), [(8, 3), (9, 4)])
    decode.check_every_byte()


def test_an_abort_while_prefill_computes(child: Child, consumer: Consumer) -> None:
    producer, decode = child(), consumer()
    producer.hold("a", [8, 9], wait_for_compute=True)
    decode.pull("a", producer.session, [1, 2])
    time.sleep(0.3)
    decode.agent.abort("a")
    decode.wait(1)
    assert producer.ask("poll", seconds=5, until=1)["sent"] == ["a"]
    producer.ask("compute", request_id="a")
    time.sleep(0.2)
    decode.check_every_byte()


@pytest.mark.parametrize("delay_s", [0.0, 0.01])
def test_an_abort_while_bytes_move(child: Child, consumer: Consumer, delay_s: float) -> None:
    producer, decode = child(blocks=MANY), consumer(blocks=MANY)
    begin_large(producer, decode)
    time.sleep(delay_s)
    decode.agent.abort("big")
    decode.wait(1)
    decode.cache.data[:] = 0xAB  # the blocks have another owner now
    assert producer.ask("poll", seconds=10, until=1)["sent"] == ["big"]
    time.sleep(0.2)
    assert np.all(decode.cache.data == 0xAB)


def test_a_withdrawn_prefill_fails_the_pull_at_once(child: Child, consumer: Consumer) -> None:
    producer, decode = child(), consumer()
    producer.ask("expect", transfer_id="transfer-a", request_id="p")
    decode.pull("a", producer.session, [1, 2])
    time.sleep(0.2)
    producer.ask("withdraw", request_id="p")
    decode.wait(1, timeout_s=2.0)
    assert decode.failed["a"].startswith("aborted")
    assert producer.ask("poll")["sent"] == []


def test_lies_and_replays_are_refused(child: Child, consumer: Consumer) -> None:
    producer, decode = child(), consumer()
    producer.hold("real", [8, 9])
    producer.hold("other", [10, 11])
    lies: dict[str, dict[str, Any]] = {
        "unknown": {"transfer_id": "never-heard-of"},
        "wrong_engine": {"transfer_id": "transfer-real", "remote_engine_id": "someone"},
        "stale": {"transfer_id": "transfer-real", "generation": 7},
        "bad_range": {"transfer_id": "transfer-real", "blocks": [1, 2, 3]},
    }
    for reason, fields in lies.items():
        blocks = fields.pop("blocks", [1, 2])
        decode.pull(reason, producer.session, blocks, **fields)
    decode.wait(len(lies))
    assert {reason: text.split(":")[0] for reason, text in decode.failed.items()} == {
        reason: reason for reason in lies
    }
    decode.check_every_byte()
    decode.pull("replay-1", producer.session, [1, 2], transfer_id="transfer-other")
    decode.wait(len(lies) + 1)
    decode.pull("replay-2", producer.session, [3, 4], transfer_id="transfer-other")
    decode.wait(len(lies) + 2)
    assert decode.received == ["replay-1"]
    assert decode.failed["replay-2"].startswith("consumed")


def test_a_pull_after_the_lease_is_refused_and_counted(child: Child, consumer: Consumer) -> None:
    producer, decode = child(lease_s=0.5), consumer()
    producer.hold("late", [8, 9])
    producer.hold("kept", [10, 11])
    decode.agent.queue("kept", producer.session, "transfer-kept", "", "engine")
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        decode.poll()
        time.sleep(0.01)
    decode.pull("late", producer.session, [1, 2])
    decode.pull("kept", producer.session, [3, 4])
    decode.wait(2)
    assert decode.failed["late"].startswith("expired")
    # Renewals go out three times a lease; a lease of 0.5 s is renewed by either side's.
    assert producer.ask("stats")["expired"] <= 2
    assert sorted(producer.ask("poll", seconds=5, until=2)["sent"]) == ["kept", "late"]


def test_release_lets_a_hold_go(child: Child, consumer: Consumer) -> None:
    producer, decode = child(), consumer()
    producer.hold("a", [8, 9])
    decode.agent.release(producer.session, "transfer-a", "", 1)
    assert producer.ask("poll", seconds=5, until=1)["sent"] == ["a"]
    assert not decode.poll().failed


def test_unequal_models_fail_at_once_with_both_values(child: Child, consumer: Consumer) -> None:
    producer, decode = child(model="tiny-2"), consumer()
    decode.pull("a", producer.session, [1, 2])
    decode.wait(1, timeout_s=5.0)
    assert decode.failed["a"].startswith("mismatch")
    assert "tiny-2" in decode.failed["a"]


def test_nobody_there_fails_within_the_greeting(consumer: Consumer, unused_port: int) -> None:
    decode = consumer(handshake_timeout_s=0.5)
    started = time.monotonic()
    decode.pull("a", f"127.0.0.1:{unused_port}", [1, 2])
    decode.pull("b", "nonsense", [1, 2])
    decode.pull("c", f"http://127.0.0.1:{unused_port}", [1, 2])
    decode.wait(3, timeout_s=5.0)
    assert time.monotonic() - started < 3
    assert all(text.startswith("unreachable") for text in decode.failed.values())


@pytest.mark.parametrize("protocol", ["tcp", "shm"])
def test_a_killed_producer_gives_blocks_back(
    child: Child, consumer: Consumer, protocol: str
) -> None:
    settings = {"protocol": protocol, "transfer_timeout_s": TIMEOUT_S}
    producer, bystander = child(blocks=MANY, **settings), child(blocks=MANY, **settings)
    decode = consumer(blocks=MANY, **settings)
    begin_large(producer, decode)
    producer.kill()
    started = time.monotonic()
    decode.wait(1)
    if decode.failed:
        assert time.monotonic() - started < 2 * TIMEOUT_S + 3
    # New keys: another producer goes on as if nothing had happened.
    decode.cache.data[:] = decode.expected
    bystander.ask("fill", seed=3)
    bystander.hold("a", [8, 9])
    decode.pull("a", bystander.session, [1, 2])
    decode.wait(2)
    assert "a" in decode.received
    decode.expect_blocks(contents(MANY, 3), [(8, 1), (9, 2)])
    decode.check_every_byte()


def test_a_stopped_producer_cannot_write_into_blocks_given_back(
    child: Child, consumer: Consumer
) -> None:
    settings = {"transfer_timeout_s": TIMEOUT_S}
    producer, decode = child(blocks=MANY, **settings), consumer(blocks=MANY, **settings)
    begin_large(producer, decode)
    producer.process.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    decode.wait(1)
    assert time.monotonic() - started < 2 * TIMEOUT_S + 3
    if decode.received:
        pytest.skip("the transfer was over before the producer was stopped")
    assert "big" in decode.doomed
    decode.cache.data[:] = 0xAB
    producer.process.send_signal(signal.SIGCONT)
    time.sleep(1.0)
    assert np.all(decode.cache.data == 0xAB)
    assert producer.ask("poll", seconds=10, until=1)["sent"] == ["big"]
    # The two understand each other again.
    producer.hold("a", [8, 9])
    decode.pull("a", producer.session, [1, 2])
    decode.wait(2)
    assert decode.received == ["a"]


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_consumer_that_dies_or_stops_does_not_keep_the_producers_blocks(
    child: Child, consumer: Consumer, end: signal.Signals
) -> None:
    """Here the process of the test is the producer.

    A stopped process keeps its connections, and with them our operations, until the rail
    gets a new endpoint.
    """
    settings = {"transfer_timeout_s": TIMEOUT_S, "forget_after_s": 2.0, "lease_s": 2.0}
    decode, here = child(blocks=MANY, **settings), consumer(blocks=MANY, **settings)
    blocks = list(range(1, MANY))
    here.agent.hold(
        Hold(
            transfer_id="t",
            request_id="r",
            generation=1,
            token_count=len(blocks) * BLOCK_TOKENS,
            block_ids=(np.array(blocks, np.uint32),),
        )
    )
    decode.ask(
        "pull",
        blocks=[blocks],
        request_id="x",
        transfer_id="t",
        remote_request_id="",
        remote_engine_id="",
        generation=0,
        address=here.agent.session,
        early=True,
        first_token=0,
        token_count=len(blocks) * BLOCK_TOKENS,
    )
    time.sleep(0.02)
    decode.process.send_signal(end)
    deadline = time.monotonic() + 30
    while not here.sent:
        here.poll()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert here.sent == ["r"]


def test_pulls_survive_a_change_of_keys_that_was_not_for_them(
    child: Child, consumer: Consumer
) -> None:
    blocks = MANY + 2
    producer, decode = child(blocks=blocks), consumer(blocks=blocks)
    producer.ask("fill", seed=5)
    begin_large(producer, decode)
    for _ in range(20):
        if decode.agent.engine.rotate_regions(0.5):
            break
    producer.hold("late", [1, 2], token_count=20)
    into = [MANY, MANY + 1]
    decode.pull("late", producer.session, into, transfer_id="transfer-late", token_count=20)
    decode.wait(2, timeout_s=30.0)
    assert sorted(decode.received) == ["big", "late"]
    source = contents(blocks, 5)
    decode.expect_blocks(source, [(block, block) for block in range(1, MANY)])
    decode.expect_blocks(source, [(1, MANY), (2, MANY + 1)])
    decode.check_every_byte()


@pytest.mark.slow
def test_a_restarted_producer_at_the_same_address(
    child: Child, consumer: Consumer, unused_port: int
) -> None:
    settings = {"transfer_timeout_s": TIMEOUT_S}
    decode = consumer(**settings)
    for round_number in range(3):
        producer = child(port=unused_port, **settings)
        producer.ask("fill", seed=round_number)
        producer.hold("a", [8, 9])
        ok, lost = f"ok-{round_number}", f"lost-{round_number}"
        decode.pull(ok, producer.session, [1, 2], transfer_id="transfer-a")
        decode.wait(2 * round_number + 1)
        producer.hold("slow", [8, 9], wait_for_compute=True)
        decode.pull(lost, producer.session, [3, 4], transfer_id="transfer-slow")
        time.sleep(0.2)
        producer.kill()
        decode.wait(2 * round_number + 2)
        decode.expect_blocks(contents(64, round_number), [(8, 1), (9, 2)])
        decode.check_every_byte()
    assert decode.received == ["ok-0", "ok-1", "ok-2"]


def test_close_is_quick_whatever_is_pending(child: Child, consumer: Consumer) -> None:
    producer, decode = child(), consumer()
    producer.hold("a", [8, 9], wait_for_compute=True)
    decode.pull("a", producer.session, [1, 2])
    time.sleep(0.2)
    started = time.monotonic()
    decode.agent.close()
    assert time.monotonic() - started < 2
    assert producer.ask("close") < 2
