"""A trial: an engine opened in a process of its own moves bytes to a peer and checks each of them.

This is the side of a command such as `efa-kv doctor`, whose own process must outlive whatever a
provider does to its host: it loads neither libfabric nor the native core, and a child that aborts
or hangs becomes a sentence. The child is `efa_kv.tools.trial_child`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import Any, Final

import msgspec

_ERROR_CHARACTERS: Final = 600


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What to try. ``engine`` goes to `EngineConfig.load`; an empty ``session`` means a peer of
    one's own; ``length_bytes`` are written at a time, for ``duration_s``."""

    engine: dict[str, Any]
    session: str = ""
    length_bytes: int = 16 << 20
    duration_s: float = 1.0


class Rail(msgspec.Struct, frozen=True, kw_only=True):
    """One local device: its line rate, and what it carried while the clock ran."""

    name: str
    line_rate_bytes_per_s: float
    bytes: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it. ``error`` is empty when bytes were moved, and then ``mismatch`` when all of
    them were right. ``nothing_lent``: the peer is there but had no scratch memory to give.
    ``same_machine``: the peer lives on this one."""

    error: str = ""
    nothing_lent: bool = False
    mismatch: str = ""
    protocol: str = ""
    provider: str = ""
    bytes_per_second: float = 0.0
    length_bytes: int = 0
    same_machine: bool = False
    rails: tuple[Rail, ...] = ()
    peer_line_rate_bytes_per_s: float = 0.0

    @property
    def line_rate_bytes_per_s(self) -> float:
        """What both sides' devices can carry; 0 where they do not say."""
        here = sum(rail.line_rate_bytes_per_s for rail in self.rails)
        return min(here, self.peer_line_rate_bytes_per_s)


def run(wish: Wish, timeout_s: float) -> Outcome:
    """Tries in a child process; an abort, a hang and nonsense become the outcome's ``error``."""
    child = subprocess.Popen(
        [sys.executable, "-m", "efa_kv.tools.trial_child", msgspec.json.encode(wish)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        said, complaints = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return Outcome(error=f"it did not end within {timeout_s:g} s")
    finally:
        # The whole group: the child may have started a peer of its own.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    last = said.strip().rsplit(b"\n", 1)[-1]
    try:
        return msgspec.json.decode(last, type=Outcome)
    except msgspec.DecodeError:
        return Outcome(error=_end_of(child.returncode, complaints))


def _end_of(status: int, complaints: bytes) -> str:
    """How a child ended that said nothing, in words."""
    how = f"with status {status}"
    if status < 0:
        with contextlib.suppress(ValueError):
            how = f"by {signal.Signals(-status).name}"
    tail = complaints.decode(errors="replace").strip()[-_ERROR_CHARACTERS:]
    return f"the process of the engine was ended {how}" + (f": {tail}" if tail else "")
