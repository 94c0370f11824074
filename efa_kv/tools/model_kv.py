"""The size of a model's KV cache, from its Hugging Face `config.json`.

Layers are told apart by what they keep: keys and values of every token (full attention), of the
last window (sliding or chunked), one latent vector per token (multi-head latent attention), or a
state of fixed size (Mamba and other linear layers). The key names are those that transformers'
model classes write; sizes follow vLLM's cache layouts.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

_DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "bf16": 2,
    "fp16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "float8_e4m3fn": 1,
}

# vLLM's packed FP8 form of a latent: 512 bytes of latent, 16 of scales, 64 rotary values of 2.
_PACKED_LATENT = "fp8_ds_mla"
_PACKED_LATENT_BYTES = 656

# The sparse-attention indexer of DeepSeek V3.2 keeps one FP8 vector and a float scale per 128.
_INDEXER_SCALE_GROUP = 128
_INDEXER_SCALE_BYTES = 4


class ModelError(ValueError):
    """A config.json from which the size of the cache cannot be told; the text says what lacks."""


class Kind(StrEnum):
    """What a layer keeps of a sequence."""

    FULL = "full"
    SLIDING = "sliding"
    LATENT = "latent"
    STATE = "state"


class LayerGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of one kind. All sizes are for one layer and one copy of its content.

    `bytes_per_token` counts keys and values of all KV heads together. `state_bytes` is what a
    STATE layer keeps per sequence. `window_tokens` limits a SLIDING layer.
    """

    kind: Kind
    layers: int
    bytes_per_token: int = 0
    window_tokens: int = 0
    state_bytes: int = 0

    def bytes_for(self, tokens: int) -> int:
        """Bytes all layers of the group keep of a sequence this long."""
        if self.kind is Kind.STATE:
            return self.layers * self.state_bytes
        kept = min(tokens, self.window_tokens) if self.kind is Kind.SLIDING else tokens
        return self.layers * self.bytes_per_token * kept


class KvModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model's cache. `kv_heads` is 0 where every rank needs the whole (latent attention)."""

    name: str
    dtype: str
    groups: tuple[LayerGroup, ...]
    kv_heads: int
    hidden_size: int
    layers: int
    experts: int = 0
    experts_per_token: int = 0

    @property
    def bytes_per_token(self) -> int:
        """What one more token adds while no window is full: the growth of a long prompt's cache."""
        return sum(one.layers * one.bytes_per_token for one in self.groups)

    def bytes_for(self, tokens: int) -> int:
        return sum(one.bytes_for(tokens) for one in self.groups)

    def copies(self, tensor_parallel: int) -> int:
        """How often the cache exists among the ranks of one server, and so crosses the network.

        KV heads are divided over the ranks; ranks beyond their number hold copies, and a latent
        is held whole by each rank.
        """
        if self.kv_heads == 0:
            return tensor_parallel
        return max(1, tensor_parallel // self.kv_heads)


def read(config: Mapping[str, Any], kv_dtype: str = "auto") -> KvModel:
    """The cache of the model that this config.json describes.

    `kv_dtype` is the server's kv-cache-dtype; "auto" takes the model's own, or FP8 where the
    checkpoint says that its cache is quantised.
    """
    text = config.get("text_config")
    model: Mapping[str, Any] = {**config, **text} if isinstance(text, Mapping) else config
    layers = _positive(model, "num_hidden_layers", "n_layer", "num_layers")
    dtype = _cache_dtype(model) if kv_dtype == "auto" else kv_dtype
    latent = bool(model.get("kv_lora_rank"))
    per_token = _latent_bytes(model, dtype) if latent else _attention_bytes(model, dtype)
    counts = Counter(_layer_kinds(model, layers, latent))
    groups = tuple(_group(model, kind, count, per_token) for kind, count in counts.items())
    return KvModel(
        name=str(config.get("_name_or_path") or (config.get("architectures") or ["model"])[0]),
        dtype=dtype,
        groups=groups,
        kv_heads=0 if latent else _kv_heads(model),
        hidden_size=_positive(model, "hidden_size", "n_embd", "d_model"),
        layers=layers,
        experts=_number(model, "num_local_experts", "n_routed_experts", "num_experts"),
        experts_per_token=_number(model, "num_experts_per_tok", "num_experts_per_token", "top_k"),
    )


def _number(model: Mapping[str, Any], *names: str) -> int:
    """The first of these keys that holds a positive number, else 0."""
    for name in names:
        value = model.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


def _positive(model: Mapping[str, Any], *names: str) -> int:
    value = _number(model, *names)
    if not value:
        raise ModelError(f"config.json has no positive {' or '.join(names)}")
    return value


def _cache_dtype(model: Mapping[str, Any]) -> str:
    quantization = model.get("quantization_config")
    scheme = quantization.get("kv_cache_scheme") if isinstance(quantization, Mapping) else None
    if isinstance(scheme, Mapping) and scheme.get("num_bits") == 8:
        return "fp8"
    return str(model.get("torch_dtype") or model.get("dtype") or "bfloat16")


def _element_bytes(dtype: str) -> int:
    if dtype not in _DTYPE_BYTES:
        raise ModelError(f"unknown cache dtype {dtype!r}; known: {', '.join(sorted(_DTYPE_BYTES))}")
    return _DTYPE_BYTES[dtype]


def _kv_heads(model: Mapping[str, Any]) -> int:
    return _number(model, "num_key_value_heads", "num_kv_heads") or _positive(
        model, "num_attention_heads", "n_head"
    )


def _attention_bytes(model: Mapping[str, Any], dtype: str) -> int:
    """Keys and values of one token in one layer, all KV heads."""
    heads = _positive(model, "num_attention_heads", "n_head")
    hidden = _positive(model, "hidden_size", "n_embd", "d_model")
    head_size = _number(model, "head_dim") or hidden // heads
    value_size = _number(model, "v_head_dim") or head_size
    return _kv_heads(model) * (head_size + value_size) * _element_bytes(dtype)


def _latent_bytes(model: Mapping[str, Any], dtype: str) -> int:
    """The latent and the rotary part of one token in one layer, and the indexer's key if any."""
    if dtype == _PACKED_LATENT:
        latent = _PACKED_LATENT_BYTES
    else:
        size = _positive(model, "kv_lora_rank") + _number(model, "qk_rope_head_dim")
        latent = size * _element_bytes(dtype)
    indexer = _number(model, "index_head_dim")
    scales = indexer // _INDEXER_SCALE_GROUP * _INDEXER_SCALE_BYTES
    return latent + indexer + scales


def _group(model: Mapping[str, Any], kind: Kind, layers: int, per_token: int) -> LayerGroup:
    if kind is Kind.STATE:
        return LayerGroup(kind=kind, layers=layers, state_bytes=_state_bytes(model))
    window = _window(model) if kind is Kind.SLIDING else 0
    return LayerGroup(kind=kind, layers=layers, bytes_per_token=per_token, window_tokens=window)


def _window(model: Mapping[str, Any]) -> int:
    return _positive(model, "sliding_window", "attention_chunk_size")


_KIND_WORDS: dict[str, tuple[Kind, ...]] = {
    "full_attention": (Kind.FULL,),
    "attention": (Kind.FULL,),
    "global": (Kind.FULL,),
    "*": (Kind.FULL,),
    "sliding_attention": (Kind.SLIDING,),
    "chunked_attention": (Kind.SLIDING,),
    "local": (Kind.SLIDING,),
    "linear_attention": (Kind.STATE,),
    "mamba": (Kind.STATE,),
    "mamba2": (Kind.STATE,),
    "recurrent": (Kind.STATE,),
    "m": (Kind.STATE,),
    "hybrid": (Kind.FULL, Kind.STATE),
}
# Keys of families whose layers are arranged in a way this module does not know. Taking them for
# full attention would give a wrong size without a word.
_UNKNOWN_ARRANGEMENTS = ("linear_attn_config", "layer_group_size", "attn_type_list", "ssm_cfg")
_STATE_KEYS = ("ssm_state_size", "mamba_d_state", "linear_num_value_heads")
# Layers of such a pattern that keep nothing of a sequence: feed-forward and expert layers.
_KEEPS_NOTHING = frozenset({"-", "e", "mlp", "moe"})


def _layer_kinds(model: Mapping[str, Any], layers: int, latent: bool) -> list[Kind]:
    """The kind of each layer that keeps something, by whichever key this family uses."""
    whole = Kind.LATENT if latent else Kind.FULL
    words = model.get("layer_types") or model.get("layers_block_type")
    pattern = model.get("hybrid_override_pattern")
    if isinstance(words, Sequence) and not isinstance(words, str):
        return _from_words([str(word) for word in words], whole)
    if isinstance(pattern, str):
        return _from_words(list(pattern), whole)
    period = _number(model, "attn_layer_period")
    if period:
        offset = _number(model, "attn_layer_offset")
        return [whole if i % period == offset else Kind.STATE for i in range(layers)]
    interval = _number(model, "full_attention_interval")
    if interval:
        return [whole if (i + 1) % interval == 0 else Kind.STATE for i in range(layers)]
    _refuse_unknown(model)
    if not _number(model, "sliding_window") or model.get("use_sliding_window") is False:
        return [whole] * layers
    every = _number(model, "sliding_window_pattern", "_sliding_window_pattern")
    if every:
        return [whole if (i + 1) % every == 0 else Kind.SLIDING for i in range(layers)]
    full_first = _number(model, "max_window_layers") if "use_sliding_window" in model else 0
    return [whole if i < full_first else Kind.SLIDING for i in range(layers)]


def _from_words(words: list[str], whole: Kind) -> list[Kind]:
    kinds = []
    for word in words:
        if word.lower() in _KEEPS_NOTHING:
            continue
        if word.lower() not in _KIND_WORDS:
            raise ModelError(f"unknown kind of layer {word!r}")
        for kind in _KIND_WORDS[word.lower()]:
            kinds.append(whole if kind is Kind.FULL else kind)
    return kinds


def _refuse_unknown(model: Mapping[str, Any]) -> None:
    """Stop where the config speaks of state layers without telling which layers they are."""
    for key in (*_UNKNOWN_ARRANGEMENTS, *_STATE_KEYS):
        if model.get(key):
            raise ModelError(f"the arrangement of layers behind {key!r} is not known here")


def _state_bytes(model: Mapping[str, Any]) -> int:
    """What one linear layer keeps of a sequence: the convolution's tail and the state proper."""
    element = _element_bytes(str(model.get("torch_dtype") or model.get("dtype") or "bfloat16"))
    if _number(model, "linear_num_value_heads"):
        return _gated_delta_elements(model) * element
    heads = _number(model, "mamba_num_heads", "mamba_n_heads")
    size = _positive(model, "ssm_state_size", "mamba_d_state", "state_size")
    tail = _positive(model, "conv_kernel", "mamba_d_conv") - 1
    if not heads:
        inner = _positive(model, "hidden_size") * (_number(model, "mamba_expand", "expand") or 2)
        return (tail * inner + inner * size) * element
    inner = heads * _positive(model, "mamba_head_dim", "mamba_d_head")
    groups = _number(model, "n_groups", "mamba_n_groups") or 1
    return (tail * (inner + 2 * groups * size) + inner * size) * element


def _gated_delta_elements(model: Mapping[str, Any]) -> int:
    """Elements per layer of a gated-delta layer (Qwen3-Next and its kin)."""
    key_size = _positive(model, "linear_key_head_dim")
    value_size = _positive(model, "linear_value_head_dim")
    value_heads = _positive(model, "linear_num_value_heads")
    channels = 2 * _positive(model, "linear_num_key_heads") * key_size + value_heads * value_size
    tail = _positive(model, "linear_conv_kernel_dim") - 1
    return tail * channels + value_heads * key_size * value_size
