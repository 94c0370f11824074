"""The control thread: one per engine, the only owner of its sockets, sessions and timers.

In: frames of peers, a bounded queue of calls from other threads (with a wake-up file
descriptor), and the native core's event file descriptor.  Out: messages, polled job
results and session changes to the handlers.  Nothing it does waits for a peer.

A handler is the seam for what engines say to each other beyond greeting; all its
methods run on this thread, must not block, and may call the methods below marked
"control thread".
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, Protocol

import zmq

from efa_kv.config import EngineConfig
from efa_kv.errors import EfaKvError, FabricBusy, StaleHandle
from efa_kv.fabric import Fabric
from efa_kv.memory import Change
from efa_kv.runtime.greeting import Greeter
from efa_kv.runtime.handle import SessionHandle
from efa_kv.runtime.peers import PeerTable
from efa_kv.runtime.router import Router
from efa_kv.runtime.sessions import Sessions
from efa_kv.runtime.timers import Timers
from efa_kv.types import Notice, Result, RowArray, U32Array, U64Array
from efa_kv.wire.envelope import Message
from efa_kv.wire.messages import VISITOR_TYPES
from efa_kv.wire.session import SessionState

__all__ = ["ControlThread", "Handler", "SessionHandle", "SessionState"]

_log = logging.getLogger(__name__)
_native_log = logging.getLogger("efa_kv.native")

_FRAMES_PER_TURN: Final = 256
_CALLS_PER_TURN: Final = 1024
# The core's log is drained at least this often; it is also the longest sleep.
_TURN_MAX_S: Final = 1.0
_START_TIMEOUT_S: Final = 5.0
_OPEN_TYPES: Final = frozenset(VISITOR_TYPES)


class Handler(Protocol):
    """What takes part in the control plane besides the sessions themselves."""

    message_types: tuple[type[Message], ...]

    def on_message(self, session: SessionHandle, message: Message, now: float) -> None:
        """A message of one of ``message_types``."""

    def on_session(
        self, session: SessionHandle, state: SessionState, reason: str | None, now: float
    ) -> None:
        """A session reached a state: READY; SUSPECT and READY again; DRAINING (of no use any
        more) and then CLOSED (its jobs have settled); REJECTED; CLOSED.  A restarted peer
        has a new handle.  Match peers by ``session.incarnation``, which two handles share
        when a peer was dialled under two names."""

    def on_job(self, job: int, result: Result, now: float) -> None:
        """A job of this handler is done, and again when it is fenced if it was not then."""

    def on_timer(self, now: float) -> float | None:
        """Time has passed, or something happened to this handler; when to call next."""


JobCallback = Callable[[Result, float], None]


class _HandlerSlot:
    """A handler, when its timer is due and whether something happened to it."""

    __slots__ = ("due", "handler", "touched")

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.due: float | None = None
        self.touched = True


class ControlThread:
    """See the module's head.  Methods are for the control thread unless they say
    "any thread"."""

    def __init__(
        self,
        config: EngineConfig,
        fabric: Fabric,
        router: Router,
        greeter: Greeter,
        peers: PeerTable,
        on_rails_changed: Callable[[], None],
    ) -> None:
        """``on_rails_changed`` is called, on a thread of its own because it may have to wait
        for memory being registered, when NICs got new addresses."""
        self._config = config
        self._fabric = fabric
        self._on_rails_changed = on_rails_changed
        self._resets = 0
        self._router = router
        self._timers = Timers()
        self.sessions = Sessions(config, router, greeter, peers, self, self._timers)
        self._handlers: list[_HandlerSlot] = []
        self._calls: deque[Callable[[float], None]] = deque()
        self._jobs: dict[int, JobCallback] = {}
        self._tokens = itertools.count(1)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Closed with this object, not with the thread: a call from another thread may be
        # about to write to it.
        weakref.finalize(self, os.close, self._wake_fd).atexit = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="efa-kv-control", daemon=True)

    # ---- any thread -------------------------------------------------------------------

    def add_handler(self, handler: Handler) -> None:
        """Adds a handler; before `start`."""
        self._handlers.append(_HandlerSlot(handler))

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the caller is the control thread. (any thread)"""
        return threading.current_thread() is self._thread

    def later(self, call: Callable[[float], None]) -> None:
        """Queues ``call(now)`` for the control thread; never blocks; raises `FabricBusy` when
        the queue is full. (any thread)"""
        if self._stopping:
            raise StaleHandle("The engine is closed.")
        if len(self._calls) >= self._config.command_queue_calls:
            raise FabricBusy(
                f"Found {len(self._calls)} calls waiting for the control thread, the most allowed."
            )
        self._calls.append(call)
        os.eventfd_write(self._wake_fd, 1)

    def call(self, function: Callable[[], None]) -> None:
        """Like `later`, for a function without arguments. (any thread)"""
        self.later(lambda _now: function())

    def track(self, callback: JobCallback) -> int:
        """A number to submit a polled job with as user data; its results go to
        ``callback`` on the control thread until it is fenced. (any thread)"""
        token = next(self._tokens)
        self._jobs[token] = callback
        return token

    def untrack(self, token: int) -> None:
        """Results with this number are of no interest any more. (any thread)"""
        self._jobs.pop(token, None)

    def find(self, address: str) -> Future[SessionHandle]:
        """The session at an address once it is READY, or why it will not be; the future is
        set on the control thread.  Raises what `later` raises. (any thread)"""
        answer: Future[SessionHandle] = Future()

        def ask(now: float) -> None:
            handles: list[SessionHandle] = []
            early: list[EfaKvError | None] = []

            def arrived(error: EfaKvError | None) -> None:
                if not handles:
                    early.append(error)
                elif error is not None:
                    answer.set_exception(error)
                else:
                    answer.set_result(handles[0])

            try:
                handles.append(self.sessions.connect(address, now, arrived))
            except EfaKvError as problem:
                answer.set_exception(problem)
                return
            if early:
                arrived(early[0])

        self.later(ask)
        return answer

    def publish(self, change: Change) -> None:
        """Tells the peers about a change of our regions. (any thread)"""
        try:
            if self._thread.ident is not None:
                self.later(lambda _now: self.sessions.broadcast(change))
        except (FabricBusy, StaleHandle):
            # Peers notice by the epoch in the next heartbeat, or ask when they miss it.
            _log.debug("a change of regions is not announced")

    def stop(self, timeout_s: float) -> None:
        """Says good-bye to the peers and ends the thread; safe to call twice. (any thread)"""
        if self._stopping:
            return
        if self._thread.ident is None:
            self._stopping = True
            self._router.close()
            return
        self._stopping = True
        os.eventfd_write(self._wake_fd, 1)
        if not self.is_current:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                _log.error("the control thread did not end within %g s", timeout_s)

    # ---- for handlers -----------------------------------------------------------------

    def now(self) -> float:
        """The time in seconds as handlers are told it."""
        return time.monotonic()

    def connect(self, address: str) -> SessionHandle:
        """The session at an address, greeting it if needed; on_session tells the rest."""
        return self.sessions.connect(address, time.monotonic())

    def send(self, session: SessionHandle, message: Message) -> bool:
        """Queues a message; False when it was dropped.  Never blocks."""
        return self.sessions.send(session, message, time.monotonic())

    def refresh_regions(self, session: SessionHandle, done: Callable[[bool], None]) -> None:
        """Asks the peer for its regions once, then ``done(whether it answered)``."""
        self.sessions.refresh(session, done, time.monotonic())

    def submit(
        self,
        session: SessionHandle,
        handler: Handler,
        operation: int,
        local: U64Array,
        remote: U64Array,
        lengths: U64Array,
        *,
        deadline_s: float,
        notice: Notice | None = None,
    ) -> int:
        """Submits a job; its results go to ``handler.on_job``, and it is released when it is
        fenced.  Raises what `Fabric.submit` raises, or the session's error."""
        return self._submit(
            session,
            handler,
            lambda token: self._fabric.submit(
                session.peer_id,
                operation,
                local,
                remote,
                lengths,
                deadline_s=deadline_s,
                polled=True,
                notice=notice,
                user_data=token,
            ),
        )

    def submit_paged(
        self,
        session: SessionHandle,
        handler: Handler,
        operation: int,
        rows: RowArray,
        local_blocks: U32Array,
        remote_blocks: U32Array,
        *,
        deadline_s: float,
        notice: Notice | None = None,
    ) -> int:
        """The paged form of `submit`."""
        return self._submit(
            session,
            handler,
            lambda token: self._fabric.submit_paged(
                session.peer_id,
                operation,
                rows,
                local_blocks,
                remote_blocks,
                deadline_s=deadline_s,
                polled=True,
                notice=notice,
                user_data=token,
            ),
        )

    def job_cancel(self, job: int) -> None:
        """Stops a job; its result comes when what is in flight has settled."""
        self._fabric.job_cancel(job)

    def wake_timer(self) -> None:
        """Has every handler's `on_timer` called soon."""
        for slot in self._handlers:
            slot.touched = True

    def _submit(
        self, session: SessionHandle, handler: Handler, attempt: Callable[[int], int]
    ) -> int:
        if not session.usable or session.peer is None:
            raise session.error()
        token = next(self._tokens)
        slot = next((slot for slot in self._handlers if slot.handler is handler), None)

        def on_result(result: Result, now: float) -> None:
            if slot is not None:
                slot.touched = True
            handler.on_job(result.job, result, now)
            if result.fenced:
                self._release(result.job)
                self.sessions.settle(session, now)

        self._jobs[token] = on_result
        try:
            job = attempt(token)
        except BaseException:
            del self._jobs[token]
            raise
        session.jobs += 1
        return job

    def _release(self, job: int) -> None:
        try:
            self._fabric.job_release(job)
        except EfaKvError as problem:
            _log.debug("releasing job %#x: %s", job, problem)

    # ---- for the sessions ---------------------------------------------------------------

    def on_message(self, handle: SessionHandle, message: Message, now: float) -> None:
        """A message of a session for a handler."""
        for slot in self._hearing(handle):
            if isinstance(message, slot.handler.message_types):
                slot.touched = True
                slot.handler.on_message(handle, message, now)

    def on_session(self, handle: SessionHandle, reason: str | None, now: float) -> None:
        """A session changed."""
        state = handle.state
        for slot in self._hearing(handle):
            slot.touched = True
            self._guard(slot.handler.on_session, handle, state, reason, now)

    def _hearing(self, handle: SessionHandle) -> list[_HandlerSlot]:
        """The handlers that hear of a session: of a visitor's only those meant for visitors,
        because its cache was not compared with ours."""
        if not handle.visitor:
            return self._handlers
        return [slot for slot in self._handlers if set(slot.handler.message_types) <= _OPEN_TYPES]

    # ---- the loop -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            for source in (self._router.inbound, self._router.outbound, self._router.auth):
                if source is not None:
                    poller.register(source, zmq.POLLIN)
            poller.register(self._wake_fd, zmq.POLLIN)
            poller.register(self._fabric.event_fd, zmq.POLLIN)
            due = time.monotonic()
            while not self._stopping:
                wait_s = min(_TURN_MAX_S, max(0.0, due - time.monotonic()))
                # Rounded up, because waking before a timer is due means waking twice.
                ready = dict(poller.poll(int(wait_s * 1000) + (wait_s > 0)))
                due = self._turn(ready)
        except BaseException:
            _log.critical("the control thread ended by an error", exc_info=True)
            raise
        finally:
            self._stopping = True
            self._guard(self.sessions.close, time.monotonic())
            self._router.close()

    def _turn(self, ready: dict[Any, int]) -> float:
        """Everything that is to do now; when to come back at the latest."""
        if self._router.auth is not None and self._router.auth in ready:
            self._guard(self._router.answer_auth)
        if self._wake_fd in ready:
            self._drain_wake()
        now = time.monotonic()
        if self._fabric.event_fd in ready:
            self._guard(self._look_for_resets)
        backlog = self._drain_jobs(now)
        for _ in range(min(len(self._calls), _CALLS_PER_TURN)):
            self._guard(self._calls.popleft(), now)
        for route, frame in self._router.receive(_FRAMES_PER_TURN):
            self._guard(self.sessions.on_frame, route, frame, now)
        self._guard(self._drain_logs)
        due = self._run_timers(now)
        return now if backlog or self._calls else due

    def _drain_wake(self) -> None:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return

    def _look_for_resets(self) -> None:
        resets = self._fabric.resets()
        if resets != self._resets:
            self._resets = resets
            threading.Thread(
                target=self._on_rails_changed, name="efa-kv-rails", daemon=True
            ).start()

    def _drain_jobs(self, now: float) -> bool:
        """Hands out finished jobs; whether more may be waiting."""
        results = self._fabric.poll()
        # The core's descriptor stays readable while notices wait there; the server's
        # thread finds them in either place.
        self._fabric.collect_notices()
        for result in results:
            callback = self._jobs.get(result.user_data)
            if result.fenced:
                self._jobs.pop(result.user_data, None)
            if callback is not None:
                self._guard(callback, result, now)
        return bool(results)

    def _drain_logs(self) -> None:
        for record in self._fabric.log_records():
            _native_log.log(record.level, "%s", record.text)
            if record.dropped:
                _native_log.warning("%d log lines were lost before this", record.dropped)

    def _run_timers(self, now: float) -> float:
        due = [now + _TURN_MAX_S]
        try:
            next_due = self._timers.run(now)
        except Exception:
            _log.exception("a timer failed")
            next_due = now
        if next_due is not None:
            due.append(next_due)
        for slot in self._handlers:
            if slot.touched or (slot.due is not None and slot.due <= now):
                slot.touched = False
                slot.due = self._guard(slot.handler.on_timer, now)
            if slot.touched:
                due.append(now)
            elif slot.due is not None:
                due.append(slot.due)
        return min(due)

    @staticmethod
    def _guard(function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs ``function``; an error is logged and costs only what it was about."""
        try:
            return function(*arguments)
        except Exception:
            _log.exception("an error in the control thread")
            return None
