"""Which device, host or pair `efa-kv validate` blames, on made-up runs with a known fault."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from efa_kv.tools.validation import schedule, verdict
from efa_kv.tools.validation.samples import HostFacts, RailSample, Sample
from efa_kv.tools.validation.schedule import Kind
from efa_kv.tools.validation.series import Change, Trend
from efa_kv.tools.validation.verdict import Fault, Problem

LINE = 25e9
WALL_S = 0.5

#: What device ``nic`` moves from one host to another, as a share of its line rate.
Share = Callable[[int, int, int], float]


def facts(hosts: int, nics: int, **more: object) -> list[HostFacts]:
    return [
        HostFacts(
            rank=rank,
            label=f"host-{rank}",
            session=f"10.0.0.{rank + 1}:9000",
            nics=tuple(f"nic{nic}" for nic in range(nics)),
            nic_rates=(LINE,) * nics,
            protocol="efa",
            provider="efa",
            boot=f"boot-{rank}",
            **more,  # type: ignore[arg-type]
        )
        for rank in range(hosts)
    ]


def run(
    hosts: int,
    nics: int,
    share: Share,
    *,
    failed: Share = lambda *_: 0,
    noise: float = 0.0,
    repeats: int = 3,
) -> list[Sample]:
    """The pairs of a run."""
    draw = random.Random(1)
    return [
        Sample(
            kind=step.kind,
            repeat=step.repeat,
            source=source,
            targets=targets,
            wall_s=WALL_S,
            rails=tuple(
                RailSample(
                    int(
                        share(source, targets[0], nic)
                        * LINE
                        * WALL_S
                        * draw.uniform(1 - noise, 1 + noise)
                    ),
                    int(failed(source, targets[0], nic)),
                )
                for nic in range(nics)
            ),
        )
        for step in schedule.steps(hosts, repeats)
        if step.kind is Kind.PAIR
        for source, targets in step.targets.items()
    ]


def named(problems: list[Problem], fault: Fault) -> list[str]:
    return [", ".join(str(one) for one in p.suspects) for p in problems if p.fault is fault]


@settings(deadline=None)
@given(st.integers(2, 6), st.integers(1, 16))
def test_a_run_in_order_blames_nobody(hosts: int, nics: int) -> None:
    samples = run(hosts, nics, lambda *_: 0.95, noise=0.1)
    assert verdict.problems(samples, facts(hosts, nics)) == []


@settings(deadline=None)
@given(
    st.integers(3, 6),
    st.integers(3, 16),
    st.randoms(use_true_random=False),
    st.floats(0.03, 0.45),
    st.sampled_from(["both", "sending", "receiving"]),
)
def test_one_slow_device_is_named_and_no_other(
    hosts: int, nics: int, draw: random.Random, factor: float, side: str
) -> None:
    bad_host, bad_nic = draw.randrange(hosts), draw.randrange(nics)

    def share(source: int, target: int, nic: int) -> float:
        hit = {"both": bad_host in (source, target), "sending": source == bad_host}
        slow = nic == bad_nic and hit.get(side, target == bad_host)
        return 0.95 * (factor if slow else 1.0)

    problems = verdict.problems(run(hosts, nics, share, noise=0.1), facts(hosts, nics))
    assert named(problems, Fault.SLOW_NIC) == [f"nic{bad_nic} of host-{bad_host}"]
    assert len(problems) == 1


def test_of_two_hosts_both_ends_are_named_once() -> None:
    samples = run(2, 4, lambda _source, _target, nic: 0.2 if nic == 2 else 0.95)
    (problem,) = verdict.problems(samples, facts(2, 4))
    assert problem.fault is Fault.SLOW_NIC
    assert [str(one) for one in problem.suspects] == ["nic2 of host-0", "nic2 of host-1"]
    assert "third host" in problem.text


def test_several_slow_devices_do_not_hide_each_other() -> None:
    samples = run(3, 4, lambda source, target, nic: 0.2 if 1 in (source, target) and nic < 2 else 1)
    problems = verdict.problems(samples, facts(3, 4))
    assert named(problems, Fault.SLOW_NIC) == ["nic0 of host-1", "nic1 of host-1"]


def dead(host: int, bad: int) -> tuple[Share, Share]:
    """A device that does nothing; what was meant for it goes to its neighbour."""

    def share(source: int, target: int, nic: int) -> float:
        if source == host and nic == bad:
            return 0.0
        return 0.5 if target == host and nic in (bad, bad + 1) else 0.95

    return share, lambda source, target, nic: 3 if host in (source, target) and nic == bad else 0


@pytest.mark.parametrize("hosts", [2, 3, 5])
def test_a_dead_device_is_named_and_its_neighbour_is_not(hosts: int) -> None:
    share, failed = dead(1, 1)
    problems = verdict.problems(run(hosts, 6, share, failed=failed), facts(hosts, 6))
    assert named(problems, Fault.DEAD_NIC) == ["nic1 of host-1"]
    assert len(problems) == 1


def test_a_device_that_dies_in_mid_run_is_dead() -> None:
    share, failed = dead(2, 0)
    good = run(3, 4, lambda *_: 0.95, repeats=3)
    bad = run(3, 4, share, failed=failed, repeats=3)
    samples = [one for one in good if one.repeat < 2] + [one for one in bad if one.repeat == 2]
    problems = verdict.problems(samples, facts(3, 4))
    assert named(problems, Fault.DEAD_NIC) == ["nic0 of host-2"]


def test_a_device_that_was_never_tried_is_not_dead() -> None:
    samples = run(3, 4, lambda _source, _target, nic: 0.0 if nic == 3 else 0.95)
    hosts = [msgspec.structs.replace(one, nic_rates=(0.0,) * 4) for one in facts(3, 4)]
    assert verdict.problems(samples, hosts) == []


def test_operations_that_never_end_name_the_device_they_have_in_common() -> None:
    def stuck(sample: Sample) -> Sample:
        if 1 not in (sample.source, *sample.targets):
            return sample
        rails = (RailSample(0, 0), RailSample(0, 0, 5))
        return msgspec.structs.replace(sample, rails=rails, error="the deadline passed")

    # What deals with a stalled device is slow in its other pairs too, while it is opened again.
    samples = [stuck(one) for one in run(3, 2, lambda *places: 0.3 if places[2] else 0.95)]
    problems = verdict.problems(samples, facts(3, 2))
    assert named(problems, Fault.DEAD_NIC) == ["nic1 of host-1"]
    assert len(named(problems, Fault.FAILED)) == 3
    assert named(problems, Fault.SLOW_NIC) == []


def test_failures_between_devices_that_work_are_counted() -> None:
    def failed(source: int, target: int, nic: int) -> float:
        return 2 if (source, target, nic) == (0, 2, 1) else 0

    samples = run(3, 2, lambda *_: 0.95, failed=failed)
    (problem,) = verdict.problems(samples, facts(3, 2))
    assert problem.fault is Fault.FAILING_NIC
    assert problem.text == "6 operations failed from nic1 of host-0 to nic1 of host-2"


def test_a_host_with_fewer_devices_is_named() -> None:
    hosts = facts(3, 4)
    hosts[1] = msgspec.structs.replace(hosts[1], nics=hosts[1].nics[:3], nic_rates=(LINE,) * 3)
    problems = verdict.problems([], hosts)
    assert named(problems, Fault.MISSING_NIC) == ["host-1"]


def test_a_slow_host_is_named_for_what_it_does_slowly() -> None:
    samples = run(4, 2, lambda source, *_: 0.3 if source == 2 else 0.95)
    problems = verdict.problems(samples, facts(4, 2))
    assert named(problems, Fault.SLOW_HOST) == ["host-2"]
    assert "host-2 sends 32%" in problems[0].text
    assert len(problems) == 1


def test_a_slow_pair_of_good_hosts_is_named() -> None:
    samples = run(4, 2, lambda source, target, _nic: 0.3 if (source, target) == (1, 3) else 0.95)
    (problem,) = verdict.problems(samples, facts(4, 2))
    assert problem.fault is Fault.SLOW_PAIR
    assert "host-1 to host-3" in problem.text


def test_hosts_below_their_line_rate_are_named_unless_they_share_a_machine() -> None:
    samples = run(2, 2, lambda *_: 0.7)
    problems = verdict.problems(samples, facts(2, 2))
    assert named(problems, Fault.BELOW_LINE_RATE) == ["host-0", "host-1"]
    together = [msgspec.structs.replace(one, boot="same") for one in facts(2, 2)]
    assert verdict.problems(samples, together) == []


def test_hosts_of_one_machine_are_not_set_against_each_other() -> None:
    hosts = [msgspec.structs.replace(one, boot="same") for one in facts(4, 4)]
    slow_host = run(4, 4, lambda source, *_: 0.3 if source == 2 else 0.95)
    assert verdict.problems(slow_host, hosts) == []
    slow_nic = run(4, 4, lambda source, _target, nic: 0.3 if (source, nic) == (2, 1) else 0.95)
    assert named(verdict.problems(slow_nic, hosts), Fault.SLOW_NIC) == ["nic1 of host-2"]


def test_wrong_bytes_come_first() -> None:
    samples = run(3, 2, lambda *_: 0.95)
    samples[0] = msgspec.structs.replace(samples[0], mismatch="byte 3 of 9 came back wrong")
    samples[1] = msgspec.structs.replace(samples[1], error="the peer is gone")
    faults = [problem.fault for problem in verdict.problems(samples, facts(3, 2))]
    assert faults == [Fault.WRONG_BYTES, Fault.FAILED]


def test_regressions_are_told_by_kind_with_the_worst() -> None:
    def change(name: str, now: float, trend: Trend) -> Change:
        return Change(name=name, unit="bytes/s", before=1e9, now=now, noise=1.0, trend=trend)

    changes = [
        change("pair 0>1", 0.9e9, Trend.WORSE),
        change("pair 1>0", 0.5e9, Trend.WORSE),
        change("pair 1>2", 1e9, Trend.SAME),
        change("ring 0", 2e9, Trend.BETTER),
    ]
    (problem,) = verdict.problems([], facts(2, 1), changes)
    assert problem.fault is Fault.REGRESSION
    assert "2 of 3" in problem.text
    assert "pair 1>0 with 500 MB/s, before 1 GB/s" in problem.text


def test_series_hold_each_pair_and_all_together() -> None:
    samples = run(3, 2, lambda *_: 1.0)
    samples.append(
        Sample(kind=Kind.LATENCY, repeat=0, source=0, targets=(1,), latencies_us=(7.0, 9.0))
    )
    samples.append(Sample(kind=Kind.RING, repeat=0, source=2, targets=(0,), error="gone"))
    found = verdict.series(samples)
    assert found["pair"].samples == (2 * LINE,) * 3
    assert found["pair 2>1"].samples == (2 * LINE,) * 3
    assert (found["latency 0>1"].samples, found["latency"].less_is_better) == ((7.0,), True)
    assert "ring 2" not in found
