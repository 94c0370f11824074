"""Scratch memory: who gets the one region, for how long, and that it always comes back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from efa_kv.errors import LocalProtocolError
from efa_kv.types import RegionRecord
from efa_kv.wire.scratch import (
    LOAN_LIMIT_S,
    Prepare,
    ScratchAsk,
    ScratchDesk,
    ScratchLent,
    ScratchRefused,
    TakeBack,
    Tell,
)

REGION = RegionRecord(7, 4096, 1024, 0, 3, ())
LIMIT_BYTES = 1 << 20


def ask(number: int = 1, length_bytes: int = 1024, loan_s: float = 10.0) -> ScratchAsk:
    return ScratchAsk(number=number, length_bytes=length_bytes, loan_s=loan_s)


def lent_to(peer: int, number: int = 1, now: float = 0.0) -> ScratchDesk:
    desk = ScratchDesk(LIMIT_BYTES)
    assert desk.asked(peer, ask(number), now) == [Prepare(1024)]
    lent = ScratchLent(number=number, region=REGION)
    assert desk.prepared(REGION) == [Tell(peer, lent)]
    return desk


def test_a_repeated_ask_gets_the_same_region() -> None:
    desk = lent_to(5)
    assert desk.asked(5, ask(), 1.0) == [Tell(5, ScratchLent(number=1, region=REGION))]


def test_a_repeated_ask_while_the_region_is_made_waits() -> None:
    desk = ScratchDesk(LIMIT_BYTES)
    desk.asked(5, ask(), 0.0)
    assert desk.asked(5, ask(), 0.5) == []


def test_a_second_borrower_is_told_to_wait() -> None:
    desk = lent_to(5)
    (effect,) = desk.asked(6, ask(), 1.0)
    assert isinstance(effect, Tell)
    assert isinstance(effect.message, ScratchRefused)
    assert (effect.peer, "somebody else" in effect.message.text) == (6, True)


@pytest.mark.parametrize("limit_bytes", [0, 1023])
def test_more_than_the_limit_is_refused_with_both_numbers(limit_bytes: int) -> None:
    (effect,) = ScratchDesk(limit_bytes).asked(5, ask(), 0.0)
    assert isinstance(effect, Tell)
    assert isinstance(effect.message, ScratchRefused)
    assert "1024" in effect.message.text
    assert str(limit_bytes) in effect.message.text


def test_a_return_takes_the_region_back_once() -> None:
    desk = lent_to(5)
    assert desk.returned(5, 2) == []
    assert desk.returned(6, 1) == []
    assert desk.returned(5, 1) == [TakeBack()]
    assert desk.returned(5, 1) == []
    # Not lent again before its keys are gone.
    assert isinstance(desk.asked(6, ask(), 1.0)[0], Tell)
    assert desk.withdrawn() == []
    assert desk.asked(6, ask(), 2.0) == [Prepare(1024)]


def test_a_loan_ends_by_time_and_never_lasts_longer_than_the_limit() -> None:
    desk = ScratchDesk(LIMIT_BYTES)
    desk.asked(5, ask(loan_s=LOAN_LIMIT_S), 100.0)
    desk.prepared(REGION)
    assert desk.next_deadline() == 100.0 + LOAN_LIMIT_S
    assert desk.on_timer(100.0 + LOAN_LIMIT_S - 1) == []
    assert desk.on_timer(100.0 + LOAN_LIMIT_S) == [TakeBack()]
    assert desk.next_deadline() is None


def test_a_borrower_that_is_gone_before_it_had_anything_leaves_nothing() -> None:
    desk = ScratchDesk(LIMIT_BYTES)
    desk.asked(5, ask(), 0.0)
    assert desk.peer_gone(5) == []
    assert desk.prepared(REGION) == [TakeBack()]
    desk.withdrawn()
    assert not desk.busy


def test_a_region_that_cannot_be_made_is_said() -> None:
    desk = ScratchDesk(LIMIT_BYTES)
    desk.asked(5, ask(), 0.0)
    (effect,) = desk.failed("memlock")
    assert isinstance(effect, Tell)
    assert effect.message == ScratchRefused(number=1, text="memlock")
    assert not desk.busy


def test_what_cannot_happen_is_an_error_of_ours() -> None:
    with pytest.raises(LocalProtocolError):
        ScratchDesk(LIMIT_BYTES).withdrawn()


WORDS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "return", "gone", "timer", "prepared", "failed", "withdrawn"]),
        st.integers(1, 3),
        st.integers(1, 2),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(WORDS)
def test_every_region_that_is_made_is_taken_back_and_never_two_at_once(
    words: list[tuple[str, int, int]],
) -> None:
    desk = ScratchDesk(LIMIT_BYTES)
    making = made = withdrawing = 0
    for now, (word, peer, number) in enumerate(words):
        effects = []
        if word == "ask":
            effects = desk.asked(peer, ask(number, loan_s=3.0), now)
        elif word == "return":
            effects = desk.returned(peer, number)
        elif word == "gone":
            effects = desk.peer_gone(peer)
        elif word == "timer":
            effects = desk.on_timer(now)
        elif word == "prepared" and making:
            making, made = 0, 1
            effects = desk.prepared(REGION)
        elif word == "failed" and making:
            making = 0
            effects = desk.failed("no memory")
        elif word == "withdrawn" and withdrawing:
            withdrawing = 0
            effects = desk.withdrawn()
        for effect in effects:
            if isinstance(effect, Prepare):
                making += 1
            elif isinstance(effect, TakeBack):
                assert made == 1
                made, withdrawing = 0, 1
        assert making + made + withdrawing <= 1
        assert desk.busy == bool(making + made + withdrawing)
    # Whatever happened, time alone brings it back.
    if made:
        assert desk.on_timer(10_000.0) == [TakeBack()]
