"""Notes between the users of two engines, each delivered once or reported as not.

`NoteBook` is a handler of the control plane: ``on_*`` run on the control thread, the
others on any.  The two meet in deques, dicts and queues only.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Final

import msgspec

from efa_kv.errors import FabricBusy, TransferTimeout
from efa_kv.runtime.control import SessionHandle, SessionState
from efa_kv.runtime.engine import Peer, TransferEngine
from efa_kv.types import Result
from efa_kv.wire.envelope import Message
from efa_kv.wire.notes import (
    NAME_CHARACTERS_LIMIT,
    NOTE_TYPES,
    TEXT_CHARACTERS_LIMIT,
    Note,
    NoteTaken,
)

_log = logging.getLogger(__name__)

_KEPT_MAX: Final = 4096
_SEEN_MAX: Final = 16384
_RESEND_S: Final = 0.5


class Received(msgspec.Struct, frozen=True):
    """A note of a peer; ``sender`` is the incarnation of its engine."""

    sender: int
    name: str
    text: str


class NoteBook:
    """The notes of one engine; give it to `TransferEngine.add_handler` before the start."""

    message_types: tuple[type[Message], ...] = NOTE_TYPES

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._numbers = itertools.count(1)
        self._kept: deque[Received] = deque()
        self._seen: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._waiting: dict[tuple[int, int], queue.SimpleQueue[None]] = {}

    # ---- any thread -------------------------------------------------------------------

    def take(self) -> list[Received]:
        """What came since the last call."""
        taken: list[Received] = []
        while True:
            try:
                taken.append(self._kept.popleft())
            except IndexError:
                return taken

    def deliver(self, peer: Peer, name: str, text: str, timeout_s: float) -> None:
        """Returns when the peer keeps the note; raises `TransferTimeout`, `ValueError` for
        one that is too long. [blocks]"""
        self.deliver_all([peer], name, [text], timeout_s)

    def deliver_all(
        self, peers: Sequence[Peer], name: str, texts: Sequence[str], timeout_s: float
    ) -> None:
        """Sends a note to each peer, all at once, and returns when every one is kept.

        Raises `TransferTimeout` for the first that is not, `ValueError` for a note that is too
        long, in which case none is sent. [blocks]
        """
        for text in texts:
            self._check(name, text)
        answers = [self._waiting_for(peer) for peer in peers]
        sent = [
            (peer, key, Note(number=key[1], name=name, text=text))
            for peer, key, text in zip(peers, answers, texts, strict=True)
        ]
        deadline = time.monotonic() + timeout_s
        try:
            for peer, _key, message in sent:
                with contextlib.suppress(FabricBusy):
                    self._post(peer, message)
            for peer, key, message in sent:
                self._await(peer, key, message, deadline)
        finally:
            for key in answers:
                self._waiting.pop(key, None)

    @staticmethod
    def _check(name: str, text: str) -> None:
        if len(name) > NAME_CHARACTERS_LIMIT or len(text) > TEXT_CHARACTERS_LIMIT:
            raise ValueError(
                f"found a note of {len(name)} and {len(text)} characters; expected at "
                f"most {NAME_CHARACTERS_LIMIT} and {TEXT_CHARACTERS_LIMIT}"
            )

    def _waiting_for(self, peer: Peer) -> tuple[int, int]:
        """A fresh number for a note to ``peer``, whose answer is waited for."""
        key = (peer.incarnation, next(self._numbers))
        self._waiting[key] = queue.SimpleQueue()
        return key

    def _post(self, peer: Peer, message: Message) -> None:
        self._engine.control.later(lambda _now: self._send(peer.handle, message))

    def _await(self, peer: Peer, key: tuple[int, int], message: Note, deadline: float) -> None:
        """Sends a note again until it is answered."""
        while True:
            remaining_s = max(0.0, deadline - time.monotonic())
            try:
                self._waiting[key].get(timeout=min(_RESEND_S, remaining_s))
                return
            except queue.Empty:
                if remaining_s <= _RESEND_S:
                    break
            with contextlib.suppress(FabricBusy):
                self._post(peer, message)
        raise TransferTimeout(f"{peer.session} did not take the note {message.name!r} in time.")

    # ---- the control thread -------------------------------------------------------------

    def _send(self, handle: SessionHandle, message: Message) -> None:
        self._engine.control.send(handle, message)

    def on_message(self, session: SessionHandle, message: Message, now: float) -> None:
        """Keeps a note and says so, or takes note that ours was kept."""
        if isinstance(message, NoteTaken):
            answer = self._waiting.get((session.incarnation, message.number))
            if answer is not None:
                answer.put(None)
            return
        assert isinstance(message, Note)
        key = (session.incarnation, message.number)
        if key not in self._seen:
            if len(self._kept) >= _KEPT_MAX:
                # Not answered: the sender tries again and is told when nobody ever reads.
                _log.warning(
                    "%d notes wait to be read; one of %s waits with its sender",
                    _KEPT_MAX,
                    session.session,
                )
                return
            self._seen[key] = None
            if len(self._seen) > _SEEN_MAX:
                self._seen.popitem(last=False)
            self._kept.append(Received(session.incarnation, message.name, message.text))
        self._send(session, NoteTaken(number=message.number))

    def on_session(
        self, session: SessionHandle, state: SessionState, reason: str | None, now: float
    ) -> None:
        """Senders wait by the clock, so sessions may come and go."""

    def on_job(self, job: int, result: Result, now: float) -> None:
        """Notes are no jobs."""

    def on_timer(self, now: float) -> float | None:
        """Nothing here is due by itself."""
        return None
