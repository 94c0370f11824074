"""Stands in for SGLang's CPU kernels, which no package index has.

SGLang imports these names without asking whether they exist.  The two that a dense model
calls are written out with torch; the others say that they are missing.  Operators under
``torch.ops.sgl_kernel`` stay undefined, because their presence would turn faster kernels on.
"""

from __future__ import annotations

import ctypes

import torch

_MISSING = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "build_tree_kernel_efficient_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
)


def assign_req_to_token_pool_cpu(
    requests: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    locations: torch.Tensor,
    _width: int,
) -> None:
    """Writes each request's new cache locations into its row of the table."""
    taken = 0
    for row, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        count = end - start
        table[row, start:end] = locations[taken : taken + count].to(table.dtype)
        taken += count


def copy_all_layer_kv_cache_cpu(
    layers: torch.Tensor, strides: torch.Tensor, targets: torch.Tensor, sources: torch.Tensor
) -> None:
    """Moves cache rows within every layer; sources are read before targets are written."""
    pairs = list(zip(targets.tolist(), sources.tolist(), strict=True))
    for layer, stride in zip(layers.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(layer + source * stride, stride) for _, source in pairs]
        for (target, _), row in zip(pairs, rows, strict=True):
            ctypes.memmove(layer + target * stride, row, stride)


def __getattr__(name: str):
    if name not in _MISSING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def missing(*_args: object, **_kwargs: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} is not among the stand-ins of the tests")

    return missing
