"""What SGLang imports as ``mooncake.engine``.

Every process of a server has this module in place; the native core is loaded where
`TransferEngine` is asked for, which only the processes that move KV do.
"""

from __future__ import annotations

from typing import Any

from efa_kv import mooncake
from efa_kv.mooncake import (
    SUPPORT_CUDA,
    SUPPORT_EFA,
    SUPPORT_HIP,
    SUPPORT_INTRA_NVLINK,
    SUPPORT_MNNVL,
    SUPPORT_MUSA,
    Read,
    TransferNotify,
    TransferOpcode,
    Write,
)

__all__ = [
    "SUPPORT_CUDA",
    "SUPPORT_EFA",
    "SUPPORT_HIP",
    "SUPPORT_INTRA_NVLINK",
    "SUPPORT_MNNVL",
    "SUPPORT_MUSA",
    "Read",
    "TransferEngine",  # noqa: F822 - made when it is first asked for
    "TransferNotify",
    "TransferOpcode",
    "Write",
]


def _engine_class() -> type:
    from efa_kv.connectors.sglang import hooks, metrics

    class TransferEngine(mooncake.TransferEngine):  # type: ignore[misc]  # lazy there
        """The engine, which opens only where SGLang's own mistakes are covered."""

        def initialize(
            self, local_hostname: str, metadata_server: str, protocol: str, device_name: str
        ) -> int:
            """See `efa_kv.mooncake`; raises `HookError` when a hook is not in place."""
            hooks.require_live()
            code = super().initialize(local_hostname, metadata_server, protocol, device_name)
            if code == 0:
                self.observer = metrics.observer(self)
            return int(code)

    return TransferEngine


def __getattr__(name: str) -> Any:
    if name == "TransferEngine":
        made = globals()[name] = _engine_class()
        return made
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
