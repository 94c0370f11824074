"""The control thread's seams: handlers, timers, bounded queues, many peers."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from efa_kv import EngineConfig, TransferEngine
from efa_kv.errors import ConfigError, FabricBusy, LocalProtocolError, PeerError
from efa_kv.runtime.control import ControlThread
from efa_kv.runtime.handle import SessionHandle
from efa_kv.types import WRITE, Notice, Result
from efa_kv.wire.envelope import Message
from efa_kv.wire.handoff import Landed
from efa_kv.wire.session import SessionState

Child = Callable[..., Any]
Wait = Callable[..., None]


class Recorder:
    """A handler that writes down what it is told."""

    message_types = (Landed,)

    def __init__(self) -> None:
        self.messages: list[tuple[int, Message]] = []
        self.states: list[tuple[SessionState, int]] = []
        self.results: list[Result] = []
        self.timer_calls = 0
        self.next_timer: float | None = None
        self.threads: set[str] = set()
        self.fails = False

    def on_message(self, session: SessionHandle, message: Message, now: float) -> None:
        self._note()
        self.messages.append((session.incarnation, message))

    def on_session(
        self, session: SessionHandle, state: SessionState, reason: str | None, now: float
    ) -> None:
        self._note()
        self.states.append((state, session.incarnation))

    def on_job(self, job: int, result: Result, now: float) -> None:
        self._note()
        self.results.append(result)

    def on_timer(self, now: float) -> float | None:
        self._note()
        self.timer_calls += 1
        due, self.next_timer = self.next_timer, None
        return due

    def _note(self) -> None:
        self.threads.add(threading.current_thread().name)
        if self.fails:
            raise RuntimeError("a bug in a handler")


def _config(**changes: Any) -> EngineConfig:
    return EngineConfig(**{"protocol": "tcp", "near": False, **changes})


@pytest.fixture
def pair() -> Iterator[tuple[TransferEngine, Recorder, TransferEngine, Recorder]]:
    first, second = Recorder(), Recorder()
    one, two = TransferEngine(_config()), TransferEngine(_config())
    one.add_handler(first)
    two.add_handler(second)
    with one, two:
        yield one, first, two, second


def _on_control(engine: TransferEngine, function: Callable[[ControlThread], Any]) -> Any:
    done = threading.Event()
    answers: list[Any] = []

    def run() -> None:
        try:
            answers.append(function(engine.control))
        except Exception as problem:
            answers.append(problem)
        done.set()

    engine.control.call(run)
    assert done.wait(5)
    return answers[0]


def test_messages_and_states_reach_handlers_on_the_control_thread(
    pair: tuple[TransferEngine, Recorder, TransferEngine, Recorder], wait_until: Wait
) -> None:
    one, first, two, second = pair
    handle = _on_control(one, lambda control: control.connect(two.session))
    wait_until(lambda: first.states and second.states)
    assert first.states == [(SessionState.READY, two.incarnation)]
    assert second.states == [(SessionState.READY, one.incarnation)]
    for number in range(100):
        message = Landed(pull_id=number)
        assert _on_control(one, lambda control, m=message: control.send(handle, m))
    wait_until(lambda: len(second.messages) == 100)
    assert [message.pull_id for _, message in second.messages] == list(range(100))
    assert {incarnation for incarnation, _ in second.messages} == {one.incarnation}
    two.close()
    wait_until(lambda: len(first.states) == 3)
    assert [state for state, _ in first.states[1:]] == [SessionState.DRAINING, SessionState.CLOSED]
    assert not _on_control(one, lambda control: control.send(handle, Landed(pull_id=1)))
    assert first.threads == second.threads == {"efa-kv-control"}


def test_jobs_of_a_handler(
    pair: tuple[TransferEngine, Recorder, TransferEngine, Recorder], wait_until: Wait
) -> None:
    one, first, two, _ = pair
    source, target = np.full(4096, 5, np.uint8), np.zeros(4096, np.uint8)
    here, there = one.register(source), two.register(target)
    handle = one.connect(two.session).handle

    def submit(control: ControlThread) -> int:
        arrays = [np.array([value], np.uint64) for value in (here.address, there.address, 4096)]
        return control.submit(
            handle, first, WRITE, *arrays, deadline_s=5.0, notice=Notice((1, 2), 3)
        )

    jobs = [_on_control(one, submit) for _ in range(10)]
    wait_until(lambda: len(first.results) == 10)
    assert sorted(result.job for result in first.results) == sorted(jobs)
    assert all(result.status == 0 and result.fenced for result in first.results)
    assert (target == 5).all()
    notices: list[Notice] = []
    wait_until(lambda: notices.extend(two.notices()) or len(notices) == 10)
    wait_until(lambda: handle.jobs == 0)
    two.close()
    wait_until(lambda: handle.over)
    assert isinstance(_on_control(one, submit), PeerError)


def test_timers_and_failures_of_a_handler(
    pair: tuple[TransferEngine, Recorder, TransferEngine, Recorder], wait_until: Wait
) -> None:
    one, first, two, second = pair
    wait_until(lambda: first.timer_calls == 1)
    first.next_timer = time.monotonic() + 0.2
    _on_control(one, lambda control: control.wake_timer())
    wait_until(lambda: first.timer_calls == 3)
    first.fails = True
    one.connect(two.session)
    second_calls = second.timer_calls
    assert second_calls >= 1
    first.fails = False
    assert one.connect(two.session).ready


def test_the_command_queue_is_bounded_and_full_means_busy_not_slow() -> None:
    with TransferEngine(_config(command_queue_calls=16)) as engine:
        release = threading.Event()
        engine.control.call(lambda: release.wait(5) and None)
        time.sleep(0.1)
        ran: list[int] = []
        for number in range(16):
            engine.control.call(lambda number=number: ran.append(number))
        begun = time.monotonic()
        with pytest.raises(FabricBusy, match="16"):
            engine.control.call(lambda: None)
        with pytest.raises(FabricBusy):
            engine.connect("127.0.0.1:1")
        assert time.monotonic() - begun < 0.5
        release.set()
        _retry(lambda: _on_control(engine, lambda control: None))
        assert ran == list(range(16))


def _retry(call: Callable[[], Any]) -> None:
    for _ in range(100):
        try:
            call()
        except FabricBusy:
            time.sleep(0.01)
        else:
            return


def test_connect_from_the_control_thread_is_a_clear_error(
    pair: tuple[TransferEngine, Recorder, TransferEngine, Recorder],
) -> None:
    one, _, two, _ = pair
    error = _on_control(one, lambda control: one.connect(two.session))
    assert isinstance(error, LocalProtocolError)


def test_handlers_and_descriptions_come_before_the_start() -> None:
    with TransferEngine(_config()) as engine:
        with pytest.raises(LocalProtocolError):
            engine.add_handler(Recorder())
        with pytest.raises(LocalProtocolError):
            engine.describe(fingerprint=b"", fields={})


def test_more_regions_than_fit_into_a_greeting() -> None:
    settings = {"max_message_bytes": 1 << 16, "max_regions": 4096}
    with TransferEngine(_config(**settings)) as one, TransferEngine(_config(**settings)) as two:
        buffers = [np.zeros(64, np.uint8) for _ in range(1500)]
        regions = [two.register(buffer) for buffer in buffers]
        peer = one.connect(two.session)
        here = one.register(np.full(64, 3, np.uint8))
        job = one.write(peer, [here.address], [regions[-1].address], [64])
        assert job.wait(10).error is None
        assert (buffers[-1] == 3).all()
        assert len(peer.regions) == len({region.region for region in regions})


def test_many_peers_cost_little_each(wait_until: Wait) -> None:
    """One engine and many that greet it; a transfer is not slowed down by their number."""
    with TransferEngine(_config()) as hub:
        target = np.zeros(4096, np.uint8)
        region = hub.register(target)
        others = [TransferEngine(_config()) for _ in range(20)]
        try:
            begun = time.monotonic()
            for other in others:
                other.connect(hub.session)
            assert (time.monotonic() - begun) / len(others) < 0.25
            assert len(hub.control.sessions) == len(others)
            for index, other in enumerate(others):
                source = other.register(np.full(4096, index + 1, np.uint8))
                job = other.write(hub.session, [source.address], [region.address], [4096])
                assert job.wait(10).error is None
                wait_until(lambda index=index: (target == index + 1).all())
        finally:
            for other in others:
                other.close()
        wait_until(lambda: len(hub.control.sessions) == 0)


def test_an_engine_can_be_its_own_peer(wait_until: Wait) -> None:
    for near in (True, False):
        with TransferEngine(_config(near=near)) as engine:
            source, target = np.full(4096, 8, np.uint8), np.zeros(4096, np.uint8)
            here, there = engine.register(source), engine.register(target)
            job = engine.write(engine.session, [here.address], [there.address], [4096])
            assert job.wait(10).error is None
            wait_until(lambda target=target: (target == 8).all())


def test_an_unused_peer_makes_room(wait_until: Wait) -> None:
    settings = {"max_peers": 2, "idle_after_s": 0.3}
    with TransferEngine(_config(**settings)) as hub:
        others = [TransferEngine(_config()).start() for _ in range(3)]
        try:
            for other in others[:2]:
                other.connect(hub.session)
            time.sleep(0.4)
            assert others[2].connect(hub.session).ready
            assert len(hub.control.sessions) == 2
            wait_until(lambda: len(others[0].control.sessions) == 0)
        finally:
            for other in others:
                other.close()


def test_two_names_of_one_peer_share_it(wait_until: Wait) -> None:
    with TransferEngine(_config()) as one, TransferEngine(_config()) as two:
        port = two.session.rpartition(":")[2]
        first, second = one.connect(two.session), one.connect(f"localhost:{port}")
        assert first.incarnation == second.incarnation
        assert first.handle.peer is second.handle.peer
        _on_control(one, lambda control: _close(control, second.handle))
        wait_until(lambda: second.handle.over)
        source, target = np.full(64, 8, np.uint8), np.zeros(64, np.uint8)
        here, there = one.register(source), two.register(target)

        def write() -> None:
            peer = one.connect(two.session)
            assert one.write(peer, [here.address], [there.address], [64]).wait(5).error is None

        for _ in range(3):
            try:
                write()
                return
            except PeerError:
                time.sleep(0.2)
        write()


def _close(control: ControlThread, handle: SessionHandle) -> None:
    now = time.monotonic()
    control.sessions._run(handle, handle.machine.close(now), now)


def test_a_layout_too_large_to_tell_is_refused_at_once() -> None:
    engine = TransferEngine(_config())
    try:
        with pytest.raises(ConfigError, match="max_message_bytes"):
            engine.describe(fingerprint=b"", fields={}, layout=b"x" * (1 << 20))
    finally:
        engine.close()


def test_engines_left_open_end_with_the_interpreter() -> None:
    program = (
        "from efa_kv import *\n"
        "a, b = (TransferEngine(EngineConfig(protocol='tcp')).start() for _ in range(2))\n"
        "a.connect(b.session)\n"
        "print('done')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=20
    )
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert done.stderr == ""
