"""Cache tensors in every physical order become rows that move exactly one block each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from efa_kv.connectors.vllm.identity import weights_identity
from efa_kv.connectors.vllm.layout import (
    ALLOCATOR_VARIABLES,
    build_layout,
    describe_order,
    refuse_kinds,
    refuse_movable_memory,
)
from efa_kv.errors import ConfigError
from efa_kv.plan.compat import check_layouts
from efa_kv.plan.layout import KvLayout

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 5, 2, 4, 6
SIZES = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": CONTENT}
ORDERS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
SPEC = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=3, dtype=torch.float32)


def make_caches(order: str, kernel_blocks: int = 1) -> dict[str, torch.Tensor]:
    """One allocation in this physical order, seen as vLLM shows it: a view per layer."""
    sizes = {**SIZES, "B": BLOCKS * kernel_blocks, "N": TOKENS // kernel_blocks}
    flat = torch.zeros(int(np.prod(list(sizes.values()))), dtype=torch.float32)
    whole = flat.view([sizes[name] for name in order])
    logical = whole.permute([order.index(name) for name in "LBHNC"])
    return {f"layer.{index}": logical[index] for index in range(LAYERS)}


def make_config(spec: Any = SPEC, layers: list[str] | None = None) -> KVCacheConfig:
    names = layers or [f"layer.{index}" for index in range(LAYERS)]
    return KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(names, spec)])


def memory(address: int, length: int) -> np.ndarray:
    import ctypes

    return np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))


def move(source: KvLayout, target: KvLayout, pairs: list[tuple[int, int]]) -> None:
    """What the fabric does with the rows, byte by byte."""
    partners = {(row.layer, row.part): row for row in target.rows}
    for row in source.rows:
        partner = partners[row.layer, row.part]
        for theirs, ours in pairs:
            data = memory(row.base_address + theirs * row.stride_bytes, row.length_bytes)
            place = partner.base_address + ours * partner.stride_bytes
            memory(place, row.length_bytes)[:] = data


def fill(caches: dict[str, torch.Tensor]) -> None:
    for number, tensor in enumerate(caches.values()):
        values = torch.arange(tensor.numel(), dtype=torch.float32) + 1000 * number
        tensor.copy_(values.view(tensor.shape))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kernel_blocks", [1, 2])
def test_rows_move_whole_blocks_and_nothing_else(order: str, kernel_blocks: int) -> None:
    sources, targets = make_caches(order, kernel_blocks), make_caches(order, kernel_blocks)
    fill(sources)
    source, target = build_layout(sources, make_config()), build_layout(targets, make_config())
    assert check_layouts(source, target) is None
    pairs = [(1, 4), (3, 2)]
    move(source, target, pairs)
    for layer, tensor in targets.items():
        expected = torch.zeros_like(tensor)
        for theirs, ours in pairs:
            for part in range(kernel_blocks):
                expected[ours * kernel_blocks + part] = sources[layer][
                    theirs * kernel_blocks + part
                ]
        assert torch.equal(tensor, expected)


def test_one_piece_per_block_is_one_row() -> None:
    layout = build_layout(make_caches("LBHNC"), make_config())
    assert [(row.layer, row.part) for row in layout.rows] == [
        (f"layer.{index}", "kv") for index in range(LAYERS)
    ]
    assert layout.rows[0].length_bytes == HEADS * TOKENS * CONTENT * 4
    assert (layout.dtype, layout.heads, layout.num_blocks) == ("float32", HEADS, BLOCKS)
    assert len(build_layout(make_caches("LHBNC"), make_config()).rows) == LAYERS * HEADS


def test_an_allocation_is_registered_once() -> None:
    caches = make_caches("LBHNC")
    storage = caches["layer.0"].untyped_storage()
    layout = build_layout(caches, make_config())
    assert layout.regions == ((storage.data_ptr(), storage.nbytes()),)


def test_groups_that_share_memory() -> None:
    """Hybrid models: layers of different groups lie at the same address."""
    (full,) = make_caches("LBHNC")["layer.0"].unsqueeze(0)
    window = SlidingWindowSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=3, dtype=torch.float32, sliding_window=6
    )
    config = KVCacheConfig(
        BLOCKS, [], [KVCacheGroupSpec(["sliding"], window), KVCacheGroupSpec(["full"], SPEC)]
    )
    layout = build_layout({"sliding": full, "full": full}, config)
    assert len(layout.regions) == 1
    assert [(row.layer, row.group) for row in layout.rows] == [("sliding", 0), ("full", 1)]
    assert [group.kind for group in layout.groups] == ["sliding", "full"]
    assert layout.groups[0].sliding_window_tokens == 6


def test_latent_attention() -> None:
    spec = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    cache = torch.zeros(BLOCKS, 1, TOKENS, 8, dtype=torch.bfloat16)
    layout = build_layout({"layer": cache}, make_config(spec, ["layer"]))
    assert layout.groups[0].kind == "mla"
    assert layout.rows[0].length_bytes == TOKENS * 8 * 2


def test_a_layer_that_shares_another_layers_cache() -> None:
    caches = make_caches("LBHNC")
    layout = build_layout({**caches, "shared": caches["layer.1"]}, make_config())
    assert len(layout.rows) == LAYERS


def test_refused_layers() -> None:
    mamba = MambaSpec(block_size=TOKENS, shapes=((2, 2),), dtypes=(torch.float32,))
    with pytest.raises(ConfigError, match="Mamba"):
        refuse_kinds(make_config(mamba))
    caches = make_caches("LBHNC")
    with pytest.raises(ConfigError, match=r"NoneType as the cache of layer 'layer\.0'"):
        build_layout({"layer.1": caches["layer.1"]}, make_config())
    with pytest.raises(ConfigError, match="is in no group"):
        build_layout({**caches, "stranger": torch.zeros(BLOCKS, 8)}, make_config())
    with pytest.raises(ConfigError, match="a part of it lies elsewhere"):
        build_layout(caches, make_config(replace(SPEC, head_size=5, head_size_v=5)))
    with pytest.raises(ConfigError, match="expected a multiple of"):
        build_layout({name: tensor[:4] for name, tensor in caches.items()}, make_config())


def test_orders_that_mean_different_things_have_different_names() -> None:
    names = {order: describe_order(make_caches(order)) for order in ORDERS}
    assert names["LBHNC"] == names["BLHNC"]  # a block is the same, whatever lies between
    assert names["LBHNC"] != names["LBNHC"]


@pytest.mark.parametrize("name", ALLOCATOR_VARIABLES)
@pytest.mark.parametrize("value", ["expandable_segments:True", "a:1, expandable_segments : true"])
def test_movable_memory_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        refuse_movable_memory({name: value})
    refuse_movable_memory({name: "expandable_segments:False,max_split_size_mb:64"})
    refuse_movable_memory({})


def test_a_model_folder_is_known_by_what_is_in_it(tmp_path: Any) -> None:
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder, content in zip(folders, (b"weights", b"weights", b"others"), strict=True):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(content)
    first, same, other = (weights_identity(str(folder), None) for folder in folders)
    assert first == same != other
    assert weights_identity("org/model", "main") == "org/model@main"
