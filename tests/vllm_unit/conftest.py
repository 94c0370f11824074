"""Real vLLM schedulers around the connector, without a model and without a network.

These tests run in vLLM's environment; elsewhere they are not collected.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

BLOCK_TOKENS = 16
EOS_TOKEN = 9

# Only the shape of the model is looked at.
MODEL_CONFIG = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "ffn_dim": 64,
    "max_position_embeddings": 2048,
    "vocab_size": 320,
    "torch_dtype": "float32",
    "bos_token_id": 2,
    "eos_token_id": EOS_TOKEN,
    "pad_token_id": 1,
}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL_CONFIG))
    return folder


def make_config(folder: Path, role: str = "kv_both", policy: str = "fail", **extra: Any) -> Any:
    """vLLM's configuration with EfaConnector."""
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVTransferConfig,
        ModelConfig,
        SchedulerConfig,
        VllmConfig,
    )

    model = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32", seed=0)
    scheduler = SchedulerConfig(
        max_num_seqs=16,
        max_num_batched_tokens=64,
        max_model_len=2048,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=False,
    )
    cache = CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True)
    cache.kv_cache_layout = "LBHNC"
    transfer = KVTransferConfig(
        kv_connector="EfaConnector",
        kv_connector_module_path="efa_kv.connectors.vllm",
        kv_role=role,
        engine_id=f"engine-{role}",
        kv_load_failure_policy=policy,
        kv_connector_extra_config=extra,
    )
    return VllmConfig(
        model_config=model,
        scheduler_config=scheduler,
        cache_config=cache,
        kv_transfer_config=transfer,
        device_config=DeviceConfig("cpu"),
    )


def make_cache_config(num_blocks: int, groups: list[Any] | None = None) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=4, dtype=torch.float32
    )
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups or [KVCacheGroupSpec(["layer.0", "layer.1"], spec)],
        kv_cache_layout="LBHNC",
    )


class Engine:
    """A scheduler that is stepped by hand; what the model samples is said by the test."""

    _serial = itertools.count(1)

    def __init__(self, config: Any, num_blocks: int = 1000, cache_config: Any = None) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        from efa_kv.connectors.vllm.commands import Handshake

        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        config.cache_config.num_gpu_blocks = num_blocks
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=cache_config or make_cache_config(num_blocks),
            log_stats=True,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
        )
        self.connector = self.scheduler.connector
        self.connector.set_xfer_handshake_metadata_pp_aware(
            {(0, 0): Handshake("127.0.0.1:15001", "tcp")}
        )
        self.half = self.connector._scheduler
        self.output: Any = None
        self.counts: dict[str, Any] = {}

    def request(
        self,
        tokens: int | list[int],
        params: Any = None,
        *,
        name: str | None = None,
        max_tokens: int = 8,
        **sampling: Any,
    ) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        prompt = list(range(10, 10 + tokens)) if isinstance(tokens, int) else list(tokens)
        options = SamplingParams(max_tokens=max_tokens, **sampling)
        options.update_from_generation_config({}, EOS_TOKEN)
        request = Request(
            request_id=name or f"request-{next(self._serial)}",
            prompt_token_ids=prompt,
            sampling_params=options,
            pooling_params=None,
            block_hasher=self._hasher,
        )
        request.kv_transfer_params = params
        return request

    def add(self, *args: Any, **kwargs: Any) -> Any:
        request = self.request(*args, **kwargs)
        self.scheduler.add_request(request)
        return request

    def schedule(self) -> list[Any]:
        """Begins a step; returns the commands that the worker half would get."""
        self.output = self.scheduler.schedule()
        return self.output.kv_connector_metadata.commands

    def finish(self, token: int = 0, **reported: Any) -> list[Any]:
        """Ends the step: every scheduled request samples ``token`` when its prompt is done."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        names = list(self.output.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in names]
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[
                [token] if request.num_computed_tokens >= request.num_tokens else []
                for request in requests
            ],
            kv_connector_output=KVConnectorOutput(**reported) if reported else None,
        )
        outputs = self.scheduler.update_from_output(self.output, result)
        for batch in outputs.values():
            if batch.scheduler_stats and batch.scheduler_stats.kv_connector_stats:
                self.counts = batch.scheduler_stats.kv_connector_stats
        return [output for batch in outputs.values() for output in batch.outputs]

    def step(self, token: int = 0, **reported: Any) -> tuple[list[Any], list[Any]]:
        commands = self.schedule()
        return commands, self.finish(token, **reported)

    def abort(self, request: Any) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    @property
    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def assert_idle(self) -> None:
        """No request, no block and no note of one is left."""
        assert not self.scheduler.requests
        assert not self.scheduler.finished_recving_kv_req_ids
        assert not self.half._incoming
        assert not self.half._outgoing
        assert len(self.half._live_in) == len(self.half._live_out) == 0
        pool = self.scheduler.kv_cache_manager.block_pool
        assert self.free_blocks == pool.num_gpu_blocks - 1  # the null block stays


@pytest.fixture
def engine(model_folder: Path) -> Any:
    """Makes an engine; arguments are those of `make_config`, and ``num_blocks``."""

    def make(
        role: str = "kv_both",
        policy: str = "fail",
        num_blocks: int = 1000,
        cache_config: Any = None,
        **extra: Any,
    ) -> Engine:
        config = make_config(model_folder, role, policy, **extra)
        return Engine(config, num_blocks, cache_config)

    return make


@pytest.fixture
def vllm_config(model_folder: Path) -> Any:
    """Makes vLLM's configuration; arguments are those of `make_config`."""
    return lambda *args, **kwargs: make_config(model_folder, *args, **kwargs)


@pytest.fixture
def cache_config() -> Any:
    """Makes vLLM's cache configuration; arguments are those of `make_cache_config`."""
    return make_cache_config
