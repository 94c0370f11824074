"""A producer and a consumer joined by a bad network, with memory that can be overwritten.

The link loses, repeats and reorders messages; processes restart; jobs fail in every way
the fabric knows, also by landing late. Whatever the order: no write can reach blocks
that were given back, every pull and every hold ends in exactly one report, success
means that every token arrived, and nothing is left when the dust has settled.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from efa_kv.wire import holds, pulls
from efa_kv.wire.consumer import ConsumerTable
from efa_kv.wire.handoff import TO_CONSUMER, Reason, pack_blocks
from efa_kv.wire.holds import Hold
from efa_kv.wire.producer import Outcome, ProducerTable
from efa_kv.wire.pulls import PullRequest

TIMEOUT_S = 10.0
LEASE_S = 8.0
UNSOLICITED_S = 5.0
HANDOFFS = 12
BLOCK_TOKENS = 4
TRANSFERS = ["a", "b"]
SELDOM = st.sampled_from([False] * 7 + [True])


@dataclass
class Job:
    """A write. It can change the consumer's memory until it is fenced or its keys are old;
    one that strayed can until the consumer has changed its keys for that very reason."""

    number: int
    hold_id: int
    producer: int
    consumer: int
    pull_id: int
    attempt: int
    tokens: int
    keys_epoch: int
    noticed: bool
    fenced: bool = False
    done: bool = False
    stray: bool = False


@dataclass
class Side:
    """What the world knows of one process."""

    incarnation: int
    hold_request: dict[int, str] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    sent: list[str] = field(default_factory=list)
    posts: list[holds.Post] = field(default_factory=list)
    started: list[int] = field(default_factory=list)
    done: dict[int, str] = field(default_factory=dict)


class Handoffs(RuleBasedStateMachine):
    """Both tables, the link and the memory between them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.incarnations = itertools.count(1000)
        self.numbers = itertools.count(1)
        self.pull_ids = itertools.count(2, 2)
        self.request_ids = itertools.count(1)
        self.link: list[tuple[int, int, object]] = []
        self.history: list[tuple[int, int, object]] = []
        self.jobs: dict[int, Job] = {}
        self.notices: list[tuple[int, int]] = []
        self.landed: dict[tuple[int, int, int], int] = {}
        self.keys_epoch = 1
        self.fence_epoch = 0
        self.seen_epoch = 1
        self.rotating = False
        self.gone: list[tuple[str, int]] = []
        self.new_producer()
        self.new_consumer()

    # ---- processes ---------------------------------------------------------------------

    def new_producer(self) -> None:
        self.p = Side(next(self.incarnations))
        limits = holds.Limits(
            lease_s=LEASE_S,
            unsolicited_s=UNSOLICITED_S,
            handoffs=HANDOFFS,
            granularity_tokens=BLOCK_TOKENS,
        )
        self.producer = ProducerTable("engine", limits)

    def new_consumer(self) -> None:
        self.c = Side(next(self.incarnations))
        limits = pulls.Limits(transfer_timeout_s=TIMEOUT_S, pulls=HANDOFFS, quarantine_blocks=6)
        self.consumer = ConsumerTable(limits)
        self.consumer.keys_epoch = self.keys_epoch
        self.rotating = False
        self.notices = []

    # ---- carrying out effects ----------------------------------------------------------

    def run_producer(self, effects: list[holds.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, holds.Send):
                self.say(self.p.incarnation, effect.peer, effect.message)
            elif isinstance(effect, holds.Post):
                self.p.posts.append(effect)
            elif isinstance(effect, holds.PostNotice):
                if effect.peer == self.c.incarnation:
                    self.notices.append((self.p.incarnation, effect.pull_id))
            elif isinstance(effect, holds.Sent):
                self.on_sent(effect.request_id)

    def on_sent(self, request_id: str) -> None:
        assert request_id in self.p.held, "reported a request whose blocks were never given"
        assert request_id not in self.p.sent, "reported twice"
        for job in self.jobs.values():
            if job.producer == self.p.incarnation and not job.fenced:
                assert self.p.hold_request[job.hold_id] != request_id, "released while moving"
        self.p.sent.append(request_id)

    def run_consumer(self, effects: list[pulls.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, pulls.Tell):
                self.say(self.c.incarnation, effect.peer, effect.message)
            elif isinstance(effect, pulls.Rotate):
                assert not self.rotating
                self.rotating = True
            elif isinstance(effect, pulls.Done):
                self.on_done(effect)

    def on_done(self, done: pulls.Done) -> None:
        assert done.pull_id in self.c.started
        assert done.pull_id not in self.c.done, "a pull was reported twice"
        self.c.done[done.pull_id] = done.reason
        if not done.reason:
            whole = [
                tokens
                for (consumer, pull_id, _), tokens in self.landed.items()
                if (consumer, pull_id) == (self.c.incarnation, done.pull_id)
            ]
            assert 8 in whole, "success without every token"

    @invariant()
    def no_write_reaches_blocks_that_were_given_back(self) -> None:
        for job in self.jobs.values():
            if job.consumer == self.c.incarnation and self.can_write(job):
                assert job.pull_id not in self.c.done

    @invariant()
    def limits_hold(self) -> None:
        assert len(self.producer.index.handoffs) <= HANDOFFS
        assert len(self.consumer.pulls) <= HANDOFFS

    def can_write(self, job: Job) -> bool:
        if job.stray:
            return job.keys_epoch >= self.fence_epoch
        return not job.fenced and job.keys_epoch == self.keys_epoch

    # ---- the servers -------------------------------------------------------------------

    @rule(transfer=st.sampled_from(TRANSFERS), final=st.booleans(), expect=st.booleans())
    def prefill(self, transfer: str, final: bool, expect: bool) -> None:
        request_id = f"{next(self.request_ids)}_parent-of-{transfer}"
        if expect:
            self.run_producer(self.producer.expect(transfer, request_id, 1, self.now))
        if not final:
            self.give(transfer, request_id, 4, final=False)
        else:
            self.give(transfer, request_id, 8, final=True)

    def give(self, transfer: str, request_id: str, tokens: int, final: bool) -> None:
        hold = Hold(
            transfer_id=transfer,
            request_id=request_id,
            generation=1,
            token_count=tokens,
            block_ids=(np.arange(1, 3, dtype=np.uint32),),
        )
        call = self.producer.hold if final else self.producer.extend
        if final:
            self.p.held.add(request_id)
        self.note_holds()
        self.run_producer(call(hold, self.now))
        self.note_holds()

    def note_holds(self) -> None:
        for hold_id, handoff in self.producer.index.handoffs.items():
            self.p.hold_request[hold_id] = handoff.hold.request_id

    @rule(data=st.data())
    def prefill_finishes(self, data: st.DataObject) -> None:
        growing = [h for h in self.producer.index.handoffs.values() if not h.final]
        if growing:
            hold = data.draw(st.sampled_from(growing)).hold
            self.give(hold.transfer_id, hold.request_id, 8, final=True)

    @rule(data=st.data())
    def prefill_is_withdrawn(self, data: st.DataObject) -> None:
        known = [h.hold.request_id for h in self.producer.index.handoffs.values()]
        known += list(self.producer.index.expected)
        if known:
            request_id = data.draw(st.sampled_from(known))
            self.run_producer(self.producer.withdraw(request_id, self.now))

    @rule(
        transfer=st.sampled_from(TRANSFERS),
        early=st.booleans(),
        generation=st.sampled_from([0, 0, 1, 2]),
        greeted=st.booleans(),
    )
    def decode(self, transfer: str, early: bool, generation: int, greeted: bool) -> None:
        self.pull(transfer, early, generation, greeted)

    def pull(self, transfer: str, early: bool, generation: int, greeted: bool) -> None:
        request = PullRequest(
            pull_id=next(self.pull_ids),
            address="there",
            transfer_id=transfer,
            remote_request_id="",
            engine_id="engine",
            generation=generation,
            early=early,
            first_token=0,
            token_count=8,
            block_ids=pack_blocks([np.arange(1, 3, dtype=np.uint32)]),
            block_count=2,
        )
        self.c.started.append(request.pull_id)
        self.run_consumer(self.consumer.start(request, self.now))
        if greeted:
            self.greet()

    @rule(transfer=st.sampled_from(TRANSFERS), jobs=st.integers(1, 2))
    def handoff_begins(self, transfer: str, jobs: int) -> None:
        """The usual way to a running write, in one step."""
        self.give(transfer, f"{next(self.request_ids)}_parent-of-{transfer}", 8, final=True)
        self.pull(transfer, early=False, generation=0, greeted=True)
        self.use_link()
        while self.p.posts:
            self.post(self.p.posts.pop(0), jobs, refuse=False)
        self.use_link()

    @rule(data=st.data())
    def decode_aborts(self, data: st.DataObject) -> None:
        if self.consumer.pulls:
            pull_id = data.draw(st.sampled_from(sorted(self.consumer.pulls)))
            self.run_consumer(self.consumer.abort(pull_id, self.now))

    # ---- sessions ----------------------------------------------------------------------

    @rule()
    def greeting_succeeds(self) -> None:
        self.greet()

    def greet(self) -> None:
        self.run_consumer(self.consumer.peer_ready("there", self.p.incarnation, self.now))

    @rule(seldom=SELDOM)
    def greeting_fails(self, seldom: bool) -> None:
        if not seldom:
            return
        effects = self.consumer.peer_failed("there", Reason.UNREACHABLE, "no answer", self.now)
        self.run_consumer(effects)

    @rule(seldom=SELDOM)
    def producer_restarts(self, seldom: bool) -> None:
        if not seldom:
            return
        self.gone.append(("producer", self.p.incarnation))
        self.new_producer()

    @rule(seldom=SELDOM)
    def consumer_restarts(self, seldom: bool) -> None:
        if not seldom:
            return
        self.gone.append(("consumer", self.c.incarnation))
        self.new_consumer()

    @rule(data=st.data())
    def death_is_noticed(self, data: st.DataObject) -> None:
        if self.gone:
            role, incarnation = data.draw(st.sampled_from(self.gone))
            self.gone.remove((role, incarnation))
            self.notice_death(role, incarnation)

    def notice_death(self, role: str, incarnation: int) -> None:
        if role == "producer":
            self.run_consumer(self.consumer.peer_gone(incarnation, self.now))
        else:
            self.run_producer(self.producer.peer_gone(incarnation, self.now))

    # ---- the link ----------------------------------------------------------------------

    @precondition(lambda self: self.link)
    @rule(data=st.data(), fate=st.sampled_from(["deliver"] * 6 + ["lose", "repeat"]))
    def link_moves(self, data: st.DataObject, fate: str) -> None:
        index = data.draw(st.integers(0, len(self.link) - 1))
        source, target, message = self.link[index]
        if fate != "repeat":
            del self.link[index]
        if fate != "lose":
            self.deliver(source, target, message)

    @rule()
    def link_is_good_for_a_while(self) -> None:
        self.use_link()

    def use_link(self) -> None:
        for _ in range(20):
            if self.link:
                self.deliver(*self.link.pop(0))

    @precondition(lambda self: self.history)
    @rule(data=st.data())
    def old_message_comes_again(self, data: st.DataObject) -> None:
        """Anything ever said may arrive once more, and be acted on at once."""
        index = data.draw(st.integers(0, len(self.history) - 1))
        self.deliver(*self.history[index])
        while self.p.posts:
            self.post(self.p.posts.pop(0), 1, refuse=False)

    def say(self, source: int, target: int, message: object) -> None:
        self.link.append((source, target, message))
        self.history.append((source, target, message))
        del self.history[:-40]

    def deliver(self, source: int, target: int, message: object) -> None:
        if target == self.p.incarnation:
            self.run_producer(self.producer.on_message(source, message, self.now))
        elif target == self.c.incarnation:
            assert isinstance(message, TO_CONSUMER)
            self.run_consumer(self.consumer.on_message(source, message, self.now))

    @rule()
    def producer_learns_the_keys(self) -> None:
        self.seen_epoch = self.keys_epoch

    # ---- the fabric --------------------------------------------------------------------

    @precondition(lambda self: self.p.posts)
    @rule(data=st.data(), count=st.integers(0, 2), refuse=st.booleans())
    def compute_completes(self, data: st.DataObject, count: int, refuse: bool) -> None:
        index = data.draw(st.integers(0, len(self.p.posts) - 1))
        self.post(self.p.posts.pop(index), max(count, 1), refuse and count == 0)

    def post(self, post: holds.Post, count: int, refuse: bool) -> None:
        if not self.producer.is_current(post):
            return
        reason = Reason.MISSING_BLOCKS if refuse else ""
        if post.ask.keys_epoch != self.seen_epoch:
            reason = Reason.KEYS
        if reason:
            self.run_producer(self.producer.unposted(post, reason, "", self.now))
            return
        noticed = count == 1 and self.producer.may_carry_notice(post)
        jobs = [self.new_job(post, post.token_count // count, noticed) for _ in range(count)]
        numbers = [job.number for job in jobs]
        self.run_producer(self.producer.posted(post, numbers, noticed, self.now))

    def new_job(self, post: holds.Post, tokens: int, noticed: bool) -> Job:
        job = Job(
            number=next(self.numbers),
            hold_id=post.hold_id,
            producer=self.p.incarnation,
            consumer=post.peer,
            pull_id=post.ask.pull_id,
            attempt=post.ask.attempt,
            tokens=tokens,
            keys_epoch=post.ask.keys_epoch,
            noticed=noticed,
        )
        self.jobs[job.number] = job
        return job

    @rule()
    def everything_lands(self) -> None:
        for job in [job for job in self.jobs.values() if not job.fenced]:
            self.end_job(job, "land")
        self.use_link()

    @rule(data=st.data(), fate=st.sampled_from(["land", "land", "fail", "stray", "hang"]))
    def job_ends(self, data: st.DataObject, fate: str) -> None:
        running = [job for job in self.jobs.values() if not job.fenced]
        if running:
            self.end_job(data.draw(st.sampled_from(running)), fate)

    def end_job(self, job: Job, fate: str) -> None:
        if job.done and fate != "stray":
            fate = "fail"  # it hung before: now it can only be fenced
        if fate == "land" and job.keys_epoch != self.keys_epoch:
            fate = "keys"
        job.done = True
        job.fenced = fate != "hang"
        job.stray = fate == "stray"
        if fate == "land":
            key = (job.consumer, job.pull_id, job.attempt)
            self.landed[key] = self.landed.get(key, 0) + job.tokens
            if job.noticed and job.consumer == self.c.incarnation:
                self.notices.append((job.producer, job.pull_id))
        if job.producer != self.p.incarnation:
            return
        reason = {"land": "", "keys": Reason.KEYS}.get(fate, Reason.FAILED)
        outcome = Outcome(job.fenced, reason, bytes=job.tokens, stray=job.stray)
        self.run_producer(self.producer.settled(job.hold_id, job.number, outcome, self.now))

    @precondition(lambda self: self.notices)
    @rule(data=st.data(), lose=st.booleans())
    def notice_arrives(self, data: st.DataObject, lose: bool) -> None:
        sender, pull_id = self.notices.pop(data.draw(st.integers(0, len(self.notices) - 1)))
        pull = self.consumer.pulls.get(pull_id)
        if not lose and pull is not None and pull.peer == sender:
            self.run_consumer(self.consumer.landed(pull_id, 8, self.now))

    @rule(seldom=SELDOM)
    def keys_change_unasked(self, seldom: bool) -> None:
        """A pull of another peer needed new keys, or memory came or went."""
        if seldom and not self.rotating:
            self.keys_epoch += 1
            self.consumer.keys_epoch = self.keys_epoch

    @precondition(lambda self: self.rotating)
    @rule(works=st.sampled_from([True, True, False]))
    def keys_change(self, works: bool) -> None:
        self.change_keys(works)

    def change_keys(self, works: bool) -> None:
        self.rotating = False
        if works:
            self.keys_epoch += 1
            self.fence_epoch = self.keys_epoch
            self.consumer.keys_epoch = self.keys_epoch
        self.run_consumer(self.consumer.rotated(self.keys_epoch if works else 0, self.now))

    # ---- time --------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 4.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.ring()

    def ring(self) -> None:
        self.run_producer(self.producer.on_timer(self.now))
        self.run_consumer(self.consumer.on_timer(self.now))

    # ---- the end -----------------------------------------------------------------------

    def teardown(self) -> None:
        for request_id in list(self.producer.index.expected):
            self.run_producer(self.producer.withdraw(request_id, self.now))
        for _ in range(400):
            if not self.settle_once():
                break
        else:
            raise AssertionError("the two sides never came to rest")
        assert set(self.c.started) == set(self.c.done)
        assert self.p.held == set(self.p.sent)
        assert not self.consumer.pulls
        assert not self.producer.index.handoffs
        assert not self.producer.index.transfers
        assert not self.producer.index.by_request

    def settle_once(self) -> bool:
        """One round on a good network; False when nothing is left to do."""
        for handoff in [h for h in self.producer.index.handoffs.values() if not h.final]:
            self.give(handoff.hold.transfer_id, handoff.hold.request_id, 8, final=True)
        while self.gone:
            self.notice_death(*self.gone.pop())
        while self.link:
            self.deliver(*self.link.pop(0))
        while self.p.posts:
            self.post(self.p.posts.pop(0), 1, refuse=False)
        for job in [job for job in self.jobs.values() if not job.fenced]:
            self.end_job(job, "land")
        if self.rotating:
            self.change_keys(works=True)
        self.seen_epoch = self.keys_epoch
        deadlines = [self.producer.next_deadline(), self.consumer.next_deadline()]
        due = [deadline for deadline in deadlines if deadline is not None]
        if not due and not self.link and not self.p.posts and not self.rotating:
            return False
        if due:
            assert min(due) < self.now + 100
            self.now = max(self.now, min(due)) + 0.001
        self.ring()
        return True


TestHandoffs = pytest.mark.timeout(300)(Handoffs.TestCase)
TestHandoffs.settings = settings(
    max_examples=300,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
