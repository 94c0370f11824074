"""What a transfer that was really made says: bytes, devices that carried nothing, the rate.

The transfers themselves are made by `efa_kv.tools.trial`; here they are judged.
"""

from collections.abc import Callable

from efa_kv.tools.checks.finding import Check, Finding, Severity, good, listed
from efa_kv.tools.host import Host
from efa_kv.tools.output import gibibytes, gigabytes
from efa_kv.tools.trial import Outcome

# Shares of the line rate: what a host in order reaches, and what says that something is wrong.
FULL_SHARE = 0.8
POOR_SHARE = 0.5


def loopback(attempt: Callable[[], Outcome]) -> Check:
    """The check of a transfer between two processes of this host."""
    return lambda host: _loopback(host, attempt())


def peer(session: str, attempt: Callable[[], Outcome]) -> Check:
    """The check of a transfer to the running engine at ``session``."""
    return lambda _host: _peer(session, attempt())


def _loopback(host: Host, outcome: Outcome) -> list[Finding]:
    if outcome.error:
        return [
            Finding(
                id="live.loopback",
                severity=Severity.PROBLEM,
                found=outcome.error,
                expected="a transfer between two processes of this host",
                why="an engine in this environment will fail in the same way",
                mend=_mend(host),
            )
        ]
    if outcome.mismatch:
        return [_wrong_bytes("live.loopback", "this host", outcome)]
    return [_idle_rails(outcome) or good("live.loopback", f"{_moved(outcome)} between processes")]


def _mend(host: Host) -> str:
    if host.machine.container:
        return "mend the problems above first; then compare with efa-kv doctor on the host itself"
    return "mend the problems above first; then FI_LOG_LEVEL=warn efa-kv doctor"


def _moved(outcome: Outcome) -> str:
    rate = gigabytes(outcome.bytes_per_second)
    devices = "device" if len(outcome.rails) == 1 else "devices"
    return (
        f"{gibibytes(outcome.length_bytes)} with every byte right, then {rate}/s over "
        f"{len(outcome.rails)} {devices} of provider {outcome.provider}"
    )


def _wrong_bytes(check: str, where: str, outcome: Outcome) -> Finding:
    return Finding(
        id=check,
        severity=Severity.PROBLEM,
        found=f"{outcome.mismatch} from {where} over provider {outcome.provider}",
        expected="every byte as it was sent",
        why="a KV cache that travelled this way gives wrong tokens",
        mend="efa-kv doctor --save-host host.json; report it with the record; do not use the path",
    )


def _idle_rails(outcome: Outcome) -> Finding | None:
    idle = [rail.name for rail in outcome.rails if rail.bytes == 0]
    if not idle or len(idle) == len(outcome.rails):
        return None
    return Finding(
        id="live.rails",
        severity=Severity.WARNING,
        found=f"{_moved(outcome)}; nothing went over {listed(idle)}",
        expected="bytes over every device",
        why="a device that carries nothing takes its line rate from the transfers of this host",
        mend="efa-kv validate, which names a dead device; dmesg | grep -i efa",
    )


def _peer(session: str, outcome: Outcome) -> list[Finding]:
    if outcome.nothing_lent:
        return [_nothing_lent(outcome)]
    if outcome.error:
        return [
            Finding(
                id="live.peer",
                severity=Severity.PROBLEM,
                found=f"to {session}: {outcome.error}",
                expected="a transfer to scratch memory of that engine",
                why="handoffs with it will fail in the same way",
                mend=(
                    "check address and secret, and that the security group lets all traffic of "
                    "its own members in and out: EFA packets are not IP"
                ),
            )
        ]
    if outcome.mismatch:
        return [_wrong_bytes("live.peer", session, outcome)]
    idle = _idle_rails(outcome)
    return ([idle] if idle else []) + [_rate(session, outcome)]


def _nothing_lent(outcome: Outcome) -> Finding:
    return Finding(
        id="live.peer",
        severity=Severity.WARNING,
        found=outcome.error,
        expected="scratch memory to write to, so that nothing of the server's is touched",
        why="the engine answers, but the way of the bytes to it could not be tried",
        mend="try again in a minute; a smaller --peer-size, or EFA_KV_SCRATCH_BYTES on its side",
    )


def _rate(session: str, outcome: Outcome) -> Finding:
    line = outcome.line_rate_bytes_per_s
    told = f"{session}: {_moved(outcome)}"
    if not line:
        return good("live.peer", f"{told}; the devices do not say their line rate")
    share = outcome.bytes_per_second / line
    told = f"{told}, {share:.0%} of the line rate of {gigabytes(line)}/s"
    if share >= FULL_SHARE:
        return good("live.peer", told)
    severity = Severity.PROBLEM if share < POOR_SHARE else Severity.WARNING
    return Finding(
        id="live.peer",
        # Two engines of one machine share its memory bus and its devices.
        severity=Severity.NOTE if outcome.same_machine else severity,
        found=told + (" (the peer is on this machine)" if outcome.same_machine else ""),
        expected=f"{FULL_SHARE:.0%} or more from an idle pair of hosts",
        why="a handoff takes longer by the same factor; a busy peer shares its line with others",
        mend="efa-kv validate over both hosts, which names the slow device",
    )
