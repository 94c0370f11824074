"""The worker's half of the connector: it owns the transfer agent.

Nothing here waits for the network.  Commands of the scheduler half are handed to the
agent, and what the agent has finished is reported to vLLM.  vLLM's scheduler asserts
that it still knows every id that is reported, so each id is reported exactly once, and
only if it was handed over here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.logger import init_logger

from efa_kv.config import EngineConfig, process_environment
from efa_kv.connectors.vllm.commands import (
    Abort,
    Command,
    Expect,
    Fail,
    Handshake,
    Hold,
    Pull,
    Queue,
    Release,
    Withdraw,
)
from efa_kv.connectors.vllm.identity import fingerprint_fields
from efa_kv.connectors.vllm.layout import (
    build_layout,
    refuse_kinds,
    refuse_movable_memory,
)
from efa_kv.connectors.vllm.stats import EfaStats
from efa_kv.errors import ConfigError, EfaKvError
from efa_kv.runtime import agent as runtime

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["WorkerHalf"]

logger = init_logger(f"vllm.{__name__}")

CAUSE_LOCAL: Final = "local"


class WorkerHalf:
    """Every worker-side hook of the connector."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None) -> None:
        if kv_cache_config is None:
            raise ConfigError("found no KV cache configuration; expected vLLM 0.32 or later.")
        refuse_kinds(kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        if vllm_config.device_config.device_type == "cuda":
            refuse_movable_memory(process_environment())
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = _engine_config(transfer)
        # With one group of layers a block id means one block, and the policy "fail" lets
        # a client be answered while its blocks are still waited for.
        self._answers_early = (
            transfer.kv_load_failure_policy == "fail" and len(kv_cache_config.kv_cache_groups) == 1
        )
        self._agent: runtime.Agent | None = None
        self._loading: dict[str, Pull] = {}
        self._aborted: set[str] = set()
        self._lent: set[str] = set()
        self._failed: dict[str, str] = {}
        self._unsent: set[str] = set()
        self._doomed_blocks: set[int] = set()
        self._stats = EfaStats()

    # ---- start and end ----------------------------------------------------

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Opens the agent on vLLM's caches; a failure here stops the server, with its cause."""
        if self._agent is not None:
            raise ConfigError("found a second set of KV caches; expected them to stay in place.")
        _share_log()
        layout = build_layout(kv_caches, self._kv_cache_config)
        fields = fingerprint_fields(self._vllm_config, self._kv_cache_config, kv_caches)
        transfer = self._vllm_config.kv_transfer_config
        assert transfer is not None
        if kv_caches and next(iter(kv_caches.values())).device.type == "cpu":
            _allow_tiles()
        self._agent = runtime.Agent(self._config, layout, fields, str(transfer.engine_id))
        self._stats.set_provider(self._agent.provider)
        logger.info(
            "EfaConnector at %s over %s: %d blocks of %d bytes, registry %s",
            self._agent.session,
            self._agent.provider,
            layout.num_blocks,
            layout.block_bytes(),
            self._agent.bootstrap_address or "none",
        )

    @property
    def handshake(self) -> Handshake | None:
        if self._agent is None:
            return None
        return Handshake(session=self._agent.session, provider=self._agent.provider)

    def close(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.close()

    # ---- commands ---------------------------------------------------------

    def run(self, commands: Iterable[Command]) -> None:
        """Carries out one step's commands, in order; never raises for one request's sake."""
        for command in commands:
            try:
                self._actions[type(command)](self, command)
            except EfaKvError as problem:
                self._give_up(command, problem)

    def _give_up(self, command: Command, problem: EfaKvError) -> None:
        """The agent would not take a command, so nothing was posted for it."""
        logger.error("request %s: %s: %s", command.request_id, type(command).__name__, problem)
        self._stats.record_failure(CAUSE_LOCAL)
        if isinstance(command, Pull):
            self._loading.pop(command.request_id, None)
            self._failed[command.request_id] = str(problem)
        elif isinstance(command, Hold):
            self._lent.discard(command.request_id)
            self._unsent.add(command.request_id)

    @property
    def _running(self) -> runtime.Agent:
        assert self._agent is not None, "commands before the KV caches were registered"
        return self._agent

    def _expect(self, command: Expect) -> None:
        self._running.expect(command.transfer_id, command.request_id, command.generation)

    def _hold(self, command: Hold) -> None:
        self._lent.add(command.request_id)
        self._running.hold(
            runtime.Hold(
                transfer_id=command.transfer_id,
                request_id=command.request_id,
                generation=command.generation,
                token_count=command.token_count,
                block_ids=command.blocks,
                prompt_digest=command.prompt_digest,
            )
        )

    def _withdraw(self, command: Withdraw) -> None:
        self._running.withdraw(command.request_id)

    def _queue(self, command: Queue) -> None:
        source = command.source
        self._running.queue(
            command.request_id,
            source.address,
            source.transfer_id,
            source.request_id,
            source.engine_id,
        )

    def _pull(self, command: Pull) -> None:
        source = command.source
        self._loading[command.request_id] = command
        self._running.pull(
            runtime.Pull(
                request_id=command.request_id,
                transfer_id=source.transfer_id,
                remote_request_id=source.request_id,
                remote_engine_id=source.engine_id,
                generation=source.generation,
                address=source.address,
                early=source.early,
                first_token=command.first_token,
                token_count=command.token_count,
                block_ids=command.blocks,
                prompt_digest=command.prompt_digest,
            )
        )

    def _release(self, command: Release) -> None:
        source = command.source
        self._running.release(
            source.address,
            source.transfer_id,
            source.request_id,
            source.generation,
            source.engine_id,
            source.early,
        )

    def _abort(self, command: Abort) -> None:
        # A load that was reported already, in a step that vLLM has yet to look at, is over.
        if command.request_id in self._loading:
            self._aborted.add(command.request_id)
            self._running.abort(command.request_id)

    def _fail(self, command: Fail) -> None:
        self._failed[command.request_id] = command.reason

    _actions: Final[dict[type, Callable[[WorkerHalf, Any], None]]] = {
        Expect: _expect,
        Hold: _hold,
        Withdraw: _withdraw,
        Queue: _queue,
        Pull: _pull,
        Release: _release,
        Abort: _abort,
        Fail: _fail,
    }

    # ---- results ----------------------------------------------------------

    def results(self) -> KVConnectorTransferResults:
        """What has finished since the last call, each request once."""
        results = KVConnectorTransferResults(finished_sending=self._unsent)
        self._unsent = set()
        failed, self._failed = self._failed, {}
        results.finished_recving.update(failed)
        results.failed_recving.update(failed)
        if self._agent is not None:
            self._add_report(results, self._agent.poll())
        return results

    def _add_report(self, results: KVConnectorTransferResults, report: runtime.Report) -> None:
        for request_id in report.sent:
            if request_id in self._lent:
                self._lent.remove(request_id)
                results.finished_sending.add(request_id)
        for request_id in report.received:
            if self._loading.pop(request_id, None) is not None:
                results.finished_recving.add(request_id)
        for request_id, reason in report.failed.items():
            if self._loading.pop(request_id, None) is not None:
                level = logging.DEBUG if request_id in self._aborted else logging.ERROR
                logger.log(level, "request %s: its KV did not come: %s", request_id, reason)
                results.finished_recving.add(request_id)
                results.failed_recving.add(request_id)
        self._aborted &= self._loading.keys()
        if self._answers_early:
            for request_id, reason in report.doomed.items():
                self._answer_early(request_id, reason)

    def _answer_early(self, request_id: str, reason: str) -> None:
        """Lets vLLM fail a request whose blocks may still be written to.

        Bad blocks make vLLM answer the client at once and keep the blocks until the
        request is reported as received, which the agent does when they are safe.
        """
        pull = self._loading.get(request_id)
        if pull is not None:
            logger.error("request %s: its KV will not come: %s", request_id, reason)
            (table,) = pull.blocks
            size = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
            # Only blocks of this load: those before may be shared with other requests.
            self._doomed_blocks.update(int(block) for block in table[pull.first_token // size :])

    def take_doomed_blocks(self) -> set[int]:
        doomed, self._doomed_blocks = self._doomed_blocks, set()
        return doomed

    def take_stats(self) -> EfaStats | None:
        if self._agent is not None:
            self._add_agent_stats(self._agent.stats())
        return self._stats.take()

    def _add_agent_stats(self, stats: runtime.AgentStats) -> None:
        for name in (
            "received_bytes",
            "received_requests",
            "sent_bytes",
            "sent_requests",
            "expired",
        ):
            self._stats.record(name, getattr(stats, name))
        for cause, count in stats.failures.items():
            self._stats.record_failure(cause, count)
        for seconds in stats.transfer_seconds:
            self._stats.record_transfer(seconds)


def _share_log() -> None:
    """Sends the package's own log where vLLM's goes, unless somebody arranged it already."""
    ours, theirs = logging.getLogger("efa_kv"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False


def _allow_tiles() -> None:
    """Asks the kernel for the CPU's tile registers, where it has them.

    vLLM's attention on CPUs uses them without asking; a local prefill asks by way of
    oneDNN. An engine whose first step decodes received KV would die of an illegal
    instruction.
    """
    ask = getattr(torch.cpu, "_init_amx", None)
    if ask is not None:
        ask()


def _engine_config(transfer: Any) -> EngineConfig:
    config = EngineConfig.load(transfer.kv_connector_extra_config)
    if transfer.kv_role == "kv_consumer":
        # Nobody looks up a consumer, and on one host two servers often share the setting.
        config = msgspec.structs.replace(config, bootstrap_port=0)
    return config
