"""The producer's half of handoffs at work: turns decisions into jobs and messages.

Everything here runs on the control thread and returns at once. The decisions are made
by `efa_kv.wire.producer`; this file knows layouts, sessions and the fabric.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import numpy as np

from efa_kv.errors import Code, EfaKvError, FabricBusy, TransferRefused
from efa_kv.plan import build, layout
from efa_kv.runtime.directory import Directory
from efa_kv.runtime.handle import SessionHandle
from efa_kv.runtime.journal import Journal
from efa_kv.runtime.outbox import Given, Outbox
from efa_kv.types import WRITE, Notice, Result
from efa_kv.wire.handoff import Reason, unpack_blocks
from efa_kv.wire.holds import Cancel, Effect, Post, PostNotice, Send, Sent
from efa_kv.wire.producer import Outcome, ProducerTable

if TYPE_CHECKING:
    from efa_kv.runtime.control import ControlThread, Handler

_log = logging.getLogger(__name__)

#: Seconds between two looks at compute that is not complete, and at a full fabric.
COMPUTE_POLL_S: Final = 0.001
_NOTHING: Final = np.zeros(0, dtype=np.uint64)
_REASONS: Final = {
    Code.EACCESS: Reason.KEYS,
    Code.EREMOTEREGION: Reason.KEYS,
    Code.EDEADLINE: Reason.TIMEOUT,
    Code.ECANCELED: Reason.ABORTED,
}


class Serving:
    """Carries out what a `ProducerTable` decides."""

    def __init__(
        self,
        table: ProducerTable,
        control: ControlThread,
        handler: Handler,
        own_layout: layout.KvLayout,
        directory: Directory,
        outbox: Outbox,
        journal: Journal,
    ) -> None:
        self.table = table
        self._journal = journal
        self._control = control
        self._handler = handler
        self._layout = own_layout
        self._directory = directory
        self._outbox = outbox
        self._plans: dict[int, build.RowPlan] = {}
        self._holds_of_jobs: dict[int, int] = {}
        self._waiting: list[Post] = []

    def run(self, effects: list[Effect], now: float) -> None:
        """Carries out effects, and what follows from them."""
        for effect in effects:
            match effect:
                case Send():
                    session = self._directory.find(effect.peer)
                    if session is not None:
                        self._control.send(session, effect.message)
                case Post():
                    self._post(effect, now)
                case PostNotice():
                    self._post_notice(effect)
                case Cancel():
                    for job in effect.jobs:
                        self._control.job_cancel(job)
                case Sent():
                    self._outbox.put(Given(effect.request_id, effect.reason, effect.bytes))

    def peer_gone(self, incarnation: int, now: float) -> None:
        self._plans.pop(incarnation, None)
        self.run(self.table.peer_gone(incarnation, now), now)

    def on_job(self, job: int, result: Result, now: float) -> None:
        """A job is done, or fenced after it was done."""
        hold_id = self._holds_of_jobs.get(job)
        if hold_id is None or not result.done:
            return  # a bare notice: the message on the control plane says the same
        if result.fenced:
            del self._holds_of_jobs[job]
        reason = ""
        if result.status != Code.OK:
            reason = _REASONS.get(Code(result.status), Reason.FAILED)
            _log.warning("job %#x failed (%s): %s", job, reason, result.text or result.status)
        outcome = Outcome(result.fenced, reason, result.text, result.bytes, result.stray)
        self.run(self.table.settled(hold_id, job, outcome, now), now)

    def on_timer(self, now: float) -> float | None:
        """Looks again at what waits for compute; when to come back."""
        self.run(self.table.on_timer(now), now)
        waiting, self._waiting = self._waiting, []
        for post in waiting:
            self._post(post, now)
        due = self.table.next_deadline()
        if self._waiting:
            due = now + COMPUTE_POLL_S
        return due

    # ---- posting ----------------------------------------------------------------------

    def _post(self, post: Post, now: float) -> None:
        if not self.table.is_current(post):
            return
        try:
            if post.hold.computed is not None and not post.hold.computed():
                self._waiting.append(post)
                return
            session = self._session_for(post, now)
            if session is not None:
                self._submit(session, post, now)
        except FabricBusy:
            self._waiting.append(post)
        except TransferRefused as refusal:
            self._give_up(post, refusal.reason or Reason.FAILED, str(refusal), now)
        except EfaKvError as problem:
            reason = Reason.KEYS if _is_remote_region(problem) else Reason.FAILED
            self._give_up(post, reason, str(problem), now)
        except Exception as problem:
            # The compute's own test is foreign code; whatever it raises costs one request.
            _log.exception("request %s cannot be written", post.hold.request_id)
            self._give_up(post, Reason.FAILED, f"{type(problem).__name__}: {problem}", now)

    def _give_up(self, post: Post, reason: str, text: str, now: float) -> None:
        _log.warning("request %s is not written (%s): %s", post.hold.request_id, reason, text)
        self.run(self.table.unposted(post, reason, text, now), now)

    def _session_for(self, post: Post, now: float) -> SessionHandle | None:
        """The consumer's session, if exactly the keys that the ask was made for are known.

        Older ones are asked for once; newer ones mean that the ask is outdated, and that
        its blocks may have another owner by now.
        """
        session = self._directory.find(post.peer)
        if session is None or session.peer is None:
            raise TransferRefused("The consumer's session is gone.", reason=Reason.UNREACHABLE)
        if session.peer.epoch == post.ask.keys_epoch and session.peer.complete:
            return session
        if session.peer.epoch > post.ask.keys_epoch:
            raise TransferRefused("The consumer's keys are newer.", reason=Reason.KEYS)

        def learned(answered: bool) -> None:
            if not self.table.is_current(post):
                return
            if answered:
                self._waiting.append(post)
                self._control.wake_timer()
            else:
                self._give_up(post, Reason.KEYS, "the consumer's keys are not known", now)

        self._control.refresh_regions(session, learned)
        return None

    def _submit(self, session: SessionHandle, post: Post, now: float) -> None:
        blocks = unpack_blocks(post.ask.block_ids)
        if blocks is None:
            raise TransferRefused("A block table is cut short.", reason=Reason.BAD_BLOCKS)
        pieces = build.pieces(
            self._plan(session), post.hold.block_ids, blocks, post.first_token, post.token_count
        )
        noticed = len(pieces) == 1 and self.table.may_carry_notice(post)
        notice = None
        if noticed:
            notice = Notice((post.ask.pull_id, post.peer), post.hold.generation)
        jobs: list[int] = []
        try:
            for piece in pieces:
                job = self._control.submit_paged(
                    session,
                    self._handler,
                    WRITE,
                    piece.rows,
                    piece.local_blocks,
                    piece.remote_blocks,
                    deadline_s=post.ask.deadline_s,
                    notice=notice,
                )
                self._holds_of_jobs[job] = post.hold_id
                self._journal.note(post.hold.request_id, "job", job)
                jobs.append(job)
        except EfaKvError as problem:
            if not jobs:
                raise
            # The other groups of layers run already: they are cancelled and waited for.
            effects = self.table.unposted(post, Reason.FAILED, str(problem), now, jobs)
            self.run(effects, now)
            return
        self.run(self.table.posted(post, jobs, noticed, now), now)

    def _plan(self, session: SessionHandle) -> build.RowPlan:
        plan = self._plans.get(session.incarnation)
        if plan is None:
            if session.layout is None:
                raise TransferRefused("The consumer has no cache.", reason=Reason.MISMATCH)
            try:
                plan = build.rows(self._layout, layout.decode(session.layout))
            except EfaKvError as problem:
                raise TransferRefused(str(problem), reason=Reason.MISMATCH) from problem
            self._plans[session.incarnation] = plan
        return plan

    def _post_notice(self, effect: PostNotice) -> None:
        session = self._directory.find(effect.peer)
        if session is None:
            return
        try:
            self._control.submit(
                session,
                self._handler,
                WRITE,
                _NOTHING,
                _NOTHING,
                _NOTHING,
                deadline_s=1.0,
                notice=Notice((effect.pull_id, effect.peer), effect.generation),
            )
        except EfaKvError as problem:
            _log.debug("no notice for pull %d: %s", effect.pull_id, problem)


def _is_remote_region(problem: EfaKvError) -> bool:
    return getattr(problem, "code", 0) == Code.EREMOTEREGION
