"""What the server's side of an engine notes of requests, for the trace.

Notes come from the server's thread and the control thread, and whoever asks for the trace reads
them; the row is bounded and appending to it is atomic, so nobody waits for anybody.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Final

from efa_kv.observe.trace import Milestone

_MILESTONES_MAX: Final = 8192


class Journal:
    """Milestones of requests, the newest few thousand.  Noting one is for any thread."""

    def __init__(self) -> None:
        self._milestones: deque[Milestone] = deque(maxlen=_MILESTONES_MAX)

    def note(self, request: str, what: str, job: int = 0) -> None:
        """What happened to a request now; see `Milestone`."""
        self._milestones.append(Milestone(request, what, time.monotonic(), job))

    def milestones(self) -> tuple[Milestone, ...]:
        """Those that are kept, oldest first."""
        while True:
            try:
                return tuple(self._milestones)
            except RuntimeError:  # another thread noted one meanwhile
                continue
