"""Asking peers to keep out what failed on the way to them, and doing so for them.

Owner: the control thread; `Fencing.ask` is for any thread.  The fence itself closes
endpoints and so runs on a thread of its own, one at a time: who asks meanwhile waits for
the next one.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING

from efa_kv.errors import EfaKvError
from efa_kv.runtime.handle import SessionHandle
from efa_kv.types import Result
from efa_kv.wire.envelope import Message
from efa_kv.wire.fence import Fence, Fenced
from efa_kv.wire.session import SessionState

if TYPE_CHECKING:
    from efa_kv.runtime.control import ControlThread

_log = logging.getLogger(__name__)


class _Question:
    """A FENCE that is not answered yet."""

    __slots__ = ("answer", "deadline", "incarnation")

    def __init__(self, incarnation: int, deadline: float, answer: Future[bool]) -> None:
        self.incarnation = incarnation
        self.deadline = deadline
        self.answer = answer


class Fencing:
    """A part of the control plane, see the module's head.

    ``fence`` makes sure that nothing that was on its way to this engine lands; it may
    block.
    """

    message_types: tuple[type[Message], ...] = (Fence, Fenced)

    def __init__(self, control: ControlThread, fence: Callable[[], None], timeout_s: float) -> None:
        self._control = control
        self._fence = fence
        self._timeout_s = timeout_s
        self._questions: dict[int, _Question] = {}
        self._numbers = itertools.count(1)
        # At most one entry for each session.
        self._waiting: dict[int, tuple[SessionHandle, int]] = {}
        self._running = False

    # ---- any thread -------------------------------------------------------------------

    def ask(self, session: str, incarnation: int) -> Future[bool]:
        """Has the engine with this incarnation fence its memory.  True: nothing posted
        there before can land any more, because it said so or is no more.  False: nothing
        is known; ask again.  Never blocks."""
        answer: Future[bool] = Future()

        def found(search: Future[SessionHandle]) -> None:
            if search.exception() is not None:
                answer.set_result(False)
            elif search.result().incarnation != incarnation:
                answer.set_result(True)  # another process has taken its place
            else:
                self._send(search.result(), answer)

        try:
            self._control.find(session).add_done_callback(found)
        except EfaKvError:
            answer.set_result(False)
        return answer

    # ---- the control thread -----------------------------------------------------------

    def _send(self, session: SessionHandle, answer: Future[bool]) -> None:
        number = next(self._numbers)
        if not self._control.send(session, Fence(query=number)):
            answer.set_result(False)
            return
        deadline = self._control.now() + self._timeout_s
        self._questions[number] = _Question(session.incarnation, deadline, answer)
        self._control.wake_timer()

    def on_message(self, session: SessionHandle, message: Message, now: float) -> None:
        if isinstance(message, Fenced):
            question = self._questions.get(message.query)
            if question is not None and question.incarnation == session.incarnation:
                del self._questions[message.query]
                question.answer.set_result(True)
        elif isinstance(message, Fence):
            self._waiting[session.incarnation] = (session, message.query)
            self._run()

    def on_session(
        self, session: SessionHandle, state: SessionState, reason: str | None, now: float
    ) -> None:
        if session.over:
            self._waiting.pop(session.incarnation, None)
            self._fail(lambda question: question.incarnation == session.incarnation)

    def on_job(self, job: int, result: Result, now: float) -> None:
        raise AssertionError("this handler submits no jobs")

    def on_timer(self, now: float) -> float | None:
        self._fail(lambda question: question.deadline <= now)
        return min((question.deadline for question in self._questions.values()), default=None)

    def _fail(self, which: Callable[[_Question], bool]) -> None:
        for number in [number for number, asked in self._questions.items() if which(asked)]:
            self._questions.pop(number).answer.set_result(False)

    def _run(self) -> None:
        if self._running or not self._waiting:
            return
        self._running = True
        served, self._waiting = self._waiting, {}

        def work() -> None:
            done = False
            try:
                self._fence()
                done = True
            except EfaKvError as problem:
                _log.warning("memory cannot be fenced for a peer that asked: %s", problem)
            try:
                self._control.later(lambda _now: self._served(served if done else {}))
            except EfaKvError as problem:
                _log.debug("a fence comes too late: %s", problem)

        threading.Thread(target=work, name="efa-kv-fence", daemon=True).start()

    def _served(self, served: dict[int, tuple[SessionHandle, int]]) -> None:
        self._running = False
        for session, query in served.values():
            self._control.send(session, Fenced(query=query))
        self._run()


class PeerFence:
    """The question to one peer whether it keeps out what failed on the way to it; asked
    anew for as long as the answer is not known.  Any thread, one at a time."""

    def __init__(self, ask: Callable[[], Future[bool]]) -> None:
        self._ask = ask
        self._answer = ask()

    @property
    def answered(self) -> bool:
        """Whether the latest question has an answer, be it that nothing is known."""
        return self._answer.done()

    def wait(self, timeout_s: float) -> None:
        """Waits for the answer, but no longer than this. [blocks]"""
        with contextlib.suppress(FutureTimeoutError):
            self._answer.result(timeout_s)

    def holds(self) -> bool:
        """Whether the peer has said so, or is no more.  Never blocks."""
        if self._answer.done() and not self._answer.result():
            self._answer = self._ask()
        return self._answer.done() and self._answer.result()
