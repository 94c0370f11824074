"""What arrives where, driven through SGLang's own senders and receivers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.disaggregation.base.conn import KVPoll

PAGES = 64


def some_pages(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).permutation(PAGES)[:count].tolist()


def assert_pages_are_equal(prefill: Any, decode: Any, source: list[int], target: list[int]) -> None:
    for mine, theirs in zip(prefill.pool, decode.pool, strict=True):
        assert torch.equal(mine[source], theirs[target])


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("page_tokens", [1, 16])
def test_pages_and_the_first_token_arrive(
    rig: Any, shape_of: Any, page_tokens: int, chunks: int
) -> None:
    rig.build(shape_of(page_tokens=page_tokens))
    prefill, decode = rig.prefill[0], rig.decode[0]
    source, target = some_pages(30, 1), some_pages(30, 2)
    handoff = rig.begin(target, aux=5)
    handoff.wait_for_metadata()
    handoff.send(source, chunks)
    assert handoff.outcome() == ([KVPoll.Success], [KVPoll.Success])
    assert_pages_are_equal(prefill, decode, source, target)
    untouched = sorted(set(range(PAGES)) - set(target))
    assert all(not layer[untouched].any() for layer in decode.pool)
    assert int(decode.aux.output_ids[5, 0]) == 1000 + handoff.room
    assert int(decode.aux.bootstrap_room[5, 0]) == handoff.room


def test_latent_attention(rig: Any, shape_of: Any) -> None:
    rig.build(shape_of(latent=True))
    source, target = some_pages(20, 3), some_pages(20, 4)
    handoff = rig.begin(target, aux=0)
    handoff.wait_for_metadata()
    handoff.send(source, 2)
    assert handoff.outcome() == ([KVPoll.Success], [KVPoll.Success])
    assert_pages_are_equal(rig.prefill[0], rig.decode[0], source, target)


def test_the_state_of_a_hybrid_model_comes_with_the_last_chunk(rig: Any, shape_of: Any) -> None:
    rig.build(shape_of(state_slots=6))
    prefill, decode = rig.prefill[0], rig.decode[0]
    source, target = some_pages(10, 5), some_pages(10, 6)
    handoff = rig.begin(target, aux=1, state=4)
    handoff.wait_for_metadata()
    handoff.send(source, 2, state=2)
    assert handoff.outcome() == ([KVPoll.Success], [KVPoll.Success])
    assert_pages_are_equal(prefill, decode, source, target)
    for mine, theirs in zip(prefill.states, decode.states, strict=True):
        assert torch.equal(mine[2], theirs[4])
        assert not theirs[[0, 1, 2, 3, 5]].any()


@pytest.mark.parametrize("page_tokens", [1, 16])
@pytest.mark.parametrize(("prefill_size", "decode_size"), [(2, 1), (1, 2), (2, 2)])
def test_heads_are_cut_and_joined_between_unequal_sides(
    rig: Any, shape_of: Any, prefill_size: int, decode_size: int, page_tokens: int
) -> None:
    rig.build(shape_of(page_tokens=page_tokens), prefill_size, decode_size)
    source, target = some_pages(12, 7), some_pages(12, 8)
    handoff = rig.begin(target, aux=2)
    handoff.wait_for_metadata()
    handoff.send(source, 2)
    senders, receivers = handoff.outcome()
    assert {*senders, *receivers} == {KVPoll.Success}
    for layer in range(len(rig.prefill[0].pool)):
        sent = torch.cat([rank.pool[layer][source] for rank in rig.prefill], dim=2)
        arrived = torch.cat([rank.pool[layer][target] for rank in rig.decode], dim=2)
        assert torch.equal(sent, arrived)


def test_sixty_four_requests_at_once(rig: Any, shape_of: Any) -> None:
    rig.build(shape_of(page_tokens=16))
    prefill, decode = rig.prefill[0], rig.decode[0]
    pairs = [([n], [PAGES - 1 - n]) for n in range(PAGES)]
    handoffs = [rig.begin(target, aux=n) for n, (_, target) in enumerate(pairs)]
    for handoff in handoffs:
        handoff.wait_for_metadata()
    for handoff, (source, _) in zip(handoffs, pairs, strict=True):
        handoff.send(source)
    for handoff in handoffs:
        assert handoff.outcome() == ([KVPoll.Success], [KVPoll.Success])
    for source, target in pairs:
        assert_pages_are_equal(prefill, decode, source, target)
    rooms = decode.aux.bootstrap_room[:PAGES, 0].tolist()
    assert rooms == [handoff.room for handoff in handoffs]
