"""Registered memory: what a buffer is, and one registration for all views of a storage.

Nothing here is thread-safe; `efa_kv.runtime.regions` owns a `Registry` and its lock.
"""

from __future__ import annotations

import math
from typing import Any, Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from efa_kv.errors import Code, RegistrationError, StaleHandle
from efa_kv.types import (
    ACCESS_REMOTE_READ,
    ACCESS_REMOTE_WRITE,
    MEMORY_CUDA,
    MEMORY_HOST,
    KeyRecord,
    Nic,
    NicRecord,
    RegionRecord,
)

ACCESS_ALL: Final = ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ


class Span(msgspec.Struct, frozen=True):
    """A range of memory.  ``owner`` keeps it alive; ``device`` is -1 for host memory."""

    address: int
    length_bytes: int
    kind: int = MEMORY_HOST
    device: int = -1
    owner: Any = None

    def contains(self, other: Span) -> bool:
        """Whether ``other`` lies inside this range of the same memory."""
        return (
            (self.kind, self.device) == (other.kind, other.device)
            and self.address <= other.address
            and other.address + other.length_bytes <= self.address + self.length_bytes
        )


def span_of(buffer: Any) -> Span:
    """The whole storage behind ``buffer``; raises `RegistrationError`.

    ``buffer`` is a numpy array, a torch tensor (host or CUDA), another array in GPU memory
    (``__cuda_array_interface__``), a bytearray or another writable buffer, or ``(address,
    length_bytes)``, of which the core asks the driver whose memory it is.  Views give their
    storage, so that all views of one allocation are the same span.
    """
    if isinstance(buffer, tuple):
        span = _span_of_pair(buffer)
    elif hasattr(buffer, "untyped_storage") and hasattr(buffer, "data_ptr"):
        span = _span_of_tensor(buffer)
    elif isinstance(buffer, np.ndarray):
        span = _span_of_array(buffer)
    elif hasattr(buffer, "__cuda_array_interface__"):
        span = _span_of_cuda_array(buffer)
    else:
        span = _span_of_view(buffer)
    if span.length_bytes <= 0 or span.address <= 0:
        raise RegistrationError(
            f"Found a buffer of {span.length_bytes} bytes at address {span.address:#x}; "
            "expected memory of at least one byte.",
            code=Code.EINVAL,
        )
    return span


def _span_of_pair(pair: tuple[Any, ...]) -> Span:
    whole = len(pair) == 2 and all(
        isinstance(value, int | np.integer) and not isinstance(value, bool) for value in pair
    )
    if not whole or int(pair[0]) + max(int(pair[1]), 0) >= 1 << 64:
        raise RegistrationError(
            f"Found {pair!r}; expected (address, length in bytes) as two whole numbers.",
            code=Code.EINVAL,
        )
    return Span(int(pair[0]), int(pair[1]))


def _span_of_tensor(tensor: Any) -> Span:
    storage = tensor.untyped_storage()
    device = tensor.device
    if device.type not in ("cpu", "cuda"):
        raise RegistrationError(
            f"Found a tensor on {device.type}; expected host or CUDA memory.", code=Code.EINVAL
        )
    on_gpu = device.type == "cuda"
    ordinal = -1
    if on_gpu:
        ordinal = 0 if device.index is None else int(device.index)
    kind = MEMORY_CUDA if on_gpu else MEMORY_HOST
    return Span(int(storage.data_ptr()), int(storage.nbytes()), kind, ordinal, tensor)


def _span_of_array(array: NDArray[Any]) -> Span:
    storage: NDArray[Any] = array
    while isinstance(storage.base, np.ndarray):
        storage = storage.base
    if not array.flags.writeable:
        raise RegistrationError(
            "Found a read-only array; expected a writable one.", code=Code.EINVAL
        )
    low = high = int(storage.__array_interface__["data"][0])
    # Strides of a storage that wraps foreign memory may be negative or leave gaps.
    for length, stride in zip(storage.shape, storage.strides, strict=True):
        if length > 1:
            low += min(0, (length - 1) * stride)
            high += max(0, (length - 1) * stride)
    size_bytes = 0 if storage.size == 0 else high + storage.itemsize - low
    return Span(low, size_bytes, owner=array)


def _span_of_cuda_array(array: Any) -> Span:
    """What CuPy and Numba offer (numba.readthedocs.io, "CUDA Array Interface", version 3).
    The driver is asked for the device."""
    described = array.__cuda_array_interface__
    address, read_only = described["data"]
    if read_only:
        raise RegistrationError(
            "Found a read-only array; expected a writable one.", code=Code.EINVAL
        )
    item_bytes = np.dtype(described["typestr"]).itemsize
    shape = described["shape"]
    strides = described.get("strides")
    if strides is None:
        return Span(address, math.prod(shape) * item_bytes, MEMORY_CUDA, -1, array)
    reaches = [(n - 1) * stride for n, stride in zip(shape, strides, strict=True) if n > 1]
    low = address + sum(reach for reach in reaches if reach < 0)
    high = address + sum(reach for reach in reaches if reach > 0)
    size_bytes = 0 if 0 in shape else high + item_bytes - low
    return Span(low, size_bytes, MEMORY_CUDA, -1, array)


