"""The little that is needed of the CUDA driver: whose memory an address is, and waiting
for a stream.  The driver's library is loaded when first asked for; without one every
address is host memory, and waiting for a stream raises.
"""

from __future__ import annotations

import ctypes
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

from efa_kv.errors import Code, FabricUnavailable

_LIBRARY: Final = "libcuda.so.1"
_SUCCESS: Final = 0
_MEMORY_TYPE: Final = 2
_IS_MANAGED: Final = 8
_DEVICE_ORDINAL: Final = 9
_TYPE_DEVICE: Final = 2


class DeviceRange:
    """Memory of a GPU in the shape in which the engine knows tensors."""

    def __init__(self, address: int, length_bytes: int, device: int) -> None:
        self._address = address
        self._length_bytes = length_bytes
        self.device = SimpleNamespace(type="cuda", index=device)

    def data_ptr(self) -> int:
        return self._address

    def nbytes(self) -> int:
        return self._length_bytes

    def untyped_storage(self) -> DeviceRange:
        return self


@cache
def _driver() -> Any:
    """The driver, or None where there is none that works."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    return library if library.cuInit(0) == _SUCCESS else None


def device_of(address: int) -> int | None:
    """The GPU that memory lies on, or None for host memory."""
    driver = _driver()
    if driver is None:
        return None
    kind, managed = ctypes.c_uint(0), ctypes.c_uint(0)
    ordinal = ctypes.c_int(-1)
    pointer = ctypes.c_uint64(address)
    for attribute, value in (
        (_MEMORY_TYPE, kind),
        (_IS_MANAGED, managed),
        (_DEVICE_ORDINAL, ordinal),
    ):
        # An address that the driver does not know is ordinary memory.
        if driver.cuPointerGetAttribute(ctypes.byref(value), attribute, pointer) != _SUCCESS:
            return None
    if kind.value != _TYPE_DEVICE or managed.value:
        return None
    return ordinal.value


def synchronize(stream: int) -> None:
    """Waits for everything that a stream was given before; raises `FabricUnavailable`.
    [blocks]"""
    driver = _driver()
    if driver is None:
        raise FabricUnavailable(
            f"Found no CUDA driver ({_LIBRARY}); expected one for a call with a stream.",
            code=Code.ENOTSUP,
            advice="Use the call of the same name without _on_cuda.",
        )
    code = driver.cuStreamSynchronize(ctypes.c_void_p(stream))
    if code != _SUCCESS:
        raise FabricUnavailable(
            f"The CUDA stream {stream:#x} failed with the driver's error {code}.",
            code=Code.EINVAL,
            provider_code=code,
        )
