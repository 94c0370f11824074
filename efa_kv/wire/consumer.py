"""The consumer's half of handoffs, as a table: pure, no clock, no thread, no network.

A *pull* asks one producer to write one request's KV into our blocks.  Inputs are calls
with ``now`` in seconds; every call returns the `Effect` values to carry out, in order.
Every pull ends in exactly one `Done`, and `Done` is said only when nobody can write to
the pull's blocks any more: the producer said so (DRAINED, REFUSED, or its notice behind
the last byte), or no ask ever left, or the memory keys it was given have been changed.
A timeout alone proves nothing; it leads to quarantine and from there to new keys.  So does
a producer's word that bytes may have strayed, unless the keys have changed since the ask.
"""

from __future__ import annotations

import math
from typing import Final

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
    Unsettled,
)
from efa_kv.wire.machine import look_up
from efa_kv.wire.pulls import (
    TABLE,
    Connect,
    Counts,
    Done,
    Doomed,
    Effect,
    Event,
    Limits,
    Pull,
    PullRequest,
    Rotate,
    State,
    Tell,
    Watch,
)

__all__ = ["ConsumerTable"]

#: Seconds before the second ask; doubled for each further one, up to `ASK_AGAIN_MAX_S`.
ASK_AGAIN_S: Final = 0.25
ASK_AGAIN_MAX_S: Final = 2.0
#: Seconds before a pull whose write failed, or whose keys were outdated, is asked for again.
TRY_AGAIN_S: Final = 0.05
#: How often one pull may be asked for.
ATTEMPTS_LIMIT: Final = 4
#: Seconds after which a failed change of keys is tried again.
ROTATE_AGAIN_S: Final = 1.0
#: Refusals after which the producer may still hold blocks for us.  After a mismatch it
#: may hold them for somebody else, whose reference we were given: that is left to its lease.
_STILL_HELD: Final = frozenset(
    {Reason.BAD_RANGE, Reason.BAD_BLOCKS, Reason.MISSING_BLOCKS, Reason.KEYS}
)
_UNSAFE: Final = (State.ASKED, State.MOVING, State.ABORTING, State.QUARANTINED)


