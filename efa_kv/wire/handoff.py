"""The messages of a handoff, between a consumer (decode) and a producer (prefill).

    ASK -> ACCEPTED, then DRAINED    the consumer names its blocks; the producer writes them
    ASK -> REFUSED                   nothing was written and nothing will be, for this ask
    ABORT -> DRAINED                 stop; always answered, also for an unknown pull
    RELEASE -> DRAINED               nothing is wanted; the producer's blocks may go
    UNSETTLED                        a write failed, but can still land: DRAINED follows
    RENEW                            the consumer still means to ask: extend the lease
    LANDED                           for the record: the consumer has everything

Everything the consumer sends is idempotent by (its incarnation, pull id, attempt) and
is sent again until it is answered.  REFUSED and DRAINED are promises about memory: for
that pull and attempt the producer has no operation left that could move a byte, and
will post none.  They are the only messages after which the consumer may reuse its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import numpy as np
from msgspec import Meta

from efa_kv.types import U32Array
from efa_kv.wire.envelope import Message

#: Most block tables in one ask, most ids in one renewal, longest id in characters.
GROUPS_LIMIT: Final = 64
RENEWALS_LIMIT: Final = 1024
ID_CHARACTERS_LIMIT: Final = 512

Id = Annotated[str, Meta(max_length=ID_CHARACTERS_LIMIT)]
Unsigned = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Seconds = Annotated[float, Meta(gt=0, le=86400)]
Digest = Annotated[bytes, Meta(max_length=64)]


class Reason:
    """Codes that say why a handoff did not happen; the same on both sides."""

    UNKNOWN: Final = "unknown"  # never heard of, or forgotten long ago
    CONSUMED: Final = "consumed"  # somebody had it already
    EXPIRED: Final = "expired"  # the lease ended before the ask
    ABORTED: Final = "aborted"  # the request ended without KV worth having
    STALE: Final = "stale"  # another generation, or an ask older than its answer
    WRONG_ENGINE: Final = "wrong_engine"  # meant for an engine that this one is not
    AMBIGUOUS: Final = "ambiguous"  # two live requests claim the id
    MISMATCH: Final = "mismatch"  # the prompt or the caches differ
    BAD_RANGE: Final = "bad_range"  # token range that the hold does not have
    BAD_BLOCKS: Final = "bad_blocks"  # block ids that cannot be
    MISSING_BLOCKS: Final = "missing_blocks"  # blocks that are needed and not there
    KEYS: Final = "keys"  # the consumer's memory keys changed: ask again
    BUSY: Final = "busy"  # a bound was reached
    TIMEOUT: Final = "timeout"  # a deadline passed
    FAILED: Final = "failed"  # the fabric failed
    UNREACHABLE: Final = "unreachable"  # no session with the peer
    PEER_GONE: Final = "peer_gone"  # the process that was asked no longer exists


class Ask(Message, frozen=True, kw_only=True, tag="ask"):
    """Please write the tokens ``[first_token, first_token + token_count)``.

    ``block_ids`` holds one block table per group, uint32 little-endian, entry 0 for
    token 0, so that both sides pair by position.  ``generation`` 0 takes any.  ``early``
    says that the producer may not have heard of the transfer yet.  ``keys_epoch`` is the
    consumer's count of region changes: the ask is good for those keys and no others.
    """

    pull_id: Unsigned
    attempt: Unsigned
    transfer_id: Id
    request_id: Id
    engine_id: Id
    generation: Unsigned
    early: bool
    first_token: Unsigned
    token_count: Unsigned
    block_ids: Annotated[tuple[bytes, ...], Meta(max_length=GROUPS_LIMIT)]
    deadline_s: Seconds
    keys_epoch: Unsigned
    prompt_digest: Digest = b""


class Accepted(Message, frozen=True, kw_only=True, tag="accepted"):
    """The ask is known here and will be served or refused; also a sign of life."""

    pull_id: Unsigned
    attempt: Unsigned


class Refused(Message, frozen=True, kw_only=True, tag="refused"):
    """Nothing was or will be written for this pull and attempt."""

    pull_id: Unsigned
    attempt: Unsigned
    reason: Id
    text: str = ""


class Drained(Message, frozen=True, kw_only=True, tag="drained"):
    """No byte of this pull leaves the producer any more.

    ``reason`` is empty when every byte has landed.  ``attempt`` is the last one known;
    ``closed`` says that no further attempt will be served either.  ``stray``: writes
    failed on a fabric where that proves nothing, so bytes that have left may still land
    until the consumer fences its memory.
    """

    pull_id: Unsigned
    attempt: Unsigned
    reason: Id = ""
    text: str = ""
    bytes: Unsigned = 0
    closed: bool = True
    stray: bool = False


class Unsettled(Message, frozen=True, kw_only=True, tag="unsettled"):
    """A write of this pull failed, but may still land; DRAINED follows when it cannot."""

    pull_id: Unsigned
    attempt: Unsigned
    reason: Id
    text: str = ""


class Abort(Message, frozen=True, kw_only=True, tag="abort"):
    """Stop this pull, all attempts, also those still on their way."""

    pull_id: Unsigned


class Release(Message, frozen=True, kw_only=True, tag="release"):
    """One hold of this transfer is not wanted.  ``pull_id`` names this message."""

    pull_id: Unsigned
    transfer_id: Id
    request_id: Id
    generation: Unsigned
    early: bool = False


class Renew(Message, frozen=True, kw_only=True, tag="renew"):
    """The sender still means to ask for these transfers (by transfer or request id)."""

    transfer_ids: Annotated[tuple[Id, ...], Meta(max_length=RENEWALS_LIMIT)] = ()
    request_ids: Annotated[tuple[Id, ...], Meta(max_length=RENEWALS_LIMIT)] = ()


class Landed(Message, frozen=True, kw_only=True, tag="landed"):
    """The consumer has everything of this pull."""

    pull_id: Unsigned


#: What a producer answers, and what a consumer says.
TO_CONSUMER: Final[tuple[type[Message], ...]] = (Accepted, Refused, Drained, Unsettled)
TO_PRODUCER: Final[tuple[type[Message], ...]] = (Ask, Abort, Release, Renew, Landed)
HANDOFF_TYPES: Final[tuple[type[Message], ...]] = TO_PRODUCER + TO_CONSUMER


def pack_blocks(tables: Sequence[U32Array]) -> tuple[bytes, ...]:
    """Block tables as they travel: uint32 little-endian."""
    return tuple(np.ascontiguousarray(table, dtype="<u4").tobytes() for table in tables)


def unpack_blocks(tables: Sequence[bytes]) -> tuple[U32Array, ...] | None:
    """The block tables of an ask, read-only uint32 arrays; None when they are malformed."""
    if any(len(table) % 4 for table in tables):
        return None
    return tuple(np.frombuffer(table, dtype="<u4").astype(np.uint32) for table in tables)
