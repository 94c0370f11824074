"""SGLang's own disaggregation classes on CPU tensors, without a server or a model.

Runs in SGLang's environment (``tests/e2e/test_sglang_units.py`` starts it there); elsewhere
nothing here is collected.  One process plays all ranks of both sides: a rank is an engine,
a KV manager and its tensors, and what SGLang reads from its process-wide topology is set
while the manager is made.
"""

from __future__ import annotations

import importlib.util
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang_demo.model import make_model

from efa_kv.mooncake import TransferEngine

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import sglang.srt.disaggregation.common.conn as common
    import sglang.srt.distributed.device_communicators.mooncake_transfer_engine as wrapper
    import torch
    from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll, StateType
    from sglang.srt.disaggregation.utils import (
        DisaggregationMode,
        KVClassType,
        MetadataBuffers,
        TransferBackend,
        get_kv_class,
    )
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.network import get_free_port

LOOPBACK = "127.0.0.1"
LAYERS, HEADS, HEAD_SIZE, PAGES = 3, 4, 8, 64
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Shape:
    """How the KV cache of a test looks, over all ranks of a side."""

    page_tokens: int = 16
    latent: bool = False
    state_slots: int = 0

    def pool(self, heads: int) -> list[torch.Tensor]:
        """Layers of K, then of V; or of latents, which have no heads to split."""
        shape = (PAGES, self.page_tokens, 1 if self.latent else heads, HEAD_SIZE)
        return [torch.zeros(shape) for _ in range(LAYERS * (1 if self.latent else 2))]

    def states(self) -> list[torch.Tensor]:
        return [torch.zeros(self.state_slots, 5, 7) for _ in range(2 * bool(self.state_slots))]


