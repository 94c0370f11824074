"""The messages of a session, and the one decoder for all control messages.

    HELLO -> WELCOME | REJECT    one round trip: who I am, my NICs, my regions, my layout
    PING -> PONG                 heartbeat of a used session
    NOT_GREETED                  "say HELLO first": after a restart or a broken connection
    REGIONS_QUERY -> REGIONS     regions that came or went after the first contact
    BYE                          the sender closes

Regions, and the NICs' addresses, travel with an epoch that their owner counts up at each
change, so that a peer notices when it missed one.  The handoff's messages are in
`efa_kv.wire.handoff`, notes between users in `efa_kv.wire.notes`, a failed transfer's in
`efa_kv.wire.fence`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Union

import msgspec

from efa_kv.errors import LocalProtocolError, RemoteProtocolError
from efa_kv.types import U64, Incarnation, NicRecord, ProcessRecord, RegionRecord
from efa_kv.wire.envelope import HEADER_BYTES, MAX_MESSAGE_BYTES, Message, open_frame, seal
from efa_kv.wire.fence import FENCE_TYPES
from efa_kv.wire.handoff import HANDOFF_TYPES
from efa_kv.wire.notes import NOTE_TYPES
from efa_kv.wire.scratch import SCRATCH_TYPES


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine tells about itself when it greets or answers a greeting.

    ``regions`` may be cut short to fit the message (``complete`` is then false); the
    rest is fetched with REGIONS_QUERY.  ``fields`` are the fingerprint's inputs in words.
    ``gate`` is the descriptor in ``process`` through which processes of the same host get
    at the engine's memory, -1 if it has none.
    A ``visitor`` only tries the way: its fingerprint is not compared, and of what it sends
    beyond the session's own messages only `VISITOR_TYPES` are taken.
    """

    session: Annotated[str, msgspec.Meta(max_length=300)]
    incarnation: Incarnation
    process: ProcessRecord
    gate: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)] = -1
    nics: Annotated[tuple[NicRecord, ...], msgspec.Meta(max_length=256)]
    regions: tuple[RegionRecord, ...] = ()
    regions_epoch: U64 = 0
    complete: bool = True
    fingerprint: Annotated[bytes, msgspec.Meta(max_length=256)] = b""
    fields: dict[str, str] = msgspec.field(default_factory=dict)
    layout: bytes | None = None
    visitor: bool = False


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """First word to a peer; a ``probe`` asks who is at an address that somebody claims."""

    card: Card
    probe: bool = False


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """Answer to a HELLO; ``to`` is the incarnation that greeted."""

    to: U64
    card: Card


class Reject(Message, frozen=True, kw_only=True, tag="reject"):
    """Answer to a HELLO that is refused; ``reason`` is a code, ``text`` a sentence.

    ``fields`` are the refusing side's, so that both sides can log both values.
    """

    to: U64
    incarnation: U64
    reason: str
    text: str = ""
    fields: dict[str, str] = msgspec.field(default_factory=dict)


class Ping(Message, frozen=True, kw_only=True, tag="ping"):
    """Are you there?  Carries the regions epoch, so that a missed change is noticed."""

    incarnation: U64
    regions_epoch: U64 = 0


class Pong(Message, frozen=True, kw_only=True, tag="pong"):
    """Answer to a PING."""

    incarnation: U64
    regions_epoch: U64 = 0


class NotGreeted(Message, frozen=True, kw_only=True, tag="not_greeted"):
    """The sender of a message is unknown here; it should say HELLO (again)."""

    incarnation: U64


class Bye(Message, frozen=True, kw_only=True, tag="bye"):
    """The sender closes; nothing it published is valid any more."""

    incarnation: U64


class RegionsQuery(Message, frozen=True, kw_only=True, tag="regions_query"):
    """Asks for the regions with an id above ``after`` (0 for all), in order of id."""

    query: U64
    after: U64 = 0


class Regions(Message, frozen=True, kw_only=True, tag="regions"):
    """Regions of the sender.

    Answer to a query (``query`` is not 0): those above ``after``; ``complete`` says that no
    more follow.  Unasked (``query`` is 0): what changed between ``epoch - 1`` and ``epoch``.
    ``nics`` are all of the sender's, in the order of its card, when their addresses may
    have changed.
    """

    query: U64
    epoch: U64
    after: U64 = 0
    complete: bool = True
    regions: tuple[RegionRecord, ...] = ()
    removed: tuple[int, ...] = ()
    nics: Annotated[tuple[NicRecord, ...], msgspec.Meta(max_length=256)] = ()


SESSION_TYPES: Final[tuple[type[Message], ...]] = (
    Hello,
    Welcome,
    Reject,
    Ping,
    Pong,
    NotGreeted,
    Bye,
    RegionsQuery,
    Regions,
)
MESSAGE_TYPES: Final[tuple[type[Message], ...]] = (
    SESSION_TYPES + HANDOFF_TYPES + NOTE_TYPES + FENCE_TYPES + SCRATCH_TYPES
)
#: What handlers are told of a visitor.
VISITOR_TYPES: Final[tuple[type[Message], ...]] = SCRATCH_TYPES

_encoder = msgspec.msgpack.Encoder()
_any_message: Any = Union[MESSAGE_TYPES]  # noqa: UP007 - built from a tuple
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(_any_message)


def encode(message: Message, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """The frame for a message; raises `LocalProtocolError` when it is too large."""
    body = _encoder.encode(message)
    if len(body) + HEADER_BYTES > max_bytes:
        raise LocalProtocolError(
            f"found a {type(message).__name__} of {len(body) + HEADER_BYTES} bytes; "
            f"expected at most {max_bytes}."
        )
    return seal(body)


def decode(frame: bytes | memoryview, max_bytes: int = MAX_MESSAGE_BYTES) -> Message:
    """The message in a frame; raises `RemoteProtocolError` and nothing else."""
    body = open_frame(frame, max_bytes)
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError) as problem:
        raise RemoteProtocolError(f"found a message that cannot be read: {problem}.") from None


def fitting_regions(
    regions: tuple[RegionRecord, ...], budget_bytes: int
) -> tuple[tuple[RegionRecord, ...], bool]:
    """As many of ``regions`` as fit into ``budget_bytes``, and whether those are all."""
    used_bytes = 0
    for index, region in enumerate(regions):
        used_bytes += len(_encoder.encode(region))
        if used_bytes > budget_bytes:
            return regions[:index], False
    return regions, True
