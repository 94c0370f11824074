"""A session as the rest of the engine sees it.

Owner: the control thread changes it; the attributes that `efa_kv.runtime.engine.Peer`
reads are replaced as a whole, so other threads may read them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from efa_kv.errors import EfaKvError, PeerError, PeerRefused, PeerRestarted, PeerUnreachable
from efa_kv.runtime.peers import RemotePeer
from efa_kv.runtime.router import Route
from efa_kv.types import RegionRecord
from efa_kv.wire.messages import Card
from efa_kv.wire.session import SessionMachine, SessionState

_ROUTES_MAX: Final = 4
_NOTHING: Final[Mapping[int, RegionRecord]] = MappingProxyType({})

Waiter = Callable[[EfaKvError | None], None]


class SessionHandle:
    """One incarnation of a peer behind one address.

    ``routes`` are the connections on which it was heard, the latest last, ``dialled`` is
    the one that we made.  ``jobs`` counts the control thread's unsettled jobs with it.
    """

    def __init__(self, session: str, machine: SessionMachine) -> None:
        self.session = session
        self.machine = machine
        self.card: Card | None = None
        self.peer: RemotePeer | None = None
        self.problem: EfaKvError | None = None
        self.dialled: Route | None = None
        self.routes: deque[Route] = deque(maxlen=_ROUTES_MAX)
        self.stranger: tuple[Route, Card] | None = None
        self.waiters: list[Waiter] = []
        self.jobs = 0
        self.wakes_at: float | None = None

    @property
    def state(self) -> SessionState:
        return self.machine.state

    @property
    def reason(self) -> str | None:
        """Why the session is of no use (any more), in words."""
        return self.machine.reason

    @property
    def incarnation(self) -> int:
        """The peer's incarnation, 0 until it is known."""
        return self.machine.incarnation

    @property
    def peer_id(self) -> int:
        """The fabric's id of the peer, 0 until it is known."""
        return 0 if self.peer is None else self.peer.peer_id

    @property
    def layout(self) -> bytes | None:
        """What the peer's layout setting holds; opaque here."""
        return None if self.card is None else self.card.layout

    @property
    def fields(self) -> Mapping[str, str]:
        """The inputs of the peer's fingerprint, in words."""
        return {} if self.card is None else self.card.fields

    @property
    def visitor(self) -> bool:
        """Whether the peer only tries the way to us."""
        return self.card is not None and self.card.visitor

    @property
    def regions(self) -> Mapping[int, RegionRecord]:
        """The peer's memory as far as it is known here, by the peer's ids."""
        return _NOTHING if self.peer is None else self.peer.regions

    @property
    def usable(self) -> bool:
        """Whether jobs and messages make sense."""
        return self.state in (SessionState.READY, SessionState.SUSPECT)

    @property
    def over(self) -> bool:
        """Whether the session will never be ready again."""
        return self.state in (SessionState.DRAINING, SessionState.CLOSED, SessionState.REJECTED)

    def error(self) -> EfaKvError:
        """Why the session cannot be used, as an exception."""
        problem = self.problem
        if problem is not None:
            return problem
        reason = self.reason or "not connected"
        kind: type[PeerError] = {
            "restarted": PeerRestarted,
            "closed by the peer": PeerUnreachable,
        }.get(reason, PeerUnreachable)
        if self.state is SessionState.REJECTED:
            return PeerRefused(
                f"{self.session} does not fit: {reason}.", peer=self.session, reason=reason
            )
        return kind(f"The peer {self.session} cannot be used: {reason}.", peer=self.session)