@dataclass
class Rank:
    """One rank of one side."""

    shape: Shape
    tp_size: int
    tp_rank: int
    pool: list[torch.Tensor] = field(init=False)
    states: list[torch.Tensor] = field(init=False)
    aux: MetadataBuffers = field(init=False)
    manager: Any = None
    engine: TransferEngine | None = None

    def __post_init__(self) -> None:
        self.pool = self.shape.pool(HEADS // self.tp_size)
        self.states = self.shape.states()
        self.aux = MetadataBuffers(128, 16, torch.float32, 16)

    @property
    def session(self) -> str:
        return self.manager.get_session_id()

    def arguments(self) -> KVArgs:
        a = KVArgs()
        a.engine_rank, a.pp_rank, a.system_dp_rank, a.rust_http_port = self.tp_rank, 0, 0, None
        a.kv_cache_dtype_str, a.kv_layout = "torch.float32", None
        a.prefill_start_layer, a.prefill_end_layer = 0, LAYERS
        a.kv_data_ptrs = [layer.data_ptr() for layer in self.pool]
        a.kv_data_lens = [layer.nbytes for layer in self.pool]
        a.kv_item_lens = [layer[0].nbytes for layer in self.pool]
        a.kv_layer_ids, a.num_draft_entries = [], 0
        a.kv_head_num = 1 if self.shape.latent else HEADS // self.tp_size
        a.total_kv_head_num = 1 if self.shape.latent else HEADS
        a.page_size = self.shape.page_tokens
        a.aux_data_ptrs, a.aux_data_lens, a.aux_item_lens = self.aux.get_buf_infos()
        a.ib_device, a.gpu_id = None, 0
        some = bool(self.states)
        a.state_types = [StateType.MAMBA] * some
        a.state_data_ptrs = [[state.data_ptr() for state in self.states]] * some
        a.state_data_lens = [[state.nbytes for state in self.states]] * some
        a.state_item_lens = [[state[0].nbytes for state in self.states]] * some
        a.state_layer_ids = [[]] * some
        a.state_dim_per_tensor = [[5 for _ in self.states]] * some
        a.state_slice_outer_counts = [[1 for _ in self.states]] * some
        a.state_conv_shard_groups = [[None for _ in self.states]] * some
        a.is_hybrid_mla_backend = False
        a.swa_kv_cache_layout = a.mla_compression_ratios = None
        return a


class Rig:
    """Both sides of a transfer, behind a bootstrap server of their own."""

    rooms = itertools.count(1)

    def __init__(self, patch: pytest.MonkeyPatch, server_args: ServerArgs) -> None:
        self._server_args = server_args
        self.classes = {
            kind: get_kv_class(TransferBackend.MOONCAKE, kind)
            for kind in (
                KVClassType.MANAGER,
                KVClassType.SENDER,
                KVClassType.RECEIVER,
                KVClassType.BOOTSTRAP_SERVER,
            )
        }
        port = get_free_port()
        self.address = f"{LOOPBACK}:{port}"
        published = common.get_disagg()
        patch.setattr(
            common,
            "get_disagg",
            lambda: SimpleNamespace(
                disaggregation_bootstrap_port=port,
                disaggregation_decode_allocation_policy=(
                    published.disaggregation_decode_allocation_policy
                ),
            ),
        )
        self.bootstrap = self.classes[KVClassType.BOOTSTRAP_SERVER](host=LOOPBACK, port=port)
        time.sleep(0.3)
        self.prefill: list[Rank] = []
        self.decode: list[Rank] = []
        self._made: list[Rank] = []

    def build(self, shape: Shape, prefill_size: int = 1, decode_size: int = 1) -> Rig:
        self.prefill = [
            self.rank(shape, DisaggregationMode.PREFILL, prefill_size, rank)
            for rank in range(prefill_size)
        ]
        self.decode = [
            self.rank(shape, DisaggregationMode.DECODE, decode_size, rank)
            for rank in range(decode_size)
        ]
        generator = torch.Generator().manual_seed(1)
        for rank in self.prefill:
            for tensor in (*rank.pool, *rank.states):
                tensor.normal_(generator=generator)
        return self

    def rank(
        self, shape: Shape, mode: DisaggregationMode, size: int, number: int, name: str = LOOPBACK
    ) -> Rank:
        """Opens an engine and a manager; ``name`` may carry the engine's port."""
        rank = Rank(shape, size, number)
        wrapper._mooncake_transfer_engine = None  # each rank has an engine of its own
        opened = wrapper.init_mooncake_transfer_engine(name, 0, None)
        if name != LOOPBACK:
            opened.session_id = opened.engine.session
        assert isinstance(opened.engine, TransferEngine)
        rank.engine = opened.engine
        with get_parallel().override(
            tp_size=size,
            attn_tp_size=size,
            attn_tp_rank=number,
            tp_rank=number,
            moe_tp_size=size,
            moe_tp_rank=number,
        ):
            rank.manager = self.classes[KVClassType.MANAGER](
                rank.arguments(), mode, self._server_args, shape.latent
            )
        if mode == DisaggregationMode.DECODE:
            assert rank.manager.try_ensure_parallel_info(self.address)
        self._made.append(rank)
        return rank

    def begin(self, decode_pages: Sequence[int], aux: int, state: int | None = None) -> Handoff:
        """Both sides of one request, up to the point where prefill may send."""
        room = next(Rig.rooms)
        handoff = Handoff(self, room, aux)
        for rank in self.prefill:
            rank.aux.output_ids[aux, 0] = 1000 + room
            rank.aux.bootstrap_room[aux, 0] = room
            sender = self.classes[KVClassType.SENDER](rank.manager, self.address, room)
            handoff.senders.append(sender)
        for rank in self.decode:
            receiver = self.classes[KVClassType.RECEIVER](rank.manager, self.address, room)
            receiver.init(0)
            receiver.send_metadata(
                np.array(decode_pages, np.int32),
                aux,
                None if state is None else [[state]],
            )
            handoff.receivers.append(receiver)
        return handoff

    def close(self) -> None:
        # The managers' own teardown waits for threads of theirs that never end; those are
        # daemons, and without an engine they have nothing left to do.
        for rank in self._made:
            assert rank.engine is not None
            rank.engine.close()
        self.bootstrap.close()


@dataclass
class Handoff:
    """One request on its way."""

    rig: Rig
    room: int
    aux: int
    senders: list[Any] = field(default_factory=list)
    receivers: list[Any] = field(default_factory=list)

    def wait_for_metadata(self) -> None:
        wait(lambda: all(s.poll() == KVPoll.WaitingForInput for s in self.senders))

    def send(self, pages: Sequence[int], chunks: int = 1, state: int | None = None) -> None:
        parts = np.array_split(np.array(pages, np.int32), chunks)
        for sender in self.senders:
            sender.init(len(pages), self.aux)
            for number, part in enumerate(parts):
                last = number == chunks - 1
                sender.send(part, [[state]] if last and state is not None else None)

    def outcome(self) -> tuple[list[int], list[int]]:
        """How both sides ended."""
        ends = (KVPoll.Success, KVPoll.Failed)
        both = (*self.senders, *self.receivers)
        wait(lambda: all(one.poll() in ends for one in both))
        return [s.poll() for s in self.senders], [r.poll() for r in self.receivers]

    def outcome_of_decode(self) -> list[int]:
        """How the decode side ended, whatever became of the other."""
        wait(lambda: all(r.poll() in (KVPoll.Success, KVPoll.Failed) for r in self.receivers))
        return [r.poll() for r in self.receivers]


def wait(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s in vain"
        time.sleep(0.001)


@pytest.fixture(scope="session")
def server_args() -> ServerArgs:
    """What SGLang takes its process-wide settings from, published as its scheduler does."""
    load_plugins()
    arguments = ServerArgs(
        model_path=str(make_model().path),
        device="cpu",
        attention_backend="torch_native",
        disable_cuda_graph=True,
        host=LOOPBACK,
        disaggregation_mode="prefill",
        disaggregation_transfer_backend="mooncake",
        dtype="float32",
    )
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0))
    get_parallel().override_permanently(pp_group=SimpleNamespace(rank_in_group=0, world_size=1))
    return arguments


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch, server_args: ServerArgs) -> Iterator[Rig]:
    made = Rig(monkeypatch, server_args)
    yield made
    made.close()


@pytest.fixture
def shape_of() -> type[Shape]:
    return Shape


@pytest.fixture
def wait_until() -> Callable[..., None]:
    return wait