def _span_of_view(buffer: Any) -> Span:
    try:
        view = memoryview(buffer)
        if view.readonly:
            raise RegistrationError(
                "Found a read-only buffer; expected a writable one.", code=Code.EINVAL
            )
        flat = np.frombuffer(view, np.uint8)
    except (TypeError, ValueError, BufferError) as problem:
        raise RegistrationError(
            f"Found a buffer of type {type(buffer).__name__} that cannot be used ({problem}); "
            "expected a numpy array, a torch tensor, a contiguous writable buffer or "
            "(address, length).",
            code=Code.EINVAL,
        ) from None
    return Span(int(flat.__array_interface__["data"][0]), flat.nbytes, owner=flat)


class RegionFabric(Protocol):
    """The part of `efa_kv.fabric.Fabric` that a registry uses."""

    def region_add(
        self, address: int, length_bytes: int, kind: int, device: int, access: int
    ) -> int: ...
    def region_keys(self, region: int) -> tuple[KeyRecord, ...]: ...
    def region_remove(self, region: int, timeout_s: float) -> None: ...
    def region_rotate(self, region: int, timeout_s: float) -> None: ...
    def rails(self) -> tuple[Nic, ...]: ...
    def rail_reset(self, rail: int) -> None: ...


class Published(msgspec.Struct, frozen=True):
    """What peers may know: all regions and NICs, and a number that grows with every change."""

    epoch: int = 0
    regions: tuple[RegionRecord, ...] = ()
    nics: tuple[NicRecord, ...] = ()


class Change(msgspec.Struct, frozen=True):
    """The step to ``epoch`` from the one before; ``nics`` are all of them, or none when
    their addresses are what they were."""

    epoch: int
    added: tuple[RegionRecord, ...] = ()
    removed: tuple[int, ...] = ()
    nics: tuple[NicRecord, ...] = ()


class _Entry:
    """A registration and how many `Region`s share it."""

    __slots__ = ("access", "region", "span", "users")

    def __init__(self, region: int, span: Span, access: int) -> None:
        self.region = region
        self.span = span
        self.access = access
        self.users = 1


class Registry:
    """Registrations of one engine, shared by storage and counted.

    ``published`` is replaced, never changed, so other threads may read it at any time.
    """

    def __init__(self, fabric: RegionFabric) -> None:
        self._fabric = fabric
        self._entries: dict[int, _Entry] = {}
        self.published = Published(nics=tuple(nic.record() for nic in fabric.rails()))

    def add(self, span: Span, access: int) -> tuple[int, Change | None]:
        """Registers ``span`` or shares a registration that holds it; the region's id, and
        the change to tell peers about. [blocks]"""
        for entry in self._entries.values():
            if entry.span.contains(span) and entry.access == access:
                entry.users += 1
                return entry.region, None
        region = self._fabric.region_add(
            span.address, span.length_bytes, span.kind, span.device, access
        )
        self._entries[region] = _Entry(region, span, access)
        return region, self._publish((region,), ())

    def retract(self, region: int) -> Change | None:
        """The change to tell peers about before the last use of a region is given back:
        they had better stop writing before the fabric refuses them."""
        entry = self._find(region)
        known = any(record.region == region for record in self.published.regions)
        return self._publish((), (region,)) if entry.users == 1 and known else None

    def remove(self, region: int, timeout_s: float) -> None:
        """Gives one use of a region back; the last one deregisters it.

        `FabricBusy` while operations use it: then it is refused to new jobs, and the call
        can be repeated. [blocks]
        """
        entry = self._find(region)
        if entry.users > 1:
            entry.users -= 1
            return
        self._fabric.region_remove(region, timeout_s)
        del self._entries[region]

    def _find(self, region: int) -> _Entry:
        entry = self._entries.get(region)
        if entry is None:
            raise StaleHandle("The region is not registered (any more).", code=Code.ESTALE)
        return entry

    def rotate(self, region: int, timeout_s: float) -> Change | None:
        """Gives a region fresh keys; old ones are refused from then on.  A region that is
        retracted already stays untold. [blocks]"""
        self._find(region)
        self._fabric.region_rotate(region, timeout_s)
        if all(record.region != region for record in self.published.regions):
            return None
        return self._publish((region,), ())

    def remotely_writable(self) -> list[int]:
        """Ids of the regions that peers may write to, those being removed included: their
        keys are good until they are gone."""
        return [
            region for region, entry in self._entries.items() if entry.access & ACCESS_REMOTE_WRITE
        ]

    def reset_loose_rails(self) -> None:
        """Closes every endpoint whose late bytes no key keeps out: nothing that was on its
        way lands from then on.  Say `rails_changed` afterwards. [blocks]"""
        for index, nic in enumerate(self._fabric.rails()):
            if not nic.fences:
                self._fabric.rail_reset(index)

    def rails_changed(self) -> Change | None:
        """The change to tell peers about when NICs have other addresses than were told."""
        nics = tuple(nic.record() for nic in self._fabric.rails())
        if nics == self.published.nics:
            return None
        self.published = Published(self.published.epoch + 1, self.published.regions, nics)
        return Change(self.published.epoch, nics=nics)

    def _publish(self, added: tuple[int, ...], removed: tuple[int, ...]) -> Change:
        records = tuple(self._record(self._entries[region]) for region in added)
        kept = tuple(
            record
            for record in self.published.regions
            if record.region not in added and record.region not in removed
        )
        regions = tuple(sorted(kept + records, key=lambda record: record.region))
        self.published = Published(self.published.epoch + 1, regions, self.published.nics)
        return Change(self.published.epoch, records, removed)

    def _record(self, entry: _Entry) -> RegionRecord:
        span = entry.span
        return RegionRecord(
            entry.region,
            span.address,
            span.length_bytes,
            span.kind,
            entry.access,
            self._fabric.region_keys(entry.region),
        )
