"""An engine here and a target in a process of its own, as the bars of the core alone need them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from efa_kv import EngineConfig, TransferEngine
from efa_kv.runtime.engine import Peer
from efa_kv.tools.bench_memory import HostBuffer
from efa_kv.tools.bench_run import remote_buffers
from efa_kv.tools.loopback import Target, TargetSettings


@dataclass(frozen=True)
class Pools:
    """A registered pool on either side, and the way from the one to the other."""

    engine: TransferEngine
    peer: Peer
    local_address: int
    remote_address: int


@contextmanager
def pools(size_bytes: int) -> Iterator[Pools]:
    """Two pools of this size over the ``efa`` provider, ready for the first transfer."""
    settings = {"protocol": "efa", "near": False}
    memory = TargetSettings(engine=settings, buffer_size_bytes=size_bytes, touch=False)
    with Target(memory) as target, TransferEngine(EngineConfig.load(settings)) as engine:
        pool = HostBuffer(size_bytes)
        engine.register(pool.whole)
        peer = engine.connect(target.session)
        engine.warmup(peer)
        yield Pools(engine, peer, pool.address, remote_buffers(peer)[0].address)
