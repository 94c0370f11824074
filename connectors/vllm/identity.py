"""The words of a fingerprint: what must be equal on both sides before a byte may move."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import vllm

from efa_kv.connectors.vllm.layout import describe_order

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["fingerprint_fields", "weights_identity"]

# How a model was found says nothing about what it is.
_IRRELEVANT_CONFIG: Final = ("_name_or_path", "transformers_version", "name_or_path")
_WEIGHT_FILES: Final = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_SAMPLE_BYTES: Final = 1 << 16


def fingerprint_fields(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
) -> dict[str, str]:
    """Names and values for the greeting; the layout's own fields are added by the plan."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return {
        "server": f"vllm {'.'.join(vllm.__version__.split('.')[:2])}",
        "model.weights": weights_identity(model.model, model.revision),
        "model.config": _config_digest(model.hf_config),
        "model.dtype": str(model.dtype).removeprefix("torch."),
        "model.quantization": str(model.quantization or "none"),
        "model.layers": str(model.get_total_num_hidden_layers()),
        "model.kv_heads": str(model.get_total_num_kv_heads()),
        "model.head_size": str(model.get_head_size()),
        "cache.dtype": str(cache.cache_dtype),
        "cache.layout": str(kv_cache_config.kv_cache_layout),
        "cache.order": describe_order(kv_caches),
        "speculative": _speculative(vllm_config.speculative_config),
    }


def weights_identity(model: str, revision: str | None) -> str:
    """The model's name, or for a folder what is in it: two hosts mount it differently.

    Of each weight file the size and both ends are read, which tells fine-tunes and
    random weights apart without reading hundreds of gigabytes.
    """
    folder = Path(model)
    if not folder.is_dir():
        return f"{model}@{revision or 'default'}"
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _WEIGHT_FILES for path in folder.glob(pattern)):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    return f"folder {digest.hexdigest()[:32]}"


def _config_digest(hf_config: Any) -> str:
    values = {
        name: value for name, value in hf_config.to_dict().items() if name not in _IRRELEVANT_CONFIG
    }
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _speculative(config: Any) -> str:
    if config is None:
        return "none"
    return f"{config.method} {config.model or ''} {config.num_speculative_tokens}"
