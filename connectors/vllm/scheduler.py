"""The scheduler's half of the connector.

It runs in vLLM's engine core and decides, per request, what the worker half is told:
no thread, no network device, no native code.  A request is known here from the moment
it is queued until vLLM has freed it.

A consumer's request goes QUEUED → LOADING → DONE.  One load per request: when vLLM
asks again, after a load, a failure or a preemption, the answer is that there is
nothing to load, and the rest is computed here.

A producer's request goes EXPECTED → HELD.  Its blocks are vLLM's again when the worker
half reports it as sent.
"""

from __future__ import annotations

import enum
import itertools
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import numpy as np
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from efa_kv.connectors.vllm import params as kv_params
from efa_kv.connectors.vllm.commands import (
    Abort,
    BlockTables,
    Command,
    Commands,
    Expect,
    Fail,
    Handshake,
    Hold,
    Pull,
    Queue,
    Release,
    Source,
    Withdraw,
)
from efa_kv.connectors.vllm.params import Invalid, Local, RemoteDecode, RemotePrefill
from efa_kv.connectors.vllm.prompt import drop_last_token, prompt_digest
from efa_kv.connectors.vllm.stats import EfaStats
from efa_kv.types import Address
from efa_kv.wire.hold_index import parent_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["SchedulerHalf"]

logger = init_logger(f"vllm.{__name__}")

# Transfer ids of parallel samples are remembered for those that come late.
SAMPLED_PARENTS_LIMIT: Final = 4096
CAUSE_INVALID: Final = "invalid_params"

# The client's answer is complete: the KV of the whole prompt has been computed.
_COMPLETE: Final = frozenset(
    {
        RequestStatus.FINISHED_LENGTH_CAPPED,
        RequestStatus.FINISHED_STOPPED,
        RequestStatus.FINISHED_REPETITION,
    }
)


class Stage(enum.Enum):
    """How far a consumer's request is; see the module's text."""

    QUEUED = enum.auto()
    LOADING = enum.auto()
    DONE = enum.auto()


@dataclass(slots=True)
class Incoming:
    """A request whose KV is to come from another server.

    Either the parameters name a ``source``, or ``problem`` says what is wrong with them.
    """

    key: str = ""
    source: Source | None = None
    problem: str = ""
    stage: Stage = Stage.QUEUED
    failed: bool = False


@dataclass(slots=True)
class Outgoing:
    """A request whose KV is for another server; ``minted`` if the id is ours."""

    transfer_id: str
    generation: int
    minted: bool
    prompt_digest: bytes


class LiveTransfers:
    """Which request family owns a transfer id, so that a second one is refused."""

    def __init__(self) -> None:
        self._owners: dict[str, tuple[str, int]] = {}

    def owned_by_other(self, key: str, parent: str) -> bool:
        owner = self._owners.get(key)
        return owner is not None and owner[0] != parent

    def add(self, key: str, parent: str) -> None:
        _, count = self._owners.get(key, (parent, 0))
        self._owners[key] = (parent, count + 1)

    def remove(self, key: str) -> None:
        parent, count = self._owners.pop(key)
        if count > 1:
            self._owners[key] = (parent, count - 1)

    def __len__(self) -> int:
        return len(self._owners)


