"""Rank 0 of `efa-kv validate` with hosts that come late, say strange things, or fall silent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from efa_kv.errors import PeerUnreachable, TransferTimeout
from efa_kv.runtime.notes import Received
from efa_kv.tools.validation import leader as leading
from efa_kv.tools.validation import orders
from efa_kv.tools.validation.leader import Leader, RunError
from efa_kv.tools.validation.orders import Answer, Joined, Measure, Meet
from efa_kv.tools.validation.samples import HostFacts, Sample
from efa_kv.tools.validation.schedule import Kind, Step


def facts(rank: int, **more: Any) -> HostFacts:
    values = {"protocol": "efa", "provider": "efa", "nics": ("a",), "nic_rates": (1.0,), **more}
    return HostFacts(rank=rank, label=f"h{rank}", session=f"10.0.0.{rank}:1", **values)


class FakePeer:
    def __init__(self, session: str) -> None:
        self.session = session
        self.ready = True


class FakeMember:
    """Rank 0's member; ``react`` is what the other hosts answer to an order."""

    def __init__(self, react: Callable[[str, Any], list[Any]]) -> None:
        self.facts = facts(0)
        self.engine = self
        self.notes = self
        self.react = react
        self.waiting: list[Received] = []
        self.peers: dict[str, FakePeer] = {}
        self.done: list[Any] = []

    def say(self, *values: Any, name: str = orders.NOTE_NAME) -> None:
        self.waiting += [Received(1, name, orders.text_of(value)) for value in values]

    def connect(self, session: str) -> FakePeer:
        return self.peers.setdefault(session, FakePeer(session))

    def deliver_all(
        self, peers: Sequence[FakePeer], name: str, texts: Sequence[str], _timeout_s: float
    ) -> None:
        for peer, text in zip(peers, texts, strict=True):
            self.say(*self.react(peer.session, orders.read_order(text)))

    def take(self) -> list[Received]:
        taken, self.waiting = self.waiting, []
        return taken

    def carry_out(self, order: Any) -> Answer:
        self.done.append(order)
        return answer(order, 0)


def answer(order: Any, position: int) -> Answer:
    if not isinstance(order, Measure):
        return Answer(number=order.number)
    sample = Sample(
        kind=order.kind, repeat=order.repeat, source=position, targets=order.targets, wall_s=1.0
    )
    return Answer(number=order.number, sample=sample)


def obedient(session: str, order: Any) -> list[Any]:
    return [answer(order, int(session.split(".")[-1].split(":")[0]))]


def gathered(member: FakeMember, *ranks: int) -> Leader:
    member.say(*(Joined(facts=facts(rank)) for rank in ranks))
    leader = Leader(member, 1 + len(ranks))  # type: ignore[arg-type]
    leader.gather(5.0, lambda _count: None)
    leader.meet()
    return leader


RING = Step(Kind.RING, 0, {0: (1,), 1: (2,), 2: (0,)})


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leading, "STEP_SPARE_S", 0.05)


def test_hosts_are_numbered_by_rank_whatever_order_they_come_in() -> None:
    told = []

    def react(session: str, order: Any) -> list[Any]:
        told.append((session, order))
        return obedient(session, order)

    leader = gathered(FakeMember(react), 16, 8)
    assert [host.rank for host in leader.hosts] == [0, 8, 16]
    meets = {session: order for session, order in told if isinstance(order, Meet)}
    assert meets["10.0.0.8:1"].position == 1
    assert meets["10.0.0.16:1"].position == 2
    assert meets["10.0.0.8:1"].sessions == ("10.0.0.0:1", "10.0.0.8:1", "10.0.0.16:1")


def test_a_step_brings_a_sample_of_every_sender() -> None:
    member = FakeMember(obedient)
    samples = gathered(member, 1, 2).step(RING, 0.1)
    assert sorted((one.source, one.targets) for one in samples) == [(0, (1,)), (1, (2,)), (2, (0,))]
    assert isinstance(member.done[-1], Measure)


