"""Calls at a later time.  Owner: the control thread."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

Call = Callable[[float], None]


class Timers:
    """Calls ``call(now)`` once each, when its time has come; nothing can be cancelled, so
    a call looks first whether it is still wanted."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Call]] = []
        self._order = itertools.count()

    def at(self, due: float, call: Call) -> None:
        """Plans ``call`` for the monotonic time ``due``."""
        heapq.heappush(self._heap, (due, next(self._order), call))

    def run(self, now: float) -> float | None:
        """Runs what is due; the time of the next call, or None."""
        while self._heap and self._heap[0][0] <= now:
            heapq.heappop(self._heap)[2](now)
        return self._heap[0][0] if self._heap else None
