"""Two engines greet each other over a network that loses, repeats and reorders, while
either may restart; whatever happens, no machine breaks a rule, and once the network is
good again both are READY for each other's present incarnation."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from efa_kv.types import ProcessRecord
from efa_kv.wire import session as steps
from efa_kv.wire.messages import Card
from efa_kv.wire.session import SessionMachine, SessionState, SessionTimes

TIMES = SessionTimes()
OVER = (SessionState.DRAINING, SessionState.CLOSED, SessionState.REJECTED)
INCARNATIONS = itertools.count(1)
NEXT_STATES = {
    SessionState.IDLE: {SessionState.READY, SessionState.CLOSED},
    SessionState.READY: {SessionState.SUSPECT, SessionState.DRAINING},
    SessionState.SUSPECT: {SessionState.READY, SessionState.DRAINING},
    SessionState.DRAINING: {SessionState.CLOSED},
    SessionState.CLOSED: set[SessionState](),
}


class Packet(NamedTuple):
    """``to`` is a place; ``sender`` the incarnation that sent it, ``known_as`` the one it
    was meant for."""

    to: int
    sender: int
    kind: str
    meant_for: int


class Life:
    """What a session machine did, to be judged."""

    def __init__(self, machine: SessionMachine) -> None:
        self.machine = machine
        self.added = 0
        self.removed = 0
        self.announced = SessionState.IDLE
        self.incarnation = 0


class Engine:
    """One process: the part of the directory that the machines need around them."""

    def __init__(self, place: int, network: list[Packet]) -> None:
        self.place = place
        self.incarnation = next(INCARNATIONS)
        self.network = network
        self.current: Life | None = None
        self.lives: list[Life] = []
        self.greeted: set[int] = set()

    def life(self) -> Life:
        if self.current is None or self.current.machine.state in OVER:
            self.current = Life(SessionMachine("peer:1", self.incarnation, TIMES))
            self.lives.append(self.current)
        return self.current

    def say(self, kind: str, meant_for: int) -> None:
        self.network.append(Packet(1 - self.place, self.incarnation, kind, meant_for))

    def run(self, life: Life, effects: list[steps.Effect], source: int, now: float) -> None:
        for effect in effects:
            match effect:
                case steps.Send():
                    self.say(effect.kind, source if effect.answer else life.machine.incarnation)
                case steps.Probe():
                    self.say("probe", 0)
                case steps.AddPeer():
                    life.added += 1
                    life.incarnation = effect.card.incarnation
                case steps.RemovePeer():
                    life.removed += 1
                case steps.Announce():
                    assert effect.state in NEXT_STATES[life.announced], (life.announced, effect)
                    life.announced = effect.state
                case steps.Succeed():
                    self.current = None
                    successor = self.life()
                    answer = successor.machine.hello(effect.card, now)
                    self.run(successor, answer, effect.card.incarnation, now)
        if life.machine.state is SessionState.DRAINING:
            self.run(life, life.machine.settled(now), 0, now)

    def receive(self, packet: Packet, now: float) -> None:
        source = packet.sender
        if packet.kind in ("hello", "probe"):
            life = self.life()
            self.greeted.add(source)
            probe = packet.kind == "probe"
            self.run(life, life.machine.hello(card(source), now, probe=probe), source, now)
            return
        life_or_none = self.current
        answers = ("welcome", "not_greeted")
        if life_or_none is None or (packet.kind not in answers and source not in self.greeted):
            if packet.kind not in ("not_greeted", "pong", "bye", "welcome"):
                self.say("not_greeted", source)
            return
        machine = life_or_none.machine
        match packet.kind:
            case "welcome":
                # The sender is known from now on, as the connection it came over is ours.
                self.greeted.add(source)
                effects = machine.welcome(card(source), packet.meant_for, now)
            case "not_greeted":
                effects = machine.not_greeted(now)
            case "ping":
                effects = machine.ping(source, now)
            case "bye":
                effects = machine.bye(source, now)
            case _:
                effects = machine.heard(now, source)
        self.run(life_or_none, effects, source, now)


def card(incarnation: int) -> Card:
    process = ProcessRecord("b", "n", 1, 1)
    return Card(session="peer:1", incarnation=incarnation, process=process, nics=())


class TwoEngines(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.network: list[Packet] = []
        self.engines = [Engine(0, self.network), Engine(1, self.network)]
        self.dead: list[Engine] = []

    places = st.integers(0, 1)

    @rule(place=places)
    def connect(self, place: int) -> None:
        engine = self.engines[place]
        life = engine.life()
        engine.run(life, life.machine.connect(self.now), 0, self.now)

    @rule(place=places)
    def use(self, place: int) -> None:
        life = self.engines[place].current
        if life is not None:
            life.machine.use(self.now)

    @precondition(lambda self: self.network)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        packet = self.network.pop(data.draw(st.integers(0, len(self.network) - 1)))
        self.engines[packet.to].receive(packet, self.now)

    @precondition(lambda self: self.network)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        self.network.append(data.draw(st.sampled_from(self.network)))

    @precondition(lambda self: self.network)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.network.pop(data.draw(st.integers(0, len(self.network) - 1)))

    @rule(place=places)
    def restart(self, place: int) -> None:
        self.dead.append(self.engines[place])
        self.engines[place] = Engine(place, self.network)

    @rule(place=places)
    def close_session(self, place: int) -> None:
        engine = self.engines[place]
        if engine.current is not None:
            engine.run(engine.current, engine.current.machine.close(self.now), 0, self.now)

    @rule(seconds=st.sampled_from((0.1, 0.5, 1.0, 3.0, 40.0, 200.0)))
    def wait(self, seconds: float) -> None:
        self._advance(seconds)

    def _advance(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            due = [
                (at, engine)
                for engine in self.engines
                if engine.current is not None
                and (at := engine.current.machine.next_timer(self.now)) is not None
                and at <= end
            ]
            if not due:
                break
            at, engine = min(due, key=lambda pair: pair[0])
            # A timer that does not move on would be called for ever.
            self.now = max(self.now, at)
            assert engine.current is not None
            effects = engine.current.machine.on_timer(self.now)
            engine.run(engine.current, effects, 0, self.now)
            self.now += 0.001
        self.now = max(self.now, end)

    @invariant()
    def lives_are_sane(self) -> None:
        for engine in self.engines:
            for life in engine.lives:
                machine = life.machine
                assert life.added <= 1
                assert life.removed <= life.added
                assert machine.incarnation == life.incarnation
                usable = machine.state in (SessionState.READY, SessionState.SUSPECT)
                assert usable == (life.added == 1 and life.removed == 0)
                assert life is engine.current or machine.state in OVER

    def teardown(self) -> None:
        """The network becomes good: both end up with each other as they are now."""
        self.network.clear()
        for _ in range(200):
            for place in (0, 1):
                self.connect(place)
            for _ in range(1000):
                if not self.network:
                    break
                packet = self.network.pop(0)
                self.engines[packet.to].receive(packet, self.now)
            assert not self.network, "the engines answer each other without end"
            if all(self._is_ready(place) for place in (0, 1)):
                return
            self._advance(0.5)
        raise AssertionError([life.machine.state for e in self.engines for life in e.lives])

    def _is_ready(self, place: int) -> bool:
        life = self.engines[place].current
        return (
            life is not None
            and life.machine.state is SessionState.READY
            and life.machine.incarnation == self.engines[1 - place].incarnation
        )


TestTwoEngines = TwoEngines.TestCase
TestTwoEngines.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
