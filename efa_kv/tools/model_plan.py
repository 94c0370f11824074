"""`efa-kv plan`: what moving a model's KV cache will cost on an instance, and how to set it up.

All numbers are arithmetic on the model's config and the instance's line rate, so they are bounds:
a transfer cannot be faster, and with the settings advised here it should come near.
"""

import math
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from efa_kv.tools import instances, model_kv, output
from efa_kv.tools.instances import Instance
from efa_kv.tools.model_kv import KvModel

# A write of less than this reached a quarter to a half of the line rate in published sweeps over
# EFA (64 KiB 97 GB/s, 128 KiB 191, 256 KiB 325 of 400 on p5en); from 512 KiB on nothing is gained.
SMALL_WRITE_BYTES = 256 << 10
STRIPE_BYTES = 1 << 20


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The traffic to plan for. Rates of 0 mean not given, and what needs them is left out.

    `prefill_tokens_per_s` is one prefill server's speed, `decode_tokens_per_s` one decode
    server's output over all its requests.
    """

    prompt_tokens: tuple[int, ...] = (8192,)
    output_tokens: int = 512
    requests_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    chunk_tokens: int = 8192


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """How a server is spread over GPUs, and the size of its cache blocks."""

    tensor_parallel: int = 8
    expert_parallel: int = 1
    block_tokens: int = 16


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt on its way: bytes, and seconds at each rate that may hold."""

    prompt_tokens: int
    bytes: int
    seconds_at_line_rate: float
    seconds_at_server_share: float
    seconds_at_gpu_share: float


