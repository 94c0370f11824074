"""The consumer's table: when a pull is asked for, again, given up, and really over."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from efa_kv.errors import LocalProtocolError
from efa_kv.wire.consumer import ConsumerTable
from efa_kv.wire.errands import Errands, Reference
from efa_kv.wire.handoff import (
    Abort,
    Accepted,
    Ask,
    Drained,
    Landed,
    Reason,
    Refused,
    Release,
    Renew,
    Unsettled,
    pack_blocks,
)
from efa_kv.wire.machine import look_up
from efa_kv.wire.pulls import (
    TABLE,
    Connect,
    Done,
    Doomed,
    Event,
    Limits,
    PullRequest,
    Rotate,
    State,
    Tell,
    Watch,
)

PEER = 77
TIMEOUT_S = 30.0


class World:
    """A table, a clock and everything it ever decided."""

    def __init__(self, **limits: Any) -> None:
        values = {"transfer_timeout_s": TIMEOUT_S, "pulls": 4, "quarantine_blocks": 3}
        self.table = ConsumerTable(Limits(**{**values, **limits}))
        self.now = 1000.0
        self.said: list[Any] = []
        self.done: dict[int, str] = {}
        self.doomed: dict[int, str] = {}
        self.other: list[Any] = []

    def do(self, name: str, *arguments: Any) -> None:
        for effect in getattr(self.table, name)(*arguments, self.now):
            if isinstance(effect, Tell):
                self.said.append(effect.message)
            elif isinstance(effect, Done):
                assert effect.pull_id not in self.done
                self.done[effect.pull_id] = effect.reason
            elif isinstance(effect, Doomed):
                self.doomed[effect.pull_id] = effect.reason
            else:
                self.other.append(effect)

    def start(self, pull_id: int = 2, blocks: int = 2) -> None:
        request = PullRequest(
            pull_id=pull_id,
            address="there",
            transfer_id="t",
            remote_request_id="",
            engine_id="",
            generation=1,
            early=False,
            first_token=0,
            token_count=32,
            block_ids=pack_blocks([np.arange(1, 3, dtype=np.uint32)]),
            block_count=blocks,
        )
        self.do("start", request)

    def asked(self, **arguments: int) -> None:
        self.start(**arguments)
        self.do("peer_ready", "there", PEER)

    def hear(self, message: Any, peer: int = PEER) -> None:
        self.do("on_message", peer, message)

    def pass_time(self, seconds: float) -> None:
        """Lets time pass the way the control thread does: from deadline to deadline."""
        end = self.now + seconds
        while (due := self.table.next_deadline()) is not None and due <= end:
            self.now = max(self.now, due)
            self.do("on_timer")
        self.now = end

    def rotate(self, works: bool = True) -> None:
        assert any(isinstance(effect, Rotate) for effect in self.other)
        if works:
            self.table.keys_epoch += 1
        self.do("rotated", self.table.keys_epoch if works else 0)


@pytest.fixture
def world() -> World:
    return World()


def test_a_pull(world: World) -> None:
    world.start()
    assert world.other == [Connect("there")]
    world.do("peer_ready", "there", PEER)
    assert world.other[1] == Watch(2, PEER)
    assert isinstance(world.said[0], Ask)
    world.hear(Accepted(pull_id=2, attempt=0))
    world.hear(Drained(pull_id=2, attempt=0, bytes=64))
    assert world.done == {2: ""}
    assert world.said[-1] == Landed(pull_id=2)
    assert world.table.next_deadline() is None
    world.hear(Drained(pull_id=2, attempt=0, reason="failed"))
    world.do("landed", 2, 64)
    assert (world.table.counts.received, world.table.counts.bytes) == (1, 64)


def test_the_notice_may_come_first_or_alone(world: World) -> None:
    world.asked()
    world.do("landed", 2, 64)
    assert world.done == {2: ""}
    world.hear(Drained(pull_id=2, attempt=0, bytes=64))


def test_an_ask_is_repeated_until_it_is_answered(world: World) -> None:
    world.asked()
    world.pass_time(10)
    asks = len(world.said)
    assert 5 < asks < 12
    assert all(message == world.said[0] for message in world.said)
    world.hear(Accepted(pull_id=2, attempt=0))
    world.pass_time(29)  # every answer is a sign of life
    assert world.done == {}


def test_words_of_others_do_not_count(world: World) -> None:
    world.asked()
    world.hear(Drained(pull_id=2, attempt=0), peer=78)
    world.hear(Refused(pull_id=2, attempt=0, reason="unknown"), peer=78)
    world.hear(Drained(pull_id=4, attempt=0))
    assert world.done == {}


@pytest.mark.parametrize("reason", [Reason.EXPIRED, Reason.MISMATCH])
def test_a_refusal_is_a_fence(world: World, reason: str) -> None:
    world.asked()
    world.hear(Refused(pull_id=2, attempt=0, reason=reason))
    assert world.done == {2: reason}
    assert not any(isinstance(message, Release) for message in world.said)


def test_a_refusal_that_leaves_the_hold_releases_it(world: World) -> None:
    world.asked()
    world.hear(Refused(pull_id=2, attempt=0, reason=Reason.BAD_RANGE))
    assert isinstance(world.said[-1], Release)
    assert world.said[-1].pull_id == 3


@pytest.mark.parametrize("connected", [False, True])
def test_what_was_never_asked_fails_at_once(world: World, connected: bool) -> None:
    world.start()
    if connected:
        world.do("abort", 2)
        assert world.done == {2: Reason.ABORTED}
    else:
        world.do("peer_failed", "there", Reason.UNREACHABLE, "no answer")
        assert world.done == {2: Reason.UNREACHABLE}


def test_no_session_ends_by_the_timeout(world: World) -> None:
    world.start()
    world.pass_time(TIMEOUT_S)
    assert world.done == {2: Reason.UNREACHABLE}


def test_too_many_pulls(world: World) -> None:
    for pull_id in (2, 4, 6, 8, 10):
        world.start(pull_id)
    assert world.done == {10: Reason.BUSY}


@pytest.mark.parametrize("reason", ["", Reason.ABORTED, Reason.UNKNOWN])
def test_an_abort_waits_for_the_fence(world: World, reason: str) -> None:
    world.asked()
    world.hear(Accepted(pull_id=2, attempt=0))
    world.do("abort", 2)
    world.do("abort", 2)
    assert world.said[-1] == Abort(pull_id=2)
    assert world.done == {}
    world.pass_time(5)
    assert world.done == {}
    world.hear(Drained(pull_id=2, attempt=0, reason=reason))
    assert world.done == {2: Reason.ABORTED}
    assert world.doomed == {}


def test_an_abort_has_a_bound_that_signs_of_life_do_not_extend(world: World) -> None:
    world.asked()
    world.do("abort", 2)
    for _ in range(8):
        world.pass_time(TIMEOUT_S / 4)
        world.hear(Unsettled(pull_id=2, attempt=0, reason="failed"))
    assert world.done == {}
    world.rotate()
    assert world.done == {2: Reason.ABORTED}


def test_a_failed_write_dooms_the_pull_before_it_is_over(world: World) -> None:
    world.asked()
    world.hear(Unsettled(pull_id=2, attempt=0, reason="failed", text="link down"))
    assert world.doomed == {2: "failed"}
    assert world.said[-1] == Abort(pull_id=2)
    world.hear(Drained(pull_id=2, attempt=0, reason="failed"))
    assert world.done == {2: "failed"}


def test_silence_proves_nothing_until_the_keys_are_changed(world: World) -> None:
    world.asked()
    world.pass_time(TIMEOUT_S + 1)
    assert world.doomed == {2: Reason.TIMEOUT}
    assert world.done == {}
    assert isinstance(world.said[-1], Abort)
    world.pass_time(TIMEOUT_S)
    world.rotate(works=False)
    assert world.done == {}
    world.pass_time(2)
    world.rotate()
    assert world.done == {2: Reason.TIMEOUT}


def test_a_silent_peer_that_comes_back_ends_the_quarantine(world: World) -> None:
    world.asked()
    world.pass_time(TIMEOUT_S + 1)
    world.hear(Drained(pull_id=2, attempt=0, reason=Reason.UNKNOWN))
    assert world.done == {2: Reason.TIMEOUT}
    world.pass_time(1000)
    assert not [effect for effect in world.other if isinstance(effect, Rotate)]


def test_too_many_quarantined_blocks_change_the_keys_at_once(world: World) -> None:
    world.asked(pull_id=2)
    world.asked(pull_id=4)
    world.pass_time(TIMEOUT_S)
    assert world.other[-1] == Rotate(frozenset({2, 4}))


def test_a_dead_process_changes_the_keys_at_once(world: World) -> None:
    world.asked(pull_id=2)
    world.hear(Accepted(pull_id=2, attempt=0))
    world.do("peer_gone", PEER)
    world.start(pull_id=4)
    world.do("peer_ready", "there", PEER + 1)
    world.rotate()
    assert world.done == {2: Reason.PEER_GONE}
    world.hear(Drained(pull_id=4, attempt=0), peer=PEER + 1)
    assert world.done[4] == ""


def test_a_change_of_keys_frees_only_what_waited_when_it_began(world: World) -> None:
    world.asked(pull_id=2)
    world.do("peer_gone", PEER)
    world.start(pull_id=4)
    world.do("peer_ready", "there", PEER + 1)
    world.do("peer_gone", PEER + 1)
    rotations = [effect for effect in world.other if isinstance(effect, Rotate)]
    assert rotations == [Rotate(frozenset({2}))]
    world.do("rotated", 1)
    assert list(world.done) == [2]
    assert world.other[-1] == Rotate(frozenset({4}))


STRAY = Drained(pull_id=2, attempt=0, reason=Reason.FAILED, stray=True)


def test_bytes_that_strayed_are_kept_out_by_new_keys(world: World) -> None:
    world.asked()
    world.hear(STRAY)
    assert world.doomed == {2: Reason.FAILED}
    assert world.done == {}
    said = len(world.said)
    world.hear(STRAY)
    world.rotate(works=False)
    world.pass_time(0.9)
    assert world.done == {}
    world.pass_time(0.2)
    world.rotate()
    assert world.done == {2: Reason.FAILED}
    assert len(world.said) == said  # the producer has nothing to add


def test_a_pull_whose_bytes_strayed_goes_on_with_new_keys(world: World) -> None:
    world.asked()
    world.hear(msgspec.structs.replace(STRAY, closed=False))
    assert world.doomed == world.done == {}
    world.rotate()
    world.pass_time(0.1)
    assert (world.said[-1].attempt, world.said[-1].keys_epoch) == (1, world.table.keys_epoch)
    world.hear(Drained(pull_id=2, attempt=1, bytes=8))
    assert world.done == {2: ""}


def test_a_pull_that_is_aborted_while_its_bytes_stray_gives_the_hold_back(world: World) -> None:
    world.asked()
    world.hear(msgspec.structs.replace(STRAY, closed=False))
    world.do("abort", 2)
    assert world.done == {}
    world.rotate()
    assert world.done == {2: Reason.ABORTED}
    assert isinstance(world.said[-1], Release)


def test_a_hold_kept_for_a_pull_that_is_over_is_given_up(world: World) -> None:
    world.asked()
    world.do("peer_gone", PEER)
    world.rotate()
    world.hear(msgspec.structs.replace(STRAY, closed=False))
    assert world.said[-1] == Abort(pull_id=2)
    said = len(world.said)
    world.hear(STRAY)
    assert len(world.said) == said


def test_bytes_that_strayed_before_the_keys_changed_are_out_already(world: World) -> None:
    world.asked(pull_id=2)
    world.asked(pull_id=4)
    world.do("peer_gone", PEER + 1)
    world.hear(STRAY)
    world.rotate()
    world.hear(msgspec.structs.replace(STRAY, pull_id=4, closed=False))
    world.pass_time(0.1)
    assert world.said[-1].attempt == 1
    rotations = [effect for effect in world.other if isinstance(effect, Rotate)]
    assert len(rotations) == 1


def test_outdated_keys_are_asked_for_again_with_a_new_attempt(world: World) -> None:
    world.asked()
    world.table.keys_epoch = 5
    old = Drained(pull_id=2, attempt=0, reason=Reason.KEYS, closed=False)
    world.hear(old)
    world.pass_time(0.1)
    assert (world.said[-1].attempt, world.said[-1].keys_epoch) == (1, 5)
    # Repetitions of what was said about the first attempt say nothing of the second.
    world.hear(old)
    world.hear(Refused(pull_id=2, attempt=0, reason=Reason.KEYS))
    world.hear(Unsettled(pull_id=2, attempt=0, reason=Reason.FAILED))
    assert world.table.pulls[2].attempt == 1
    assert world.done == world.doomed == {}
    for attempt in (1, 2):
        world.hear(Drained(pull_id=2, attempt=attempt, reason=Reason.KEYS, closed=False))
    assert world.done == {}
    world.hear(Drained(pull_id=2, attempt=3, reason=Reason.KEYS))
    assert world.done == {2: Reason.KEYS}


def test_after_an_abort_an_old_word_about_an_earlier_attempt_is_no_fence(world: World) -> None:
    world.asked()
    old = Drained(pull_id=2, attempt=0, reason=Reason.KEYS, closed=False)
    world.hear(old)
    world.pass_time(0.1)
    world.do("abort", 2)
    world.hear(old)
    assert world.done == {}
    world.hear(Drained(pull_id=2, attempt=0, reason=Reason.KEYS, closed=True))
    assert world.done == {2: Reason.ABORTED}


def test_confirmed_and_failed_are_the_end() -> None:
    for state in (State.CONFIRMED, State.FAILED):
        for event in Event:
            with pytest.raises(LocalProtocolError):
                look_up("pull", TABLE, state, event)


REFERENCE = Reference(address="there", transfer_id="t", remote_request_id="r", generation=1)


def test_renewals_go_out_several_times_a_lease_until_stopped() -> None:
    errands = Errands(lease_s=30.0, limit=4)
    assert errands.renew(REFERENCE, 0.0) == [Connect("there")]
    assert errands.peer_ready("there", PEER, 1.0) == [Tell(PEER, Renew(transfer_ids=("t",)))]
    assert errands.next_deadline() == 11.0
    assert errands.on_timer(11.0) == [Tell(PEER, Renew(transfer_ids=("t",)))]
    errands.stop(REFERENCE)
    errands.stop(REFERENCE)
    assert errands.on_timer(100.0) == []
    assert errands.next_deadline() is None


def test_a_renewal_that_nobody_stops_is_forgotten() -> None:
    errands = Errands(lease_s=1.0, limit=4)
    errands.renew(REFERENCE, 0.0)
    errands.peer_ready("there", PEER, 0.0)
    now = 0.0
    while (due := errands.next_deadline()) is not None:
        now = due
        errands.on_timer(now)
    assert 39 < now < 42
    assert errands.dropped == 1


def test_a_release_is_repeated_until_it_is_answered_or_pointless() -> None:
    errands = Errands(lease_s=5.0, limit=1)
    assert errands.release(3, REFERENCE, 0.0) == [Connect("there")]
    assert errands.release(5, REFERENCE, 0.0) == []
    first = errands.peer_ready("there", PEER, 0.5)
    assert errands.on_timer(1.5) == first
    errands.on_message(PEER + 1, Drained(pull_id=3, attempt=0))
    assert errands.next_deadline() is not None
    errands.on_message(PEER, Drained(pull_id=3, attempt=0))
    assert errands.next_deadline() is None
    errands.release(7, REFERENCE, 10.0)
    errands.on_timer(15.0)
    assert errands.next_deadline() is None


def test_errands_for_nobody_are_dropped() -> None:
    errands = Errands(lease_s=5.0, limit=4)
    errands.release(3, REFERENCE, 0.0)
    errands.renew(REFERENCE, 0.0)
    errands.peer_failed("there")
    assert errands.next_deadline() is None
