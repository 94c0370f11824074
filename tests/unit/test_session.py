"""The session's table: every legal move, and that an illegal one changes nothing."""

from __future__ import annotations

import pytest

from efa_kv.errors import LocalProtocolError
from efa_kv.types import ProcessRecord
from efa_kv.wire import session as steps
from efa_kv.wire.machine import look_up
from efa_kv.wire.messages import Card
from efa_kv.wire.session import (
    TABLE,
    AddPeer,
    Announce,
    Probe,
    RemovePeer,
    Send,
    SessionEvent,
    SessionMachine,
    SessionState,
    SessionTimes,
    Succeed,
)

OWN = 1
PEER = 2
OTHER = 3
TIMES = SessionTimes()


def card(incarnation: int = PEER) -> Card:
    return Card(
        session="127.0.0.1:2",
        incarnation=incarnation,
        process=ProcessRecord("b", "n", 1, 1),
        nics=(),
    )


def machine() -> SessionMachine:
    return SessionMachine("127.0.0.1:2", OWN, TIMES)


def ready(now: float = 0.0) -> SessionMachine:
    made = machine()
    made.connect(now)
    made.welcome(card(), OWN, now)
    assert made.state is SessionState.READY
    return made


def suspect() -> SessionMachine:
    made = ready()
    made.on_timer(TIMES.suspect_after_s)
    assert made.state is SessionState.SUSPECT
    return made


def kinds(effects: list[steps.Effect]) -> list[object]:
    return [
        effect.kind
        if isinstance(effect, Send)
        else effect.state
        if isinstance(effect, Announce)
        else type(effect)
        for effect in effects
    ]


def test_one_round_trip() -> None:
    made = machine()
    assert kinds(made.connect(0.0)) == ["hello"]
    effects = made.welcome(card(), OWN, 0.1)
    assert kinds(effects) == [AddPeer, SessionState.READY]
    assert made.incarnation == PEER


def test_the_greeted_side_answers() -> None:
    made = machine()
    effects = made.hello(card(), 0.0)
    assert kinds(effects) == [AddPeer, "welcome", SessionState.READY]


def test_crossing_greetings_merge() -> None:
    made = machine()
    made.connect(0.0)
    assert kinds(made.hello(card(), 0.1)) == [AddPeer, "welcome", SessionState.READY]
    assert made.welcome(card(), OWN, 0.2) == []
    assert made.state is SessionState.READY


def test_greeting_is_repeated_and_gives_up() -> None:
    made = machine()
    made.connect(10.0)
    assert made.next_timer(10.0) == 10.0 + TIMES.hello_again_s
    assert kinds(made.on_timer(10.5)) == ["hello"]
    assert made.on_timer(10.6) == []
    effects = made.on_timer(10.0 + TIMES.handshake_timeout_s)
    assert effects == [Announce(SessionState.CLOSED, "no answer")]
    assert made.next_timer(99.0) is None


def test_answer_for_another_engine_is_ignored() -> None:
    made = machine()
    made.connect(0.0)
    assert made.welcome(card(), OWN + 1, 0.1) == []
    assert made.reject(OWN + 1, "layout", 0.1) == []
    assert made.state is SessionState.GREETING


def test_refused_by_the_peer() -> None:
    made = machine()
    made.connect(0.0)
    assert made.reject(OWN, "layout", 0.1) == [Announce(SessionState.REJECTED, "layout")]
    assert made.connect(0.2) == []
    assert made.on_timer(0.1 + TIMES.handshake_timeout_s) == [
        Announce(SessionState.CLOSED, "layout")
    ]


def test_misfit_is_refused_on_both_sides() -> None:
    greeted = machine()
    assert kinds(greeted.hello(card(), 0.0, "dtype differs")) == ["reject", SessionState.REJECTED]
    greeter = machine()
    greeter.connect(0.0)
    effects = greeter.welcome(card(), OWN, 0.1, "dtype differs")
    assert kinds(effects) == ["reject", SessionState.REJECTED]
    assert greeter.reason == "dtype differs"


def test_heartbeats_only_while_used() -> None:
    made = ready()
    assert kinds(made.on_timer(1.0)) == ["ping"]
    made.heard(1.1, PEER)
    quiet = TIMES.idle_after_s + 1
    assert made.next_timer(quiet) is None
    assert made.on_timer(quiet) == []
    made.use(quiet + 100)
    assert made.next_timer(quiet + 100) is not None
    assert made.state is SessionState.READY
    # Silence counts from the moment it is used again, not from the last word long ago.
    assert made.on_timer(quiet + 100) == []
    assert kinds(made.on_timer(quiet + 101)) == ["ping"]


