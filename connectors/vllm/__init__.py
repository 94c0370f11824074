"""The connector that vLLM loads: ``EfaConnector``.

vLLM finds it in either of two ways:

- the entry point ``vllm.general_plugins`` calls `register`, after which
  ``"kv_connector": "EfaConnector"`` is enough;
- ``"kv_connector_module_path": "efa_kv.connectors.vllm"`` names this module.

Importing this module loads neither torch, vLLM nor the native core: vLLM's API server
and every worker import it, whether they use it or not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from efa_kv.connectors.vllm.connector import EfaConnector

__all__ = ["CONNECTOR_NAME", "EfaConnector", "register"]

CONNECTOR_NAME = "EfaConnector"
_CONNECTOR_MODULE = "efa_kv.connectors.vllm.connector"


def register() -> None:
    """Makes the connector known to vLLM by its name; may be called any number of times.

    vLLM calls plugins once per process and more often under some test runners, and its
    factory refuses a name that it already knows.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, _CONNECTOR_MODULE, CONNECTOR_NAME)
    except ValueError:
        # Taken: by an earlier call of ours, or by somebody else's class of this name.
        known = KVConnectorFactory.get_connector_class_by_name(CONNECTOR_NAME)
        if known.__module__ != _CONNECTOR_MODULE:
            raise


def __getattr__(name: str) -> Any:
    if name == CONNECTOR_NAME:
        return getattr(importlib.import_module(_CONNECTOR_MODULE), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
