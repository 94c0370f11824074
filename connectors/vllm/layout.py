"""From vLLM's cache tensors and specifications to the plan's `KvLayout`.

The only file that knows vLLM's cache specifications.  A cache tensor is a view
[block, head, token, content] of one big allocation in any physical order; what is one
piece per block becomes a row, and what is not is cut into rows that are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from efa_kv.errors import ConfigError
from efa_kv.plan.layout import ROWS_LIMIT, Group, KvLayout, Row, merge_ranges, validate

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = [
    "ALLOCATOR_VARIABLES",
    "build_layout",
    "describe_order",
    "refuse_kinds",
    "refuse_movable_memory",
    "refuse_parallel",
]

ALLOCATOR_VARIABLES: Final = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
)
"""Torch reads its allocator's settings from any of these."""


def refuse_movable_memory(environ: Mapping[str, str]) -> None:
    """Raises `ConfigError` where torch's allocator may remap memory under a registration."""
    for name in ALLOCATOR_VARIABLES:
        value = environ.get(name, "").replace(" ", "").lower()
        if "expandable_segments:true" in value or "expandable_segments:1" in value:
            raise ConfigError(
                f"found {name}={environ[name]}; expected no expandable segments, because their "
                "pages move under a registration.",
                advice=f"Remove expandable_segments from {name}.",
            )


def refuse_parallel(vllm_config: VllmConfig) -> None:
    """Raises `ConfigError` where one engine has several workers."""
    parallel = vllm_config.parallel_config
    for option, size in (
        ("--tensor-parallel-size", parallel.tensor_parallel_size),
        ("--pipeline-parallel-size", parallel.pipeline_parallel_size),
        ("--decode-context-parallel-size", parallel.decode_context_parallel_size),
        ("--prefill-context-parallel-size", parallel.prefill_context_parallel_size),
    ):
        if size > 1:
            raise ConfigError(
                f"found {option} {size}; expected 1: EfaConnector serves one worker per engine.",
                advice=f"Start vLLM with {option} 1.",
            )


def refuse_kinds(kv_cache_config: KVCacheConfig) -> None:
    """Raises `ConfigError` for layers whose cache cannot be moved."""
    for index, group in enumerate(kv_cache_config.transfer_groups):
        _group(index, group.kv_cache_spec)


def build_layout(kv_caches: Mapping[str, torch.Tensor], config: KVCacheConfig) -> KvLayout:
    """The layout of the caches that vLLM registers; raises `ConfigError`."""
    groups = tuple(
        _group(index, group.kv_cache_spec) for index, group in enumerate(config.transfer_groups)
    )
    rows: list[Row] = []
    known: dict[int, str] = {}
    for layer, group_index in config.transfer_group_index_by_layer.items():
        tensor = kv_caches.get(layer)
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(
                f"found {type(tensor).__name__} as the cache of layer {layer!r}; "
                "expected one tensor."
            )
        spec = _layer_spec(config.transfer_groups[group_index].kv_cache_spec, layer)
        rows += _layer_rows(layer, group_index, tensor, spec, config.num_blocks)
        known[tensor.data_ptr()] = layer
    _refuse_strangers(kv_caches, config, known)
    if len(rows) > ROWS_LIMIT:
        raise ConfigError(
            f"found a cache of {len(rows)} separate pieces per block; at most {ROWS_LIMIT} can "
            "be moved.",
            advice="Choose another VLLM_KV_CACHE_LAYOUT, for example LBHNC.",
        )
    first = next(iter(kv_caches.values()))
    layout = KvLayout(
        block_size_tokens=groups[0].block_size_tokens,
        num_blocks=config.num_blocks,
        groups=groups,
        rows=tuple(rows),
        regions=_regions(kv_caches.values()),
        dtype=str(first.dtype).removeprefix("torch."),
        heads=_heads(config),
    )
    validate(layout)
    return layout


def describe_order(kv_caches: Mapping[str, torch.Tensor]) -> str:
    """How the bytes of a block are ordered, in words that must be equal on both sides.

    Two caches may cut a block into pieces of the same size and still disagree on what
    is inside: heads first or tokens first.
    """
    orders = set()
    for tensor in kv_caches.values():
        inner = range(1, tensor.dim())
        order = sorted(inner, key=lambda d, t=tensor: (-t.stride(d), d))
        orders.add(",".join(f"{d}:{tensor.shape[d]}" for d in order if tensor.shape[d] > 1))
    return ";".join(sorted(orders))