def test_only_the_first_repeat_of_pairs_compares_bytes() -> None:
    member = FakeMember(obedient)
    leader = gathered(member, 1)
    for kind, repeat in ((Kind.PAIR, 0), (Kind.PAIR, 1), (Kind.ALL_TO_ALL, 0)):
        leader.step(Step(kind, repeat, {0: (1,)}), 0.1)
    assert [order.verify for order in member.done if isinstance(order, Measure)] == [
        True,
        False,
        False,
    ]


def test_hosts_that_do_not_come_are_counted() -> None:
    member = FakeMember(obedient)
    member.say(Joined(facts=facts(1)))
    leader = Leader(member, 3)  # type: ignore[arg-type]
    with pytest.raises(RunError, match=r"2 of 3 hosts came .*\(ranks 0, 1\)"):
        leader.gather(0.05, lambda _count: None)


def test_two_hosts_of_one_rank_are_refused() -> None:
    member = FakeMember(obedient)
    member.say(Joined(facts=facts(1)), Joined(facts=facts(1, container="docker")))
    leader = Leader(member, 3)  # type: ignore[arg-type]
    with pytest.raises(RunError, match="two hosts say that they are rank 1"):
        leader.gather(5.0, lambda _count: None)


def test_hosts_of_different_protocols_are_refused() -> None:
    member = FakeMember(obedient)
    member.say(Joined(facts=facts(1, protocol="tcp")))
    leader = Leader(member, 2)  # type: ignore[arg-type]
    with pytest.raises(RunError, match="h0: efa, h1: tcp"):
        leader.gather(5.0, lambda _count: None)


@pytest.mark.usefixtures("soon")
def test_a_silent_host_is_named_when_its_time_is_up() -> None:
    def react(session: str, order: Any) -> list[Any]:
        silent = isinstance(order, Measure) and session == "10.0.0.2:1"
        return [] if silent else obedient(session, order)

    leader = gathered(FakeMember(react), 1, 2)
    with pytest.raises(RunError, match="no answer from h2"):
        leader.step(RING, 0.01)


def test_a_host_that_is_gone_is_named_at_once() -> None:
    member = FakeMember(lambda *_: [])
    member.react = obedient
    leader = gathered(member, 1, 2)
    member.react = lambda session, order: (
        [] if session == "10.0.0.1:1" else obedient(session, order)
    )
    member.peers["10.0.0.1:1"].ready = False
    with pytest.raises(RunError, match="no answer from h1"):
        leader.step(RING, 3600.0)


def test_a_host_that_cannot_be_told_ends_the_run() -> None:
    leader = gathered(FakeMember(obedient), 1)

    def fail(*_: Any) -> None:
        raise TransferTimeout("10.0.0.1:1 did not take the note.")

    leader._member.notes.deliver_all = fail  # type: ignore[method-assign]
    with pytest.raises(RunError, match=r"10\.0\.0\.1:1"):
        leader.step(Step(Kind.PAIR, 0, {1: (0,)}), 0.1)
    leader.end()  # must not raise: whoever is gone needs no good-bye


def test_what_a_host_could_not_do_is_told_with_its_name() -> None:
    def react(session: str, order: Any) -> list[Any]:
        told = answer(order, 1)
        return [msgspec.structs.replace(told, error="no way to 10.0.0.2:1")]

    with pytest.raises(RunError, match="h1: no way"):
        gathered(FakeMember(react), 1)


def test_a_host_that_rank_0_cannot_greet_ends_the_run() -> None:
    member = FakeMember(obedient)

    def unreachable(session: str) -> FakePeer:
        raise PeerUnreachable(f"no answer from {session}")

    member.connect = unreachable  # type: ignore[method-assign]
    with pytest.raises(RunError, match=r"no answer from 10\.0\.0\.1:1"):
        gathered(member, 1)


def test_late_answers_and_other_notes_are_passed_over_and_other_releases_are_not() -> None:
    member = FakeMember(obedient)
    leader = gathered(member, 1)
    member.say(Answer(number=999))
    member.say(Answer(number=999), name="of somebody else")
    assert len(leader.step(Step(Kind.PAIR, 0, {1: (0,)}), 0.1)) == 1
    member.waiting.append(Received(1, orders.NOTE_NAME, '{"type": "Tomorrow"}'))
    with pytest.raises(RunError, match="same release"):
        leader.step(Step(Kind.PAIR, 0, {1: (0,)}), 0.1)
