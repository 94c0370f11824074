"""`EfaConnector`: vLLM's hooks, each passed on to the half that this process runs.

vLLM makes one object in the scheduler's process and one in every worker.  Which half it
is, is decided once; the scheduler half has no thread, no network device and no native
code, and the worker half owns the transfer agent.  The API server imports the class only
for its class methods.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from efa_kv.connectors.vllm.commands import Commands
from efa_kv.connectors.vllm.layout import refuse_parallel
from efa_kv.connectors.vllm.scheduler import SchedulerHalf
from efa_kv.connectors.vllm.stats import EfaPromMetrics, EfaStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from efa_kv.connectors.vllm.worker import WorkerHalf

__all__ = ["EfaConnector"]

logger = init_logger(f"vllm.{__name__}")


class EfaConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves the KV cache between prefill and decode servers over libfabric."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[arg-type]
        refuse_parallel(vllm_config)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(vllm_config, kv_cache_config)
        else:
            # Here and not above: it brings the native core.
            from efa_kv.connectors.vllm.worker import WorkerHalf

            self._worker = WorkerHalf(vllm_config, kv_cache_config)

    @property
    def _on_scheduler(self) -> SchedulerHalf:
        assert self._scheduler is not None, "a scheduler hook was called in a worker"
        return self._scheduler

    @property
    def _on_worker(self) -> WorkerHalf:
        assert self._worker is not None, "a worker hook was called in the scheduler"
        return self._worker

    # ---- class methods, also called in the API server ----------------------

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Heads outside tokens, so that a part of the heads is one piece of memory.

        Latent attention has no heads, and some of its kernels take one layout only.
        """
        model = vllm_config.model_config
        return None if model is None or model.use_mla else "LBHNC"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """No: nothing is done between the layers of a forward pass."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """No: registered memory may not go away (asked by vLLM 0.33 and later)."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> EfaStats:
        return EfaStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> EfaPromMetrics:
        return EfaPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- scheduler side ----------------------------------------------------

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        self._on_scheduler.set_handshake({(0, rank): data for rank, data in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self._on_scheduler.set_handshake(metadata)

    def on_new_request(self, request: Request) -> None:
        self._on_scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._on_scheduler.matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return self._on_scheduler.loaded_group_ids

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._on_scheduler.update_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._on_scheduler.take_commands()

    def has_pending_push_work(self) -> bool:
        return self._on_scheduler.has_commands

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._on_scheduler.update_output(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._on_scheduler.finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._on_scheduler.finished(request, block_ids)

    def take_events(self) -> Iterable[KVCacheEvent]:
        return ()

    def reset_cache(self) -> bool | None:
        """Nothing is kept beyond the requests that vLLM itself knows."""
        return True

    # ---- worker side -------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._on_worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._on_worker.handshake

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Commands)
        self._on_worker.run(metadata.commands)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request runs only when all of its KV is there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing to save: the cache itself is what is sent."""

    def wait_for_save(self) -> None:
        """Nothing to wait for: blocks stay lent until they are sent."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The older form of `get_transfer_results`."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._on_worker.results()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._on_worker.take_doomed_blocks()

    def get_kv_connector_stats(self) -> EfaStats | None:
        half = self._scheduler or self._worker
        return half.take_stats() if half is not None else None

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