def test_a_peer_that_was_heard_just_now_is_not_asked() -> None:
    made = ready()
    made.ping(PEER, 0.9)
    assert made.on_timer(1.0) == []
    assert made.next_timer(1.0) == 1.9
    assert kinds(made.on_timer(1.9)) == ["ping"]
    assert made.on_timer(2.0) == []


def test_silence_makes_suspect_and_a_word_makes_ready() -> None:
    made = suspect()
    assert kinds(made.heard(4.0)) == [SessionState.READY]
    made = suspect()
    assert kinds(made.ping(PEER, 4.0)) == [SessionState.READY, "pong"]
    made = suspect()
    assert kinds(made.hello(card(), 4.0)) == ["welcome", SessionState.READY]


def test_a_suspect_is_forgotten_in_the_end() -> None:
    made = suspect()
    assert kinds(made.on_timer(4.1)) == ["ping"]
    effects = made.on_timer(3.0 + TIMES.forget_after_s)
    assert kinds(effects) == [RemovePeer, SessionState.DRAINING]
    assert kinds(made.settled(200.0)) == [SessionState.CLOSED]


def test_a_stranger_is_checked_while_the_peer_is_alive() -> None:
    made = ready()
    assert made.hello(card(OTHER), 0.5) == [Probe()]
    assert made.state is SessionState.READY
    assert made.incarnation == PEER


def test_a_stranger_that_asks_who_is_here_is_told_and_checked() -> None:
    made = ready()
    effects = made.hello(card(OTHER), 0.5, probe=True)
    assert effects == [Send("welcome", answer=True), Probe()]
    assert made.state is SessionState.READY
    assert made.incarnation == PEER


def test_a_stranger_that_does_not_fit_costs_a_live_session_nothing() -> None:
    made = ready()
    effects = made.hello(card(OTHER), 0.5, "dtype differs")
    assert effects == [Send("reject", answer=True, reason="dtype differs")]
    assert made.state is SessionState.READY


def test_a_verified_new_incarnation_retires_the_old() -> None:
    made = ready()
    effects = made.welcome(card(OTHER), OWN, 0.5)
    assert effects == [
        RemovePeer(),
        Announce(SessionState.DRAINING, "restarted"),
        Succeed(card(OTHER)),
    ]
    assert made.incarnation == PEER


def test_a_stranger_is_believed_when_the_old_one_is_silent() -> None:
    assert kinds(suspect().hello(card(OTHER), 4.0)) == [RemovePeer, SessionState.DRAINING, Succeed]


def test_messages_of_another_incarnation_are_not_the_peers() -> None:
    made = ready()
    assert made.ping(OTHER, 0.1) == [Send("not_greeted", answer=True)]
    assert made.bye(OTHER, 0.1) == []
    assert made.heard(0.1, OTHER) == []
    assert made.state is SessionState.READY


def test_good_bye() -> None:
    assert kinds(ready().bye(PEER, 1.0)) == [RemovePeer, SessionState.DRAINING]
    assert kinds(ready().close(1.0)) == ["bye", RemovePeer, SessionState.DRAINING]
    assert kinds(machine().close(1.0)) == [SessionState.CLOSED]


def test_forgotten_by_the_peer_greets_again() -> None:
    assert kinds(ready().not_greeted(1.0)) == ["hello"]
    assert kinds(suspect().not_greeted(4.0)) == ["hello"]


@pytest.mark.parametrize(
    "state", [SessionState.DRAINING, SessionState.CLOSED, SessionState.REJECTED]
)
def test_late_messages_never_move_a_last_state(state: SessionState) -> None:
    made = ready()
    made.state = state
    made.hello(card(), 1.0)
    made.hello(card(OTHER), 1.0)
    made.welcome(card(), OWN, 1.0)
    made.welcome(card(OTHER), OWN, 1.0)
    made.reject(OWN, "x", 1.0)
    made.ping(PEER, 1.0)
    made.heard(1.0, PEER)
    made.not_greeted(1.0)
    made.bye(PEER, 1.0)
    made.connect(1.0)
    assert made.state is state


@pytest.mark.parametrize("state", list(SessionState))
@pytest.mark.parametrize("event", list(SessionEvent))
def test_unknown_pairs_are_errors_and_change_nothing(
    state: SessionState, event: SessionEvent
) -> None:
    if (state, event) in TABLE:
        assert look_up("session", TABLE, state, event).state in SessionState
        return
    with pytest.raises(LocalProtocolError, match=f"{event.name}.*{state.name}"):
        look_up("session", TABLE, state, event)
    made = machine()
    made.state = state
    with pytest.raises(LocalProtocolError):
        made._step(event, 1.0, card())
    assert made.state is state
