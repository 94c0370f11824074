"""From the address that a request names to the session of the right engine.

An address is ``host:port`` of an engine, or the ``http://host:port`` of a registry plus
the id of the engine wanted. Owner: the control thread; answers of registries come from
the HTTP thread and are queued.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from efa_kv.errors import EfaKvError, PeerRefused, PeerUnreachable
from efa_kv.runtime.handle import SessionHandle
from efa_kv.wire.handoff import Reason
from efa_kv.wire.session import SessionState

if TYPE_CHECKING:
    from efa_kv.runtime.bootstrap import Registry
    from efa_kv.runtime.control import ControlThread

_log = logging.getLogger(__name__)

_SCHEMES: Final = ("http://", "https://")
_SEPARATOR: Final = "#"


def key_of(address: str, engine_id: str) -> str:
    """What pulls from one place are filed under."""
    return f"{address}{_SEPARATOR}{engine_id}" if address.startswith(_SCHEMES) else address


class Asker(Protocol):
    """The client of registries."""

    def query(self, url: str, answer: Callable[[Registry | EfaKvError], None]) -> None: ...


class PlaceWatcher(Protocol):
    """Who wants to know what became of a place."""

    def place_ready(self, key: str, session: SessionHandle, now: float) -> None: ...
    def place_failed(self, key: str, reason: str, text: str, now: float) -> None: ...


class Places:
    """Places that are being looked for; each ends in one call of the watcher."""

    def __init__(
        self,
        control: ControlThread,
        watcher: PlaceWatcher,
        asker: Callable[[], Asker],
        ranks: tuple[int, int],
    ) -> None:
        """``asker`` makes the client when it is first needed; ``ranks`` are the tensor and
        the pipeline rank whose counterpart is wanted."""
        self._control = control
        self._watcher = watcher
        self._asker = asker
        self._ranks = ranks
        self._waiting: dict[str, SessionHandle | None] = {}
        self._again: set[str] = set()

    def find(self, key: str, now: float) -> None:
        """Begins to look for a place, unless that is going on."""
        if key in self._waiting:
            return
        address, _, engine_id = key.partition(_SEPARATOR)
        self._waiting[key] = None
        if not address.startswith(_SCHEMES):
            self._connect(key, address, now)
            return
        try:
            self._asker().query(address, lambda found: self._later(key, engine_id, found))
        except EfaKvError as problem:
            self._fail(key, Reason.UNREACHABLE, str(problem), now)

    def on_session(self, session: SessionHandle, now: float) -> None:
        """A session changed: who waited for it is told."""
        for key in [key for key, waiting in self._waiting.items() if waiting is session]:
            self._judge(key, session, now)

    def _later(self, key: str, engine_id: str, found: Registry | EfaKvError) -> None:
        try:
            self._control.later(lambda now: self._resolved(key, engine_id, found, now))
        except EfaKvError as problem:
            _log.warning("an answer of a registry is lost: %s", problem)

    def _resolved(self, key: str, engine_id: str, found: Registry | EfaKvError, now: float) -> None:
        if isinstance(found, EfaKvError):
            self._fail(key, Reason.UNREACHABLE, str(found), now)
            return
        try:
            self._connect(key, choose(found, engine_id, self._ranks), now)
        except EfaKvError as problem:
            self._fail(key, Reason.UNREACHABLE, str(problem), now)

    def _connect(self, key: str, address: str, now: float) -> None:
        try:
            session = self._control.connect(address)
        except EfaKvError as problem:
            self._fail(key, Reason.UNREACHABLE, str(problem), now)
            return
        self._waiting[key] = session
        self._judge(key, session, now)

    def _judge(self, key: str, session: SessionHandle, now: float) -> None:
        if session.state is SessionState.READY:
            del self._waiting[key]
            self._again.discard(key)
            self._watcher.place_ready(key, session, now)
        elif session.state is SessionState.REJECTED:
            self._fail(key, Reason.MISMATCH, str(session.error()), now)
        elif session.over and session.incarnation and key not in self._again:
            # What was there is gone; who took its place is greeted once the old session
            # has been put away.
            self._again.add(key)
            self._waiting[key] = None
            self._control.later(lambda at: self._connect(key, session.session, at))
        elif session.over:
            self._fail(key, Reason.UNREACHABLE, str(session.error()), now)

    def _fail(self, key: str, reason: str, text: str, now: float) -> None:
        self._waiting.pop(key, None)
        self._again.discard(key)
        self._watcher.place_failed(key, reason, text, now)


def choose(found: Registry, engine_id: str, ranks: tuple[int, int]) -> str:
    """The address of the engine wanted; raises `PeerUnreachable` or `PeerRefused`.

    Routers remember engine ids from their start; an engine that restarted since has a new
    one. Where the registry knows one engine only, that one is meant: a transfer that it
    does not know is refused there, quickly and with the reason.
    """
    fitting = [workers for workers in found.values() if workers.engine_id == engine_id]
    if not fitting and (len(found) == 1 or not engine_id):
        fitting = list(found.values())[:1]
    if not fitting:
        known = ", ".join(sorted(workers.engine_id for workers in found.values()))
        raise PeerRefused(
            f"Found no engine {engine_id!r} at the registry; it knows {known or 'none'}.",
            reason=Reason.WRONG_ENGINE,
        )
    session = fitting[0].session(*ranks)
    if session is None:
        raise PeerUnreachable(
            f"Found no worker with tensor and pipeline rank {ranks} in engine {engine_id!r}."
        )
    return session
