"""What the samples of a run say: the series, and what is wrong, with the device's name.  Pure.

Local device k sends to device k of the peer, so a pair of hosts measures pairs of devices. Which of
the two is at fault, the other pairs tell: a device is judged by the best of its pairs, and a device
in order has a good one, unless there are only two hosts; then both are named. What was meant for a
dead device goes to its neighbour, which then looks slow from outside: so the receiving side of a
host with a dead device is not judged.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from efa_kv.tools.output import gigabytes
from efa_kv.tools.validation.samples import HostFacts, Sample
from efa_kv.tools.validation.schedule import Kind
from efa_kv.tools.validation.series import Change, Series, Trend

#: Below this share of its like, a device, a host or a pair is slow.
SLOW_SHARE: Final = 0.6
#: Below this share a device carries nothing worth naming.
NOTHING_SHARE: Final = 0.02
#: What an idle host in order reaches of its line rate.
LINE_SHARE: Final = 0.8

_STALLED: Final = "takes operations and never ends them"
_DEAD: Final = "carries nothing after failures"


class Fault(StrEnum):
    """Kinds of problems, in the order in which they are worth looking at."""

    WRONG_BYTES = "wrong-bytes"
    DEAD_NIC = "dead-nic"
    SLOW_NIC = "slow-nic"
    MISSING_NIC = "missing-nic"
    FAILED = "failed"
    FAILING_NIC = "failing-nic"
    SLOW_HOST = "slow-host"
    SLOW_PAIR = "slow-pair"
    BELOW_LINE_RATE = "below-line-rate"
    OUTSIDE = "other-tool"
    REGRESSION = "regression"


class Suspect(msgspec.Struct, frozen=True):
    """A host, or one of its devices where ``nic`` is not empty."""

    host: str
    nic: str = ""

    def __str__(self) -> str:
        return f"{self.nic} of {self.host}" if self.nic else self.host


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong; any of ``suspects`` may be to blame."""

    fault: Fault
    suspects: tuple[Suspect, ...]
    text: str


# ---- series ---------------------------------------------------------------------------


def series(samples: Iterable[Sample]) -> dict[str, Series]:
    """Every series of a run by name: a kind alone for all hosts together (the median over them,
    by repeat), ``pair 0>3`` for a pair of ranks, ``ring 2`` for one sender."""
    found: dict[str, list[float]] = defaultdict(list)
    overall: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for sample in samples:
        value = _value(sample)
        if value is None:
            continue
        name = f"{sample.kind.value} {sample.source}"
        if sample.kind in (Kind.LATENCY, Kind.PAIR):
            name += f">{sample.targets[0]}"
        found[name].append(value)
        overall[sample.kind, sample.repeat].append(value)
    summary: dict[str, list[float]] = defaultdict(list)
    for (kind, _repeat), values in sorted(overall.items()):
        summary[kind.value].append(statistics.median(values))
    return {
        name: _series(name, values) for group in (summary, found) for name, values in group.items()
    }


def _value(sample: Sample) -> float | None:
    if sample.error:
        return None
    if sample.kind is Kind.LATENCY:
        return None if sample.latencies_us is None else sample.latencies_us[0]
    return sample.bytes_per_second


def _series(name: str, values: Sequence[float]) -> Series:
    is_time = name.startswith(Kind.LATENCY.value)
    return Series("us" if is_time else "bytes/s", tuple(values), less_is_better=is_time)


# ---- what is wrong --------------------------------------------------------------------


def problems(
    samples: Sequence[Sample], hosts: Sequence[HostFacts], changes: Sequence[Change] = ()
) -> list[Problem]:
    """Everything that is wrong, causes before what may follow from them."""
    found = [*_broken(samples, hosts), *_missing(hosts)]
    found += judge_nics(samples, hosts)
    blamed = {suspect.host for problem in found for suspect in problem.suspects}
    found += _slow_ways(samples, hosts, blamed)
    blamed = {suspect.host for problem in found for suspect in problem.suspects}
    found += _below_line_rate(samples, hosts, blamed)
    found += _regressions(changes)
    return sorted(found, key=lambda problem: list(Fault).index(problem.fault))


