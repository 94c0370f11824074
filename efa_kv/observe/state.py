"""An engine's state, and whether it lives and is ready: what probes and people are told.

Ages are in seconds; None means never.  All of it travels as JSON.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Final

import msgspec

#: A thread that has not looked around for this long is stuck; it does twice a second.
STUCK_AFTER_S: Final = 5.0
#: A failure counts for this long: an engine that is not asked any more could not recover.
FAILURE_COUNTS_S: Final = 60.0


class RailState(msgspec.Struct, frozen=True, kw_only=True):
    """One network device: how it stands, and what it did since the engine opened.

    ``turned_age_s``: since its progress thread last looked around.
    """

    name: str
    provider: str
    speed_bits_per_second: int
    down: bool
    resets: int
    failures: int
    in_flight: int
    bytes_written: int
    bytes_read: int
    bytes_near: int
    bytes_staged: int
    operations_settled: int
    operations_failed: int
    turned_age_s: float


class PeerView(msgspec.Struct, frozen=True, kw_only=True):
    """A session: ``state`` as in `efa_kv.wire.session`, ``jobs`` that have not settled."""

    session: str
    state: str
    reason: str = ""
    jobs: int = 0


class LastTransfers(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the transfers that this engine made, as far as its trace goes back."""

    landed_age_s: float | None = None
    failed_age_s: float | None = None
    landed: int = 0
    failed: int = 0


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is told of an engine.  ``control_answered`` is None before it started."""

    session: str
    protocol: str
    process: int
    version: str
    started: bool
    control_answered: bool | None
    rails: tuple[RailState, ...]
    peers: tuple[PeerView, ...]
    regions: int
    registered_bytes: int
    transfers: LastTransfers


class Bears(enum.Enum):
    """What a check that is not in order means."""

    ON_LIFE = "liveness"
    ON_READINESS = "readiness"
    ON_NOTHING = "note"


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing looked at; ``expected`` and ``advice`` are empty where it is in order."""

    name: str
    ok: bool
    bears: Bears
    found: str
    expected: str = ""
    advice: str = ""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict.  Not ``live``: the process has to be restarted.  Not ``ready``: it should
    get no new requests for now."""

    session: str
    live: bool
    ready: bool
    checks: tuple[Check, ...]


def judge(state: EngineState) -> Health:
    """The verdict on a state.  An engine that has nothing to do is in order."""
    checks = (
        _control(state),
        _progress(state),
        _fabric(state),
        _some_rails(state),
        _registration(state),
        *_peers(state),
        _transfers(state),
    )
    wrong = {check.bears for check in checks if not check.ok}
    live = Bears.ON_LIFE not in wrong
    return Health(
        session=state.session,
        live=live,
        ready=live and Bears.ON_READINESS not in wrong,
        checks=checks,
    )


def _control(state: EngineState) -> Check:
    found = {None: "not started", True: "answers", False: "does not answer"}
    return Check(
        name="control thread",
        ok=state.control_answered is not False,
        bears=Bears.ON_LIFE,
        found=found[state.control_answered],
        **_mend(state.control_answered is False, "an answer", "Restart the process."),
    )


def _progress(state: EngineState) -> Check:
    oldest = max((rail.turned_age_s for rail in state.rails), default=0.0)
    stuck = oldest > STUCK_AFTER_S
    return Check(
        name="progress threads",
        ok=not stuck,
        bears=Bears.ON_LIFE,
        found=f"the last turn was {oldest:.1f} s ago",
        **_mend(stuck, f"at most {STUCK_AFTER_S:g} s", "Restart the process."),
    )


def _fabric(state: EngineState) -> Check:
    up = sum(not rail.down for rail in state.rails)
    return Check(
        name="fabric",
        ok=up > 0,
        bears=Bears.ON_READINESS,
        found=f"{up} of {len(state.rails)} rails are up, {state.protocol}",
        **_mend(up == 0, "one rail at least", "Run efa-kv doctor on this host."),
    )


def _some_rails(state: EngineState) -> Check:
    down = [rail.name for rail in state.rails if rail.down]
    return Check(
        name="rails",
        ok=not down,
        bears=Bears.ON_NOTHING,
        found=f"out: {', '.join(down)}" if down else "all are up",
        **_mend(bool(down), "all of them", "They are probed; run efa-kv doctor if they stay out."),
    )


def _registration(state: EngineState) -> Check:
    none = state.regions == 0
    return Check(
        name="registration",
        ok=not none,
        bears=Bears.ON_READINESS,
        found=f"{state.regions} regions, {state.registered_bytes} bytes",
        **_mend(none, "the server's KV cache", "Wait for the server to finish its start."),
    )


def _peers(state: EngineState) -> Iterator[Check]:
    known = [peer for peer in state.peers if peer.state not in ("idle", "greeting", "closed")]
    lost = [peer for peer in known if peer.state in ("suspect", "draining")]
    rejected = [peer for peer in known if peer.state == "rejected"]
    all_lost = bool(known) and len(lost) + len(rejected) == len(known)
    yield Check(
        name="peers",
        ok=not all_lost,
        bears=Bears.ON_READINESS,
        found=f"{len(known)} known, {len(lost)} silent, {len(rejected)} refused",
        **_mend(all_lost, "one that answers", f"Look at {_names(lost + rejected)}."),
    )
    if rejected:
        yield Check(
            name="refused peers",
            ok=False,
            bears=Bears.ON_NOTHING,
            found="; ".join(f"{peer.session}: {peer.reason}" for peer in rejected[:3]),
            **_mend(True, "equal models and caches", "Start both servers with the same model."),
        )


def _transfers(state: EngineState) -> Check:
    last = state.transfers
    failed = last.failed_age_s
    worse = failed is not None and (last.landed_age_s is None or failed < last.landed_age_s)
    bad = worse and failed is not None and failed < FAILURE_COUNTS_S
    found = "none yet"
    if last.landed_age_s is not None:
        found = f"the last that landed was {last.landed_age_s:.1f} s ago"
    if failed is not None:
        found += f", the last that failed {failed:.1f} s ago"
    return Check(
        name="last transfer",
        ok=not bad,
        bears=Bears.ON_READINESS,
        found=found,
        **_mend(bad, "one that landed after it", "Run efa-kv doctor --peer to the peer's session."),
    )


def _mend(wrong: bool, expected: str, advice: str) -> dict[str, str]:
    return {"expected": expected, "advice": advice} if wrong else {}


def _names(peers: list[PeerView]) -> str:
    shown = ", ".join(peer.session for peer in peers[:3])
    return shown + (f" and {len(peers) - 3} more" if len(peers) > 3 else "")
