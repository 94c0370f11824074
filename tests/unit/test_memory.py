"""Buffers, and one registration for all views of a storage."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from efa_kv.errors import FabricBusy, RegistrationError, StaleHandle
from efa_kv.memory import ACCESS_ALL, Registry, Span, span_of
from efa_kv.runtime.regions import RegionBook, neighbour
from efa_kv.types import ACCESS_REMOTE_READ, MEMORY_CUDA, KeyRecord, Nic


def nic(address: str, fences: bool) -> Nic:
    return Nic(
        name="nic0",
        fabric="fabric",
        provider="provider",
        pci="",
        numa_node=-1,
        flags=0,
        queue_depth=8,
        provider_queue_depth=8,
        completion_queue_size=16,
        speed_bits_per_second=0,
        address=address.encode(),
        fences=fences,
    )


class FakeFabric:
    def __init__(self) -> None:
        self.regions: dict[int, tuple[int, int]] = {}
        self.next = 1
        self.key = 100
        self.keys: dict[int, int] = {}
        self.busy = False
        self.fences = True
        self.resets = 0

    def rails(self) -> tuple[Nic, ...]:
        return (nic(f"address-{self.resets}", self.fences),)

    def rail_reset(self, rail: int) -> None:
        assert rail == 0
        self.resets += 1

    def region_add(
        self, address: int, length_bytes: int, kind: int, device: int, access: int
    ) -> int:
        region, self.next = self.next, self.next + 1
        self.regions[region] = (address, length_bytes)
        self.region_rotate(region, 0)
        return region

    def region_keys(self, region: int) -> tuple[KeyRecord, ...]:
        return (KeyRecord(0, self.keys[region], 0, 0, self.regions[region][1]),)

    def region_remove(self, region: int, timeout_s: float) -> None:
        if self.busy:
            raise FabricBusy("in use")
        del self.regions[region]

    def region_rotate(self, region: int, timeout_s: float) -> None:
        if self.busy:
            raise FabricBusy("in use")
        self.key += 1
        self.keys[region] = self.key


class FakeTensor:
    """What torch tensors look like from here."""

    class Device:
        def __init__(self, kind: str, index: int | None) -> None:
            self.type, self.index = kind, index

    class Storage:
        def data_ptr(self) -> int:
            return 0x1000

        def nbytes(self) -> int:
            return 8192

    def __init__(self, kind: str = "cuda", index: int | None = 1) -> None:
        self.device = self.Device(kind, index)

    def untyped_storage(self) -> FakeTensor.Storage:
        return self.Storage()

    def data_ptr(self) -> int:
        return 0x1800


class CudaArray:
    """What CuPy's and Numba's arrays look like from here."""

    def __init__(self, shape: tuple[int, ...], strides: Any, read_only: bool = False) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "<f4",
            "data": (0x7000, read_only),
            "strides": strides,
            "version": 3,
        }


@pytest.mark.parametrize(
    ("shape", "strides", "address", "length_bytes"),
    [
        ((3, 5), None, 0x7000, 60),
        ((3, 5), (40, 4), 0x7000, 100),
        ((3,), (-8,), 0x7000 - 16, 20),
        ((1, 2), (1 << 40, 4), 0x7000, 8),
    ],
)
def test_arrays_in_gpu_memory(
    shape: tuple[int, ...], strides: Any, address: int, length_bytes: int
) -> None:
    span = span_of(CudaArray(shape, strides))
    assert (span.address, span.length_bytes) == (address, length_bytes)
    assert (span.kind, span.device) == (MEMORY_CUDA, -1)


def test_arrays_in_gpu_memory_that_cannot_be_registered() -> None:
    with pytest.raises(RegistrationError, match="read-only"):
        span_of(CudaArray((3,), None, read_only=True))
    with pytest.raises(RegistrationError, match="0 bytes"):
        span_of(CudaArray((3, 0), (4, 4)))


def test_views_give_their_storage() -> None:
    base = np.zeros((4, 6, 8), np.float32)
    whole = span_of(base)
    assert whole.length_bytes == base.nbytes
    for view in (
        base[1],
        base[:, 2],
        base.reshape(-1)[5:9],
        base.T,
        base[::-1],
        base.view(np.uint8),
    ):
        span = span_of(view)
        assert (span.address, span.length_bytes) == (whole.address, whole.length_bytes)


def test_buffers() -> None:
    buffer = bytearray(100)
    span = span_of(buffer)
    np.frombuffer(buffer, np.uint8)[3] = 9
    assert span.length_bytes == 100
    assert span_of(memoryview(buffer)).address == span.address
    assert span_of((0x1000, 64)) == Span(0x1000, 64)
    assert span_of((np.uint64(0x1000), np.int64(64))) == Span(0x1000, 64)


def test_tensors_without_torch() -> None:
    span = span_of(FakeTensor())
    assert (span.address, span.length_bytes) == (0x1000, 8192)
    assert (span.kind, span.device) == (MEMORY_CUDA, 1)
    assert span_of(FakeTensor("cuda", None)).device == 0
    assert span_of(FakeTensor("cpu", None)).device == -1
    with pytest.raises(RegistrationError, match="mps"):
        span_of(FakeTensor("mps", 0))


def _read_only() -> np.ndarray:
    array = np.zeros(10, np.uint8)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "buffer",
    [
        b"read only",
        _read_only(),
        "text",
        None,
        5,
        [1, 2],
        (1,),
        (1, 2, 3),
        ("a", 1),
        (1.5, 2),
        (True, 10),
        (0, 10),
        (10, 0),
        (10, -5),
        (2**64 - 1, 10),
        np.zeros(0, np.uint8),
        bytearray(0),
        memoryview(bytearray(10))[::2],
    ],
)
def test_what_is_no_memory_is_refused(buffer: Any) -> None:
    with pytest.raises(RegistrationError, match="Found"):
        span_of(buffer)


def test_views_share_one_registration_until_the_last_goes() -> None:
    fabric = FakeFabric()
    registry = Registry(fabric)
    base = np.zeros(1000, np.uint8)
    first, change = registry.add(span_of(base), ACCESS_ALL)
    assert change is not None
    assert change.epoch == 1
    second, none = registry.add(span_of(base[10:]), ACCESS_ALL)
    assert (second, none) == (first, None)
    inside, none = registry.add(Span(span_of(base).address + 5, 10), ACCESS_ALL)
    assert (inside, none) == (first, None)
    for _ in range(2):
        assert registry.retract(first) is None
        registry.remove(first, 0)
    gone = registry.retract(first)
    assert gone is not None
    assert (gone.epoch, gone.removed) == (2, (first,))
    assert registry.retract(first) is None
    registry.remove(first, 0)
    assert fabric.regions == {}
    with pytest.raises(StaleHandle):
        registry.remove(first, 0)


def test_other_access_or_more_memory_is_another_registration() -> None:
    registry = Registry(FakeFabric())
    one, _ = registry.add(Span(0x1000, 100), ACCESS_ALL)
    two, _ = registry.add(Span(0x1000, 100), ACCESS_REMOTE_READ)
    three, _ = registry.add(Span(0x1000, 101), ACCESS_ALL)
    four, _ = registry.add(Span(0x1000, 100, MEMORY_CUDA, 0), ACCESS_ALL)
    assert len({one, two, three, four}) == 4
    assert registry.remotely_writable() == [one, three, four]


def test_published_is_replaced_and_counts_up() -> None:
    registry = Registry(FakeFabric())
    before = registry.published
    region, _ = registry.add(Span(0x1000, 100), ACCESS_ALL)
    assert before.regions == ()
    [record] = registry.published.regions
    change = registry.rotate(region, 0)
    assert change is not None
    assert change.added[0].region == record.region
    assert change.added[0].keys != record.keys
    assert registry.published.epoch == 2


def test_a_busy_region_stays_and_can_be_tried_again() -> None:
    fabric = FakeFabric()
    registry = Registry(fabric)
    region, _ = registry.add(Span(0x1000, 100), ACCESS_ALL)
    fabric.busy = True
    with pytest.raises(FabricBusy):
        registry.remove(region, 0)
    with pytest.raises(FabricBusy):
        registry.rotate(region, 0)
    assert registry.published.epoch == 1
    fabric.busy = False
    registry.remove(region, 0)
    assert fabric.regions == {}


def test_a_region_on_its_way_out_still_gets_fresh_keys_but_is_not_told_again() -> None:
    fabric = FakeFabric()
    registry = Registry(fabric)
    region, _ = registry.add(Span(0x1000, 100), ACCESS_ALL)
    assert registry.retract(region) is not None
    key = fabric.keys[region]
    assert registry.remotely_writable() == [region]
    assert registry.rotate(region, 0) is None
    assert fabric.keys[region] != key
    assert registry.published.regions == ()


def test_book_announces_every_change_in_order_and_is_found_by_its_incarnation() -> None:
    fabric, changes = FakeFabric(), []
    book = RegionBook(fabric, 4711, changes.append, lambda: 1)
    assert neighbour(4711) is book
    region = book.register(bytearray(100))
    assert book.rotate_writable(0)
    fabric.busy = True
    assert not book.rotate_writable(0)
    fabric.busy = False
    region.deregister()
    region.deregister()
    assert [change.epoch for change in changes] == [1, 2, 3]
    assert book.published.regions == ()
    del book, region
    assert neighbour(4711) is None


@pytest.mark.parametrize("fences", [True, False])
def test_where_keys_do_not_fence_the_rails_are_reset_and_peers_told(fences: bool) -> None:
    fabric, changes, peers = FakeFabric(), [], 0
    fabric.fences = fences
    book = RegionBook(fabric, 4712, changes.append, lambda: peers)
    assert [record.address for record in book.published.nics] == [b"address-0"]
    first, second = book.register(bytearray(100)), book.register(bytearray(200))
    epoch = book.rotate_writable(0)
    assert epoch == changes[-1].epoch == book.published.epoch
    assert fabric.resets == (0 if fences else 1)
    assert [record.address for record in changes[-1].nics] == ([] if fences else [b"address-1"])
    assert changes[-2].added
    first.deregister()
    assert fabric.resets == (0 if fences else 1), "nobody is there to write late"
    peers = 1
    second.deregister()
    assert fabric.resets == (0 if fences else 2)
    assert [record.address for record in book.published.nics] == (
        [b"address-0"] if fences else [b"address-2"]
    )


def test_addresses_that_the_core_changed_are_told_once() -> None:
    fabric, changes = FakeFabric(), []
    book = RegionBook(fabric, 4713, changes.append, lambda: 1)
    book.rails_changed()
    assert changes == []
    fabric.rail_reset(0)
    book.rails_changed()
    book.rails_changed()
    [change] = changes
    assert (change.epoch, change.nics) == (1, book.published.nics)
