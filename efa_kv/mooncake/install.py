"""Puts a module in the place of ``mooncake.engine`` for this process.

The rest of Mooncake's package, installed or not, stays as it is: Python looks a module up
by its full name before it looks for the package around it.
"""

from __future__ import annotations

import importlib
import logging
import sys
from types import ModuleType
from typing import Final

_log = logging.getLogger(__name__)

#: The module that Mooncake's users import.
MODULE: Final = "mooncake.engine"


def install(name: str = "efa_kv.mooncake") -> ModuleType:
    """From now on ``from mooncake.engine import TransferEngine`` is answered by the module
    ``name``.  Safe to call twice; who has imported Mooncake's own before keeps it."""
    module = importlib.import_module(name)
    present = sys.modules.get(MODULE)
    if present is not None and present is not module:
        _log.warning(
            "%s had been imported from %s; it is replaced for everybody who asks from now on",
            MODULE,
            getattr(present, "__file__", None) or present.__name__,
        )
    sys.modules[MODULE] = module
    return module


def installed() -> ModuleType | None:
    """What answers in the place of ``mooncake.engine``, if somebody was put or came there."""
    return sys.modules.get(MODULE)
