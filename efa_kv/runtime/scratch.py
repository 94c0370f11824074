"""Scratch memory at work: `Lender` on the side of a running engine, `Borrower` on the other.

Both are handlers of the control plane; ``on_*`` run on the control thread.  The lender registers
and withdraws its one region on a thread of its own, because both can take long; that thread hands
its result over by `ControlThread.later`.  The borrower's callers and the control thread meet in a
dict of queues.  What is lent when, `efa_kv.wire.scratch` decides.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from efa_kv.errors import EfaKvError, FabricBusy, PeerRefused, StaleHandle, TransferTimeout
from efa_kv.runtime.control import ControlThread, SessionHandle, SessionState
from efa_kv.runtime.directory import Directory
from efa_kv.runtime.regions import Region, RegionBook
from efa_kv.types import RegionRecord, Result
from efa_kv.wire.envelope import Message
from efa_kv.wire.scratch import (
    SCRATCH_TYPES,
    Effect,
    Prepare,
    ScratchAsk,
    ScratchDesk,
    ScratchLent,
    ScratchRefused,
    ScratchReturn,
    TakeBack,
    Tell,
)

if TYPE_CHECKING:
    from efa_kv.runtime.engine import Peer, TransferEngine

_log = logging.getLogger(__name__)

#: The code of a refusal to lend.
REASON_SCRATCH: Final = "scratch"

_RESEND_S: Final = 0.5
_WITHDRAW_TIMEOUT_S: Final = 1.0


class Lender:
    """Lends scratch memory of this engine; owner of the desk: the control thread."""

    message_types: tuple[type[Message], ...] = (ScratchAsk, ScratchReturn)

    def __init__(self, control: ControlThread, book: RegionBook, limit_bytes: int) -> None:
        self._control = control
        self._book = book
        self._desk = ScratchDesk(limit_bytes)
        self._directory = Directory()
        self._region: Region | None = None

    def on_message(self, session: SessionHandle, message: Message, now: float) -> None:
        """An ask or a return."""
        if isinstance(message, ScratchAsk):
            self._directory.note(session)
            self._run(self._desk.asked(session.incarnation, message, now))
        elif isinstance(message, ScratchReturn):
            self._run(self._desk.returned(session.incarnation, message.number))

    def on_session(
        self, session: SessionHandle, state: SessionState, reason: str | None, now: float
    ) -> None:
        """A borrower that is gone has nothing to return."""
        if session.over and self._directory.forget(session):
            self._run(self._desk.peer_gone(session.incarnation))

    def on_job(self, job: int, result: Result, now: float) -> None:
        """The lender moves no bytes."""

    def on_timer(self, now: float) -> float | None:
        """Takes back what was lent for too long."""
        self._run(self._desk.on_timer(now))
        return self._desk.next_deadline()

    def _run(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Tell():
                    session = self._directory.find(effect.peer)
                    if session is not None:
                        self._control.send(session, effect.message)
                case Prepare():
                    self._start(self._prepare, effect.length_bytes)
                case TakeBack():
                    self._start(self._withdraw, self._region)

    @staticmethod
    def _start(work: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, name="efa-kv-scratch", daemon=True)
        thread.start()

    def _prepare(self, length_bytes: int) -> None:
        """On a thread of its own: makes the region and says so."""
        try:
            region = self._book.register(np.zeros(length_bytes, np.uint8))
            record = self._record(region)
        except (EfaKvError, MemoryError) as problem:
            text = str(problem)
            self._report(lambda: self._desk.failed(f"cannot make scratch memory: {text}"))
            return

        def lend() -> list[Effect]:
            self._region = region
            return self._desk.prepared(record)

        self._report(lend)

    def _record(self, region: Region) -> RegionRecord:
        for record in self._book.published.regions:
            if record.region == region.region:
                return record
        raise StaleHandle("The scratch region was withdrawn while it was made.")

    def _withdraw(self, region: Region) -> None:
        """On a thread of its own: takes the keys back; the memory goes with the region."""
        while True:
            try:
                region.deregister(_WITHDRAW_TIMEOUT_S)
            except FabricBusy:
                continue
            except EfaKvError as problem:
                _log.debug("scratch memory is not withdrawn: %s", problem)
                return
            break

        def clear() -> list[Effect]:
            self._region = None
            return self._desk.withdrawn()

        self._report(clear)

    def _report(self, step: Callable[[], list[Effect]]) -> None:
        """Has the control thread take a step; an engine that closes needs it no more."""
        with contextlib.suppress(EfaKvError):
            self._control.later(lambda _now: self._run(step()))
            self._control.later(lambda _now: self._control.wake_timer())


class Borrower:
    """Borrows scratch memory of live engines.  Make it before the engine starts.

    The engine becomes a visitor: peers let it in without comparing caches, and take nothing from
    it but what this module sends.
    """

    message_types: tuple[type[Message], ...] = (ScratchLent, ScratchRefused)

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._numbers = itertools.count(1)
        self._waiting: dict[int, queue.SimpleQueue[Message]] = {}
        engine.identity.visitor = True
        engine.add_handler(self)

    @contextlib.contextmanager
    def borrow(
        self, peer: Peer, length_bytes: int, loan_s: float, timeout_s: float
    ) -> Iterator[RegionRecord]:
        """A region of ``peer`` that holds nothing; it is returned at the end.

        Raises `PeerRefused` with the peer's reason, and `TransferTimeout` when it does not answer
        within ``timeout_s``, as an engine of an older release would not. [blocks]
        """
        number = next(self._numbers)
        ask = ScratchAsk(number=number, length_bytes=length_bytes, loan_s=loan_s)
        try:
            yield self._ask(peer, ask, timeout_s)
        finally:
            with contextlib.suppress(EfaKvError):
                self._send(peer, ScratchReturn(number=number))

    def _ask(self, peer: Peer, ask: ScratchAsk, timeout_s: float) -> RegionRecord:
        answers = self._waiting.setdefault(ask.number, queue.SimpleQueue())
        deadline = time.monotonic() + timeout_s
        try:
            while time.monotonic() < deadline:
                self._send(peer, ask)
                try:
                    remaining_s = max(0.0, deadline - time.monotonic())
                    answer = answers.get(timeout=min(_RESEND_S, remaining_s))
                except queue.Empty:
                    continue
                if isinstance(answer, ScratchLent):
                    return answer.region
                assert isinstance(answer, ScratchRefused)
                raise PeerRefused(
                    f"{peer.session} lends no scratch memory: {answer.text}.",
                    peer=peer.session,
                    reason=REASON_SCRATCH,
                )
        finally:
            del self._waiting[ask.number]
        raise TransferTimeout(
            f"{peer.session} did not answer the ask for scratch memory within {timeout_s:g} s.",
            advice="An engine of an older release has none to lend.",
        )

    def _send(self, peer: Peer, message: Message) -> None:
        self._engine.control.later(lambda _now: self._hand_over(peer, message))

    def _hand_over(self, peer: Peer, message: Message) -> None:
        self._engine.control.send(peer.handle, message)

    def on_message(self, session: SessionHandle, message: Message, now: float) -> None:
        """An answer; one that nobody waits for is dropped."""
        assert isinstance(message, ScratchLent | ScratchRefused)
        answers = self._waiting.get(message.number)
        if answers is not None:
            answers.put(message)

    def on_session(
        self, session: SessionHandle, state: SessionState, reason: str | None, now: float
    ) -> None:
        """Who waits, waits by the clock."""

    def on_job(self, job: int, result: Result, now: float) -> None:
        """Borrowing moves no bytes."""

    def on_timer(self, now: float) -> float | None:
        """Nothing here is due by itself."""
        return None


assert set(Lender.message_types) | set(Borrower.message_types) == set(SCRATCH_TYPES)
