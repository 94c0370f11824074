"""The state machine of a session: this engine's view of one incarnation of a peer.

Rules of this file:
1. All transitions are in `TABLE`; a pair that is missing there is a bug here.
2. The machine doesn't know which side greeted first; crossing greetings end READY on
   both sides.
3. A peer's incarnation never changes during a machine's life.  Another incarnation at
   the same address retires this machine (`Succeed`) and begins a new one.  While the
   known one is alive a stranger's greeting is not believed: the peer's own address is
   asked first (`Probe`), so a forged or late greeting cannot retire a live session.
4. Inputs take ``now`` (monotonic seconds) and return effects; nothing else happens.

    IDLE -> GREETING -> READY <-> SUSPECT -> DRAINING -> CLOSED, or REJECTED
"""

from __future__ import annotations

import enum
from typing import Final, Literal

import msgspec

from efa_kv.wire.machine import Move, Table, look_up
from efa_kv.wire.messages import Card


class SessionState(enum.Enum):
    """Where a session stands; DRAINING, CLOSED and REJECTED are of no use any more."""

    IDLE = "idle"
    GREETING = "greeting"
    READY = "ready"
    SUSPECT = "suspect"
    DRAINING = "draining"
    CLOSED = "closed"
    REJECTED = "rejected"


class SessionEvent(enum.Enum):
    """What can happen to a session."""

    CONNECT = "someone here wants the peer"
    GREETED = "a first greeting from the peer"
    GREETED_AGAIN = "another greeting of the incarnation we know"
    STRANGER = "a greeting of another incarnation, not verified"
    ASKED = "another incarnation, not verified, asks who is here"
    WELCOMED = "the first answer to our greeting"
    WELCOMED_AGAIN = "another answer of the incarnation we know"
    REPLACED = "another incarnation answered at the peer's address"
    MISFIT = "the peer's card does not fit ours"
    REFUSED = "the peer refused our greeting"
    HEARD = "any other message of the peer"
    FORGOTTEN = "the peer does not know us"
    PARTED = "the peer closes"
    SILENCE = "no sign of life for too long"
    TICK = "time to say something"
    EXPIRED = "time is up"
    CLOSE = "closed from here"
    SETTLED = "no job with the peer is left"


_I, _G, _R, _S, _D, _C, _J = SessionState
_ANNOUNCE: Final = "announce"
_RETIRE: Final = ("remove_peer", _ANNOUNCE)