class SchedulerHalf:
    """Every scheduler-side hook of the connector; see vLLM's base class for when each runs."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None) -> None:
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        self._engine_id = str(transfer.engine_id)
        self._producer_only = transfer.kv_role == "kv_producer"
        self._recompute = transfer.kv_load_failure_policy == "recompute"
        self._kv_cache_config = kv_cache_config
        # A recurrent state can't be stepped back: the consumer must get it as it is before
        # the last prompt token, which the consumer computes.
        self._withheld_tokens = int(
            kv_cache_config is not None and kv_cache_config.has_mamba_layers
        )
        self._block_size_tokens = vllm_config.cache_config.block_size
        self._handshake: Handshake | None = None
        self._incoming: dict[str, Incoming] = {}
        self._outgoing: dict[str, Outgoing] = {}
        self._live_in = LiveTransfers()
        self._live_out = LiveTransfers()
        self._minted: OrderedDict[tuple[str, bytes], tuple[str, int]] = OrderedDict()
        self._generations = itertools.count(1)
        self._commands: list[Command] = []
        self._stats = EfaStats()

    # ---- start ------------------------------------------------------------

    def set_handshake(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Takes what the one worker told about itself."""
        for (pp_rank, tp_rank), handshake in metadata.items():
            if pp_rank or tp_rank or not isinstance(handshake, Handshake):
                raise ValueError(
                    f"found {type(handshake).__name__} of worker pp {pp_rank}, tp {tp_rank}; "
                    "expected the handshake of a single EfaConnector worker"
                )
            self._handshake = handshake
            self._stats.set_provider(handshake.provider)

    @property
    def loaded_group_ids(self) -> tuple[int, ...]:
        return self._kv_cache_config.transfer_group_ids if self._kv_cache_config else (0,)

    # ---- a request arrives ------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Learns what the request asks for; tells the worker half so that leases start."""
        parsed = kv_params.parse(request.kv_transfer_params)
        if isinstance(parsed, Local):
            return
        if not isinstance(request.kv_transfer_params, dict):
            # The scheduler calls .get() on it: a list from a client must not end the engine.
            request.kv_transfer_params = {}
        if isinstance(parsed, RemoteDecode):
            self._add_outgoing(request, parsed)
        elif isinstance(parsed, Invalid):
            self._refuse(request, parsed.reason)
        else:
            self._add_incoming(request, parsed)

    def _refuse(self, request: Request, reason: str) -> None:
        """The request is failed, or computed here, when vLLM asks what can be loaded."""
        self._incoming[request.request_id] = Incoming(problem=reason)

    def _add_outgoing(self, request: Request, parsed: RemoteDecode) -> None:
        request_id, parent = request.request_id, parent_of(request.request_id)
        digest = prompt_digest(request)
        minted = parsed.transfer_id is None
        transfer_id, generation = self._identity(request_id, parent, digest)
        transfer_id = parsed.transfer_id or transfer_id
        if self._live_out.owned_by_other(transfer_id, parent):
            self._refuse(request, f"the transfer id {transfer_id!r} belongs to another request")
            return
        self._live_out.add(transfer_id, parent)
        self._outgoing[request_id] = Outgoing(transfer_id, generation, minted, digest)
        if self._withheld_tokens:
            drop_last_token(request)
        self._commands.append(Expect(request_id, transfer_id, generation))

    def _identity(self, request_id: str, parent: str, digest: bytes) -> tuple[str, int]:
        """A new transfer id and generation.

        Parallel samples of one request share both, since decode is told only one pair.
        """
        if request_id == parent:
            return uuid4().hex, next(self._generations)
        # Their prompt is part of the key: a client may choose ids that merely look alike.
        key = (parent, digest)
        identity = self._minted.pop(key, None) or (uuid4().hex, next(self._generations))
        self._minted[key] = identity
        while len(self._minted) > SAMPLED_PARENTS_LIMIT:
            self._minted.popitem(last=False)
        return identity

    def _add_incoming(self, request: Request, parsed: RemotePrefill) -> None:
        request_id, parent = request.request_id, parent_of(request.request_id)
        if self._producer_only:
            self._refuse(request, "do_remote_prefill at a server with kv_role kv_producer")
            return
        if self._live_in.owned_by_other(parsed.key, parent):
            self._refuse(request, f"the transfer {parsed.key!r} belongs to another request")
            return
        # Before anything is said about it: nobody would end a renewal of its lease.
        handed = request.num_prompt_tokens - self._withheld_tokens
        if parsed.remote_tokens is not None and parsed.remote_tokens < handed:
            held = parsed.remote_tokens
            self._refuse(request, f"the producer holds {held} tokens; expected {handed}")
            return
        source = Source(
            address=parsed.address,
            transfer_id=parsed.transfer_id,
            request_id=parsed.remote_request_id,
            engine_id=parsed.remote_engine_id,
            generation=parsed.generation,
            early=parsed.early,
        )
        self._live_in.add(parsed.key, parent)
        self._incoming[request_id] = Incoming(key=parsed.key, source=source)
        self._commands.append(Queue(request_id, source))

    # ---- a request is scheduled -------------------------------------------

    def matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens beyond the local ones come from the producer, and that it takes time.

        A request that cannot be served takes the same way, so that vLLM answers it by
        its own policy for failed loads.
        """
        incoming = self._incoming.get(request.request_id)
        if incoming is None or incoming.stage is not Stage.QUEUED:
            return 0, False
        prompt_tokens = request.num_prompt_tokens
        if incoming.problem:
            return (0, False) if self._recompute else (prompt_tokens - num_computed_tokens, True)
        # vLLM computes the last token of a prompt itself in any case: its output is the
        # first new token.
        worthwhile = num_computed_tokens < prompt_tokens - 1
        handed = prompt_tokens - self._withheld_tokens
        return (handed - num_computed_tokens, True) if worthwhile else (0, False)

    def update_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Turns vLLM's decision into a command; called a second time after the load."""
        incoming = self._incoming.get(request.request_id)
        if incoming is None or incoming.stage is Stage.DONE:
            return
        if incoming.stage is Stage.LOADING:
            if num_external_tokens == 0:
                incoming.stage = Stage.DONE
            return
        if num_external_tokens == 0:
            self._compute_here(request, incoming)
        elif incoming.problem:
            self._fail(request, incoming)
        else:
            self._pull(request, incoming, blocks, num_external_tokens)

    def _pull(
        self, request: Request, incoming: Incoming, blocks: KVCacheBlocks, token_count: int
    ) -> None:
        assert incoming.source is not None
        incoming.stage = Stage.LOADING
        self._commands.append(
            Pull(
                request_id=request.request_id,
                source=incoming.source,
                first_token=request.num_prompt_tokens - self._withheld_tokens - token_count,
                token_count=token_count,
                blocks=self._tables(blocks.get_block_ids()),
                prompt_digest=prompt_digest(request),
            )
        )

    def _fail(self, request: Request, incoming: Incoming) -> None:
        incoming.stage = Stage.LOADING
        incoming.failed = True
        self._stats.record_failure(CAUSE_INVALID)
        logger.error("request %s: %s", request.request_id, incoming.problem)
        self._commands.append(Fail(request.request_id, incoming.problem))

    def _compute_here(self, request: Request, incoming: Incoming) -> None:
        """Nothing is loaded: the prompt is cached here, or has to be computed here."""
        incoming.stage = Stage.DONE
        if incoming.problem:
            self._stats.record_failure(CAUSE_INVALID)
            logger.warning("request %s is computed here: %s", request.request_id, incoming.problem)
            self._stats.record_recomputed()
        else:
            self._release(request.request_id, incoming)
            if request.skip_reading_prefix_cache and request.num_prompt_tokens > 1:
                # For example prompt log probabilities, which only computing gives.
                self._stats.record_zero_byte_pull()

    def _release(self, request_id: str, incoming: Incoming) -> None:
        if incoming.source is not None:
            self._commands.append(Release(request_id, incoming.source))

    # ---- every step -------------------------------------------------------

    def take_commands(self) -> Commands:
        commands, self._commands = self._commands, []
        return Commands(commands)

    @property
    def has_commands(self) -> bool:
        """Whether a step is needed although no request may be left: a release must go out."""
        return bool(self._commands)

    def update_output(self, output: KVConnectorOutput) -> None:
        """Follows what the worker half reported."""
        for request_id in output.failed_recving or ():
            incoming = self._incoming.get(request_id)
            if incoming is not None and self._recompute:
                self._stats.record_recomputed()
        for request_id in output.finished_recving or ():
            incoming = self._incoming.get(request_id)
            if incoming is not None:
                incoming.stage = Stage.DONE
        for request_id in output.finished_sending or ():
            self._drop_outgoing(request_id)

    def take_stats(self) -> EfaStats | None:
        return self._stats.take()

    # ---- a request ends ---------------------------------------------------

    def finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks stay lent, and what the response tells the client.

        Blocks of an unfinished load need nothing from here: vLLM keeps them until the
        worker half reports the request as received.
        """
        request_id = request.request_id
        incoming = self._incoming.pop(request_id, None)
        if incoming is not None:
            self._end_incoming(request_id, incoming)
        outgoing = self._outgoing.get(request_id)
        if outgoing is None:
            return False, None
        token_count = request.num_prompt_tokens
        tables = self._selected(block_ids)
        if request.status not in _COMPLETE or not self._covers(request, tables):
            self._commands.append(Withdraw(request_id))
            self._drop_outgoing(request_id)
            return False, None
        self._commands.append(
            Hold(
                request_id,
                outgoing.transfer_id,
                outgoing.generation,
                token_count,
                self._tables(block_ids),
                outgoing.prompt_digest,
            )
        )
        if not outgoing.minted:
            return True, None
        return True, kv_params.response(
            transfer_id=outgoing.transfer_id,
            generation=outgoing.generation,
            engine_id=self._engine_id,
            request_id=request_id,
            address=Address.parse(self._handshake.session) if self._handshake else None,
            block_ids=tables,
            token_count=token_count,
        )

    def _end_incoming(self, request_id: str, incoming: Incoming) -> None:
        if incoming.stage is Stage.QUEUED:
            self._release(request_id, incoming)
        elif incoming.stage is Stage.LOADING and not incoming.failed:
            self._commands.append(Abort(request_id))
        if incoming.source is not None:
            self._live_in.remove(incoming.key)

    def _drop_outgoing(self, request_id: str) -> None:
        outgoing = self._outgoing.pop(request_id, None)
        if outgoing is not None:
            self._live_out.remove(outgoing.transfer_id)

    def _covers(self, request: Request, tables: tuple[list[int], ...]) -> bool:
        """Whether the blocks hold the whole prompt: a preemption may have taken them."""
        tokens = request.num_prompt_tokens
        if not tables or request.num_computed_tokens < tokens:
            return False
        return all(
            len(table) * size >= tokens
            for table, size in zip(tables, self._block_sizes(), strict=True)
        )

    # ---- blocks -----------------------------------------------------------

    def _block_sizes(self) -> list[int]:
        if self._kv_cache_config is None:
            return [self._block_size_tokens]
        return [group.kv_cache_spec.block_size for group in self._kv_cache_config.transfer_groups]

    def _selected(self, block_ids: tuple[list[int], ...]) -> tuple[list[int], ...]:
        """The tables of the groups that take part in transfers."""
        return tuple(block_ids[group] for group in self.loaded_group_ids)

    def _tables(self, block_ids: tuple[list[int], ...]) -> BlockTables:
        return tuple(np.asarray(table, dtype=np.uint32) for table in self._selected(block_ids))