class ConsumerTable:
    """All pulls of one engine.  Not safe for threads: one owner calls everything."""

    def __init__(self, limits: Limits) -> None:
        self.pulls: dict[int, Pull] = {}
        self.counts = Counts()
        self.keys_epoch = 0
        self._fenced_epoch = 0
        self._limits = limits
        self._effects: list[Effect] = []
        self._rotating: frozenset[int] = frozenset()
        self._rotate_at = 0.0
        # Never later than the first deadline; found out exactly when it has passed.
        self._soonest = math.inf

    # ---- the server's words ----------------------------------------------------------

    def start(self, request: PullRequest, now: float) -> list[Effect]:
        """Begins a pull; ends in exactly one `Done`."""
        pull = Pull(request, State.PLANNED, heard=now, send_at=now)
        self.pulls[request.pull_id] = pull
        if len(self.pulls) > self._limits.pulls:
            self._end(pull, Reason.BUSY, "too many handoffs at once")
        else:
            self._move(pull, Event.CONNECT)
            self._effects.append(Connect(request.address))
        return self._take_effects()

    def abort(self, pull_id: int, now: float) -> list[Effect]:
        """The request is not wanted any more; its blocks still need the fence."""
        pull = self.pulls.get(pull_id)
        if pull is not None:
            if pull.state in _UNSAFE:
                self._abort(pull, Reason.ABORTED, "aborted here", now)
            else:
                self._end(pull, Reason.ABORTED, "aborted before anything was asked for")
        return self._take_effects()

    def landed(self, pull_id: int, byte_count: int, now: float) -> list[Effect]:
        """The producer's notice behind the last byte of this pull was seen."""
        pull = self.pulls.get(pull_id)
        if pull is not None and pull.state in _UNSAFE:
            self._landed(pull, byte_count)
        return self._take_effects()

    # ---- the peer's words ------------------------------------------------------------

    def peer_ready(self, address: str, peer: int, now: float) -> list[Effect]:
        """The engine at ``address`` is ``peer``: asks for all that waits for it."""
        for pull in self.pulls.values():
            if pull.state is State.WAITING_PEER and pull.request.address == address:
                pull.peer = peer
                pull.heard = now
                self._move(pull, Event.ASK)
                self._effects.append(Watch(pull.request.pull_id, peer))
                self._say(pull, now)
        return self._take_effects()

    def peer_failed(self, address: str, reason: str, text: str, now: float) -> list[Effect]:
        """Nobody usable is at ``address``: what only waited for it fails at once."""
        for pull in list(self.pulls.values()):
            if pull.state is State.WAITING_PEER and pull.request.address == address:
                self._end(pull, reason, text)
        return self._take_effects()

    def peer_gone(self, peer: int, now: float) -> list[Effect]:
        """This incarnation will never answer again: what it was asked for needs new keys."""
        for pull in self.pulls.values():
            if pull.peer == peer and pull.state in _UNSAFE:
                pull.needs_keys = True
                self._quarantine(pull, Reason.PEER_GONE, "the producer's process is gone", now)
        self._rotate_if_needed(now)
        return self._take_effects()

    def on_message(self, peer: int, message: Message, now: float) -> list[Effect]:
        """A message of the engine with incarnation ``peer``."""
        if isinstance(message, Accepted | Refused | Drained | Unsettled):
            pull = self.pulls.get(message.pull_id)
            if pull is not None and pull.peer == peer and pull.state in _UNSAFE:
                self._on_answer(pull, message, now)
            elif pull is None and isinstance(message, Drained) and not message.closed:
                # The producer keeps its blocks for an attempt that will not come.
                self._effects.append(Tell(peer, Abort(pull_id=message.pull_id)))
        return self._take_effects()

    def _on_answer(
        self, pull: Pull, message: Accepted | Refused | Drained | Unsettled, now: float
    ) -> None:
        if pull.state in (State.ASKED, State.MOVING):
            pull.heard = now  # an abort has a bound that no sign of life extends
        closed = isinstance(message, Drained) and message.closed
        if message.attempt < pull.attempt and not closed:
            return  # about an attempt that is over: says nothing of the present one
        if isinstance(message, Accepted):
            self._move(pull, Event.ACCEPTED)
        elif isinstance(message, Unsettled):
            self._abort(pull, message.reason, message.text, now)
        elif isinstance(message, Drained) and not message.reason:
            self._landed(pull, message.bytes)
        elif isinstance(message, Drained) and message.stray and not self._is_fenced(pull):
            self._strayed(pull, message, now)
        elif self._may_ask_again(pull, message):
            self._ask_again(pull, now)
        else:
            self._give_up(pull, message)

    def _is_fenced(self, pull: Pull) -> bool:
        """Whether the keys have changed since the pull was last asked for."""
        return pull.asked_epoch < self._fenced_epoch

    def _strayed(self, pull: Pull, message: Drained, now: float) -> None:
        """What the producer could not take back has to be kept out here."""
        again = self._may_ask_again(pull, message)
        pull.needs_keys = True
        pull.stray = message
        self._quarantine(pull, message.reason, message.text, now, doomed=not again)
        self._rotate_if_needed(now)

    def _ask_again(self, pull: Pull, now: float) -> None:
        pull.attempt += 1
        pull.sent = 0
        pull.heard = now
        pull.send_at = now + TRY_AGAIN_S * pull.attempt
        pull.needs_keys = False
        pull.stray = None
        self.counts.asked_again += 1
        self._move(pull, Event.AGAIN)

    def _give_up(self, pull: Pull, message: Refused | Drained) -> None:
        self._move(pull, Event.DRAINED)
        self._release_if_held(pull, message)
        self._end(pull, pull.reason or message.reason, pull.text or message.text)

    @staticmethod
    def _may_ask_again(pull: Pull, message: Refused | Drained) -> bool:
        if isinstance(message, Drained):
            worth_it = not message.closed
        else:
            worth_it = message.reason == Reason.KEYS
        wanted = pull.state in (State.ASKED, State.MOVING)
        return wanted and worth_it and pull.attempt + 1 < ATTEMPTS_LIMIT

    # ---- the owner's words -----------------------------------------------------------

    def rotated(self, epoch: int, now: float) -> list[Effect]:
        """The change of keys that `Rotate` asked for is done: ``epoch`` is the first with
        the new ones.  0: it could not be made.

        Set ``keys_epoch`` to the present count before.
        """
        waiting, self._rotating = self._rotating, frozenset()
        self._soonest = min(self._soonest, now + ROTATE_AGAIN_S)
        if not epoch:
            self._rotate_at = now + ROTATE_AGAIN_S
            return []
        self.counts.rotations += 1
        self._fenced_epoch = epoch
        for pull_id in sorted(waiting):
            pull = self.pulls.get(pull_id)
            if pull is None:
                continue
            if not pull.reason:
                self._ask_again(pull, now)
            elif pull.stray is not None:
                self._give_up(pull, pull.stray)
            else:
                self._move(pull, Event.DRAINED)
                self._end(pull, pull.reason, pull.text)
        self._rotate_if_needed(now)
        return self._take_effects()

    def next_deadline(self) -> float | None:
        """When `on_timer` wants to be called next; None while there is no pull."""
        if not self.pulls:
            self._soonest = math.inf
        return None if self._soonest == math.inf else self._soonest

    def on_timer(self, now: float) -> list[Effect]:
        """Repeats what was not answered and judges silence."""
        if now < self._soonest:
            return []
        timeout_s = self._limits.transfer_timeout_s
        for pull in list(self.pulls.values()):
            if pull.state is State.WAITING_PEER:
                if pull.heard + timeout_s <= now:
                    self._end(pull, Reason.UNREACHABLE, "no session with the producer in time")
                continue
            if pull.state is not State.QUARANTINED and pull.heard + timeout_s <= now:
                self._quarantine(pull, Reason.TIMEOUT, "the producer fell silent", now)
            if pull.send_at <= now and not pull.needs_keys:
                self._say(pull, now)
        self._rotate_if_needed(now)
        self._soonest = min(map(self._deadline_of, self.pulls.values()), default=math.inf)
        return self._take_effects()

    # ---- inside ----------------------------------------------------------------------

    def _take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def _move(self, pull: Pull, event: Event) -> None:
        pull.state = look_up(f"pull {pull.request.pull_id}", TABLE, pull.state, event).state
        self._soonest = min(self._soonest, self._deadline_of(pull))

    def _deadline_of(self, pull: Pull) -> float:
        timeout_s = self._limits.transfer_timeout_s
        if pull.state is State.WAITING_PEER:
            return pull.heard + timeout_s
        if pull.state is not State.QUARANTINED:
            return min(pull.send_at, pull.heard + timeout_s)
        send_at = math.inf if pull.needs_keys else pull.send_at
        if self._rotating:
            return send_at
        since = -math.inf if pull.needs_keys else pull.since + timeout_s
        return min(send_at, max(self._rotate_at, since))

    def _say(self, pull: Pull, now: float) -> None:
        """Sends what the state of a pull calls for, and plans the repetition."""
        pull.send_at = now + min(ASK_AGAIN_S * 2 ** min(pull.sent, 8), ASK_AGAIN_MAX_S)
        pull.sent += 1
        request = pull.request
        message: Message
        if pull.state in (State.ABORTING, State.QUARANTINED):
            message = Abort(pull_id=request.pull_id)
        else:
            pull.asked_epoch = self.keys_epoch
            message = Ask(
                pull_id=request.pull_id,
                attempt=pull.attempt,
                transfer_id=request.transfer_id,
                request_id=request.remote_request_id,
                engine_id=request.engine_id,
                generation=request.generation,
                early=request.early,
                first_token=request.first_token,
                token_count=request.token_count,
                block_ids=request.block_ids,
                deadline_s=self._limits.transfer_timeout_s,
                keys_epoch=self.keys_epoch,
                prompt_digest=request.prompt_digest,
            )
        self._effects.append(Tell(pull.peer, message))

    def _abort(self, pull: Pull, reason: str, text: str, now: float) -> None:
        """From here on the pull cannot succeed; what it was asked for must be fenced."""
        first = not pull.reason
        if first:
            self._doom(pull, reason, text)
        elif reason == Reason.ABORTED:
            pull.reason, pull.text = reason, text
        was = pull.state
        self._move(pull, Event.ABORT)
        if was is not pull.state or first:
            pull.heard = now
            pull.sent = 0
            self._say(pull, now)

    def _doom(self, pull: Pull, reason: str, text: str) -> None:
        """The first word that the pull cannot succeed; it is held to it."""
        pull.reason, pull.text = reason, text
        if reason != Reason.ABORTED:
            self._effects.append(Doomed(pull.request.pull_id, reason, text))

    def _quarantine(
        self, pull: Pull, reason: str, text: str, now: float, doomed: bool = True
    ) -> None:
        if doomed and not pull.reason:
            self._doom(pull, reason, text)
        if pull.state is State.QUARANTINED:
            return
        self._move(pull, Event.SILENT)
        pull.since = now
        pull.sent = 0
        pull.send_at = now
        self.counts.quarantined += 1

    def _rotate_if_needed(self, now: float) -> None:
        """Asks for new keys when quarantine lasts too long or grows too large."""
        if self._rotating or now < self._rotate_at:
            return
        waiting = [pull for pull in self.pulls.values() if pull.state is State.QUARANTINED]
        blocks = sum(pull.request.block_count for pull in waiting)
        due = any(
            pull.needs_keys or pull.since + self._limits.transfer_timeout_s <= now
            for pull in waiting
        )
        if due or blocks > self._limits.quarantine_blocks:
            self._rotating = frozenset(pull.request.pull_id for pull in waiting)
            self._effects.append(Rotate(self._rotating))

    def _landed(self, pull: Pull, byte_count: int) -> None:
        """Everything arrived, which is a fence too; a success unless it is not wanted."""
        if pull.reason:
            self._move(pull, Event.DRAINED)
            self._end(pull, pull.reason, pull.text)
            return
        self._move(pull, Event.LANDED)
        self.counts.received += 1
        self.counts.bytes += byte_count
        self._effects.append(Done(pull.request.pull_id, "", "", byte_count))
        self._effects.append(Tell(pull.peer, Landed(pull_id=pull.request.pull_id)))
        self._move(pull, Event.CONFIRM)
        del self.pulls[pull.request.pull_id]

    def _end(self, pull: Pull, reason: str, text: str) -> None:
        """Reports a failure; the pull is fenced or never left."""
        self._move(pull, Event.FAIL)
        self.counts.failed[reason] = self.counts.failed.get(reason, 0) + 1
        self._effects.append(Done(pull.request.pull_id, reason, text))
        del self.pulls[pull.request.pull_id]

    def _release_if_held(self, pull: Pull, message: Refused | Drained) -> None:
        """Lets the producer's blocks go where its answer left them held for us."""
        request = pull.request
        closed = isinstance(message, Drained) and message.closed
        if not closed and (isinstance(message, Drained) or message.reason in _STILL_HELD):
            # A number of its own, so that it cannot be taken for a repetition of the pull.
            self._effects.append(
                Tell(
                    pull.peer,
                    Release(
                        pull_id=request.pull_id + 1,
                        transfer_id=request.transfer_id,
                        request_id=request.remote_request_id,
                        generation=request.generation,
                    ),
                )
            )
