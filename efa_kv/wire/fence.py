"""Asking a peer to keep out what failed on the way to it.

FENCE -> FENCED    idempotent: fencing twice does no harm

Where a failed write may still land (`efa_kv.types.Nic.fences` is false), only the engine
whose memory it is can prevent that.  The consumer of a handoff knows by itself when it
has to; an engine that is written to by plain transfers has to be asked.
"""

from __future__ import annotations

from typing import Final

from efa_kv.types import U64
from efa_kv.wire.envelope import Message


class Fence(Message, frozen=True, kw_only=True, tag="fence"):
    """Nothing that the sender posted before this may land from your answer on."""

    query: U64


class Fenced(Message, frozen=True, kw_only=True, tag="fenced"):
    """Done.  New addresses of NICs, if there are any, were told before."""

    query: U64


FENCE_TYPES: Final[tuple[type[Message], ...]] = (Fence, Fenced)