_MOVES: Final[Table[SessionState, SessionEvent]] = {
    (_I, SessionEvent.CONNECT): Move(_G, ("send_hello",)),
    (_I, SessionEvent.GREETED): Move(_R, ("add_peer", "send_welcome", _ANNOUNCE)),
    (_I, SessionEvent.MISFIT): Move(_J, ("send_reject", _ANNOUNCE)),
    (_I, SessionEvent.CLOSE): Move(_C, (_ANNOUNCE,)),
    (_G, SessionEvent.CONNECT): Move(_G),
    (_G, SessionEvent.TICK): Move(_G, ("send_hello",)),
    (_G, SessionEvent.EXPIRED): Move(_C, (_ANNOUNCE,)),
    (_G, SessionEvent.GREETED): Move(_R, ("add_peer", "send_welcome", _ANNOUNCE)),
    (_G, SessionEvent.WELCOMED): Move(_R, ("add_peer", _ANNOUNCE)),
    (_G, SessionEvent.MISFIT): Move(_J, ("send_reject", _ANNOUNCE)),
    (_G, SessionEvent.REFUSED): Move(_J, (_ANNOUNCE,)),
    (_G, SessionEvent.HEARD): Move(_G),
    (_G, SessionEvent.FORGOTTEN): Move(_G),
    (_G, SessionEvent.PARTED): Move(_G),
    (_G, SessionEvent.CLOSE): Move(_C, (_ANNOUNCE,)),
    (_R, SessionEvent.CONNECT): Move(_R),
    (_R, SessionEvent.GREETED_AGAIN): Move(_R, ("send_welcome",)),
    (_R, SessionEvent.WELCOMED_AGAIN): Move(_R),
    (_R, SessionEvent.STRANGER): Move(_R, ("probe",)),
    (_R, SessionEvent.ASKED): Move(_R, ("send_welcome", "probe")),
    (_R, SessionEvent.REPLACED): Move(_D, (*_RETIRE, "succeed")),
    (_R, SessionEvent.MISFIT): Move(_D, (*_RETIRE, "send_reject")),
    (_R, SessionEvent.REFUSED): Move(_D, _RETIRE),
    (_R, SessionEvent.HEARD): Move(_R),
    (_R, SessionEvent.FORGOTTEN): Move(_R, ("send_hello",)),
    (_R, SessionEvent.PARTED): Move(_D, _RETIRE),
    (_R, SessionEvent.SILENCE): Move(_S, (_ANNOUNCE,)),
    (_R, SessionEvent.TICK): Move(_R, ("send_ping",)),
    (_R, SessionEvent.CLOSE): Move(_D, ("send_bye", *_RETIRE)),
    (_S, SessionEvent.CONNECT): Move(_S, ("send_ping",)),
    (_S, SessionEvent.GREETED_AGAIN): Move(_R, ("send_welcome", _ANNOUNCE)),
    (_S, SessionEvent.WELCOMED_AGAIN): Move(_R, (_ANNOUNCE,)),
    (_S, SessionEvent.STRANGER): Move(_D, (*_RETIRE, "succeed")),
    (_S, SessionEvent.ASKED): Move(_D, (*_RETIRE, "succeed")),
    (_S, SessionEvent.REPLACED): Move(_D, (*_RETIRE, "succeed")),
    (_S, SessionEvent.MISFIT): Move(_D, (*_RETIRE, "send_reject")),
    (_S, SessionEvent.REFUSED): Move(_D, _RETIRE),
    (_S, SessionEvent.HEARD): Move(_R, (_ANNOUNCE,)),
    (_S, SessionEvent.FORGOTTEN): Move(_S, ("send_hello",)),
    (_S, SessionEvent.PARTED): Move(_D, _RETIRE),
    (_S, SessionEvent.TICK): Move(_S, ("send_ping",)),
    (_S, SessionEvent.EXPIRED): Move(_D, _RETIRE),
    (_S, SessionEvent.CLOSE): Move(_D, ("send_bye", *_RETIRE)),
    (_D, SessionEvent.SETTLED): Move(_C, (_ANNOUNCE,)),
    (_J, SessionEvent.CONNECT): Move(_J),
    (_J, SessionEvent.MISFIT): Move(_J, ("send_reject",)),
    (_J, SessionEvent.REFUSED): Move(_J),
    (_J, SessionEvent.EXPIRED): Move(_C, (_ANNOUNCE,)),
    (_J, SessionEvent.CLOSE): Move(_C, (_ANNOUNCE,)),
}
# Messages can arrive late, twice or out of order, so they may find the session in any
# of its last states; they must not move it.
_MESSAGE_EVENTS: Final = (
    SessionEvent.GREETED,
    SessionEvent.GREETED_AGAIN,
    SessionEvent.STRANGER,
    SessionEvent.ASKED,
    SessionEvent.WELCOMED,
    SessionEvent.WELCOMED_AGAIN,
    SessionEvent.REPLACED,
    SessionEvent.MISFIT,
    SessionEvent.REFUSED,
    SessionEvent.HEARD,
    SessionEvent.FORGOTTEN,
    SessionEvent.PARTED,
    SessionEvent.CONNECT,
    SessionEvent.CLOSE,
)
TABLE: Final[Table[SessionState, SessionEvent]] = {
    **{(state, event): Move(state) for state in (_D, _C, _J) for event in _MESSAGE_EVENTS},
    **_MOVES,
}

MessageKind = Literal["hello", "welcome", "reject", "not_greeted", "ping", "pong", "bye"]


class Send(msgspec.Struct, frozen=True):
    """Send a message of this kind; to the source of the input when it is an answer."""

    kind: MessageKind
    answer: bool = False
    reason: str = ""


class AddPeer(msgspec.Struct, frozen=True):
    """Make the peer of this card known to the fabric."""

    card: Card


class RemovePeer(msgspec.Struct, frozen=True):
    """Retire the peer in the fabric: its jobs settle, new ones are refused."""


class Announce(msgspec.Struct, frozen=True):
    """Tell everybody who waits or watches that the session reached ``state``."""

    state: SessionState
    reason: str | None


class Probe(msgspec.Struct, frozen=True):
    """Ask the peer's own address who is there: send HELLO over a connection made from here."""


