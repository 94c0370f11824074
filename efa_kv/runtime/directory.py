"""Which session leads to which incarnation of a peer. Owner: the control thread."""

from __future__ import annotations

from efa_kv.runtime.handle import SessionHandle


class Directory:
    """Sessions of the peers that handoffs deal with.

    A peer that was dialled under two names has two sessions; it is gone when the last of
    them is over.
    """

    def __init__(self) -> None:
        self._sessions: dict[int, list[SessionHandle]] = {}

    def note(self, session: SessionHandle) -> None:
        """The session is usable."""
        known = self._sessions.setdefault(session.incarnation, [])
        if session not in known:
            known.append(session)

    def forget(self, session: SessionHandle) -> bool:
        """The session is over; True when its peer was known and has no other."""
        known = self._sessions.get(session.incarnation)
        if known is None or session not in known:
            return False
        known.remove(session)
        if known:
            return False
        del self._sessions[session.incarnation]
        return True

    def find(self, incarnation: int) -> SessionHandle | None:
        """A usable session with this incarnation, the one heard of last first."""
        for session in reversed(self._sessions.get(incarnation, ())):
            if session.usable:
                return session
        return None

    def __len__(self) -> int:
        return len(self._sessions)
