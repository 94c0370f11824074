"""Buffers of a benchmark, in host or GPU memory, filled and read by the piece."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from efa_kv.tools.bench_load import pattern_bytes

#: A multiple of 8; the piece by which buffers are filled and compared.
PIECE_BYTES: Final = 16 << 20
_PAGE_BYTES: Final = 4096
_NVIDIA_CONTROL: Final = Path("/dev/nvidiactl")

Bytes = NDArray[np.uint8]


class Buffer(Protocol):
    """Memory that an engine can register: ``whole`` is what to give to `register`."""

    whole: Any
    address: int
    length_bytes: int

    def put(self, offset: int, data: Bytes) -> None: ...
    def get(self, offset: int, length_bytes: int) -> Bytes: ...


class HostBuffer:
    """DRAM, page-aligned."""

    def __init__(self, length_bytes: int) -> None:
        room = np.empty(length_bytes + _PAGE_BYTES, np.uint8)
        skip = -room.ctypes.data % _PAGE_BYTES
        self._bytes = room[skip : skip + length_bytes]
        self.address = int(self._bytes.ctypes.data)
        self.length_bytes = length_bytes
        # A view gives its whole storage away; the pair names these bytes alone.
        self.whole = (self.address, length_bytes)

    def put(self, offset: int, data: Bytes) -> None:
        self._bytes[offset : offset + len(data)] = data

    def get(self, offset: int, length_bytes: int) -> Bytes:
        return self._bytes[offset : offset + length_bytes]


class GpuBuffer:
    """Memory of one CUDA device."""

    def __init__(self, length_bytes: int, device: int) -> None:
        import torch

        self._torch = torch
        self.whole = torch.empty(length_bytes, dtype=torch.uint8, device=f"cuda:{device}")
        self.address = int(self.whole.data_ptr())
        self.length_bytes = length_bytes

    def put(self, offset: int, data: Bytes) -> None:
        self.whole[offset : offset + len(data)].copy_(self._torch.from_numpy(data.copy()))
        self._torch.cuda.synchronize(self.whole.device)

    def get(self, offset: int, length_bytes: int) -> Bytes:
        data: Bytes = self.whole[offset : offset + length_bytes].cpu().numpy()
        return data


def gpu_count() -> int:
    """CUDA devices that can be used here; 0 without a driver or without torch."""
    if not _NVIDIA_CONTROL.exists():
        return 0
    try:
        import torch
    except ImportError:
        return 0
    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


def allocate(length_bytes: int, gpus: tuple[int, ...]) -> list[Buffer]:
    """One buffer per GPU, or one in host memory where none is named."""
    if not gpus:
        return [HostBuffer(length_bytes)]
    return [GpuBuffer(length_bytes, device) for device in gpus]


def difference(sent: Buffer, back: Buffer, length_bytes: int) -> str:
    """The first byte in which what came back differs from what was sent, in words; or nothing."""
    for offset, size in pieces(length_bytes):
        wrong = np.flatnonzero(sent.get(offset, size) != back.get(offset, size))
        if len(wrong):
            return f"byte {offset + int(wrong[0])} of {length_bytes} came back wrong"
    return ""


def pieces(length_bytes: int) -> Iterator[tuple[int, int]]:
    """Offsets and lengths that cover a buffer."""
    for offset in range(0, length_bytes, PIECE_BYTES):
        yield offset, min(PIECE_BYTES, length_bytes - offset)


def fill(buffer: Buffer, seed: int | None) -> None:
    """The text of a seed (`pattern_bytes`), or zeros."""
    for offset, length_bytes in pieces(buffer.length_bytes):
        if seed is None:
            buffer.put(offset, np.zeros(length_bytes, np.uint8))
        else:
            buffer.put(offset, pattern_bytes(seed, offset, length_bytes))