class Succeed(msgspec.Struct, frozen=True):
    """Begin a new session with this card at the same address."""

    card: Card


Effect = Send | AddPeer | RemovePeer | Announce | Probe | Succeed


class SessionTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The durations a session lives by; see the settings of the same names."""

    handshake_timeout_s: float = 5.0
    heartbeat_interval_s: float = 1.0
    suspect_after_s: float = 3.0
    idle_after_s: float = 10.0
    forget_after_s: float = 120.0
    hello_again_s: float = 0.5


class SessionMachine:
    """One session.  Not thread-safe; the owner calls it from one thread.

    ``incarnation`` is the peer's, 0 until it is known; ``reason`` says why the session is
    of no use any more.
    """

    def __init__(self, address: str, own_incarnation: int, times: SessionTimes) -> None:
        self.address = address
        self.state = SessionState.IDLE
        self.incarnation = 0
        self.reason: str | None = None
        self._own_incarnation = own_incarnation
        self._times = times
        self._since = 0.0
        self._heard_at = 0.0
        self._used_at = 0.0
        self._spoke_at = 0.0

    # ---- inputs ---------------------------------------------------------------------

    def connect(self, now: float) -> list[Effect]:
        """Someone here wants to use the peer."""
        self.use(now)
        return self._step(SessionEvent.CONNECT, now)

    def use(self, now: float) -> None:
        """Note traffic other than heartbeats: the peer is watched while it is used."""
        if now - self._used_at > self._times.idle_after_s:
            self._heard_at = max(self._heard_at, now)  # silence counts from here on
        self._used_at = max(self._used_at, now)

    @property
    def used_at(self) -> float:
        """When the session was last used for more than heartbeats."""
        return self._used_at

    def hello(
        self, card: Card, now: float, misfit: str | None = None, probe: bool = False
    ) -> list[Effect]:
        """The peer greets; ``misfit`` says why its card does not fit ours.

        A ``probe`` asks who is at this address because somebody else was known there.
        It is answered even when we know somebody else there: two engines that each know
        only the other's predecessor would answer each other's questions with questions.
        """
        if misfit is not None:
            if self.incarnation not in (0, card.incarnation) and self.state is SessionState.READY:
                # Not verified to be our peer: it is refused, and the live session stays.
                return [Send("reject", answer=True, reason=misfit)]
            return self._step(SessionEvent.MISFIT, now, reason=misfit)
        if self.incarnation == 0:
            return self._step(SessionEvent.GREETED, now, card=card)
        if card.incarnation == self.incarnation:
            return self._heard(SessionEvent.GREETED_AGAIN, now)
        event = SessionEvent.ASKED if probe else SessionEvent.STRANGER
        return self._step(event, now, card=card, reason="restarted")

    def welcome(self, card: Card, to: int, now: float, misfit: str | None = None) -> list[Effect]:
        """The peer answers our greeting."""
        if to != self._own_incarnation:
            return []  # meant for an engine that was here before
        if misfit is not None:
            return self._step(SessionEvent.MISFIT, now, reason=misfit)
        if self.incarnation == 0:
            return self._step(SessionEvent.WELCOMED, now, card=card)
        if card.incarnation == self.incarnation:
            return self._heard(SessionEvent.WELCOMED_AGAIN, now)
        return self._step(SessionEvent.REPLACED, now, card=card, reason="restarted")

    def reject(self, to: int, reason: str, now: float) -> list[Effect]:
        """The peer refuses our greeting."""
        if to != self._own_incarnation:
            return []
        return self._step(SessionEvent.REFUSED, now, reason=reason)

    def ping(self, incarnation: int, now: float) -> list[Effect]:
        """A heartbeat of the peer; another incarnation than we know is told to greet."""
        if incarnation != self.incarnation:
            return [Send("not_greeted", answer=True)]
        effects = self._heard(SessionEvent.HEARD, now)
        if self.state in (SessionState.READY, SessionState.SUSPECT):
            effects.append(Send("pong", answer=True))
        return effects

    def heard(self, now: float, incarnation: int | None = None) -> list[Effect]:
        """Any other message of the peer (a PONG gives its incarnation)."""
        if incarnation is not None and incarnation != self.incarnation:
            return []
        return self._heard(SessionEvent.HEARD, now)

    def not_greeted(self, now: float) -> list[Effect]:
        """The peer's process does not know us: it restarted, or a connection was renewed."""
        return self._step(SessionEvent.FORGOTTEN, now)

    def bye(self, incarnation: int, now: float) -> list[Effect]:
        """The peer closes."""
        if incarnation != self.incarnation:
            return []
        return self._step(SessionEvent.PARTED, now, reason="closed by the peer")

    def close(self, now: float, reason: str = "closed") -> list[Effect]:
        """Closed from here."""
        return self._step(SessionEvent.CLOSE, now, reason=reason)

    def settled(self, now: float) -> list[Effect]:
        """The last job with a DRAINING peer has settled."""
        return self._step(SessionEvent.SETTLED, now)

    def on_timer(self, now: float) -> list[Effect]:
        """Time has passed; call it at `next_timer` at the latest."""
        times = self._times
        if self.state is SessionState.GREETING:
            if now >= self._since + times.handshake_timeout_s:
                return self._step(SessionEvent.EXPIRED, now, reason="no answer")
            if now >= self._spoke_at + times.hello_again_s:
                return self._step(SessionEvent.TICK, now)
        elif self.state is SessionState.READY:
            if not self._is_watched(now):
                return []
            if now >= self._heard_at + times.suspect_after_s:
                return self._step(SessionEvent.SILENCE, now, reason="silent")
            if now >= self._ping_at():
                return self._step(SessionEvent.TICK, now)
        elif self.state is SessionState.SUSPECT:
            if now >= self._since + times.forget_after_s:
                return self._step(SessionEvent.EXPIRED, now, reason="silent for too long")
            if now >= self._spoke_at + times.heartbeat_interval_s:
                return self._step(SessionEvent.TICK, now)
        elif self.state is SessionState.REJECTED and now >= self._since + times.handshake_timeout_s:
            return self._step(SessionEvent.EXPIRED, now)
        return []

    def next_timer(self, now: float) -> float | None:
        """When `on_timer` wants to be called, or None."""
        times = self._times
        if self.state is SessionState.GREETING:
            return min(
                self._since + times.handshake_timeout_s, self._spoke_at + times.hello_again_s
            )
        if self.state is SessionState.READY:
            if not self._is_watched(now):
                return None
            return min(self._heard_at + times.suspect_after_s, self._ping_at())
        if self.state is SessionState.SUSPECT:
            return min(
                self._since + times.forget_after_s, self._spoke_at + times.heartbeat_interval_s
            )
        if self.state is SessionState.REJECTED:
            return self._since + times.handshake_timeout_s
        return None

    # ---- inside ---------------------------------------------------------------------

    def _ping_at(self) -> float:
        """Who was heard just now need not be asked; so one of the two sides asks, not both."""
        return max(self._heard_at, self._spoke_at) + self._times.heartbeat_interval_s

    def _is_watched(self, now: float) -> bool:
        return now - self._used_at <= self._times.idle_after_s

    def _heard(self, event: SessionEvent, now: float) -> list[Effect]:
        self._heard_at = max(self._heard_at, now)
        return self._step(event, now)

    def _step(
        self, event: SessionEvent, now: float, card: Card | None = None, reason: str | None = None
    ) -> list[Effect]:
        move = look_up(f"session {self.address}", TABLE, self.state, event)
        if move.state is not self.state:
            self._since = now
            self.state = move.state
            if reason is not None or move.state is SessionState.READY:
                self.reason = reason
        effects: list[Effect] = []
        for action in move.actions:
            effects.append(self._act(action, now, card, reason))
        return effects

    def _act(self, action: str, now: float, card: Card | None, reason: str | None) -> Effect:
        match action:
            case "send_hello" | "send_ping":
                self._spoke_at = now
                return Send("hello" if action == "send_hello" else "ping")
            case "send_welcome":
                return Send("welcome", answer=True)
            case "send_reject":
                return Send("reject", answer=True, reason=reason or "")
            case "send_bye":
                return Send("bye")
            case "add_peer":
                assert card is not None
                self.incarnation = card.incarnation
                self._heard_at = self._spoke_at = now
                self._used_at = max(self._used_at, now)
                return AddPeer(card)
            case "remove_peer":
                return RemovePeer()
            case "probe":
                return Probe()
            case "succeed":
                assert card is not None
                return Succeed(card)
            case _:
                return Announce(self.state, self.reason)
