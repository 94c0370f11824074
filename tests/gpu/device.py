"""GPU memory by way of NVIDIA's driver, or of the one that plays it; no torch needed."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

DMA_BUF_FD = 1


class NoDriverError(Exception):
    """There is no driver, or no GPU behind it."""


class Driver:
    """The driver's calls that the checks need; raises `NoDriverError` or `RuntimeError`."""

    def __init__(self, path: str) -> None:
        try:
            self._library = ctypes.CDLL(path)
        except OSError as problem:
            raise NoDriverError(f"{problem}") from None
        count = ctypes.c_int()
        if self._library.cuInit(0) != 0 or self._library.cuDeviceGetCount(ctypes.byref(count)):
            raise NoDriverError(f"{path} finds no GPU")
        self.count = count.value
        if self.count == 0:
            raise NoDriverError(f"{path} finds no GPU")
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._streams: dict[int, ctypes.c_void_p] = {}

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name} answered {code}")

    def enter(self, device: int) -> None:
        """Makes the device's primary context this thread's."""
        if device not in self._contexts:
            handle, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(handle), device)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
            self._contexts[device] = context
            self._call("cuCtxPushCurrent_v2", context)
            self._call("cuStreamCreate", ctypes.byref(stream), 1)
            self._streams[device] = stream
        else:
            self._call("cuCtxPushCurrent_v2", self._contexts[device])

    def leave(self) -> None:
        self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def allocate(self, length_bytes: int, device: int) -> int:
        address = ctypes.c_uint64()
        self.enter(device)
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(length_bytes))
        self.leave()
        return address.value

    def copy(self, to: int, source: int, length_bytes: int, device: int) -> None:
        """Copies and waits."""
        self.enter(device)
        stream = self._streams[device]
        sizes = (ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(length_bytes))
        self._call("cuMemcpyAsync", *sizes, stream)
        self._call("cuStreamSynchronize", stream)
        self.leave()

    def exports(self, address: int, length_bytes: int, device: int) -> bool:
        """Whether the driver gives out a dmabuf descriptor of the memory."""
        descriptor = ctypes.c_int(-1)
        self.enter(device)
        try:
            self._call(
                "cuMemGetHandleForAddressRange",
                ctypes.byref(descriptor),
                ctypes.c_uint64(address),
                ctypes.c_size_t(length_bytes),
                DMA_BUF_FD,
                ctypes.c_uint64(0),
            )
        except (RuntimeError, AttributeError):
            return False
        finally:
            self.leave()
        return descriptor.value >= 0


class GpuArray:
    """Bytes on a GPU, in the shape in which CuPy and Numba offer theirs."""

    def __init__(self, driver: Driver, length_bytes: int, device: int) -> None:
        self._driver = driver
        self.device = device
        self.length_bytes = length_bytes
        self.address = driver.allocate(length_bytes, device)
        self.__cuda_array_interface__ = {
            "shape": (length_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }

    def put(self, data: np.ndarray) -> None:
        """Fills all of it."""
        self._driver.copy(self.address, data.ctypes.data, self.length_bytes, self.device)

    def get(self) -> np.ndarray:
        """All of it, on the host."""
        data = np.zeros(self.length_bytes, np.uint8)
        self._driver.copy(data.ctypes.data, self.address, self.length_bytes, self.device)
        return data
