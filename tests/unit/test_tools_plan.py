"""`efa-kv plan`: cache sizes of known models, and the arithmetic built on them."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from efa_kv.tools import instances, model_kv, model_plan
from efa_kv.tools.model_kv import Kind
from efa_kv.tools.model_plan import Layout, Load

app = typer.Typer()
app.command("plan")(model_plan.command)
runner = CliRunner()

LLAMA_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "n_routed_experts": 256,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
}
GPT_OSS: dict[str, Any] = {
    "head_dim": 64,
    "hidden_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "num_attention_heads": 64,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "sliding_window": 128,
}
QWEN3_NEXT: dict[str, Any] = {
    "dtype": "bfloat16",
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 2048,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "num_attention_heads": 16,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
}
BASE: dict[str, Any] = {
    "head_dim": 128,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
}
P5EN = instances.INSTANCES["p5en.48xlarge"]


def group(model: model_kv.KvModel, kind: Kind) -> model_kv.LayerGroup:
    return next(one for one in model.groups if one.kind is kind)


def counts(config: dict[str, Any]) -> dict[str, int]:
    return {one.kind.value: one.layers for one in model_kv.read(config).groups}


def test_grouped_query_attention() -> None:
    model = model_kv.read(LLAMA_70B)
    assert model.bytes_per_token == 2 * 8 * 128 * 2 * 80 == 327680
    assert model.bytes_for(131072) == 327680 * 131072
    assert [model.copies(tp) for tp in (1, 8, 16)] == [1, 1, 2]


def test_fp8_halves_the_cache_by_flag_or_by_checkpoint() -> None:
    assert model_kv.read(LLAMA_70B, "fp8").bytes_per_token == 163840
    quantised = {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}
    assert model_kv.read({**LLAMA_70B, **quantised}).bytes_per_token == 163840
    assert model_kv.read({**LLAMA_70B, **quantised}, "bfloat16").bytes_per_token == 327680


def test_latent_attention_is_held_whole_by_every_rank() -> None:
    model = model_kv.read(DEEPSEEK_V3)
    assert model.bytes_per_token == (512 + 64) * 2 * 61 == 70272
    assert model.copies(8) == 8
    assert model_kv.read(DEEPSEEK_V3, "fp8_ds_mla").bytes_per_token == 656 * 61
    sparse = {**DEEPSEEK_V3, "index_head_dim": 128}
    assert model_kv.read(sparse).bytes_per_token == (1152 + 132) * 61


def test_a_sliding_window_bounds_its_layers() -> None:
    model = model_kv.read(GPT_OSS)
    per_layer = 2 * 8 * 64 * 2
    assert group(model, Kind.SLIDING).layers == group(model, Kind.FULL).layers == 18
    assert model.bytes_for(10_000) == 18 * per_layer * (10_000 + 128)
    assert model.bytes_for(100) == 36 * per_layer * 100


def test_gated_delta_layers_keep_a_state() -> None:
    model = model_kv.read(QWEN3_NEXT)
    state = group(model, Kind.STATE)
    channels = 2 * 16 * 128 + 32 * 128
    assert (state.layers, group(model, Kind.FULL).layers) == (36, 12)
    assert state.state_bytes == (3 * channels + 32 * 128 * 128) * 2
    assert model.bytes_for(1000) - model.bytes_for(0) == 1000 * 12 * 2 * 2 * 256 * 2


def test_mamba_layers_keep_a_state() -> None:
    second = {
        **BASE,
        "hybrid_override_pattern": "M-M*M-E*",
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
    }
    model = model_kv.read(second)
    assert counts(second) == {"state": 3, "full": 2}
    inner = 128 * 64
    assert group(model, Kind.STATE).state_bytes == (3 * (inner + 2048) + inner * 128) * 2
    first = {
        **BASE,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    }
    assert counts(first) == {"state": 7, "full": 1}
    assert group(model_kv.read(first), Kind.STATE).state_bytes == (3 * 8192 + 8192 * 16) * 2


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({}, {"full": 8}),
        ({"sliding_window": 1024, "sliding_window_pattern": 4}, {"sliding": 6, "full": 2}),
        (
            {"num_hidden_layers": 62, "sliding_window": 1024, "sliding_window_pattern": 6},
            {"sliding": 52, "full": 10},
        ),
        ({"sliding_window": 1024}, {"sliding": 8}),
        ({"sliding_window": 1024, "use_sliding_window": False}, {"full": 8}),
        (
            {"sliding_window": 1024, "use_sliding_window": True, "max_window_layers": 6},
            {"full": 6, "sliding": 2},
        ),
        (
            {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 8192},
            {"sliding": 1, "full": 1},
        ),
    ],
)
def test_arrangements_of_layers(extra: dict[str, Any], expected: dict[str, int]) -> None:
    assert counts({**BASE, **extra}) == expected


def test_a_layer_that_is_both_counts_twice() -> None:
    both = {
        **BASE,
        "layers_block_type": ["mamba", "hybrid"],
        "mamba_n_heads": 64,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
        "mamba_d_conv": 4,
    }
    assert counts(both) == {"state": 2, "full": 1}


def test_the_text_part_of_a_multimodal_model_counts() -> None:
    assert model_kv.read({"text_config": LLAMA_70B, "hidden_size": 1}).bytes_per_token == 327680


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "num_hidden_layers"),
        ({**BASE, "layer_types": ["quantum"]}, "quantum"),
        ({**BASE, "linear_attn_config": {"kda_layers": [1]}}, "linear_attn_config"),
        ({**BASE, "mamba_d_state": 16}, "mamba_d_state"),
        ({**BASE, "torch_dtype": "int3"}, "int3"),
    ],
)
def test_what_is_not_understood_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(model_kv.ModelError, match=message):
        model_kv.read(config)


def test_bytes_and_seconds_of_a_prompt() -> None:
    layout = Layout(tensor_parallel=4)
    load = Load(prompt_tokens=(8192,))
    result = model_plan.plan(model_kv.read(LLAMA_70B), P5EN, layout, load)
    (one,) = result.transfers
    assert one.bytes == 327680 * 8192
    assert one.seconds_at_line_rate == pytest.approx(one.bytes / 400e9)
    assert one.seconds_at_server_share == pytest.approx(one.bytes / 200e9)
    assert one.seconds_at_gpu_share == pytest.approx(one.bytes / 50e9)
    assert result.hidden_up_to_tokens_per_s == pytest.approx(200e9 / 327680)


def test_earlier_pushes_leave_less_over() -> None:
    load = Load(prompt_tokens=(65536,), prefill_tokens_per_s=20_000, chunk_tokens=8192)
    result = model_plan.plan(model_kv.read(LLAMA_70B), P5EN, Layout(), load)
    (one,) = result.hiding
    whole = 327680 * 65536 / 400e9
    assert one.exposed_request_s == pytest.approx(whole)
    assert one.exposed_chunk_s == pytest.approx(whole / 8)
    assert one.exposed_layer_s == pytest.approx(whole / 8 / 80)


def test_a_network_slower_than_prefill_cannot_be_hidden() -> None:
    load = Load(prompt_tokens=(8192,), prefill_tokens_per_s=10e6)
    result = model_plan.plan(model_kv.read(LLAMA_70B), P5EN, Layout(), load)
    (one,) = result.hiding
    assert result.hidden_up_to_tokens_per_s < 10e6
    left = one.exposed_request_s - one.prefill_s
    assert one.exposed_layer_s == pytest.approx(left)


def test_servers_for_a_load() -> None:
    load = Load(
        prompt_tokens=(8192,),
        output_tokens=500,
        requests_per_s=10,
        prefill_tokens_per_s=20_000,
        decode_tokens_per_s=2_000,
    )
    ratio = model_plan.plan(model_kv.read(LLAMA_70B), P5EN, Layout(), load).ratio
    assert ratio is not None
    assert (ratio.prefill_servers, ratio.decode_servers) == (5, 3)
    assert ratio.network_use == pytest.approx(10 * 327680 * 8192 / 5 / 400e9)


@pytest.mark.parametrize(
    ("expert_parallel", "tensor_parallel", "fits"),
    [(8, 1, True), (4, 2, True), (16, 1, False), (8, 2, False)],
)
def test_expert_groups_must_fit_a_node(
    expert_parallel: int, tensor_parallel: int, fits: bool
) -> None:
    layout = Layout(expert_parallel=expert_parallel, tensor_parallel=tensor_parallel)
    experts = model_plan.plan(model_kv.read(DEEPSEEK_V3), P5EN, layout, Load()).experts
    assert experts is not None
    assert experts.fits_node is fits
    assert experts.ceiling_bytes_per_s == 50e9
    half_crosses = 2 * 2 * 7168 * 8 * 61 / 2
    assert experts.crossing_bytes_per_token == (0 if fits else half_crosses)
    named = ["NVLink", "8 ranks of a node contiguously"]
    if not fits:
        named = ["not supported", "through the CPU", "upstream DeepEP", "2.31", "1.50", "3.3.0"]
    assert all(words in experts.advice for words in named)


def test_settings_come_with_reasons() -> None:
    p5 = instances.INSTANCES["p5.48xlarge"]
    result = model_plan.plan(model_kv.read(LLAMA_70B), p5, Layout(), Load())
    values = {one.name: one.value for one in result.settings}
    assert values["rails per GPU"] == "4"
    assert values["cores per rank"] == "24"
    assert values["stripe_bytes"] == "1048576"
    assert values["max_in_flight"] == "unset"
    assert values["progress_threads"] == "unset"
    assert values["block size"].startswith(f"16 now, {256 * 1024 // 512}")
    assert all(one.reason for one in result.settings)
    large = model_plan.plan(model_kv.read(LLAMA_70B), p5, Layout(block_tokens=512), Load())
    assert {one.name: one.value for one in large.settings}["block size"] == "512"


@pytest.mark.parametrize(
    ("name", "line_rate", "share", "rails"),
    [
        ("p5.48xlarge", 400e9, 50e9, 4),
        ("p5e.48xlarge", 400e9, 50e9, 4),
        ("p5en.48xlarge", 400e9, 50e9, 2),
        ("p6-b200.48xlarge", 400e9, 50e9, 1),
        ("p6-b300.48xlarge", 800e9, 100e9, 2),
    ],
)
def test_instances(name: str, line_rate: float, share: float, rails: float) -> None:
    known = instances.INSTANCES[name]
    assert known.line_rate_bytes_per_s == line_rate
    assert known.gpu_share_bytes_per_s == share
    assert known.nics_per_gpu == rails
    assert instances.find(name.split(".")[0]) == known


def test_an_unknown_family_is_not_guessed() -> None:
    assert instances.find("p99") is None
    assert instances.find("") is None


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_70B))
    return path


def test_the_command(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    load = ["--requests-per-s", "2", "--prefill-tokens-per-s", "20000"]
    load += [
        "--decode-tokens-per-s",
        "2000",
        "--prompt-tokens",
        "8192",
        "--prompt-tokens",
        "131072",
    ]
    arguments = ["--model", str(config), "--instance", "p5en", *load, "--json", str(out)]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    for words in ("327680 bytes per token", "42.9 GB", "push request", "prefill, ", "MC_MAX_WR"):
        assert words in result.output
    report = json.loads(out.read_text())
    assert report["bytes_per_token"] == 327680
    assert [one["prompt_tokens"] for one in report["transfers"]] == [8192, 131072]


def test_a_bad_plan_ends_with_1(config: Path) -> None:
    base = ["--model", str(config), "--instance", "p5en.48xlarge"]
    result = runner.invoke(app, [*base, "--expert-parallel", "16"])
    assert result.exit_code == 1
    assert "PROBLEM: an expert group of 128 GPUs crosses nodes" in result.output
    load = ["--requests-per-s", "1000", "--prefill-tokens-per-s", "9e9"]
    full = runner.invoke(app, [*base, *load, "--decode-tokens-per-s", "1e9"])
    assert full.exit_code == 1
    assert "more than the network" in full.output


def test_what_cannot_be_planned_ends_with_2(config: Path, tmp_path: Path) -> None:
    base = ["--model", str(config), "--instance"]
    assert "p5en.48xlarge" in runner.invoke(app, [*base, "x1"]).output
    assert runner.invoke(app, [*base, "x1"]).exit_code == 2
    dtype = runner.invoke(app, [*base, "p5", "--kv-dtype", "int3"])
    assert (dtype.exit_code, "int3" in dtype.output) == (2, True)
    broken = tmp_path / "broken.json"
    broken.write_text("[]")
    arguments = ["--model", str(broken), "--instance", "p5"]
    assert runner.invoke(app, arguments).exit_code == 2
    assert runner.invoke(app, ["--instance", "p5"]).exit_code == 2
    assert "--instance" in runner.invoke(app, ["--help"]).output
