"""Two agents in two processes: what arrives, byte by byte, and what is reported."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kv_caches import BLOCK_TOKENS, contents

from efa_kv.runtime.agent import Hold

Child = Callable[..., Any]
Consumer = Callable[..., Any]


@pytest.mark.parametrize("protocol", ["tcp", "shm"])
def test_every_byte_arrives_and_no_other_changes(
    protocol: str, child: Child, consumer: Consumer
) -> None:
    producer, decode = child(protocol=protocol), consumer(protocol=protocol)
    producer.ask("fill", seed=1)
    producer.hold("a", [5, 6, 7, 20, 3], token_count=70)
    producer.hold("b", [40, 41])
    decode.pull("a", producer.session, [10, 11, 12, 1, 2], token_count=70)
    decode.pull("b", producer.session, [60, 50])
    decode.wait(2)
    assert sorted(decode.received) == ["a", "b"]
    source = contents(64, 1)
    decode.expect_blocks(source, [(5, 10), (6, 11), (7, 12), (20, 1), (3, 2)])
    decode.expect_blocks(source, [(40, 60), (41, 50)])
    decode.check_every_byte()
    assert sorted(producer.ask("poll", seconds=5, until=2)["sent"]) == ["a", "b"]
    stats = decode.agent.stats()
    assert (stats.received_requests, stats.failures) == (2, {})
    assert stats.received_bytes == 7 * 3 * 2048


@pytest.mark.parametrize("hit_blocks", range(5))
def test_prefix_hits_of_every_length(child: Child, consumer: Consumer, hit_blocks: int) -> None:
    producer, decode = child(), consumer()
    producer.ask("fill", seed=2)
    theirs, ours = [9, 3, 30, 31, 17], [1, 2, 3, 40, 41]
    producer.hold("a", theirs, token_count=75)
    first = hit_blocks * BLOCK_TOKENS
    decode.pull("a", producer.session, ours, first_token=first, token_count=75 - first)
    decode.wait(1)
    assert decode.received == ["a"]
    pairs = list(zip(theirs, ours, strict=True))[hit_blocks:]
    decode.expect_blocks(contents(64, 2), pairs)
    decode.check_every_byte()


def test_hybrid_groups_leave_out_blocks_outside_the_window(
    child: Child, consumer: Consumer
) -> None:
    producer, decode = child(hybrid=True), consumer(hybrid=True)
    producer.ask("fill", seed=3)
    producer.hold("a", [[1, 2, 3, 4], [0, 0, 7, 8]])
    decode.pull("a", producer.session, [[11, 12, 13, 14], [0, 16, 17, 18]])
    decode.wait(1)
    assert decode.received == ["a"]
    pairs = [(1, 11), (2, 12), (3, 13), (4, 14), (7, 17), (8, 18)]
    decode.expect_blocks(contents(64, 3), pairs)
    decode.check_every_byte()


def test_ask_before_hold_waits(child: Child, consumer: Consumer) -> None:
    producer, decode = child(), consumer()
    producer.ask("fill", seed=4)
    producer.ask("expect", transfer_id="transfer-a", request_id="0_p")
    decode.pull("a", producer.session, [1, 2])
    decode.pull("b", producer.session, [3, 4], early=True)
    time.sleep(0.3)
    assert not decode.poll().failed
    producer.hold("0_p", [8, 9], transfer_id="transfer-a")
    producer.hold("0_q", [10, 11], transfer_id="transfer-b")
    decode.wait(2)
    assert sorted(decode.received) == ["a", "b"]
    decode.expect_blocks(contents(64, 4), [(8, 1), (9, 2), (10, 3), (11, 4)])
    decode.check_every_byte()


def test_by_request_id_as_a_response_of_prefill_names_it(child: Child, consumer: Consumer) -> None:
    producer, decode = child(), consumer()
    producer.ask("fill", seed=5)
    producer.hold("0_cmpl-x-1234", [8, 9], transfer_id="")
    decode.pull(
        "cmpl-x-5678", producer.session, [1, 2], transfer_id="", remote_request_id="0_cmpl-x-1234"
    )
    decode.wait(1)
    assert decode.received == ["cmpl-x-5678"]


def test_by_registry_even_with_the_engine_id_of_a_former_process(
    child: Child, consumer: Consumer, unused_port: int
) -> None:
    producer = child(bootstrap_port=unused_port, engine_id="engine-2")
    decode = consumer()
    producer.ask("fill", seed=6)
    producer.hold("a", [8, 9])
    producer.hold("b", [10, 11])
    decode.pull("a", producer.bootstrap, [1, 2], remote_engine_id="engine-2")
    decode.pull("b", producer.bootstrap, [3, 4], remote_engine_id="engine-1")
    decode.wait(2)
    assert sorted(decode.received) == ["a", "b"]
    decode.expect_blocks(contents(64, 6), [(8, 1), (9, 2), (10, 3), (11, 4)])
    decode.check_every_byte()


def test_nothing_leaves_before_the_compute_is_complete(child: Child, consumer: Consumer) -> None:
    producer, decode = child(), consumer()
    producer.hold("a", [8, 9], wait_for_compute=True)
    decode.pull("a", producer.session, [1, 2])
    time.sleep(0.3)
    decode.poll()
    decode.check_every_byte()
    assert not decode.received
    producer.ask("fill", seed=7)
    producer.ask("compute", request_id="a")
    decode.wait(1)
    decode.expect_blocks(contents(64, 7), [(8, 1), (9, 2)])
    decode.check_every_byte()


def test_finished_chunks_arrive_while_prefill_goes_on(child: Child, consumer: Consumer) -> None:
    producer, decode = child(), consumer()
    producer.ask("fill", seed=8)
    chunk = {"transfer_id": "transfer-a", "request_id": "a", "generation": 1}
    producer.ask("expect", transfer_id="transfer-a", request_id="a")
    decode.pull("a", producer.session, [1, 2, 3, 4])
    producer.ask("extend", blocks=[[8, 9, 10]], token_count=40, **chunk)
    source = contents(64, 8)
    decode.expect_blocks(source, [(8, 1), (9, 2)])
    deadline = time.monotonic() + 5
    while not np.array_equal(decode.cache.data, decode.expected):
        assert time.monotonic() < deadline
        assert not decode.poll().received
        time.sleep(0.01)
    producer.hold("a", [8, 9, 10, 11])
    decode.wait(1)
    assert decode.received == ["a"]
    decode.expect_blocks(source, [(10, 3), (11, 4)])
    decode.check_every_byte()
    assert producer.ask("poll", seconds=5, until=1)["sent"] == ["a"]


def test_siblings_take_one_hold_each(child: Child, consumer: Consumer) -> None:
    producer, decode = child(), consumer()
    producer.ask("fill", seed=9)
    for index in range(4):
        producer.hold(f"{index}_parent", [8 + index], transfer_id="shared")
        decode.pull(f"{index}_child", producer.session, [1 + index], transfer_id="shared")
    decode.wait(4)
    assert len(decode.received) == 4
    assert len(producer.ask("poll", seconds=5, until=4)["sent"]) == 4
    source = contents(64, 9)
    arrived = sorted(decode.cache.data[0, 1 + index].tobytes() for index in range(4))
    assert arrived == sorted(source[0, 8 + index].tobytes() for index in range(4))


def test_64_handoffs_at_once(child: Child, consumer: Consumer) -> None:
    producer, decode = child(blocks=300), consumer(blocks=300)
    producer.ask("fill", seed=10)
    source = contents(300, 10)
    for index in range(64):
        theirs = [1 + 4 * index + part for part in range(4)]
        ours = [256 - part - 4 * index for part in range(4)]
        producer.hold(f"r{index}", theirs)
        decode.pull(f"r{index}", producer.session, ours, early=True)
        decode.expect_blocks(source, list(zip(theirs, ours, strict=True)))
    decode.wait(64)
    assert len(decode.received) == 64
    decode.check_every_byte()
    print(f"slowest poll: {decode.slowest_poll_s * 1e3:.2f} ms")


@pytest.mark.parametrize("near", [True, False])
def test_two_agents_of_one_process(consumer: Consumer, near: bool) -> None:
    prefill, decode = consumer(near=near), consumer(near=near)
    prefill.cache.fill(12)
    blocks = (np.array([8, 9], np.uint32),)
    prefill.agent.hold(
        Hold(
            transfer_id="transfer-a",
            request_id="a",
            generation=1,
            token_count=32,
            block_ids=blocks,
        )
    )
    decode.pull("a", prefill.agent.session, [1, 2])
    decode.wait(1)
    assert decode.received == ["a"]
    decode.expect_blocks(contents(64, 12), [(8, 1), (9, 2)])
    decode.check_every_byte()
