"""Scratch memory: what a running engine lends to somebody who wants to try the way to it.

    SCRATCH_ASK -> SCRATCH_LENT       a region made for the occasion, for a limited time
    SCRATCH_ASK -> SCRATCH_REFUSED    none is to be had; the text says why
    SCRATCH_RETURN                    the borrower is done with it

A check of a live server must write somewhere and must touch nothing of the server's, so the
server makes a region that holds nothing.  One is lent at a time; it is taken back when it is
returned, when the borrower's session ends and when its time is up.  Taking it back withdraws its
keys first, so that a late write is refused and never lands in memory that serves something else.

`ScratchDesk` is the lender's side: a pure table, time is an argument.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from efa_kv.types import U64, RegionRecord
from efa_kv.wire.envelope import Message
from efa_kv.wire.machine import Move, look_up

#: Longest loan in seconds, whatever is asked for.
LOAN_LIMIT_S: Final = 60.0
#: Longest text of a refusal in characters.
TEXT_CHARACTERS_LIMIT: Final = 1024


class ScratchAsk(Message, frozen=True, kw_only=True, tag="scratch_ask"):
    """Please lend ``length_bytes`` for ``loan_s``; sent again until it is answered.

    ``number`` tells the borrower's asks apart.
    """

    number: U64
    length_bytes: Annotated[int, Meta(ge=1, le=1 << 40)]
    loan_s: Annotated[float, Meta(gt=0, le=LOAN_LIMIT_S)]


class ScratchLent(Message, frozen=True, kw_only=True, tag="scratch_lent"):
    """The region that was made for ask ``number``."""

    number: U64
    region: RegionRecord


class ScratchRefused(Message, frozen=True, kw_only=True, tag="scratch_refused"):
    """Nothing is lent for ask ``number``."""

    number: U64
    text: Annotated[str, Meta(max_length=TEXT_CHARACTERS_LIMIT)]


class ScratchReturn(Message, frozen=True, kw_only=True, tag="scratch_return"):
    """What was lent for ask ``number`` is not needed any more."""

    number: U64


SCRATCH_TYPES: Final[tuple[type[Message], ...]] = (
    ScratchAsk,
    ScratchLent,
    ScratchRefused,
    ScratchReturn,
)


class Tell(msgspec.Struct, frozen=True):
    """Send ``message`` to the peer of this incarnation."""

    peer: int
    message: Message


class Prepare(msgspec.Struct, frozen=True):
    """Make a region; then call `ScratchDesk.prepared` or `ScratchDesk.failed`."""

    length_bytes: int


class TakeBack(msgspec.Struct, frozen=True):
    """Withdraw the region; then call `ScratchDesk.withdrawn`."""


Effect = Tell | Prepare | TakeBack


class _State(enum.Enum):
    FREE = "free"
    PREPARING = "preparing"
    UNWANTED = "unwanted"  # still being prepared, but nobody waits for it any more
    LENT = "lent"
    WITHDRAWING = "withdrawing"


class _Event(enum.Enum):
    ASKED = "asked"
    PREPARED = "prepared"
    FAILED = "failed"
    ENDED = "ended"
    WITHDRAWN = "withdrawn"


_TABLE: Final[Mapping[tuple[_State, _Event], Move[_State]]] = MappingProxyType(
    {
        (_State.FREE, _Event.ASKED): Move(_State.PREPARING, ("prepare",)),
        (_State.PREPARING, _Event.PREPARED): Move(_State.LENT, ("lend",)),
        (_State.PREPARING, _Event.FAILED): Move(_State.FREE, ("refuse",)),
        (_State.PREPARING, _Event.ENDED): Move(_State.UNWANTED),
        (_State.UNWANTED, _Event.PREPARED): Move(_State.WITHDRAWING, ("take_back",)),
        (_State.UNWANTED, _Event.FAILED): Move(_State.FREE),
        (_State.LENT, _Event.ENDED): Move(_State.WITHDRAWING, ("take_back",)),
        (_State.WITHDRAWING, _Event.WITHDRAWN): Move(_State.FREE),
    }
)


class ScratchDesk:
    """Lends one region at a time, of at most ``limit_bytes``; 0 lends none.

    Every method returns what is to be done.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._state = _State.FREE
        self._borrower: tuple[int, int] | None = None
        self._region: RegionRecord | None = None
        self._until = 0.0

    @property
    def busy(self) -> bool:
        """Whether a region exists or is being made."""
        return self._state is not _State.FREE

    def asked(self, peer: int, ask: ScratchAsk, now: float) -> list[Effect]:
        """The peer of incarnation ``peer`` asks; a repeated ask is answered again."""
        if self._borrower == (peer, ask.number):
            return self._lend() if self._state is _State.LENT else []
        text = ""
        if ask.length_bytes > self._limit_bytes:
            text = f"asked for {ask.length_bytes} bytes, lends at most {self._limit_bytes}"
        elif self.busy:
            text = "lends scratch memory to somebody else at the moment"
        if text:
            return [Tell(peer, ScratchRefused(number=ask.number, text=text))]
        self._borrower = (peer, ask.number)
        self._until = now + min(ask.loan_s, LOAN_LIMIT_S)
        return self._step(_Event.ASKED, length_bytes=ask.length_bytes)

    def prepared(self, region: RegionRecord) -> list[Effect]:
        """The region is registered."""
        self._region = region
        return self._step(_Event.PREPARED)

    def failed(self, text: str) -> list[Effect]:
        """The region cannot be made."""
        return self._step(_Event.FAILED, text=text)

    def returned(self, peer: int, number: int) -> list[Effect]:
        """A borrower is done; of no interest when it has nothing (any more)."""
        return self._end() if self._borrower == (peer, number) else []

    def peer_gone(self, peer: int) -> list[Effect]:
        """The peer's session is over."""
        return self._end() if self._borrower and self._borrower[0] == peer else []

    def on_timer(self, now: float) -> list[Effect]:
        """The loan's time may be up."""
        return self._end() if self._borrower and now >= self._until else []

    def next_deadline(self) -> float | None:
        """When to call `on_timer`."""
        return self._until if self._borrower else None

    def withdrawn(self) -> list[Effect]:
        """The region's keys are gone and its memory may go too."""
        return self._step(_Event.WITHDRAWN)

    def _end(self) -> list[Effect]:
        effects = self._step(_Event.ENDED)
        self._borrower = None
        return effects

    def _step(self, event: _Event, *, length_bytes: int = 0, text: str = "") -> list[Effect]:
        move = look_up("scratch desk", _TABLE, self._state, event)
        self._state = move.state
        effects: list[Effect] = []
        for action in move.actions:
            match action:
                case "prepare":
                    effects.append(Prepare(length_bytes))
                case "lend":
                    effects += self._lend()
                case "refuse":
                    effects += self._refuse(text)
                case "take_back":
                    effects.append(TakeBack())
        return effects

    def _lend(self) -> list[Effect]:
        assert self._borrower is not None
        assert self._region is not None
        peer, number = self._borrower
        return [Tell(peer, ScratchLent(number=number, region=self._region))]

    def _refuse(self, text: str) -> list[Effect]:
        assert self._borrower is not None
        (peer, number), self._borrower = self._borrower, None
        return [Tell(peer, ScratchRefused(number=number, text=text[:TEXT_CHARACTERS_LIMIT]))]