def share_machines(hosts: Sequence[HostFacts]) -> bool:
    """Whether some of the hosts are processes of one machine, whose rates say little."""
    boots = [host.boot for host in hosts if host.boot]
    return len(set(boots)) < len(boots)


def _broken(samples: Sequence[Sample], hosts: Sequence[HostFacts]) -> list[Problem]:
    """Wrong bytes and failed transfers, each sender and text once."""
    found: dict[tuple[Fault, int, str], dict[int, None]] = defaultdict(dict)
    for sample in samples:
        for fault, text in ((Fault.WRONG_BYTES, sample.mismatch), (Fault.FAILED, sample.error)):
            if text:
                found[fault, sample.source, text].update(dict.fromkeys(sample.targets))
    problems = []
    for (fault, source, text), targets in found.items():
        ends = [hosts[source].label, *(hosts[target].label for target in targets)]
        problems.append(
            Problem(
                fault=fault,
                suspects=tuple(Suspect(label) for label in ends),
                text=f"{ends[0]} to {', '.join(ends[1:])}: {text}",
            )
        )
    return problems


def _missing(hosts: Sequence[HostFacts]) -> list[Problem]:
    most = max(len(host.nics) for host in hosts)
    return [
        Problem(
            fault=Fault.MISSING_NIC,
            suspects=(Suspect(host.label),),
            text=f"{host.label} has {len(host.nics)} devices, others have {most}: "
            "efa-kv doctor there says why",
        )
        for host in hosts
        if len(host.nics) < most
    ]


class _Port(msgspec.Struct, frozen=True):
    """Device ``nic`` of host ``host``, judged in one direction."""

    host: int
    nic: int


class _Judged(msgspec.Struct, frozen=True, kw_only=True):
    """The best of a port's pairs, as a share of its host's devices: over all repeats (the
    median) and in the last one."""

    share: float
    last_share: float


def judge_nics(samples: Sequence[Sample], hosts: Sequence[HostFacts]) -> list[Problem]:
    """Devices that carry nothing after failures, that are slow, or whose operations failed."""
    stalled, disturbed = _stalled(samples, hosts)
    pairs = [one for one in samples if one.kind is Kind.PAIR and not one.error and one.rails]
    failed = _failed_ports(samples, hosts)
    # Without a failure it was not tried: the engine may prefer nearer devices.
    dead = {
        port
        for port, judged in _judge(pairs, hosts, _sending).items()
        if judged.last_share < NOTHING_SHARE and port in failed
    }
    maimed = {port.host for port in dead | stalled}
    direct = [one for one in pairs if one.targets[0] not in maimed]
    slow: dict[_Port, float] = {}
    for direction in (_sending, _receiving):
        for port, judged in _judge(direct, hosts, direction).items():
            if port not in dead | disturbed and NOTHING_SHARE <= judged.share < SLOW_SHARE:
                slow[port] = min(judged.share, slow.get(port, 1.0))
    explained = dead | stalled | set(slow)
    return [
        *_told(
            stalled, hosts, Fault.DEAD_NIC, lambda _port: "takes operations and never ends them"
        ),
        *_told(
            dead - stalled, hosts, Fault.DEAD_NIC, lambda _port: "carries nothing after failures"
        ),
        *_told(
            set(slow),
            hosts,
            Fault.SLOW_NIC,
            lambda port: f"moves {slow[port]:.0%} of what its neighbours move",
        ),
        *_failing(samples, hosts, explained),
    ]


def _sending(sample: Sample, nic: int, _hosts: Sequence[HostFacts]) -> _Port:
    return _Port(sample.source, nic)


def _receiving(sample: Sample, nic: int, hosts: Sequence[HostFacts]) -> _Port:
    target = sample.targets[0]
    return _Port(target, nic % len(hosts[target].nics))


_Direction = Callable[[Sample, int, Sequence[HostFacts]], _Port]


