"""What the scheduler half tells the worker half, once per engine step.

The commands travel, in order, inside vLLM's connector metadata, pickled to every
worker.  They hold plain values only; ids of requests are this server's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

__all__ = [
    "Abort",
    "BlockTables",
    "Command",
    "Commands",
    "Expect",
    "Fail",
    "Handshake",
    "Hold",
    "Pull",
    "Queue",
    "Release",
    "Source",
    "Withdraw",
]

BlockTables = tuple[npt.NDArray[np.uint32], ...]
"""One table per group of layers; entry i of a table holds the tokens of block i."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a consumer's KV comes from; ``generation`` 0 means any."""

    address: str
    transfer_id: str
    request_id: str
    engine_id: str
    generation: int
    early: bool


@dataclass(frozen=True, slots=True)
class Expect:
    """Producer: this request is being computed; a consumer may ask for it already."""

    request_id: str
    transfer_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class Hold:
    """Producer: this request's KV is complete and its blocks are lent to the handoff."""

    request_id: str
    transfer_id: str
    generation: int
    token_count: int
    blocks: BlockTables
    prompt_digest: bytes


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Producer: an expected request ended without KV to hand over."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Queue:
    """Consumer: this request waits here, so its producer should keep the KV."""

    request_id: str
    source: Source


@dataclass(frozen=True, slots=True)
class Pull:
    """Consumer: move ``token_count`` tokens from ``first_token`` on into these blocks."""

    request_id: str
    source: Source
    first_token: int
    token_count: int
    blocks: BlockTables
    prompt_digest: bytes


@dataclass(frozen=True, slots=True)
class Release:
    """Consumer: nothing is wanted from the producer (any more), and nothing was asked."""

    request_id: str
    source: Source


@dataclass(frozen=True, slots=True)
class Abort:
    """Consumer: the request of a pull is gone; report it when its blocks are safe."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Fail:
    """Consumer: report this request as failed, nothing was or will be asked for it."""

    request_id: str
    reason: str


Command = Expect | Hold | Withdraw | Queue | Pull | Release | Abort | Fail


@dataclass
class Commands(KVConnectorMetadata):
    """The connector metadata of one step."""

    commands: list[Command] = field(default_factory=list)


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """What the scheduler half learns from the worker half at the start."""

    session: str
    provider: str
