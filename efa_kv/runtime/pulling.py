"""The consumer's half of handoffs at work: turns decisions into messages and new keys.

Everything here runs on the control thread and returns at once, except `KeyChanger`,
which has a thread of its own while keys are being changed: that waits for operations in
flight. The decisions are made by `efa_kv.wire.consumer` and `efa_kv.wire.errands`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from efa_kv.errors import EfaKvError
from efa_kv.runtime.directory import Directory
from efa_kv.runtime.handle import SessionHandle
from efa_kv.runtime.outbox import Asked, Ended, Lost, Outbox
from efa_kv.runtime.places import Places
from efa_kv.wire.consumer import ConsumerTable
from efa_kv.wire.envelope import Message
from efa_kv.wire.errands import Errands, Reference
from efa_kv.wire.pulls import Connect, Done, Doomed, Effect, PullRequest, Rotate, Tell, Watch

if TYPE_CHECKING:
    from efa_kv.runtime.engine import TransferEngine

_log = logging.getLogger(__name__)

#: Seconds to wait for operations in flight, for each region and each try.
_ROTATE_TIMEOUT_S: Final = 0.5
_ROTATE_TRIES: Final = 4


class KeyChanger:
    """Changes the keys of all regions, one change at a time, on a thread of its own."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine

    def start(self, done: Callable[[int, float], None]) -> None:
        """Calls ``done(first epoch with new keys or 0, now)`` on the control thread. Never
        blocks."""

        def change() -> None:
            epoch = 0
            try:
                for _ in range(_ROTATE_TRIES):
                    epoch = self._engine.rotate_regions(_ROTATE_TIMEOUT_S)
                    if epoch:
                        break
            except EfaKvError as problem:
                _log.warning("memory keys are not changed: %s", problem)
            try:
                self._engine.control.later(lambda now: done(epoch, now))
            except EfaKvError as problem:
                _log.debug("new keys come too late: %s", problem)

        threading.Thread(target=change, name="efa-kv-keys", daemon=True).start()


class Pulling:
    """Carries out what a `ConsumerTable` and its `Errands` decide."""

    def __init__(
        self,
        table: ConsumerTable,
        errands: Errands,
        engine: TransferEngine,
        directory: Directory,
        outbox: Outbox,
    ) -> None:
        self.table = table
        self.errands = errands
        self.places: Places | None = None
        self._engine = engine
        self._directory = directory
        self._outbox = outbox
        self._keys = KeyChanger(engine)

    # ---- the server's words -----------------------------------------------------------

    def start(self, request: PullRequest, references: tuple[Reference, ...], now: float) -> None:
        """Begins a pull; ``references`` are what may have been renewed until now."""
        for reference in references:
            self.errands.stop(reference)
        self.table.keys_epoch = self._engine.regions_epoch
        self.run(self.table.start(request, now), now)

    def abort(self, pull_id: int, now: float) -> None:
        self.run(self.table.abort(pull_id, now), now)

    def landed(self, pull_id: int, byte_count: int, now: float) -> None:
        self.run(self.table.landed(pull_id, byte_count, now), now)

    def renew(self, reference: Reference, now: float) -> None:
        self.run(self.errands.renew(reference, now), now)

    def release(self, pull_id: int, reference: Reference, now: float) -> None:
        self.errands.stop(reference)
        self.run(self.errands.release(pull_id, reference, now), now)

    # ---- the network's words ----------------------------------------------------------

    def on_message(self, peer: int, message: Message, now: float) -> None:
        self.table.keys_epoch = self._engine.regions_epoch
        self.errands.on_message(peer, message)
        self.run(self.table.on_message(peer, message, now), now)

    def place_ready(self, key: str, session: SessionHandle, now: float) -> None:
        self._directory.note(session)
        self.table.keys_epoch = self._engine.regions_epoch
        self.run(self.table.peer_ready(key, session.incarnation, now), now)
        self.run(self.errands.peer_ready(key, session.incarnation, now), now)
        self._engine.control.wake_timer()

    def place_failed(self, key: str, reason: str, text: str, now: float) -> None:
        _log.warning("no producer at %s (%s): %s", key, reason, text)
        self.errands.peer_failed(key)
        self.run(self.table.peer_failed(key, reason, text, now), now)

    def peer_gone(self, incarnation: int, now: float) -> None:
        self.errands.peer_gone(incarnation)
        self.run(self.table.peer_gone(incarnation, now), now)

    def on_timer(self, now: float) -> float | None:
        self.table.keys_epoch = self._engine.regions_epoch
        self.run(self.table.on_timer(now), now)
        self.run(self.errands.on_timer(now), now)
        due = [self.table.next_deadline(), self.errands.next_deadline()]
        return min((deadline for deadline in due if deadline is not None), default=None)

    # ---- effects ----------------------------------------------------------------------

    def run(self, effects: list[Effect] | list[Connect | Tell], now: float) -> None:
        """Carries out effects, and what follows from them."""
        for effect in effects:
            match effect:
                case Tell():
                    session = self._directory.find(effect.peer)
                    if session is not None:
                        self._engine.control.send(session, effect.message)
                case Connect():
                    assert self.places is not None
                    self.places.find(effect.address, now)
                case Watch():
                    self._outbox.put(Asked(effect.pull_id, effect.peer))
                case Done():
                    word = Ended(effect.pull_id, effect.reason, effect.text, effect.bytes)
                    self._outbox.put(word)
                case Doomed():
                    self._outbox.put(Lost(effect.pull_id, effect.reason, effect.text))
                case Rotate():
                    _log.warning(
                        "the memory keys are changed, because %d pulls cannot be fenced otherwise",
                        len(effect.pull_ids),
                    )
                    self._keys.start(self._rotated)

    def _rotated(self, epoch: int, now: float) -> None:
        self.table.keys_epoch = self._engine.regions_epoch
        self.run(self.table.rotated(epoch, now), now)
        self._engine.control.wake_timer()
