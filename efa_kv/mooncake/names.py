"""The small types and the numbers of Mooncake's interface."""

from __future__ import annotations

import enum
from typing import Final


class TransferOpcode(enum.IntEnum):
    """Direction of a transfer, seen from the caller."""

    Read = 0
    Write = 1


class TransferNotify:
    """A short text for the user of the peer's engine."""

    __slots__ = ("msg", "name")

    def __init__(self, name: str = "", msg: str = "") -> None:
        self.name = name
        self.msg = msg

    def __repr__(self) -> str:
        return f"TransferNotify(name={self.name!r}, msg={self.msg!r})"


# What calls return.  FAILED is the answer to everything that has no number of its own.
OK: Final = 0
FAILED: Final = -1
NOT_REGISTERED: Final = -3
BUSY: Final = -4
NO_ENDPOINT: Final = -201
NO_CONTEXT: Final = -202

# What `transfer_check_status` returns besides FAILED.
PENDING: Final = 0
DONE: Final = 1
