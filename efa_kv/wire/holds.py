"""Words of the producer's table: states, inputs, effects and the live records.

    HELD -> OFFERED -> MOVING -> DRAINED -> RELEASED
      |        |          |         ^  |
      v        v          v         |  +--> HELD again, if the consumer may try once more
      EXPIRED, ABORTED, FAILED -----+

All times are seconds of one monotonic clock.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from efa_kv.types import U32Array
from efa_kv.wire.envelope import Message
from efa_kv.wire.handoff import Ask, Release
from efa_kv.wire.machine import Move, Table
from efa_kv.wire.memory import PullKey


class State(enum.Enum):
    """Where a hold is; see the picture above."""

    HELD = "held"
    OFFERED = "offered"
    MOVING = "moving"
    EXPIRED = "expired"
    ABORTED = "aborted"
    FAILED = "failed"
    DRAINED = "drained"
    RELEASED = "released"


class Event(enum.Enum):
    """What can happen to a hold."""

    ASK = "ask"
    POST = "post"
    UNPOSTED = "unposted"
    LANDED = "landed"
    FAIL = "fail"
    ABORT = "abort"
    EXPIRE = "expire"
    DECLINE = "decline"
    SETTLE = "settle"
    REOFFER = "reoffer"
    RELEASE = "release"


TABLE: Final[Table[State, Event]] = {
    (State.HELD, Event.ASK): Move(State.OFFERED),
    (State.HELD, Event.EXPIRE): Move(State.EXPIRED),
    (State.HELD, Event.ABORT): Move(State.ABORTED),
    (State.HELD, Event.DECLINE): Move(State.DRAINED),
    (State.OFFERED, Event.POST): Move(State.MOVING),
    (State.OFFERED, Event.UNPOSTED): Move(State.HELD),
    (State.OFFERED, Event.LANDED): Move(State.DRAINED),
    (State.OFFERED, Event.FAIL): Move(State.FAILED),
    (State.OFFERED, Event.ABORT): Move(State.ABORTED),
    (State.MOVING, Event.POST): Move(State.MOVING),
    (State.MOVING, Event.LANDED): Move(State.DRAINED),
    (State.MOVING, Event.FAIL): Move(State.FAILED),
    (State.MOVING, Event.ABORT): Move(State.ABORTED),
    (State.FAILED, Event.FAIL): Move(State.FAILED),
    (State.FAILED, Event.ABORT): Move(State.ABORTED),
    (State.FAILED, Event.SETTLE): Move(State.DRAINED),
    (State.ABORTED, Event.FAIL): Move(State.ABORTED),
    (State.ABORTED, Event.ABORT): Move(State.ABORTED),
    (State.ABORTED, Event.SETTLE): Move(State.DRAINED),
    (State.EXPIRED, Event.SETTLE): Move(State.DRAINED),
    (State.DRAINED, Event.REOFFER): Move(State.HELD),
    (State.DRAINED, Event.RELEASE): Move(State.RELEASED),
}


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that a finished prefill leaves for a consumer.

    ``block_ids`` holds one uint32 block table per group, entry 0 for token 0; the tokens
    ``[0, token_count)`` have KV.  ``computed`` says whether the compute that wrote the
    blocks is complete (None: it is); it is called on the control thread until it returns
    true, and nothing is posted before.  ``prompt_digest`` names the prompt (and adapter,
    images, ...); when both sides give one, they must be equal.
    """

    transfer_id: str
    request_id: str
    generation: int
    token_count: int
    block_ids: tuple[U32Array, ...]
    computed: Callable[[], bool] | None = None
    prompt_digest: bytes = b""


class Send(msgspec.Struct, frozen=True):
    """Say this to the engine with this incarnation."""

    peer: int
    message: Message


class Post(msgspec.Struct, frozen=True):
    """Write the tokens ``[first_token, first_token + token_count)`` of a hold.

    The owner answers with `ProducerTable.posted` or `ProducerTable.unposted`, once the
    compute is complete and only while `ProducerTable.is_current`.
    """

    hold_id: int
    peer: int
    ask: Ask
    hold: Hold
    first_token: int
    token_count: int


class PostNotice(msgspec.Struct, frozen=True):
    """Every byte of this pull has landed: send the bare notice."""

    peer: int
    pull_id: int
    generation: int


class Cancel(msgspec.Struct, frozen=True):
    """Stop these jobs; their settling is still to be reported."""

    jobs: tuple[int, ...]


class Sent(msgspec.Struct, frozen=True):
    """The request's blocks may go; ``reason`` is empty when they were delivered."""

    request_id: str
    reason: str
    bytes: int = 0


Effect = Send | Post | PostNotice | Cancel | Sent


@dataclass(slots=True)
class Offer:
    """What an ask made of a hold.

    ``posts`` counts `Post` effects not answered yet (``deadline`` is for the last of
    them), ``jobs`` are those not fenced yet.  ``unsettled``: the consumer was told that
    this cannot succeed.  ``stray``: as in `Drained`.
    """

    peer: int
    ask: Ask
    next_token: int
    deadline: float = 0.0
    posts: int = 0
    jobs: set[int] = field(default_factory=set)
    bytes: int = 0
    all_posted: bool = False
    noticed: bool = False
    unsettled: bool = False
    stray: bool = False

    def quiet(self) -> bool:
        """Whether everything asked of the owner was done and has settled."""
        return not self.posts and not self.jobs

    def waits_too_long(self, now: float) -> bool:
        """Whether the compute behind a `Post` did not complete in time."""
        return self.posts > 0 and self.deadline <= now


@dataclass(slots=True)
class Handoff:
    """A hold and how far it got.

    ``final`` is false while prefill still adds tokens; until then the blocks are the
    server's own and ``reason`` of a failed one waits for `ProducerTable.hold`.
    ``kept_for``: the pull that failed and may ask again.
    """

    hold_id: int
    hold: Hold
    state: State
    lease_until: float
    final: bool = True
    offer: Offer | None = None
    reason: str = ""
    text: str = ""
    kept_for: PullKey | None = None


@dataclass(slots=True)
class Parked:
    """An ask or a release that came before its hold."""

    peer: int
    message: Ask | Release
    until: float


@dataclass(slots=True)
class Transfer:
    """The live holds of one transfer id: siblings of one parent request.

    ``expected`` maps requests still being computed to their generation.  ``ambiguous``:
    another parent claimed the id, so only an exact request id or prompt decides.
    """

    parent: str
    hold_ids: list[int] = field(default_factory=list)
    expected: dict[str, int] = field(default_factory=dict)
    ambiguous: bool = False


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a producer.

    ``granularity_tokens`` is the largest block size of the cache: a growing hold is
    written in multiples of it.
    """

    lease_s: float
    unsolicited_s: float
    handoffs: int
    granularity_tokens: int = 1


class Counts(msgspec.Struct, kw_only=True):
    """What happened since the table was made."""

    held: int = 0
    delivered: int = 0
    bytes: int = 0
    expired: int = 0
    aborted: int = 0
    failed: int = 0
    collisions: int = 0
    parked: int = 0
    landed: int = 0
    refused: dict[str, int] = msgspec.field(default_factory=dict)
