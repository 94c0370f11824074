"""Lets vLLM's own Mooncake connector run here: on this engine, and without a GPU.

Python runs this file by itself where the folder is on ``PYTHONPATH``.  The first half is
what a user of that connector does; the second is for CPUs alone: the connector asks which
GPU it is on before it asks whether there is one.
"""

from __future__ import annotations

import importlib.abc
import sys

from efa_kv.mooncake.install import install

CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector"


class _BeforeTheConnector(importlib.abc.MetaPathFinder):
    """Finds nothing; sees the connector asked for and gives torch a device number."""

    def find_spec(self, name, path=None, target=None):
        if name == CONNECTOR:
            import torch

            if not torch.accelerator.is_available():
                torch.accelerator.current_device_index = lambda: 0
        return


install()
sys.meta_path.insert(0, _BeforeTheConnector())
