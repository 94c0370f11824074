"""Asking a peer to fence, and fencing for a peer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from efa_kv.errors import FabricBusy, FabricError
from efa_kv.runtime.fencing import Fencing, PeerFence
from efa_kv.wire.fence import Fence, Fenced
from efa_kv.wire.session import SessionState

TIMEOUT_S = 5.0


class FakeSession:
    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.over = False


class FakeControl:
    """Runs on the test's own thread, but for what `later` is called with."""

    def __init__(self) -> None:
        self.time = 100.0
        self.sent: list[tuple[FakeSession, Any]] = []
        self.sessions: dict[str, FakeSession] = {}
        self.calls: list[Callable[[float], None]] = []
        self.called = threading.Event()
        self.full = False

    def find(self, session: str) -> Future[FakeSession]:
        if self.full:
            raise FabricBusy("too many calls")
        answer: Future[FakeSession] = Future()
        if session in self.sessions:
            answer.set_result(self.sessions[session])
        else:
            answer.set_exception(FabricError("nobody there"))
        return answer

    def now(self) -> float:
        return self.time

    def send(self, session: FakeSession, message: Any) -> bool:
        self.sent.append((session, message))
        return not session.over

    def wake_timer(self) -> None:
        return

    def later(self, call: Callable[[float], None]) -> None:
        self.calls.append(call)
        self.called.set()

    def catch_up(self) -> None:
        assert self.called.wait(10)
        self.called.clear()
        while self.calls:
            self.calls.pop(0)(self.time)


@pytest.fixture
def control() -> FakeControl:
    return FakeControl()


def fencing(control: FakeControl, fence: Callable[[], None] = lambda: None) -> Fencing:
    return Fencing(control, fence, TIMEOUT_S)  # type: ignore[arg-type]


def test_an_answer_of_the_peer_that_was_asked_is_the_proof(control: FakeControl) -> None:
    here = fencing(control)
    peer = control.sessions["there"] = FakeSession(7)
    answer = here.ask("there", 7)
    [(_, question)] = control.sent
    assert isinstance(question, Fence)
    here.on_message(FakeSession(8), Fenced(query=question.query), 100.0)  # type: ignore[arg-type]
    assert not answer.done()
    here.on_message(peer, Fenced(query=question.query), 100.0)  # type: ignore[arg-type]
    assert answer.result(0) is True
    assert here.on_timer(101.0) is None


def test_a_process_that_is_no_more_writes_nothing(control: FakeControl) -> None:
    control.sessions["there"] = FakeSession(8)
    assert fencing(control).ask("there", 7).result(0) is True
    assert control.sent == []


def test_without_an_answer_nothing_is_known(control: FakeControl) -> None:
    here = fencing(control)
    assert here.ask("nowhere", 7).result(0) is False
    control.full = True
    assert here.ask("there", 7).result(0) is False
    control.full = False
    peer = control.sessions["there"] = FakeSession(7)
    late, gone = here.ask("there", 7), here.ask("there", 7)
    assert here.on_timer(100.0) == 100.0 + TIMEOUT_S
    assert not late.done()
    here.on_timer(100.0 + TIMEOUT_S)
    assert late.result(0) is gone.result(0) is False
    closed = here.ask("there", 7)
    peer.over = True
    here.on_session(peer, SessionState.CLOSED, None, 100.0)  # type: ignore[arg-type]
    assert closed.result(0) is False
    assert here.ask("there", 7).result(0) is False


def test_who_asks_during_a_fence_gets_the_next_one(control: FakeControl) -> None:
    begun, go, fences = threading.Event(), threading.Event(), []

    def fence() -> None:
        fences.append(1)
        begun.set()
        assert go.wait(10)

    here = fencing(control, fence)
    first, second = FakeSession(1), FakeSession(2)
    here.on_message(first, Fence(query=11), 100.0)  # type: ignore[arg-type]
    assert begun.wait(10)
    for query in (21, 22):  # repeated: only the latest is answered
        here.on_message(second, Fence(query=query), 100.0)  # type: ignore[arg-type]
    go.set()
    while len(control.sent) < 2:
        control.catch_up()
    assert control.sent == [(first, Fenced(query=11)), (second, Fenced(query=22))]
    assert len(fences) == 2


def test_a_fence_that_fails_is_not_answered(control: FakeControl) -> None:
    def fence() -> None:
        raise FabricError("no endpoint")

    here = fencing(control, fence)
    here.on_message(FakeSession(1), Fence(query=11), 100.0)  # type: ignore[arg-type]
    control.catch_up()
    assert control.sent == []


def test_a_peer_is_asked_until_it_says_so() -> None:
    answers: list[Future[bool]] = []

    def ask() -> Future[bool]:
        answers.append(Future())
        return answers[-1]

    fence = PeerFence(ask)
    fence.wait(0.0)
    assert not fence.answered
    assert not fence.holds()
    answers[0].set_result(False)
    assert fence.answered
    assert not fence.holds()
    answers[1].set_result(True)
    assert fence.holds()
    assert len(answers) == 2