def _judge(
    pairs: Sequence[Sample], hosts: Sequence[HostFacts], direction: _Direction
) -> dict[_Port, _Judged]:
    """Every port that was used in one direction."""
    if not pairs:
        return {}
    rates: dict[tuple[_Port, int], list[float]] = defaultdict(list)
    last = max(sample.repeat for sample in pairs)
    last_rates: dict[_Port, list[float]] = defaultdict(list)
    for sample in pairs:
        for nic, rail in enumerate(sample.rails):
            port = direction(sample, nic, hosts)
            other = sample.targets[0] if port.host == sample.source else sample.source
            rates[port, other].append(rail.bytes / sample.wall_s)
            if sample.repeat == last:
                last_rates[port].append(rail.bytes / sample.wall_s)
    best: dict[_Port, float] = defaultdict(float)
    for (port, _other), values in rates.items():
        best[port] = max(best[port], statistics.median(values))
    last_best = {port: max(values) for port, values in last_rates.items()}
    return {
        port: _Judged(
            share=_share(value, [best[one] for one in best if one.host == port.host]),
            last_share=_share(
                last_best.get(port, value),
                [last_best[one] for one in last_best if one.host == port.host],
            ),
        )
        for port, value in best.items()
    }


def _share(value: float, like: Sequence[float]) -> float:
    """A value against what its like reach: their upper quartile, so that several bad ones do not
    hide each other."""
    ordered = sorted(like)
    reference = ordered[min(len(ordered) - 1, 3 * len(ordered) // 4)] if ordered else 0.0
    return value / reference if reference else 1.0


def _failed_ports(samples: Iterable[Sample], hosts: Sequence[HostFacts]) -> set[_Port]:
    """Both ends of every pair of devices on which an operation failed in any step."""
    found: set[_Port] = set()
    for sample in samples:
        for nic, rail in enumerate(sample.rails):
            if rail.failed:
                found.add(_Port(sample.source, nic))
                found |= {_Port(target, nic % len(hosts[target].nics)) for target in sample.targets}
    return found


def _stalled(
    samples: Iterable[Sample], hosts: Sequence[HostFacts]
) -> tuple[set[_Port], set[_Port]]:
    """Ports on which operations never ended with every other host that was tried; and all on which
    some did not, which the engine closes and opens again, so that their rates say nothing."""
    tried: dict[_Port, set[int]] = defaultdict(set)
    stuck: dict[_Port, set[int]] = defaultdict(set)
    for sample in samples:
        if len(sample.targets) != 1:
            continue
        for nic, rail in enumerate(sample.rails):
            ends = (_sending(sample, nic, hosts), _receiving(sample, nic, hosts))
            for port, other in (ends, ends[::-1]):
                tried[port].add(other.host)
                if rail.stuck:
                    stuck[port].add(other.host)
    return {port for port, others in stuck.items() if others == tried[port]}, set(stuck)


def _told(
    ports: set[_Port], hosts: Sequence[HostFacts], fault: Fault, words: Callable[[_Port], str]
) -> list[Problem]:
    """One problem per device; of two hosts, one per pair of devices."""
    found = []
    for port in sorted(ports, key=lambda one: (one.host, one.nic)):
        other = _Port(1 - port.host, port.nic)
        paired = len(hosts) == 2 and other in ports
        if paired and port.host == 1:
            continue
        suspects = tuple(
            Suspect(hosts[one.host].label, hosts[one.host].nics[one.nic])
            for one in ((port, other) if paired else (port,))
        )
        names = " or ".join(str(suspect) for suspect in suspects)
        hint = "; a third host would tell which" if paired else ""
        found.append(Problem(fault=fault, suspects=suspects, text=f"{names} {words(port)}{hint}"))
    return found


def _failing(
    samples: Sequence[Sample], hosts: Sequence[HostFacts], explained: set[_Port]
) -> list[Problem]:
    """Failed operations between devices that carry bytes all the same."""
    counts: dict[tuple[_Port, _Port], int] = defaultdict(int)
    for sample in samples:
        if len(sample.targets) != 1:
            continue
        for nic, rail in enumerate(sample.rails):
            ends = (_Port(sample.source, nic), _receiving(sample, nic, hosts))
            if rail.failed and not explained & set(ends):
                counts[ends] += rail.failed
    found = []
    for ends, count in sorted(counts.items(), key=lambda item: -item[1]):
        suspects = tuple(
            Suspect(hosts[end.host].label, hosts[end.host].nics[end.nic]) for end in ends
        )
        text = f"{count} operations failed from {suspects[0]} to {suspects[1]}"
        found.append(Problem(fault=Fault.FAILING_NIC, suspects=suspects, text=text))
    return found


# ---- hosts and pairs ------------------------------------------------------------------


def _pair_rates(samples: Iterable[Sample]) -> dict[tuple[int, int], float]:
    """The median rate of each pair over its repeats."""
    values: dict[tuple[int, int], list[float]] = defaultdict(list)
    for sample in samples:
        if sample.kind is Kind.PAIR and not sample.error:
            values[sample.source, sample.targets[0]].append(sample.bytes_per_second)
    return {pair: statistics.median(rates) for pair, rates in values.items()}


def _slow_ways(
    samples: Sequence[Sample], hosts: Sequence[HostFacts], blamed: set[str]
) -> list[Problem]:
    """Hosts that send or receive slowly whoever the other is, and slow pairs of good hosts."""
    # With two hosts there is nothing to set a pair against, and processes of one machine take each
    # other's processors.
    if len(hosts) < 3 or share_machines(hosts):
        return []
    rates = _pair_rates(samples)
    found = []
    for verb, end in (("sends", 0), ("receives", 1)):
        best = [
            max((rate for pair, rate in rates.items() if pair[end] == rank), default=0.0)
            for rank in range(len(hosts))
        ]
        for host, rate in zip(hosts, best, strict=True):
            share = _share(rate, best)
            if share < SLOW_SHARE and host.label not in blamed:
                text = f"{host.label} {verb} {share:.0%} of what others do, {gigabytes(rate)}/s"
                suspect = (Suspect(host.label),)
                found.append(Problem(fault=Fault.SLOW_HOST, suspects=suspect, text=text))
    blamed = blamed | {suspect.host for problem in found for suspect in problem.suspects}
    for (source, target), rate in sorted(rates.items()):
        ends = (Suspect(hosts[source].label), Suspect(hosts[target].label))
        share = _share(rate, list(rates.values()))
        if share < SLOW_SHARE and not blamed & {end.host for end in ends}:
            text = (
                f"{ends[0]} to {ends[1]} moves {share:.0%} of what other pairs do, "
                f"{gigabytes(rate)}/s: efa-kv topology tells whether they are far apart"
            )
            found.append(Problem(fault=Fault.SLOW_PAIR, suspects=ends, text=text))
    return found


def _below_line_rate(
    samples: Sequence[Sample], hosts: Sequence[HostFacts], blamed: set[str]
) -> list[Problem]:
    if share_machines(hosts):
        return []
    rates = _pair_rates(samples)
    found = []
    for rank, host in enumerate(hosts):
        line = host.line_rate_bytes_per_s
        best = max((rate for pair, rate in rates.items() if pair[0] == rank), default=0.0)
        if line and best and best < LINE_SHARE * line and host.label not in blamed:
            text = (
                f"{host.label} sends {gigabytes(best)}/s, {best / line:.0%} of its line rate of "
                f"{gigabytes(line)}/s; expected {LINE_SHARE:.0%}"
            )
            suspects = (Suspect(host.label),)
            found.append(Problem(fault=Fault.BELOW_LINE_RATE, suspects=suspects, text=text))
    return found


def _regressions(changes: Sequence[Change]) -> list[Problem]:
    """One problem for each kind of quantity that became worse, with the worst of them."""
    groups: dict[str, list[Change]] = defaultdict(list)
    for change in changes:
        groups[change.name.split(" ")[0]].append(change)
    found = []
    for kind, group in groups.items():
        worse = [change for change in group if change.trend is Trend.WORSE]
        if not worse:
            continue
        worst = max(
            worse, key=lambda change: abs(change.now - change.before) / max(change.before, 1e-9)
        )
        text = (
            f"{kind}: {len(worse)} of {len(group)} are worse than the baseline, the worst "
            f"{worst.name} with {quantity(worst.now, worst.unit)}, before "
            f"{quantity(worst.before, worst.unit)}"
        )
        found.append(Problem(fault=Fault.REGRESSION, suspects=(), text=text))
    return found


def quantity(value: float, unit: str) -> str:
    """A number with its unit, for people."""
    return f"{value:.1f} us" if unit == "us" else f"{gigabytes(value)}/s"
