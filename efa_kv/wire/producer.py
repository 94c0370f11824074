"""The producer's half of handoffs, as a table: pure, no clock, no thread, no network.

A *hold* is a request whose prefill is done (or growing): its blocks are leased to
whoever may ask for them.  An *ask* takes one hold, exactly once.  States and effects are
in `efa_kv.wire.holds`, the search for the hold that an ask means in
`efa_kv.wire.hold_index`.

Inputs are calls with ``now`` in seconds; every call returns the `Effect` values to carry
out, in order.  The owner reports back what became of `Post`: `posted` or `unposted`,
then `settled` for each job.  Two promises hold at every moment: a hold is released, and
its request reported as sent, exactly once and never while one of its jobs is unfenced;
REFUSED and DRAINED are said only when no job of that pull can move a byte.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import msgspec

from efa_kv.errors import LocalProtocolError
from efa_kv.wire.envelope import Message
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
)
from efa_kv.wire.hold_index import HoldIndex, Park, Refuse, key_of
from efa_kv.wire.holds import (
    TABLE,
    Cancel,
    Counts,
    Effect,
    Event,
    Handoff,
    Hold,
    Limits,
    Offer,
    Parked,
    Post,
    PostNotice,
    Send,
    Sent,
    State,
)
from efa_kv.wire.machine import look_up
from efa_kv.wire.memory import Answers, PullKey

__all__ = ["Outcome", "ProducerTable"]

#: How often one pull may be tried, by what the try before it failed with.  Providers do
#: not all tell outdated keys from other failures, and writing again does no harm.
ATTEMPTS_LIMIT: Final = {Reason.KEYS: 4, Reason.FAILED: 2}
#: Seconds between two looks at leases and other deadlines.
SWEEP_S: Final = 0.25


class Outcome(msgspec.Struct, frozen=True):
    """What became of a job: ``reason`` is empty when every byte has landed; ``stray`` as in
    `Drained`."""

    fenced: bool
    reason: str = ""
    text: str = ""
    bytes: int = 0
    stray: bool = False


class ProducerTable:
    """All holds of one engine.  Not safe for threads: one owner calls everything."""

    def __init__(self, engine_id: str, limits: Limits) -> None:
        self.index = HoldIndex(engine_id, limits.handoffs)
        self.counts = Counts()
        self._limits = limits
        self._ids = itertools.count(1)
        self._active: dict[PullKey, int] = {}
        self._kept: dict[PullKey, int] = {}
        self._parked: OrderedDict[PullKey, Parked] = OrderedDict()
        self._answers = Answers(limits.handoffs * 4)
        self._effects: list[Effect] = []
        self._swept = 0.0

    # ---- the server's words ----------------------------------------------------------

    def expect(
        self, transfer_id: str, request_id: str, generation: int, now: float
    ) -> list[Effect]:
        """The request is being computed here: an ask for it waits instead of failing."""
        if request_id not in self.index.by_request and not self.index.expect(
            transfer_id, request_id, generation
        ):
            self.counts.collisions += 1
        return self._take_effects()

    def hold(self, hold: Hold, now: float) -> list[Effect]:
        """A finished prefill leaves its blocks; ends in exactly one `Sent`."""
        growing = self.index.by_request.get(hold.request_id)
        if growing is not None:
            if growing.final:
                raise LocalProtocolError(f"found a second hold of request {hold.request_id}.")
            growing.hold, growing.final = hold, True
            growing.lease_until = now + self._limits.lease_s
            self.counts.held += 1
            self._go_on(growing, now)
            return self._take_effects()
        ended = self.index.tombstones.take(f"grown:{hold.request_id}")
        if ended is not None:
            self._effects.append(Sent(hold.request_id, ended))
            return self._take_effects()
        self._file(hold, True, now)
        return self._take_effects()

    def extend(self, hold: Hold, now: float) -> list[Effect]:
        """More tokens of a request that is still being computed may be written.

        ``hold`` describes everything so far, and its ``computed`` the newest part.  The
        request is not reported before `hold` was called for it.
        """
        growing = self.index.by_request.get(hold.request_id)
        if growing is None:
            if self.index.tombstones.get(f"grown:{hold.request_id}") is None:
                self._file(hold, False, now)
        elif growing.final:
            raise LocalProtocolError(f"found more tokens for finished request {hold.request_id}.")
        else:
            growing.hold = hold
            self._go_on(growing, now)
        return self._take_effects()

    def withdraw(self, request_id: str, now: float) -> list[Effect]:
        """The request ended without KV worth having, or its blocks are wanted back."""
        handoff = self.index.by_request.get(request_id)
        if handoff is not None:
            self._abort(handoff, "withdrawn by the producer's server")
        key = self.index.forget_expected(request_id)
        if key is not None:
            self.index.bury(key, Reason.ABORTED)
            self._serve_parked({key, key_of("", request_id)}, now)
        return self._take_effects()

    # ---- the consumer's words --------------------------------------------------------

    def on_message(self, peer: int, message: Message, now: float) -> list[Effect]:
        """A message of the engine with incarnation ``peer``."""
        if isinstance(message, Ask):
            self._on_ask(peer, message, now)
        elif isinstance(message, Abort):
            self._on_abort(peer, message.pull_id)
        elif isinstance(message, Release):
            self._on_release(peer, message, now)
        elif isinstance(message, Renew):
            self._on_renew(message, now)
        elif isinstance(message, Landed):
            self.counts.landed += 1
        return self._take_effects()

    def peer_gone(self, peer: int, now: float) -> list[Effect]:
        """The consumer's process is gone for good: nobody wants its pulls any more."""
        for key in [key for key in self._parked if key[0] == peer]:
            del self._parked[key]
        for key in [key for key in self._active if key[0] == peer]:
            self._abort(self.index.handoffs[self._active[key]], "the consumer is gone")
        return self._take_effects()

    def _on_ask(self, peer: int, ask: Ask, now: float) -> None:
        key = (peer, ask.pull_id)
        if key in self._active:
            self._repeat(self.index.handoffs[self._active[key]])
        elif key in self._parked:
            self._effects.append(Send(peer, Accepted(pull_id=ask.pull_id, attempt=ask.attempt)))
        elif (answer := self._answers.answer_to(key, ask.attempt)) is not None:
            self._effects.append(Send(peer, answer))
        else:
            self._match(peer, ask, now)

    def _repeat(self, handoff: Handoff) -> None:
        """Says again how a served ask stands; for the consumer a sign of life."""
        offer = _offer_of(handoff)
        pull_id, attempt = offer.ask.pull_id, offer.ask.attempt
        if handoff.reason:
            self._effects.append(Send(offer.peer, _unsettled(handoff, offer)))
        else:
            self._effects.append(Send(offer.peer, Accepted(pull_id=pull_id, attempt=attempt)))

    def _match(self, peer: int, wanted: Ask | Release, now: float) -> None:
        key = (peer, wanted.pull_id)
        try:
            handoff = self.index.find(wanted)
            while handoff.final and handoff.lease_until <= now:
                self._expire(handoff)
                handoff = self.index.find(wanted)
            if isinstance(wanted, Release):
                self._move(handoff, Event.DECLINE)
                self._answer(peer, Drained(pull_id=wanted.pull_id, attempt=0))
                self._release(handoff, Reason.CONSUMED, "declined")
                return
            _check_range(handoff, wanted)
            self._move(handoff, Event.ASK)
            if key in self._kept:  # a sibling may match now
                self._keep_for(self.index.handoffs[self._kept[key]], None)
            self._keep_for(handoff, None)
            handoff.offer = Offer(peer, wanted, wanted.first_token)
            self._active[key] = handoff.hold_id
            accepted = Accepted(pull_id=wanted.pull_id, attempt=wanted.attempt)
            self._effects.append(Send(peer, accepted))
            self._go_on(handoff, now)
        except Park:
            self._park(peer, wanted, now)
        except Refuse as refusal:
            self._refuse(peer, wanted, refusal.reason, refusal.text)

    def _park(self, peer: int, wanted: Ask | Release, now: float) -> None:
        if len(self._parked) >= self._limits.handoffs:
            self._refuse(peer, wanted, Reason.BUSY, "too many asks wait for their transfer")
            return
        until = now + self._limits.unsolicited_s
        self._parked[peer, wanted.pull_id] = Parked(peer, wanted, until)
        self.counts.parked += 1
        attempt = wanted.attempt if isinstance(wanted, Ask) else 0
        self._effects.append(Send(peer, Accepted(pull_id=wanted.pull_id, attempt=attempt)))

    def _refuse(self, peer: int, wanted: Ask | Release, reason: str, text: str) -> None:
        self.counts.refused[reason] = self.counts.refused.get(reason, 0) + 1
        if isinstance(wanted, Release):
            self._answer(peer, Drained(pull_id=wanted.pull_id, attempt=0, reason=reason))
            return
        pull_id, attempt = wanted.pull_id, wanted.attempt
        refused = Refused(pull_id=pull_id, attempt=attempt, reason=reason, text=text)
        self._answer(peer, refused, closed=reason != Reason.KEYS)

    def _answer(self, peer: int, answer: Refused | Drained, closed: bool = True) -> None:
        self._answers.note((peer, answer.pull_id), answer, closed)
        self._effects.append(Send(peer, answer))

    def _on_abort(self, peer: int, pull_id: int) -> None:
        key = (peer, pull_id)
        if key in self._active:
            handoff = self.index.handoffs[self._active[key]]
            self._abort(handoff, "aborted by the consumer")
            return
        if key in self._kept:
            self._abort(self.index.handoffs[self._kept[key]], "aborted by the consumer")
        self._parked.pop(key, None)
        self._effects.append(Send(peer, self._answers.close(key)))

    def _on_release(self, peer: int, release: Release, now: float) -> None:
        key = (peer, release.pull_id)
        answer = self._answers.answer_to(key, 0)
        if answer is not None:
            self._effects.append(Send(peer, answer))
        elif key in self._parked:
            self._effects.append(Send(peer, Accepted(pull_id=release.pull_id, attempt=0)))
        else:
            self._match(peer, release, now)

    def _on_renew(self, renew: Renew, now: float) -> None:
        until = now + self._limits.lease_s
        keys = [f"t:{transfer_id}" for transfer_id in renew.transfer_ids]
        for key in keys:
            transfer = self.index.transfers.get(key)
            for hold_id in transfer.hold_ids if transfer else ():
                self._renew(self.index.handoffs[hold_id], now, until)
        for request_id in renew.request_ids:
            handoff = self.index.by_request.get(request_id)
            if handoff is not None:
                self._renew(handoff, now, until)

    @staticmethod
    def _renew(handoff: Handoff, now: float, until: float) -> None:
        if handoff.lease_until > now:  # an expired lease stays expired
            handoff.lease_until = max(handoff.lease_until, until)

    # ---- the owner's words -----------------------------------------------------------

    def is_current(self, post: Post) -> bool:
        """Whether a `Post` is still to be carried out; if not, forget it."""
        handoff = self.index.handoffs.get(post.hold_id)
        return (
            handoff is not None
            and handoff.offer is not None
            and handoff.offer.ask is post.ask
            and handoff.state in (State.OFFERED, State.MOVING)
        )

    def may_carry_notice(self, post: Post) -> bool:
        """Whether a single job for this `Post` would be the last one of its pull."""
        offer = _offer_of(self.index.handoffs[post.hold_id])
        return offer.all_posted and offer.posts == 1 and not offer.jobs

    def posted(self, post: Post, jobs: list[int], noticed: bool, now: float) -> list[Effect]:
        """These jobs run for a `Post`; ``noticed``: the only one carries the notice."""
        handoff = self.index.handoffs[post.hold_id]
        offer = _offer_of(handoff)
        offer.posts -= 1
        offer.jobs.update(jobs)
        offer.noticed = noticed
        self._move(handoff, Event.POST)
        self._finish(handoff, now)
        return self._take_effects()

    def unposted(
        self, post: Post, reason: str, text: str, now: float, jobs: Sequence[int] = ()
    ) -> list[Effect]:
        """A `Post` could not be carried out, except for ``jobs``, which run already."""
        handoff = self.index.handoffs[post.hold_id]
        offer = _offer_of(handoff)
        offer.posts -= 1
        if jobs:
            offer.jobs.update(jobs)
            self._move(handoff, Event.POST)
        if handoff.state is State.OFFERED and offer.quiet():
            del self._active[offer.peer, offer.ask.pull_id]
            self._move(handoff, Event.UNPOSTED)
            handoff.offer = None
            handoff.lease_until = now + self._limits.lease_s
            self._refuse(offer.peer, offer.ask, reason, text)
            self._serve_parked(_keys(handoff.hold), now)
        else:
            self._fail(handoff, reason, text)
            self._finish(handoff, now)
        return self._take_effects()

    def settled(self, hold_id: int, job: int, outcome: Outcome, now: float) -> list[Effect]:
        """A job is done; again when it is fenced, if it was not then."""
        handoff = self.index.handoffs.get(hold_id)
        if handoff is None or handoff.offer is None or job not in handoff.offer.jobs:
            raise LocalProtocolError(f"found job {job} settled twice for hold {hold_id}.")
        offer = handoff.offer
        if outcome.fenced:
            offer.jobs.remove(job)
            offer.bytes += outcome.bytes
            offer.stray |= outcome.stray
        if outcome.reason and not handoff.reason:
            self._fail(handoff, outcome.reason, outcome.text)
            if not outcome.fenced:
                offer.unsettled = True
                self._effects.append(Send(offer.peer, _unsettled(handoff, offer)))
        self._finish(handoff, now)
        return self._take_effects()

    def next_deadline(self) -> float | None:
        """When `on_timer` wants to be called next; None while nothing lives here."""
        if not self.index.handoffs and not self._parked:
            return None
        return self._swept + SWEEP_S

    def on_timer(self, now: float) -> list[Effect]:
        """Looks at leases, offers that wait too long, and asks for nothing known."""
        if now < self._swept + SWEEP_S:
            return []
        self._swept = now
        for handoff in list(self.index.handoffs.values()):
            if handoff.state is State.HELD and handoff.final and handoff.lease_until <= now:
                self._expire(handoff)
            elif handoff.offer and not handoff.reason and handoff.offer.waits_too_long(now):
                self._fail(handoff, Reason.TIMEOUT, "the compute did not complete in time")
                self._finish(handoff, now)
        for key, parked in list(self._parked.items()):
            if parked.until <= now and not self._is_expected(parked.message):
                del self._parked[key]
                self._refuse(parked.peer, parked.message, Reason.UNKNOWN, "nobody produced it")
        return self._take_effects()

    # ---- inside ----------------------------------------------------------------------

    def _take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def _move(self, handoff: Handoff, event: Event) -> None:
        name = f"hold of {handoff.hold.request_id}"
        handoff.state = look_up(name, TABLE, handoff.state, event).state

    def _file(self, hold: Hold, final: bool, now: float) -> None:
        handoff = Handoff(next(self._ids), hold, State.HELD, now + self._limits.lease_s, final)
        reason = ""
        if len(self.index.handoffs) >= self._limits.handoffs:
            reason = Reason.BUSY
        elif not self.index.add(handoff):
            self.counts.collisions += 1
            reason = Reason.AMBIGUOUS
        if not reason:
            self.counts.held += final
            self._serve_parked(_keys(hold), now)
        elif final:
            self._effects.append(Sent(hold.request_id, reason))

    def _serve_parked(self, keys: set[str], now: float) -> None:
        """Matches again what waited for one of these keys, oldest first."""
        for key, parked in list(self._parked.items()):
            message = parked.message
            ids = {key_of(message.transfer_id, message.request_id)}
            if ids & keys and self._parked.pop(key, None) is not None:
                self._match(parked.peer, message, now)

    def _is_expected(self, wanted: Ask | Release) -> bool:
        transfer = self.index.transfers.get(key_of(wanted.transfer_id, wanted.request_id))
        return transfer is not None or wanted.request_id in self.index.expected

    def _go_on(self, handoff: Handoff, now: float) -> None:
        """Asks for the next part to be written, as far as there is one."""
        offer = handoff.offer
        if offer is None or handoff.state not in (State.OFFERED, State.MOVING):
            return
        end = offer.ask.first_token + offer.ask.token_count
        if handoff.final and end > handoff.hold.token_count:
            self._fail(handoff, Reason.BAD_RANGE, f"only {handoff.hold.token_count} tokens exist")
            self._finish(handoff, now)
            return
        ready = min(end, handoff.hold.token_count)
        if ready < end:
            ready -= ready % self._limits.granularity_tokens
        if ready <= offer.next_token:
            return
        first, offer.next_token = offer.next_token, ready
        offer.all_posted = ready == end
        offer.posts += 1
        offer.deadline = now + offer.ask.deadline_s
        self._effects.append(
            Post(handoff.hold_id, offer.peer, offer.ask, handoff.hold, first, ready - first)
        )

    def _expire(self, handoff: Handoff) -> None:
        self.counts.expired += 1
        self._move(handoff, Event.EXPIRE)
        self._move(handoff, Event.SETTLE)
        self._release(handoff, Reason.EXPIRED, Reason.EXPIRED)

    def _abort(self, handoff: Handoff, text: str) -> None:
        if handoff.reason != Reason.ABORTED:
            self.counts.aborted += 1
        self._move(handoff, Event.ABORT)
        handoff.reason, handoff.text = Reason.ABORTED, text
        self._stop(handoff)

    def _fail(self, handoff: Handoff, reason: str, text: str) -> None:
        self._move(handoff, Event.FAIL)
        handoff.reason, handoff.text = reason, text
        self.counts.failed += 1
        if _offer_of(handoff).jobs:
            self._effects.append(Cancel(tuple(sorted(_offer_of(handoff).jobs))))

    def _stop(self, handoff: Handoff) -> None:
        """Cancels what runs for an aborted hold, or ends it at once."""
        if handoff.offer is not None and handoff.offer.jobs:
            self._effects.append(Cancel(tuple(sorted(handoff.offer.jobs))))
            return
        self._move(handoff, Event.SETTLE)
        self._drained(handoff)

    def _finish(self, handoff: Handoff, now: float) -> None:
        offer = _offer_of(handoff)
        if offer.jobs:
            return
        if handoff.state in (State.FAILED, State.ABORTED):
            self._move(handoff, Event.SETTLE)
            limit = ATTEMPTS_LIMIT.get(handoff.reason, 0)
            again = not offer.unsettled and offer.ask.attempt + 1 < limit
            self._drained(handoff, again)
            if again:
                handoff.reason = handoff.text = ""
                handoff.lease_until = now + self._limits.lease_s
                self._serve_parked(_keys(handoff.hold), now)
        elif offer.all_posted and offer.quiet():
            self._move(handoff, Event.LANDED)
            self.counts.delivered += 1
            self.counts.bytes += offer.bytes
            self._drained(handoff)

    def _drained(self, handoff: Handoff, again: bool = False) -> None:
        """Tells the consumer that nothing moves any more, then lets the hold go."""
        offer, reason = handoff.offer, handoff.reason
        if offer is not None:
            pull_id, attempt = offer.ask.pull_id, offer.ask.attempt
            del self._active[offer.peer, pull_id]
            drained = Drained(
                pull_id=pull_id,
                attempt=attempt,
                reason=reason,
                text=handoff.text,
                bytes=offer.bytes,
                closed=not again,
                stray=offer.stray,
            )
            self._answer(offer.peer, drained, closed=not again)
            if not reason and not offer.noticed:
                self._effects.append(PostNotice(offer.peer, pull_id, handoff.hold.generation))
        if again:
            handoff.offer = None
            self._move(handoff, Event.REOFFER)
            self._keep_for(handoff, (offer.peer, offer.ask.pull_id) if offer else None)
        else:
            self._release(handoff, reason or Reason.CONSUMED, reason)

    def _keep_for(self, handoff: Handoff, key: PullKey | None) -> None:
        """A pull that failed may ask again, or be given up with what it was held for."""
        self._kept.pop(handoff.kept_for or (0, 0), None)
        handoff.kept_for = key
        if key is not None:
            self._kept[key] = handoff.hold_id

    def _release(self, handoff: Handoff, tombstone: str, reason: str) -> None:
        self._keep_for(handoff, None)
        self._move(handoff, Event.RELEASE)
        self.index.remove(handoff, tombstone)
        if handoff.final:
            byte_count = handoff.offer.bytes if handoff.offer else 0
            self._effects.append(Sent(handoff.hold.request_id, reason, byte_count))
        else:
            key = f"grown:{handoff.hold.request_id}"
            self.index.tombstones.note(key, reason or "delivered")


def _keys(hold: Hold) -> set[str]:
    return {key_of(hold.transfer_id, hold.request_id), key_of("", hold.request_id)}


def _offer_of(handoff: Handoff) -> Offer:
    if handoff.offer is None:
        raise LocalProtocolError(f"found no ask for request {handoff.hold.request_id}.")
    return handoff.offer


def _check_range(handoff: Handoff, ask: Ask) -> None:
    end = ask.first_token + ask.token_count
    if not ask.token_count or (handoff.final and end > handoff.hold.token_count):
        raise Refuse(
            Reason.BAD_RANGE,
            f"asked for tokens {ask.first_token} to {end} of {handoff.hold.token_count}",
        )


def _unsettled(handoff: Handoff, offer: Offer) -> Unsettled:
    return Unsettled(
        pull_id=offer.ask.pull_id,
        attempt=offer.ask.attempt,
        reason=handoff.reason,
        text=handoff.text,
    )
