"""What the control thread tells the server's thread, in order.

Two threads, one deque: the control thread appends, the server's thread takes. Its length
is bounded by the handoffs that are alive, each of which says only a few words.
"""

from __future__ import annotations

from collections import deque

import msgspec


class Asked(msgspec.Struct, frozen=True):
    """A pull is about to be asked for: only this incarnation's notice is good for it."""

    pull_id: int
    peer: int


class Ended(msgspec.Struct, frozen=True):
    """A pull is over and its blocks are safe; ``reason`` is empty for success."""

    pull_id: int
    reason: str
    text: str
    bytes: int


class Lost(msgspec.Struct, frozen=True):
    """A pull cannot succeed any more; its blocks are not safe yet."""

    pull_id: int
    reason: str
    text: str


class Given(msgspec.Struct, frozen=True):
    """A hold is over; ``reason`` is empty when its blocks were delivered."""

    request_id: str
    reason: str
    bytes: int


Word = Asked | Ended | Lost | Given


class Outbox:
    """See the module's head."""

    def __init__(self) -> None:
        self._words: deque[Word] = deque()

    def put(self, word: Word) -> None:
        """For the control thread."""
        self._words.append(word)

    def take(self) -> list[Word]:
        """Everything said so far; for the server's thread."""
        words: list[Word] = []
        while self._words:
            words.append(self._words.popleft())
        return words
