"""Notes between the users of two engines, each delivered once or reported as not.

`NoteBook` is a handler of the control plane: ``on_*`` run on the control thread, the
others on any.  The two meet in deques, dicts and queues only.
"""

from __future__ import annotations

import itertools
import logging
import queue
import time
from collections import OrderedDict, deque
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
        if len(name) > NAME_CHARACTERS_LIMIT or len(text) > TEXT_CHARACTERS_LIMIT:
            raise ValueError(
                f"found a note of {len(name)} and {len(text)} characters; expected at "
                f"most {NAME_CHARACTERS_LIMIT} and {TEXT_CHARACTERS_LIMIT}"
            )
        number = next(self._numbers)
        answer: queue.SimpleQueue[None] = queue.SimpleQueue()
        key = (peer.incarnation, number)
        self._waiting[key] = answer
        message = Note(number=number, name=name, text=text)
        deadline = time.monotonic() + timeout_s
        try:
            while time.monotonic() < deadline:
                try:
                    self._engine.control.later(lambda _now: self._send(peer.handle, message))
                    answer.get(timeout=min(_RESEND_S, max(0.0, deadline - time.monotonic())))
                    return
                except (queue.Empty, FabricBusy):
                    continue
        finally:
            self._waiting.pop(key, None)
        raise TransferTimeout(f"{peer.session} did not take the note {name!r} in time.")

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
