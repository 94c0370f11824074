"""The producer's table: who gets which hold, when it goes, and what is said about it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from efa_kv.errors import LocalProtocolError
from efa_kv.wire.handoff import (
    Abort,
    Accepted,
    Ask,
    Drained,
    Reason,
    Refused,
    Release,
    Renew,
    Unsettled,
    pack_blocks,
)
from efa_kv.wire.hold_index import parent_of
from efa_kv.wire.holds import TABLE, Event, Hold, Limits, Post, PostNotice, Send, Sent, State
from efa_kv.wire.machine import look_up
from efa_kv.wire.producer import Outcome, ProducerTable

PEER = 77
BLOCKS = (np.arange(1, 3, dtype=np.uint32),)


class World:
    """A table, a clock and everything it ever decided."""

    def __init__(self, **limits: Any) -> None:
        values = {"lease_s": 30.0, "unsolicited_s": 60.0, "handoffs": 8, "granularity_tokens": 16}
        self.table = ProducerTable("engine", Limits(**{**values, **limits}))
        self.now = 1000.0
        self.said: list[Any] = []
        self.sent: list[tuple[str, str]] = []
        self.posts: list[Post] = []
        self.notices: list[PostNotice] = []

    def do(self, name: str, *arguments: Any) -> None:
        for effect in getattr(self.table, name)(*arguments, self.now):
            if isinstance(effect, Send):
                self.said.append(effect.message)
            elif isinstance(effect, Sent):
                self.sent.append((effect.request_id, effect.reason))
            elif isinstance(effect, Post):
                self.posts.append(effect)
            elif isinstance(effect, PostNotice):
                self.notices.append(effect)

    def hold(self, request_id: str = "r", transfer_id: str = "t", **fields: Any) -> None:
        values = {"generation": 1, "token_count": 32, "block_ids": BLOCKS, **fields}
        self.do("hold", Hold(request_id=request_id, transfer_id=transfer_id, **values))

    def ask(self, pull_id: int = 2, transfer_id: str = "t", **fields: Any) -> Any:
        values = {
            "attempt": 0,
            "request_id": "",
            "engine_id": "",
            "generation": 0,
            "early": False,
            "first_token": 0,
            "token_count": 32,
            "block_ids": pack_blocks(BLOCKS),
            "deadline_s": 10.0,
            "keys_epoch": 1,
            **fields,
        }
        before = len(self.said)
        message = Ask(pull_id=pull_id, transfer_id=transfer_id, **values)
        self.do("on_message", PEER, message)
        return self.said[-1] if len(self.said) > before else None

    def tell(self, message: Any) -> Any:
        self.do("on_message", PEER, message)
        return self.said[-1]

    def post(self, job: int = 1, noticed: bool = True) -> Post:
        post = self.posts.pop(0)
        assert self.table.is_current(post)
        self.do("posted", post, [job], noticed)
        return post

    def settle(self, post: Post, job: int = 1, **outcome: Any) -> None:
        self.do("settled", post.hold_id, job, Outcome(**{"fenced": True, **outcome}))


@pytest.fixture
def world() -> World:
    return World()


def test_a_handoff(world: World) -> None:
    world.hold()
    assert isinstance(world.ask(), Accepted)
    assert world.table.may_carry_notice(world.posts[0])
    post = world.post()
    assert isinstance(world.ask(), Accepted)  # asked again meanwhile
    world.settle(post, bytes=64)
    assert world.said[-1] == Drained(pull_id=2, attempt=0, bytes=64)
    assert world.sent == [("r", "")]
    assert not world.notices
    assert world.ask() == Drained(pull_id=2, attempt=0, bytes=64)  # the answer was lost
    assert world.ask(pull_id=4).reason == Reason.CONSUMED
    assert world.table.next_deadline() is None


def test_without_a_notice_of_its_own_a_bare_one_follows(world: World) -> None:
    world.hold()
    world.ask()
    world.settle(world.post(noticed=False))
    assert world.notices == [PostNotice(PEER, 2, 1)]


def test_nothing_to_move_is_delivered_at_once(world: World) -> None:
    world.hold()
    world.ask()
    world.do("posted", world.posts.pop(), [], False)
    assert world.sent == [("r", "")]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"transfer_id": "other"}, Reason.UNKNOWN),
        ({"transfer_id": "", "request_id": "other"}, Reason.UNKNOWN),
        ({"engine_id": "other"}, Reason.WRONG_ENGINE),
        ({"generation": 9}, Reason.STALE),
        ({"token_count": 33}, Reason.BAD_RANGE),
        ({"token_count": 0}, Reason.BAD_RANGE),
        ({"prompt_digest": b"other"}, Reason.MISMATCH),
    ],
)
def test_refusals_leave_the_hold_alone(world: World, fields: dict[str, Any], reason: str) -> None:
    world.hold(prompt_digest=b"mine")
    refused = world.ask(**fields)
    assert isinstance(refused, Refused)
    assert refused.reason == reason
    assert world.table.counts.refused == {reason: 1}
    assert isinstance(world.ask(pull_id=4, prompt_digest=b"mine"), Accepted)


def test_lookup_by_request_id(world: World) -> None:
    world.hold(transfer_id="")
    assert isinstance(world.ask(transfer_id="", request_id="r", engine_id="engine"), Accepted)
    named = World()
    named.hold()
    assert isinstance(named.ask(transfer_id="", request_id="r"), Accepted)


def test_siblings_are_served_first_in_first_out(world: World) -> None:
    assert [parent_of(name) for name in ("3_x", "x", "x_3")] == ["x", "x", "x_3"]
    for index in range(3):
        world.hold(f"{index}_x")
    world.ask(pull_id=2)
    world.ask(pull_id=4, request_id="2_x")
    world.ask(pull_id=6)
    assert [post.hold.request_id for post in world.posts] == ["0_x", "2_x", "1_x"]
    assert world.ask(pull_id=8).reason == Reason.CONSUMED


def test_a_second_parent_is_refused_and_the_id_is_ambiguous_from_then_on(world: World) -> None:
    world.hold("x", prompt_digest=b"one")
    world.hold("y", prompt_digest=b"two")
    assert world.sent == [("y", Reason.AMBIGUOUS)]
    assert world.table.counts.collisions == 1
    assert world.ask(pull_id=2).reason == Reason.AMBIGUOUS
    assert world.ask(pull_id=4, prompt_digest=b"two").reason == Reason.AMBIGUOUS
    assert isinstance(world.ask(pull_id=6, prompt_digest=b"one"), Accepted)


def test_an_early_ask_waits_for_its_hold(world: World) -> None:
    assert isinstance(world.ask(early=True), Accepted)
    assert isinstance(world.ask(early=True), Accepted)
    world.hold()
    assert [post.hold.request_id for post in world.posts] == ["r"]


def test_an_early_ask_for_nothing_is_refused_after_a_while(world: World) -> None:
    world.ask(early=True)
    world.now += 61
    world.do("on_timer")
    assert world.said[-1].reason == Reason.UNKNOWN
    assert world.table.next_deadline() is None


def test_an_expected_request_is_waited_for_without_limit(world: World) -> None:
    world.do("expect", "t", "r", 1)
    assert isinstance(world.ask(), Accepted)
    world.now += 1000
    world.do("on_timer")
    world.hold()
    assert len(world.posts) == 1


def test_an_expected_request_that_ends_badly_is_said_at_once(world: World) -> None:
    world.do("expect", "t", "r", 1)
    world.ask()
    world.do("withdraw", "r")
    assert world.said[-1].reason == Reason.ABORTED
    assert world.sent == []


def test_unsolicited_state_is_bounded(world: World) -> None:
    for pull_id in range(2, 200, 2):
        last = world.ask(pull_id=pull_id, transfer_id=f"t{pull_id}", early=True)
    assert last.reason == Reason.BUSY


def test_holds_are_bounded(world: World) -> None:
    for index in range(9):
        world.hold(f"r{index}", f"t{index}")
    assert world.sent == [("r8", Reason.BUSY)]


def test_a_lease_ends_and_the_ask_after_it_is_refused(world: World) -> None:
    world.hold()
    world.now += 31  # no timer rang: the ask itself must notice
    assert world.ask().reason == Reason.EXPIRED
    assert world.sent == [("r", Reason.EXPIRED)]
    assert world.table.counts.expired == 1


def test_leases_are_renewed_one_by_one(world: World) -> None:
    world.hold("a", "ta")
    world.hold("b", "tb")
    world.now += 20
    world.do("on_message", PEER, Renew(transfer_ids=("ta",)))
    world.now += 15
    world.do("on_timer")
    assert world.sent == [("b", Reason.EXPIRED)]
    world.do("on_message", PEER, Renew(request_ids=("a",)))
    world.now += 29
    world.do("on_timer")
    assert len(world.sent) == 1
    world.now += 2
    world.do("on_timer")
    assert world.sent[-1] == ("a", Reason.EXPIRED)


def test_a_lease_does_not_end_while_bytes_move(world: World) -> None:
    world.hold()
    world.ask()
    post = world.post()
    world.now += 1000
    world.do("on_timer")
    assert world.sent == []
    world.settle(post)
    assert world.sent == [("r", "")]


def test_release_takes_one_hold_and_repeats_do_not(world: World) -> None:
    world.hold("0_x")
    world.hold("1_x")
    release = Release(pull_id=3, transfer_id="t", request_id="", generation=1)
    assert world.tell(release) == Drained(pull_id=3, attempt=0)
    assert world.tell(release) == Drained(pull_id=3, attempt=0)
    assert world.sent == [("0_x", "declined")]


def test_an_early_release_waits_for_its_hold(world: World) -> None:
    world.tell(Release(pull_id=3, transfer_id="t", request_id="", generation=0, early=True))
    world.hold()
    assert world.sent == [("r", "declined")]


@pytest.mark.parametrize("stage", ["unknown", "parked", "offered", "moving", "drained"])
def test_an_abort_is_always_answered_and_closes_the_pull(world: World, stage: str) -> None:
    post = None
    if stage == "parked":
        world.ask(early=True)
    elif stage != "unknown":
        world.hold()
        world.ask()
    if stage in ("moving", "drained"):
        post = world.post()
    if stage == "drained":
        assert post is not None
        world.settle(post)
    before = len(world.said)
    world.do("on_message", PEER, Abort(pull_id=2))
    if stage == "moving":
        assert world.said[before:] == []  # not before the job is fenced
        assert post is not None
        world.settle(post, reason=Reason.ABORTED)
    assert isinstance(world.said[-1], Drained)
    assert world.said[-1].closed
    world.hold("another")
    for attempt in range(3):  # the ask was on its way when the abort overtook it
        assert not isinstance(world.ask(attempt=attempt), Accepted | None)
    assert not [post for post in world.posts if world.table.is_current(post)]


def test_a_failed_job_is_drained_when_it_is_fenced(world: World) -> None:
    world.hold()
    world.ask()
    post = world.post()
    world.settle(post, fenced=False, reason=Reason.FAILED, text="link down")
    assert world.said[-1] == Unsettled(pull_id=2, attempt=0, reason="failed", text="link down")
    assert isinstance(world.ask(), Unsettled)
    assert world.sent == []
    world.settle(post, reason=Reason.FAILED)
    assert world.said[-1].reason == Reason.FAILED
    assert world.said[-1].closed
    assert world.sent == [("r", Reason.FAILED)]
    with pytest.raises(LocalProtocolError):
        world.settle(post)


def test_a_pull_that_failed_and_is_then_aborted_gives_its_hold_up(world: World) -> None:
    world.hold()
    world.ask()
    world.settle(world.post(), reason=Reason.FAILED, stray=True)
    assert (world.said[-1].closed, world.said[-1].stray) == (False, True)
    assert world.sent == []
    world.tell(Abort(pull_id=2))
    assert world.sent == [("r", Reason.ABORTED)]
    assert (world.said[-1].closed, world.said[-1].stray) == (True, True)


def test_a_hold_that_another_pull_took_over_is_not_the_failed_ones_to_abort(world: World) -> None:
    world.hold()
    world.ask()
    world.settle(world.post(), reason=Reason.FAILED)
    assert isinstance(world.ask(pull_id=4), Accepted)
    world.tell(Abort(pull_id=2))
    assert world.sent == []
    world.settle(world.post(1))
    assert world.sent == [("r", "")]


def test_outdated_keys_put_the_hold_back(world: World) -> None:
    world.hold()
    for attempt in range(4):
        assert isinstance(world.ask(attempt=attempt), Accepted)
        world.settle(world.post(), reason=Reason.KEYS)
        assert world.said[-1].reason == Reason.KEYS
        assert world.said[-1].closed is (attempt == 3)
        assert world.ask(attempt=attempt).reason == Reason.KEYS
    assert world.sent == [("r", Reason.KEYS)]


def test_a_failed_write_may_be_tried_once_more(world: World) -> None:
    world.hold()
    for attempt in range(2):
        assert isinstance(world.ask(attempt=attempt), Accepted)
        world.settle(world.post(), reason=Reason.FAILED)
        assert world.said[-1].closed is (attempt == 1)
    assert world.sent == [("r", Reason.FAILED)]


def test_what_cannot_be_posted_is_refused_and_stays_held(world: World) -> None:
    world.hold()
    world.ask()
    world.do("unposted", world.posts.pop(), Reason.MISSING_BLOCKS, "gone")
    assert world.said[-1].reason == Reason.MISSING_BLOCKS
    assert world.sent == []
    assert isinstance(world.ask(pull_id=4), Accepted)


def test_compute_that_never_completes_ends_by_the_deadline(world: World) -> None:
    world.hold()
    world.ask()
    world.now += 11
    world.do("on_timer")
    assert world.said[-1].reason == Reason.TIMEOUT
    assert world.sent == [("r", Reason.TIMEOUT)]
    assert not world.table.is_current(world.posts[0])


@pytest.mark.parametrize("moving", [False, True])
def test_withdrawing_a_hold(world: World, moving: bool) -> None:
    world.hold()
    if moving:
        world.ask()
        post = world.post()
        world.do("withdraw", "r")
        assert world.sent == []
        world.settle(post, reason=Reason.ABORTED)
        assert world.said[-1].reason == Reason.ABORTED
    else:
        world.do("withdraw", "r")
    assert world.sent == [("r", Reason.ABORTED)]
    world.do("withdraw", "r")
    assert len(world.sent) == 1


def test_a_consumer_that_is_gone_frees_what_it_asked_for(world: World) -> None:
    world.hold("a", "ta")
    world.hold("b", "tb")
    world.ask(pull_id=2, transfer_id="ta")
    world.ask(pull_id=4, transfer_id="tc", early=True)
    world.do("peer_gone", PEER)
    assert world.sent == [("a", Reason.ABORTED)]
    assert isinstance(world.ask(pull_id=6, transfer_id="tb"), Accepted)


def test_growing_holds_are_written_chunk_by_chunk(world: World) -> None:
    chunk = Hold(transfer_id="t", request_id="r", generation=1, token_count=20, block_ids=BLOCKS)
    world.do("extend", chunk)
    world.ask(token_count=40)
    assert (world.posts[0].first_token, world.posts[0].token_count) == (0, 16)
    assert not world.table.may_carry_notice(world.posts[0])
    first = world.post(job=1, noticed=False)
    world.settle(first, job=1)
    assert world.sent == []
    world.hold(token_count=40)
    assert (world.posts[0].first_token, world.posts[0].token_count) == (16, 24)
    world.settle(world.post(job=2), job=2)
    assert world.sent == [("r", "")]


def test_a_growing_hold_that_ended_early_is_reported_by_hold(world: World) -> None:
    world.do(
        "extend",
        Hold(transfer_id="t", request_id="r", generation=1, token_count=16, block_ids=BLOCKS),
    )
    world.do("withdraw", "r")
    assert world.sent == []
    world.hold()
    assert world.sent == [("r", Reason.ABORTED)]


def test_forgotten_answers_make_old_pulls_stale(world: World) -> None:
    for pull_id in range(2, 2 * 40, 2):
        world.tell(Abort(pull_id=pull_id))
    world.hold()
    assert world.ask(pull_id=2).reason == Reason.STALE
    assert world.posts == []


def test_a_second_hold_of_a_request_is_a_bug_here(world: World) -> None:
    world.hold()
    with pytest.raises(LocalProtocolError):
        world.hold()


def test_released_is_the_end() -> None:
    for event in Event:
        with pytest.raises(LocalProtocolError):
            look_up("hold", TABLE, State.RELEASED, event)
