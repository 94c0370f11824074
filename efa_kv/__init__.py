"""efa-kv moves the paged KV cache of a prefill server into that of a decode server.

Importing this package is cheap: neither the native core nor ZeroMQ is loaded before
one of the names below is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from efa_kv.config import EngineConfig
    from efa_kv.runtime.engine import TransferEngine, health, trace
    from efa_kv.runtime.job import Job
    from efa_kv.types import JobResult

__version__ = "0.1.0"

__all__ = [
    "EngineConfig",
    "Job",
    "JobResult",
    "TransferEngine",
    "__version__",
    "health",
    "trace",
]

_HOMES = {
    "EngineConfig": "efa_kv.config",
    "Job": "efa_kv.runtime.job",
    "JobResult": "efa_kv.types",
    "TransferEngine": "efa_kv.runtime.engine",
    "health": "efa_kv.runtime.engine",
    "trace": "efa_kv.runtime.engine",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