class Hiding(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a transfer the prefill covers, by the `push` setting, in seconds.

    `exposed_*_s` is what is left after the last prompt token is computed.
    `hidden_up_to_tokens_per_s` is the prefill speed up to which the network keeps up.
    """

    prompt_tokens: int
    prefill_s: float
    exposed_request_s: float
    exposed_chunk_s: float
    exposed_layer_s: float


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """Servers for the load, and how far the prefill side fills its network (1 is full)."""

    prefill_servers: int
    decode_servers: int
    network_use: float


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """The expert-parallel check: whether a group fits a node, and what crosses if not.

    `crossing_bytes_per_token` is dispatch plus combine of one token, all expert layers, for the
    share of experts on other nodes. `ceiling_bytes_per_s` is the per-GPU share of the line rate.
    """

    group_gpus: int
    fits_node: bool
    crossing_bytes_per_token: float
    ceiling_bytes_per_s: float
    advice: str


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One value to set, or to leave alone, and the reason."""

    name: str
    value: str
    reason: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of the command."""

    model: KvModel
    instance: Instance
    layout: Layout
    bytes_per_token: int
    copies: int
    hidden_up_to_tokens_per_s: float
    transfers: tuple[Transfer, ...]
    hiding: tuple[Hiding, ...]
    ratio: Ratio | None
    experts: Experts | None
    settings: tuple[Setting, ...]


def plan(model: KvModel, instance: Instance, layout: Layout, load: Load) -> Plan:
    """Put all parts together. Pure: the same input gives the same plan."""
    copies = model.copies(layout.tensor_parallel)
    rate = server_rate_bytes_per_s(instance, layout)
    transfers = tuple(_transfer(model, instance, layout, n) for n in load.prompt_tokens)
    hiding: tuple[Hiding, ...] = ()
    if load.prefill_tokens_per_s:
        hiding = tuple(_hiding(model, copies, rate, load, n) for n in load.prompt_tokens)
    return Plan(
        model=model,
        instance=instance,
        layout=layout,
        bytes_per_token=model.bytes_per_token * copies,
        copies=copies,
        hidden_up_to_tokens_per_s=_break_even(model, copies, rate),
        transfers=transfers,
        hiding=hiding,
        ratio=_ratio(model, copies, rate, load),
        experts=_experts(model, instance, layout),
        settings=_settings(model, instance, layout),
    )


def server_rate_bytes_per_s(instance: Instance, layout: Layout) -> float:
    """Line rate of the devices that belong to the server's GPUs on one node."""
    gpus = min(layout.tensor_parallel, instance.gpus)
    return instance.gpu_share_bytes_per_s * gpus


def _break_even(model: KvModel, copies: int, rate: float) -> float:
    per_token = model.bytes_per_token * copies
    return rate / per_token if per_token else math.inf


def _transfer(model: KvModel, instance: Instance, layout: Layout, tokens: int) -> Transfer:
    size = model.bytes_for(tokens) * model.copies(layout.tensor_parallel)
    return Transfer(
        prompt_tokens=tokens,
        bytes=size,
        seconds_at_line_rate=size / instance.line_rate_bytes_per_s,
        seconds_at_server_share=size / server_rate_bytes_per_s(instance, layout),
        seconds_at_gpu_share=size / instance.gpu_share_bytes_per_s,
    )


def _hiding(model: KvModel, copies: int, rate: float, load: Load, tokens: int) -> Hiding:
    """Chunks go out while the next is computed, so what counts is the slower of the two.

    After the last token the last chunk (or its last layer) is still to go, and besides whatever
    a slow network has piled up by then.
    """
    whole_s = model.bytes_for(tokens) * copies / rate
    prefill_s = tokens / load.prefill_tokens_per_s
    chunks = max(1, math.ceil(tokens / load.chunk_tokens))
    last_chunk_s = whole_s / chunks
    piled_up_s = max(0.0, whole_s - prefill_s)
    return Hiding(
        prompt_tokens=tokens,
        prefill_s=prefill_s,
        exposed_request_s=whole_s,
        exposed_chunk_s=max(last_chunk_s, piled_up_s),
        exposed_layer_s=max(last_chunk_s / model.layers, piled_up_s),
    )


def _ratio(model: KvModel, copies: int, rate: float, load: Load) -> Ratio | None:
    if not (load.requests_per_s and load.prefill_tokens_per_s and load.decode_tokens_per_s):
        return None
    longest = max(load.prompt_tokens)
    prefill = load.requests_per_s * longest / load.prefill_tokens_per_s
    decode = load.requests_per_s * load.output_tokens / load.decode_tokens_per_s
    servers = max(1, math.ceil(prefill))
    sent = load.requests_per_s * model.bytes_for(longest) * copies / servers
    return Ratio(
        prefill_servers=servers,
        decode_servers=max(1, math.ceil(decode)),
        network_use=sent / rate,
    )


def _experts(model: KvModel, instance: Instance, layout: Layout) -> Experts | None:
    """EP x TP must not exceed a node's GPUs; beyond, the GPU's share of EFA is the ceiling."""
    if layout.expert_parallel <= 1:
        return None
    group = layout.expert_parallel * layout.tensor_parallel
    fits = group <= instance.gpus
    elsewhere = 0.0 if fits else 1 - instance.gpus / group
    # Dispatch and combine each carry the hidden state to and from every chosen expert, 2 bytes a
    # value; tokens bound for several experts of one node are counted as often, so it is a bound.
    crossing = 2 * 2 * model.hidden_size * max(1, model.experts_per_token) * elsewhere
    if fits:
        advice = (
            "expert traffic stays on NVLink; place the "
            f"{instance.gpus} ranks of a node contiguously"
        )
    else:
        advice = (
            f"reduce EP x TP to {instance.gpus}; an intra-node build stops at start with "
            "'Inter-node communication is not supported', or goes through the CPU; upstream DeepEP "
            "does not cross nodes on EFA, and AWS's fork of DeepEP v2, which does, needs "
            "NCCL 2.31, EFA installer 1.50 and driver 3.3.0"
        )
    return Experts(
        group_gpus=group,
        fits_node=fits,
        crossing_bytes_per_token=crossing * model.layers,
        ceiling_bytes_per_s=instance.gpu_share_bytes_per_s,
        advice=advice,
    )


def page_bytes(model: KvModel, layout: Layout) -> int:
    """One block of one layer on one rank: the piece that is written when nothing can be merged."""
    per_token = max((one.bytes_per_token for one in model.groups), default=0)
    ranks = min(layout.tensor_parallel, model.kv_heads) if model.kv_heads else 1
    return layout.block_tokens * per_token // ranks


def _settings(model: KvModel, instance: Instance, layout: Layout) -> tuple[Setting, ...]:
    depth = instance.transmit_depth
    read_back = f" ({depth} read on this type)" if depth else ""
    settings = [
        Setting(
            name="rails per GPU",
            value=f"{instance.nics_per_gpu:g}",
            reason=f"{instance.nics} devices over {instance.gpus} GPUs; use those of its switch",
        ),
        Setting(
            name="cores per rank",
            value=str(instance.cores_per_gpu),
            reason=f"{instance.vcpus} vCPUs / {instance.gpus} GPUs: --cpus-per-task",
        ),
        Setting(
            name="stripe_bytes",
            value=str(STRIPE_BYTES),
            reason="1 MiB a write is within a few percent of the plateau",
        ),
        Setting(
            name="max_in_flight",
            value="unset",
            reason=f"the provider's own queue depth is read back{read_back}; never set MC_MAX_WR",
        ),
        Setting(
            name="progress_threads",
            value="unset",
            reason="chosen from devices and cores; they rest when idle, so none costs a core",
        ),
    ]
    return (*settings, _block_setting(model, layout))


def _block_setting(model: KvModel, layout: Layout) -> Setting:
    page = page_bytes(model, layout)
    if not page or page >= SMALL_WRITE_BYTES:
        return Setting(
            name="block size",
            value=str(layout.block_tokens),
            reason=f"a block of one layer is {output.gibibytes(page)}: large enough by itself",
        )
    wanted = layout.block_tokens * 2 ** math.ceil(math.log2(SMALL_WRITE_BYTES / page))
    return Setting(
        name="block size",
        value=f"{layout.block_tokens} now, {wanted} for full rate without luck",
        reason=(
            f"a block of one layer is {output.gibibytes(page)}; below 256 KiB the rate depends on "
            "neighbouring blocks being written as one"
        ),
    )


def show(result: Plan, console: Console) -> None:
    """Print the plan in the order in which it is needed."""
    model, instance = result.model, result.instance
    console.print(f"{model.name}, cache in {model.dtype}")
    for group in model.groups:
        size = f"{group.state_bytes} B per sequence" if group.state_bytes else ""
        size = size or f"{group.bytes_per_token} B per token"
        window = f", window {group.window_tokens}" if group.window_tokens else ""
        console.print(f"  {group.layers} {group.kind.value} layers: {size} each{window}")
    console.print(f"  {result.bytes_per_token} bytes per token on the wire, {result.copies} copies")
    total = output.gigabytes(instance.line_rate_bytes_per_s)
    share = output.gigabytes(instance.gpu_share_bytes_per_s)
    console.print(f"{instance.name}: {total}/s line rate, {share}/s per GPU\n")
    _show_transfers(result, console)
    console.print(
        f"prefill up to {result.hidden_up_to_tokens_per_s:.0f} tokens/s hides its own transfer"
    )
    for one in result.hiding:
        console.print(
            f"  {one.prompt_tokens} tokens, prefill {one.prefill_s:.3f} s; left over with push "
            f"request {one.exposed_request_s:.4f} s, chunk {one.exposed_chunk_s:.4f} s, "
            f"layer {one.exposed_layer_s:.4f} s"
        )
    if result.ratio:
        console.print(
            f"for this load: {result.ratio.prefill_servers} prefill, "
            f"{result.ratio.decode_servers} decode servers; the network of a prefill server is "
            f"{result.ratio.network_use:.0%} full"
        )
    if result.experts:
        console.print(f"experts: {result.experts.group_gpus} GPUs a group; {result.experts.advice}")
    for setting in result.settings:
        console.print(f"{setting.name}: {setting.value} ({setting.reason})")


def _show_transfers(result: Plan, console: Console) -> None:
    table = Table("prompt tokens", "size", "line rate", "server's GPUs", "one GPU", box=None)
    for one in result.transfers:
        seconds = (
            one.seconds_at_line_rate,
            one.seconds_at_server_share,
            one.seconds_at_gpu_share,
        )
        cells = [f"{value * 1e3:.3g} ms" for value in seconds]
        table.add_row(str(one.prompt_tokens), output.gigabytes(one.bytes), *cells)
    console.print(table)


def problems(result: Plan) -> list[str]:
    """What makes the plan a bad one; the command then ends with 1."""
    found = []
    if result.experts and not result.experts.fits_node:
        found.append(f"an expert group of {result.experts.group_gpus} GPUs crosses nodes")
    if result.ratio and result.ratio.network_use > 1:
        found.append("the load sends more than the network of the prefill servers can carry")
    return found


def _config(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(output.read_text(path), type=dict[str, Any])
    except msgspec.DecodeError as error:
        output.could_not_run(f"{path}: {error}")


def command(
    model: Annotated[Path, typer.Option(metavar="FILE", help="The model's config.json.")],
    instance: Annotated[str, typer.Option(help="Instance type, such as p5en.48xlarge.")],
    prompt_tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="Length of a prompt; repeat for more.")
    ] = None,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 512,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="GPUs of one server.")] = 8,
    expert_parallel: Annotated[int, typer.Option(min=1, help="Degree of expert parallelism.")] = 1,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a cache block.")] = 16,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prefill chunk.")] = 8192,
    kv_dtype: Annotated[str, typer.Option(help="The server's kv-cache-dtype.")] = "auto",
    requests_per_s: Annotated[float, typer.Option(min=0, help="Load to plan for.")] = 0.0,
    prefill_tokens_per_s: Annotated[
        float, typer.Option(min=0, help="Measured speed of one prefill server.")
    ] = 0.0,
    decode_tokens_per_s: Annotated[
        float, typer.Option(min=0, help="Measured output of one decode server.")
    ] = 0.0,
    json_file: output.JsonOption = None,
) -> None:
    """Work out bytes, seconds, servers and settings for a model on an instance type.

    Ends with 0 for a sound plan, 1 when experts cross nodes or the network is too small for the
    load, 2 when the model or the instance type is not understood.
    """
    known = instances.find(instance)
    if known is None:
        output.could_not_run(
            f"unknown instance {instance}; known: {', '.join(instances.INSTANCES)}"
        )
    try:
        cache = model_kv.read(_config(model), kv_dtype)
    except model_kv.ModelError as error:
        output.could_not_run(f"{model}: {error}")
    result = plan(
        cache,
        known,
        Layout(
            tensor_parallel=tensor_parallel,
            expert_parallel=expert_parallel,
            block_tokens=block_tokens,
        ),
        Load(
            prompt_tokens=tuple(prompt_tokens or (8192,)),
            output_tokens=output_tokens,
            requests_per_s=requests_per_s,
            prefill_tokens_per_s=prefill_tokens_per_s,
            decode_tokens_per_s=decode_tokens_per_s,
            chunk_tokens=chunk_tokens,
        ),
    )
    console = output.console()
    show(result, console)
    for problem in problems(result):
        console.print(f"PROBLEM: {problem}")
    output.write_json(json_file, result)
    raise typer.Exit(output.EXIT_PROBLEM if problems(result) else output.EXIT_GOOD)