def _group(index: int, spec: KVCacheSpec) -> Group:
    inner = spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec
    size = spec.block_size
    # Exact types: what a subclass adds, a state or another meaning of a block, is unknown.
    if type(inner) is MLAAttentionSpec and inner.tokens_per_state == 1:
        return Group(kind="mla", block_size_tokens=size)
    if type(inner) is FullAttentionSpec and inner.tokens_per_state == 1:
        return Group(kind="full", block_size_tokens=size)
    if type(inner) is SlidingWindowSpec and inner.tokens_per_state == 1:
        return Group(
            kind="sliding", block_size_tokens=size, sliding_window_tokens=inner.sliding_window
        )
    name = "state-space (Mamba)" if isinstance(inner, MambaSpec) else type(inner).__name__
    raise ConfigError(
        f"found layers of the kind {name} in cache group {index}; expected full, sliding-window "
        "or multi-head latent attention: EfaConnector cannot move the others."
    )


def _layer_spec(spec: KVCacheSpec, layer: str) -> KVCacheSpec:
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _heads(config: KVCacheConfig) -> int:
    return max(
        getattr(_layer_spec(group.kv_cache_spec, group.layer_names[0]), "num_kv_heads", 1)
        for group in config.transfer_groups
    )


def _layer_rows(
    layer: str, group: int, tensor: torch.Tensor, spec: KVCacheSpec, num_blocks: int
) -> Iterator[Row]:
    """The rows of one layer's cache tensor."""
    blocks = tensor.shape[0]
    if blocks % num_blocks:
        raise ConfigError(
            f"found {blocks} blocks in the cache of layer {layer!r}; "
            f"expected a multiple of {num_blocks}."
        )
    # Kernels may use smaller blocks than the scheduler: several in a row are one of ours.
    ratio = blocks // num_blocks
    item = tensor.element_size()
    stride = tensor.stride(0) * item * ratio
    inner = [(ratio, tensor.stride(0) * item)]
    inner += [(tensor.shape[d], tensor.stride(d) * item) for d in range(1, tensor.dim())]
    length, offsets = _dense_pieces(inner, item)
    moved, expected = length * len(offsets), getattr(spec, "unpadded_page_size_bytes", 0)
    if moved < expected:
        raise ConfigError(
            f"found {moved} bytes per block in the cache of layer {layer!r}; "
            f"expected {expected}: a part of it lies elsewhere."
        )
    for index, offset in enumerate(offsets):
        yield Row(
            layer=layer,
            part="kv" if len(offsets) == 1 else f"kv.{index}",
            group=group,
            base_address=tensor.data_ptr() + offset,
            stride_bytes=stride,
            length_bytes=length,
        )


def _dense_pieces(dimensions: Sequence[tuple[int, int]], item: int) -> tuple[int, list[int]]:
    """The largest gapless piece of one block, in bytes, and where each piece starts.

    Dimensions are (size, stride in bytes).
    """
    length, apart = item, []
    for size, stride in sorted((d for d in dimensions if d[0] > 1), key=lambda d: d[1]):
        if stride == length:
            length *= size
        else:
            apart.append([index * stride for index in range(size)])
    return length, sorted(sum(offsets) for offsets in itertools.product(*apart))


def _refuse_strangers(
    kv_caches: Mapping[str, torch.Tensor], config: KVCacheConfig, known: Mapping[int, str]
) -> None:
    """A cache outside every group is fine if it is another name of one inside."""
    local = {
        layer
        for group in config.kv_cache_groups
        if not group.enable_kv_transfer
        for layer in group.layer_names
    }
    for layer, tensor in kv_caches.items():
        if layer in config.transfer_group_index_by_layer or layer in local:
            continue
        if not isinstance(tensor, torch.Tensor) or tensor.data_ptr() not in known:
            raise ConfigError(
                f"found a cache of layer {layer!r}, which is in no group; "
                "expected every cache to be in one."
            )


def _regions(
    tensors: Iterator[torch.Tensor] | Sequence[torch.Tensor],
) -> tuple[tuple[int, int], ...]:
    """What to register: each allocation once, however many layers are views of it."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return merge_ranges((storage.data_ptr(), storage.nbytes()) for storage in storages)
