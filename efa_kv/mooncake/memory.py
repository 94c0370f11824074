"""Registered memory by address, and buffers that the engine itself allocates.

Any thread: the tables are dicts whose single operations are atomic, and nothing is
looked up in one and changed in another.
"""

from __future__ import annotations

import ctypes
import logging
import time
from typing import Any, Final

import numpy as np

from efa_kv.errors import (
    AddressError,
    Code,
    EfaKvError,
    FabricBusy,
    FabricError,
    RegistrationError,
    StaleHandle,
)
from efa_kv.mooncake import cuda
from efa_kv.mooncake.names import BUSY, FAILED, NO_CONTEXT, NOT_REGISTERED, OK
from efa_kv.runtime.engine import TransferEngine
from efa_kv.runtime.regions import Region

_log = logging.getLogger(__name__)

_REMOVE_PIECE_S: Final = 0.5


class _Entry:
    """A registration; one of a managed buffer owns its memory."""

    __slots__ = ("length_bytes", "owner", "region")

    def __init__(self, region: Region, length_bytes: int, owner: Any = None) -> None:
        self.region = region
        self.length_bytes = length_bytes
        self.owner = owner


class MemoryBook:
    """What ``register_memory`` and its siblings did.  Returns Mooncake's numbers; why
    something failed is in the log."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._entries: dict[int, tuple[_Entry, ...]] = {}
        self._managed: dict[int, _Entry] = {}

    # ---- the caller's memory ------------------------------------------------------------

    def register(self, address: int, length_bytes: int, location: str) -> int:
        """Registers; a range that is registered already counts once more. [blocks]"""
        try:
            region = self._engine.register(_buffer(address, length_bytes, location))
        except EfaKvError as problem:
            _log.error(
                "%d bytes at %#x (%s) could not be registered by %s: %s",
                length_bytes,
                address,
                location,
                self._engine.session,
                problem,
            )
            wrong = isinstance(problem, FabricError) and problem.code == Code.EINVAL
            return FAILED if wrong or not isinstance(problem, RegistrationError) else NO_CONTEXT
        entry = _Entry(region, length_bytes)
        self._entries[address] = (*self._entries.get(address, ()), entry)
        return OK

    def register_all(self, addresses: list[int], lengths: list[int], location: str) -> int:
        """All or none. [blocks]"""
        if len(addresses) != len(lengths):
            _log.error(
                "found %d addresses and %d lengths to register; expected equally many",
                len(addresses),
                len(lengths),
            )
            return FAILED
        for index, (address, length_bytes) in enumerate(zip(addresses, lengths, strict=True)):
            code = self.register(address, length_bytes, location)
            if code != OK:
                self.unregister_all(addresses[:index])
                return code
        return OK

    def unregister(self, address: int) -> int:
        """No peer can write there after it returned 0. [blocks]"""
        entries = self._entries.pop(address, ())
        if not entries:
            _log.error(
                "memory at %#x is to be unregistered by %s, which has not registered it",
                address,
                self._engine.session,
            )
            return NOT_REGISTERED
        *kept, last = entries
        code = self._remove(last.region)
        if code != OK:
            kept.append(last)
        if kept:
            self._entries[address] = (*kept, *self._entries.get(address, ()))
        return code

    def unregister_all(self, addresses: list[int]) -> int:
        """Tries all; the first failure's number. [blocks]"""
        codes = [self.unregister(address) for address in addresses]
        return next((code for code in codes if code != OK), OK)

    def _remove(self, region: Region) -> int:
        """Waits as long as a transfer may take for those that use the memory."""
        deadline = time.monotonic() + self._engine.config.transfer_timeout_s
        while True:
            try:
                region.deregister(_REMOVE_PIECE_S)
                return OK
            except FabricBusy as problem:
                if time.monotonic() >= deadline:
                    _log.error("%r stays in use: %s", region, problem)
                    return BUSY
            except StaleHandle:
                return OK  # the engine is closed
            except EfaKvError as problem:
                _log.error("%r could not be unregistered: %s", region, problem)
                return FAILED

    # ---- managed buffers ----------------------------------------------------------------

    def allocate(self, length_bytes: int) -> int:
        """The address of new registered memory, 0 on failure. [blocks]"""
        if length_bytes <= 0:
            _log.error("found %d bytes to allocate; expected at least 1", length_bytes)
            return 0
        try:
            owner = np.zeros(length_bytes, np.uint8)
            region = self._engine.register(owner)
        except (MemoryError, EfaKvError) as problem:
            _log.error("%d bytes could not be allocated: %s", length_bytes, problem)
            return 0
        self._managed[region.address] = _Entry(region, length_bytes, owner)
        return region.address

    def free(self, address: int) -> int:
        """Gives a managed buffer back. [blocks]"""
        entry = self._managed.pop(address, None)
        if entry is None:
            _log.error("found %#x to be freed, which is no managed buffer", address)
            return FAILED
        code = self._remove(entry.region)
        if code != OK:
            self._managed[address] = entry
        return code

    def write(self, address: int, data: bytes) -> int:
        """Copies into registered host memory."""
        if not self._holds(address, len(data)):
            _log.error("%d bytes at %#x are not registered host memory", len(data), address)
            return FAILED
        ctypes.memmove(address, data, len(data))
        return OK

    def read(self, address: int, length_bytes: int) -> bytes:
        """Copies out of registered host memory; raises `AddressError`."""
        if length_bytes < 0 or not self._holds(address, length_bytes):
            raise AddressError(
                f"Found {length_bytes} bytes at {address:#x}; expected registered host memory.",
                code=Code.EREGION,
            )
        return ctypes.string_at(address, length_bytes)

    def _holds(self, address: int, length_bytes: int) -> bool:
        for table in (self._managed.copy(), self._entries.copy()):
            for base, value in table.items():
                entries = value if isinstance(value, tuple) else (value,)
                longest = max(entry.length_bytes for entry in entries)
                if base <= address and address + length_bytes <= base + longest:
                    return cuda.device_of(address) is None
        return False


def _buffer(address: int, length_bytes: int, location: str) -> Any:
    """What the engine registers: a bare range, or one that says which GPU it lies on."""
    device = cuda.device_of(address)
    if device is None and location.startswith("cuda:") and location[5:].isdigit():
        device = int(location[5:])
    if device is None:
        return (address, length_bytes)
    return cuda.DeviceRange(address, length_bytes, device)
