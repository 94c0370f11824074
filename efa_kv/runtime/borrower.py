"""Borrowing the scratch memory of a running engine, to try the way to it.

`Borrower` is a handler of the control plane; its ``on_*`` run on the control thread, which
meets the callers in a dict of queues.  The other side is `efa_kv.runtime.lender`.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import time
from collections.abc import Iterator
from typing import Final

from efa_kv.errors import EfaKvError, PeerRefused, TransferTimeout
from efa_kv.runtime.control import SessionHandle, SessionState
from efa_kv.runtime.engine import Peer, TransferEngine
from efa_kv.types import RegionRecord, Result
from efa_kv.wire.envelope import Message
from efa_kv.wire.scratch import ScratchAsk, ScratchLent, ScratchRefused, ScratchReturn

#: The code of a refusal to lend.
REASON_SCRATCH: Final = "scratch"

_RESEND_S: Final = 0.5


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
