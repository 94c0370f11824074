"""Words of the consumer's table: states, inputs, effects and the live records.

    PLANNED -> WAITING_PEER -> ASKED -> MOVING -> LANDED -> CONFIRMED
       |            |            |  \\     |          ^
       |            |            |   v    v          |
       |            |            |  ABORTING ------->|  (everything had landed already)
       |            |            |     |             |
       |            |            |     v             |
       |            |            |  QUARANTINED ---->+
       |            |            |     |
       v            v            v     v
     FAILED       FAILED       DRAINED ----> FAILED

LANDED and DRAINED are the fence: only behind them, or where no ask ever left, do the
blocks of a pull go back to the server.  All times are seconds of one monotonic clock.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

import msgspec

from efa_kv.wire.envelope import Message
from efa_kv.wire.handoff import Drained
from efa_kv.wire.machine import Move, Table


class State(enum.Enum):
    """Where a pull is; see the picture above."""

    PLANNED = "planned"
    WAITING_PEER = "waiting_peer"
    ASKED = "asked"
    MOVING = "moving"
    LANDED = "landed"
    CONFIRMED = "confirmed"
    ABORTING = "aborting"
    QUARANTINED = "quarantined"
    DRAINED = "drained"
    FAILED = "failed"


class Event(enum.Enum):
    """What can happen to a pull."""

    CONNECT = "connect"
    ASK = "ask"
    ACCEPTED = "accepted"
    AGAIN = "again"
    LANDED = "landed"
    CONFIRM = "confirm"
    ABORT = "abort"
    SILENT = "silent"
    DRAINED = "drained"
    FAIL = "fail"


_ASKED: Final = (State.ASKED, State.MOVING)
_UNSAFE: Final = (*_ASKED, State.ABORTING, State.QUARANTINED)

TABLE: Final[Table[State, Event]] = {
    (State.PLANNED, Event.CONNECT): Move(State.WAITING_PEER),
    (State.PLANNED, Event.FAIL): Move(State.FAILED),
    (State.WAITING_PEER, Event.ASK): Move(State.ASKED),
    (State.WAITING_PEER, Event.FAIL): Move(State.FAILED),
    (State.ASKED, Event.ACCEPTED): Move(State.MOVING),
    (State.MOVING, Event.ACCEPTED): Move(State.MOVING),
    (State.ABORTING, Event.ACCEPTED): Move(State.ABORTING),
    (State.QUARANTINED, Event.ACCEPTED): Move(State.QUARANTINED),
    (State.LANDED, Event.CONFIRM): Move(State.CONFIRMED),
    (State.DRAINED, Event.FAIL): Move(State.FAILED),
    (State.ABORTING, Event.ABORT): Move(State.ABORTING),
    (State.QUARANTINED, Event.ABORT): Move(State.QUARANTINED),
    (State.ABORTING, Event.SILENT): Move(State.QUARANTINED),
    (State.QUARANTINED, Event.AGAIN): Move(State.ASKED),
    **{(state, Event.AGAIN): Move(State.ASKED) for state in _ASKED},
    **{(state, Event.ABORT): Move(State.ABORTING) for state in _ASKED},
    **{(state, Event.SILENT): Move(State.QUARANTINED) for state in _ASKED},
    **{(state, Event.LANDED): Move(State.LANDED) for state in _UNSAFE},
    **{(state, Event.DRAINED): Move(State.DRAINED) for state in _UNSAFE},
}


class PullRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be fetched, and into which blocks.

    ``pull_id`` is even and counts up for the life of the engine; the odd number behind
    it names a release that the pull may cause.  ``address`` is opaque here: what
    the owner connects to.  ``block_ids`` is packed as in `Ask`, with entry 0 for token 0;
    ``block_count`` is how many blocks of this side the pull may write.
    """

    pull_id: int
    address: str
    transfer_id: str
    remote_request_id: str
    engine_id: str
    generation: int
    early: bool
    first_token: int
    token_count: int
    block_ids: tuple[bytes, ...]
    block_count: int
    prompt_digest: bytes = b""


class Connect(msgspec.Struct, frozen=True):
    """Find the peer at this address and say `peer_ready` or `peer_failed`."""

    address: str


class Tell(msgspec.Struct, frozen=True):
    """Say this to the engine with this incarnation."""

    peer: int
    message: Message


class Watch(msgspec.Struct, frozen=True):
    """From now on a notice for this pull is good if it comes from this incarnation."""

    pull_id: int
    peer: int


class Done(msgspec.Struct, frozen=True):
    """A pull ended and its blocks are the server's; ``reason`` is empty for success."""

    pull_id: int
    reason: str
    text: str = ""
    bytes: int = 0


class Doomed(msgspec.Struct, frozen=True):
    """A pull cannot succeed any more, but its blocks are not safe yet: `Done` follows."""

    pull_id: int
    reason: str
    text: str


class Rotate(msgspec.Struct, frozen=True):
    """Change the keys of all regions so that nothing that was asked for before can land any
    more, then say `rotated`; these pulls wait for it."""

    pull_ids: frozenset[int]


Effect = Connect | Tell | Watch | Done | Doomed | Rotate


@dataclass(slots=True)
class Pull:
    """A pull and how far it got.

    ``peer`` is the incarnation that was asked.  ``heard`` is the last sign of life,
    ``send_at`` when the next message is due, ``since`` when quarantine began.
    ``asked_epoch`` is that of the newest keys it was asked with.  ``needs_keys``: nobody
    but ourselves can fence it any more; ``stray`` is the answer that said so, if one did.
    ``reason`` is set once it cannot succeed any more.
    """

    request: PullRequest
    state: State
    heard: float
    send_at: float
    peer: int = 0
    attempt: int = 0
    sent: int = 0
    since: float = 0.0
    asked_epoch: int = 0
    needs_keys: bool = False
    stray: Drained | None = None
    reason: str = ""
    text: str = ""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a consumer; times in seconds.

    ``quarantine_blocks`` is how many blocks may wait for silent peers before the keys
    are changed.
    """

    transfer_timeout_s: float
    pulls: int
    quarantine_blocks: int


class Counts(msgspec.Struct, kw_only=True):
    """What happened since the table was made."""

    received: int = 0
    bytes: int = 0
    quarantined: int = 0
    rotations: int = 0
    asked_again: int = 0
    failed: dict[str, int] = msgspec.field(default_factory=dict)
