"""Two processes move bytes over software providers, and every byte is checked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from efa_kv import EngineConfig, TransferEngine
from efa_kv.errors import AddressError, StaleHandle
from efa_kv.types import ROW_DTYPE, Notice

PROTOCOLS = ["tcp", "shm", pytest.param("tcp;ofi_rxm", marks=pytest.mark.slow)]
Child = Callable[..., Any]


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(protocol: str) -> Iterator[TransferEngine]:
    with TransferEngine(EngineConfig(protocol=protocol, near=False)) as opened:
        yield opened


def _random(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@pytest.mark.parametrize("size", [1, 4096, 1_000_003])
def test_write_and_read_back(
    engine: TransferEngine, child: Child, protocol: str, size: int
) -> None:
    target = child(protocol=protocol)
    remote = target.ask("register", name="a", size=size)["address"]
    source, back = _random(size, 5), np.zeros(size, np.uint8)
    local, returned = engine.register(source), engine.register(back)
    peer = engine.connect(target.session)
    assert peer.incarnation == target.incarnation
    result = engine.write(peer, [local.address], [remote], [size]).wait(20)
    assert result.error is None
    assert (result.bytes, result.fenced) == (size, True)
    assert target.ask("matches", name="a", seed=5)
    assert engine.read(peer, [returned.address], [remote], [size]).wait(20).error is None
    assert np.array_equal(source, back)


def test_scattered_pieces_land_where_they_belong_and_nowhere_else(
    engine: TransferEngine, child: Child, protocol: str
) -> None:
    size, count, piece = 1 << 20, 300, 1000
    target = child(protocol=protocol)
    remote = target.ask("register", name="a", size=size)["address"]
    engine_buffer = _random(size, 1)
    region = engine.register(engine_buffer)
    rng = np.random.default_rng(2)
    slots = size // piece
    here = rng.permutation(slots)[:count].astype(np.uint64) * piece
    there = rng.permutation(slots)[:count].astype(np.uint64) * piece
    lengths = rng.integers(1, piece + 1, count).astype(np.uint64)
    result = engine.write(target.session, here + region.address, there + remote, lengths).wait(20)
    assert result.error is None
    assert result.bytes == int(lengths.sum())
    expected = np.zeros(size, np.uint8)
    for source, destination, length in zip(here, there, lengths, strict=True):
        expected[int(destination) : int(destination + length)] = engine_buffer[
            int(source) : int(source + length)
        ]
    back = np.zeros(size, np.uint8)
    returned = engine.register(back)
    engine.read(target.session, [returned.address], [remote], [size]).wait(20)
    assert np.array_equal(back, expected)


def test_paged_blocks(engine: TransferEngine, child: Child, protocol: str) -> None:
    layers, blocks, block_bytes = 6, 40, 512
    size = layers * blocks * block_bytes
    target = child(protocol=protocol)
    remote = target.ask("register", name="a", size=size)["address"]
    source = _random(size, 3)
    region = engine.register(source)
    rows = np.zeros(layers, ROW_DTYPE)
    offsets = np.arange(layers, dtype=np.uint64) * blocks * block_bytes
    rows["local_address"] = region.address + offsets
    rows["remote_address"] = remote + offsets
    rows["local_stride_bytes"] = rows["remote_stride_bytes"] = block_bytes
    rows["length_bytes"] = block_bytes
    local_blocks = np.array([0, 1, 2, 7, 9, 39], np.uint32)
    remote_blocks = np.array([5, 6, 7, 0, 38, 2], np.uint32)
    job = engine.write_paged(target.session, rows, local_blocks, remote_blocks)
    assert job.wait(20).error is None
    back = np.zeros(size, np.uint8)
    returned = engine.register(back)
    engine.read(target.session, [returned.address], [remote], [size]).wait(20)
    expected = np.zeros((layers, blocks, block_bytes), np.uint8)
    expected[:, remote_blocks] = source.reshape(layers, blocks, block_bytes)[:, local_blocks]
    assert np.array_equal(back, expected.reshape(-1))


def test_a_notice_comes_behind_the_last_byte(
    engine: TransferEngine, child: Child, protocol: str
) -> None:
    size = 1 << 20
    target = child(protocol=protocol)
    remote = target.ask("register", name="a", size=size)["address"]
    region = engine.register(_random(size, 4))
    notice = Notice((11, 22), 33)
    engine.write(target.session, [region.address], [remote], [size], notice=notice).wait(20)
    assert target.ask("notices") == [[11, 22, 33, 0, size, engine.incarnation]]
    assert target.ask("matches", name="a", seed=4)
    engine.write(target.session, [], [], [], notice=Notice((1, 2), 3)).wait(20)
    assert target.ask("notices") == [[1, 2, 3, 0, 0, engine.incarnation]]


def test_regions_that_come_and_go(
    engine: TransferEngine, child: Child, protocol: str, wait_until: Callable[..., None]
) -> None:
    target = child(protocol=protocol)
    peer = engine.connect(target.session)
    assert not peer.regions
    source = engine.register(_random(4096, 6))

    remote = target.ask("register", name="new", size=4096)["address"]
    assert engine.write(peer, [source.address], [remote], [4096]).wait(20).error is None
    assert target.ask("matches", name="new", seed=6)

    target.ask("deregister", name="new")
    wait_until(lambda: not peer.regions)
    result = engine.write(peer, [source.address], [remote], [4096]).wait(20)
    assert result.error is not None
    assert (result.bytes, result.fenced) == (0, True)


def test_a_region_the_change_of_which_was_missed_is_asked_for(
    engine: TransferEngine, child: Child, protocol: str
) -> None:
    target = child(protocol=protocol)
    peer = engine.connect(target.session)
    source = engine.register(_random(4096, 6))
    handle = peer.handle
    assert handle.peer is not None
    remote = target.ask("register", name="a", size=4096)["address"]
    # As if the announcement had been lost on the way.
    for number in list(handle.peer.regions):
        engine.fabric.peer_region_remove(handle.peer_id, number)
    handle.peer.regions = {}
    handle.peer.epoch = 0
    assert engine.write(peer, [source.address], [remote], [4096]).wait(20).error is None
    assert target.ask("matches", name="a", seed=6)


def test_what_is_not_registered_is_refused_at_once(
    engine: TransferEngine, child: Child, protocol: str
) -> None:
    target = child(protocol=protocol)
    remote = target.ask("register", name="a", size=4096)["address"]
    region = engine.register(np.zeros(4096, np.uint8))
    with pytest.raises(AddressError, match="EREGION"):
        engine.write(target.session, [region.address + 1], [remote], [4096])
    for address in (remote + 1, remote - 1, 1):
        result = engine.write(target.session, [region.address], [address], [4096]).wait(20)
        assert isinstance(result.error, AddressError)
        assert result.bytes == 0
    assert target.ask("count", name="a", value=0) == 4096
    for wrong in ([-1], [1.5], ["x"], [[1]], [2**64]):
        with pytest.raises(AddressError):
            engine.write(target.session, [region.address], [remote], wrong)
    with pytest.raises(AddressError, match="equally many"):
        engine.write(target.session, [region.address], [remote, remote], [1, 1])
    region.deregister()
    with pytest.raises(AddressError, match="EREGION"):
        engine.write(target.session, [region.address], [remote], [4096])
    with pytest.raises(StaleHandle):
        engine._book.remove(region.region, 0.1)


async def test_await_several_jobs(child: Child) -> None:
    target = child(protocol="tcp")
    remote = target.ask("register", name="a", size=1 << 20)["address"]
    with TransferEngine(EngineConfig(protocol="tcp", near=False)) as engine:
        region = engine.register(_random(1 << 20, 8))
        peer = engine.connect(target.session)
        piece = 1 << 16
        jobs = [
            engine.write(peer, [region.address + at], [remote + at], [piece])
            for at in range(0, 1 << 20, piece)
        ]
        results = await asyncio.gather(*jobs)
        assert all(result.error is None for result in results)
        assert target.ask("matches", name="a", seed=8)
        assert (await jobs[0]).bytes == piece
        refused = await engine.write(peer, [region.address], [1], [piece])
        assert isinstance(refused.error, AddressError)
        outside = await asyncio.to_thread(engine.write, peer, [region.address], [remote], [piece])
        assert (await outside).error is None


def test_jobs_dropped_early_give_the_native_job_back(child: Child) -> None:
    target = child(protocol="tcp")
    remote = target.ask("register", name="a", size=4096)["address"]
    with TransferEngine(EngineConfig(protocol="tcp", near=False, max_jobs=64)) as engine:
        region = engine.register(_random(4096, 9))
        peer = engine.connect(target.session)
        for _ in range(2000):
            engine.write(peer, [region.address], [remote], [4096]).wait(10)
        assert target.ask("matches", name="a", seed=9)


def test_warmup_and_counters(engine: TransferEngine, child: Child, protocol: str) -> None:
    target = child(protocol=protocol)
    remote = target.ask("register", name="a", size=4096)["address"]
    region = engine.register(_random(4096, 9))
    engine.warmup(target.session)
    before = sum(rail.bytes_written for rail in engine.counters())
    engine.write(target.session, [region.address], [remote], [4096]).wait(10)
    assert sum(rail.bytes_written for rail in engine.counters()) - before == 4096


def test_rotated_keys_reach_the_peer(engine: TransferEngine, child: Child, protocol: str) -> None:
    target = child(protocol=protocol)
    source = np.zeros(4096, np.uint8)
    region = engine.register(source)
    peer_address = target.ask("register", name="a", size=4096, seed=3)["address"]
    target.ask("connect", session=engine.session)

    def write() -> Any:
        return target.ask(
            "write",
            session=engine.session,
            local=[peer_address],
            remote=[region.address],
            lengths=[4096],
            timeout_s=5.0,
        )

    assert write()["error"] is None
    source[:] = 0
    assert engine.rotate_regions(1.0)
    # A write before the announcement is refused; shm then never answers again, so wait.
    assert target.ask("knows", session=engine.session, epoch=engine.regions_epoch)
    assert write()["error"] is None
    assert np.array_equal(source, _random(4096, 3))


def test_same_process_takes_the_short_way() -> None:
    with (
        TransferEngine(EngineConfig(protocol="tcp")) as one,
        TransferEngine(EngineConfig(protocol="tcp")) as two,
    ):
        source, target = _random(1 << 16, 1), np.zeros(1 << 16, np.uint8)
        here, there = one.register(source), two.register(target)
        job = one.write(two.session, [here.address], [there.address], [1 << 16])
        assert job.wait(10).error is None
        assert np.array_equal(source, target)
        assert sum(rail.bytes_near for rail in one.counters()) == 1 << 16


def test_another_process_of_this_host_takes_the_short_way(child: Child) -> None:
    size = 1 << 20
    target = child(protocol="tcp", near=True, near_consent=True)
    remote = target.ask("register", name="a", size=size)["address"]
    with TransferEngine(EngineConfig(protocol="tcp")) as engine:
        region = engine.register(_random(size, 5))
        notice = Notice((1, 2), 3)
        job = engine.write(target.session, [region.address], [remote], [size], notice=notice)
        assert job.wait(20).error is None
        assert target.ask("notices") == [[1, 2, 3, 0, size, engine.incarnation]]
        assert target.ask("matches", name="a", seed=5)
        (rail,) = engine.counters()
        assert (rail.bytes_near, rail.bytes_written) == (size, 0)


def test_a_neighbour_that_offers_no_memory_is_reached_by_the_provider(child: Child) -> None:
    size = 1 << 16
    target = child(protocol="tcp", near=False)
    remote = target.ask("register", name="a", size=size)["address"]
    with TransferEngine(EngineConfig(protocol="tcp")) as engine:
        region = engine.register(_random(size, 5))
        assert engine.write(target.session, [region.address], [remote], [size]).wait(20).bytes
        (rail,) = engine.counters()
        assert (rail.bytes_near, rail.bytes_written) == (0, size)
        assert rail.near_refused_system == 1
