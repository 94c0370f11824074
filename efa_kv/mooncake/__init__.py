"""The engine under the names that Mooncake's users call: vLLM's and SGLang's own code
for Mooncake runs on it unchanged, with this package in place of ``mooncake.engine``.

Importing it loads neither the native core nor ZeroMQ; naming `TransferEngine` does.
Left out are Mooncake's RPC, its shared segments and everything that hands out its C++
objects: `TransferEngine` says so where such a method is called.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from efa_kv.mooncake.names import TransferNotify, TransferOpcode

if TYPE_CHECKING:
    from efa_kv.mooncake.engine import TransferEngine

__all__ = [
    "SUPPORT_CUDA",
    "SUPPORT_EFA",
    "SUPPORT_HIP",
    "SUPPORT_INTRA_NVLINK",
    "SUPPORT_MNNVL",
    "SUPPORT_MUSA",
    "Read",
    "TransferEngine",
    "TransferNotify",
    "TransferOpcode",
    "Write",
]

SUPPORT_EFA: Final = True
#: The ``*_on_cuda`` calls are there and need a driver when they are called.
SUPPORT_CUDA: Final = True
SUPPORT_HIP: Final = False
SUPPORT_INTRA_NVLINK: Final = False
SUPPORT_MNNVL: Final = False
SUPPORT_MUSA: Final = False

Read: Final = TransferOpcode.Read
Write: Final = TransferOpcode.Write


#: What Mooncake's module has besides, and why it is not here.
_LEFT_OUT: Final = {
    "SharedSegment": "segments that Mooncake's metadata server shares; register memory",
    "create_rpc_client": "Mooncake's own RPC, which moves no cache; use any other one",
    "create_rpc_server": "Mooncake's own RPC, which moves no cache; use any other one",
}


def __getattr__(name: str) -> Any:
    if name == "TransferEngine":
        return importlib.import_module("efa_kv.mooncake.engine").TransferEngine
    if name in _LEFT_OUT:
        raise AttributeError(f"efa-kv has no {name}: {_LEFT_OUT[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
