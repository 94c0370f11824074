"""The public engine.  Safe from any thread.

Owns the native engine, the control thread and the registered memory.  Calls marked
[blocks] may wait for a peer or the core; ``write`` and ``read`` never do.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from efa_kv.config import EngineConfig
from efa_kv.errors import (
    AddressError,
    Code,
    ConfigError,
    EfaKvError,
    ForkedError,
    LocalProtocolError,
    PeerUnreachable,
    StaleHandle,
    TransferTimeout,
)
from efa_kv.fabric import Fabric, choose_protocol, unsigned
from efa_kv.memory import ACCESS_ALL, Change, Published
from efa_kv.observe.state import EngineState, Health
from efa_kv.observe.trace import TraceDocument
from efa_kv.runtime.announce import log_start
from efa_kv.runtime.control import ControlThread, Handler
from efa_kv.runtime.fencing import Fencing, PeerFence
from efa_kv.runtime.greeting import Greeter, Identity, this_process
from efa_kv.runtime.handle import SessionHandle
from efa_kv.runtime.job import Job, inside_event_loop
from efa_kv.runtime.journal import Journal
from efa_kv.runtime.lender import Lender
from efa_kv.runtime.observer import Observer
from efa_kv.runtime.peers import PeerTable
from efa_kv.runtime.regions import Region, RegionBook
from efa_kv.runtime.rendezvous import resolve_own
from efa_kv.runtime.router import Router
from efa_kv.runtime.status import StatusServer
from efa_kv.types import (
    READ,
    WRITE,
    Address,
    Nic,
    Notice,
    RailCounters,
    RegionRecord,
    RowArray,
    Session,
)
from efa_kv.wire.session import SessionState

_log = logging.getLogger(__name__)

# Together less than two seconds, the time that closing an engine may take.
_STOP_TIMEOUT_S: Final = 1.0
_SETTLE_TIMEOUT_S: Final = 0.4

_open_engines: weakref.WeakSet[TransferEngine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Ends the threads of engines that nobody closed before the interpreter goes."""
    for engine in list(_open_engines):
        engine.close()


def open_engines() -> list[TransferEngine]:
    """Those of this process that are not closed."""
    return [engine for engine in list(_open_engines) if not engine.closed]


def health() -> dict[str, Health]:
    """The verdict on every open engine of this process, by session. [blocks]"""
    return {engine.session: engine.health() for engine in open_engines()}


def trace() -> list[TraceDocument]:
    """The traces of all open engines of this process. [blocks]"""
    return [engine.trace() for engine in open_engines()]


Attempt = Callable[[int, float, bool, int], int]


class Peer:
    """One incarnation of a remote engine.  When it restarts, connect again."""

    def __init__(self, handle: SessionHandle) -> None:
        self._handle = handle
        self.session = handle.session
        self.incarnation = handle.incarnation

    @property
    def handle(self) -> SessionHandle:
        """The control thread's view of it."""
        return self._handle

    @property
    def regions(self) -> Mapping[int, RegionRecord]:
        """The peer's memory as far as it is known here, by the peer's ids."""
        return self._handle.regions

    @property
    def ready(self) -> bool:
        """Whether the peer is there, as far as is known."""
        return self._handle.usable

    def __repr__(self) -> str:
        return f"Peer({self.session}, incarnation {self.incarnation:#x})"


class TransferEngine:
    """Moves bytes between registered memory of this process and of others.

    The constructor opens the network devices and binds the control port, and raises
    what is wrong with either; the control thread runs from `start`, the ``with``
    statement or the first call that needs it.
    """

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.config = (config or EngineConfig.load()).checked()
        secret = self.config.load_secret()
        host = resolve_own(self.config.host)
        incarnation = secrets.randbelow((1 << 64) - 1) + 1
        with contextlib.ExitStack() as undo:
            self.fabric = Fabric(self.config, choose_protocol(self.config), host, incarnation)
            undo.callback(self.fabric.close, 0.0)
            router = Router(
                Address(host, self.config.port),
                secret=secret,
                queue_messages=self.config.send_queue_messages,
                max_bytes=self.config.max_message_bytes,
            )
            undo.callback(router.close)
            self.identity = Identity(
                session=Address(host, router.port).session,
                incarnation=incarnation,
                process=this_process(),
                nics=self.fabric.rails(),
                gate=self.fabric.gate(),
            )
            peers = PeerTable(
                self.fabric,
                self.identity.process,
                near=self.config.near,
                max_regions=self.config.max_regions,
            )
            self._book = RegionBook(self.fabric, incarnation, self._publish, lambda: len(peers))
            greeter = Greeter(
                self.identity, lambda: self._book.published, self.config.max_message_bytes
            )
            self.control = ControlThread(
                self.config, self.fabric, router, greeter, peers, self._book.rails_changed
            )
            self.control.add_handler(Lender(self.control, self._book, self.config.scratch_bytes))
            self._fencing = Fencing(self.control, self._book.fence, self.config.handshake_timeout_s)
            self.control.add_handler(self._fencing)
            self.journal = Journal()
            self.observer = Observer(self)
            self._status: StatusServer | None = None
            if self.config.http_port:
                self._status = StatusServer(self, self.observer, host, self.config.http_port)
            undo.pop_all()
        self._peers: dict[str, Peer] = {}
        self._lock = threading.Lock()
        self._started = False
        self._closed = False
        _open_engines.add(self)
        log_start(self, authenticated=secret is not None)

    # ---- set-up -----------------------------------------------------------------------

    @property
    def session(self) -> Session:
        """This engine's name on the network, "host:port"."""
        return self.identity.session

    @property
    def incarnation(self) -> int:
        """The random number that tells this engine from others at the same address."""
        return self.identity.incarnation

    @property
    def regions_epoch(self) -> int:
        """How often the registered memory or its keys changed; grows with every change."""
        return self._book.published.epoch

    @property
    def published(self) -> Published:
        """The registered memory as peers are told of it."""
        return self._book.published

    @property
    def status_url(self) -> str | None:
        """The HTTP endpoint, "http://host:port", if there is one."""
        return None if self._status is None else self._status.url

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def protocol(self) -> str:
        """The protocol in use; never "auto"."""
        return self.fabric.protocol

    @property
    def rails(self) -> tuple[Nic, ...]:
        """The local network devices, with the addresses they had at the start."""
        return self.identity.nics

    @property
    def started(self) -> bool:
        """Whether the control thread runs or ran."""
        return self._started

    def add_handler(self, handler: Handler) -> None:
        """Adds a part of the control plane; before `start`."""
        self._check_not_started()
        self.control.add_handler(handler)

    def describe(
        self, *, fingerprint: bytes, fields: Mapping[str, str], layout: bytes | None = None
    ) -> None:
        """What peers must share with us to be accepted, its inputs in words, and an opaque
        layout that they are told; before `start`."""
        self._check_not_started()
        words_bytes = sum(len(name.encode()) + len(text.encode()) for name, text in fields.items())
        size_bytes = len(fingerprint) + len(layout or b"") + words_bytes
        if size_bytes > self.config.max_message_bytes // 4:
            raise ConfigError(
                f"found {size_bytes} bytes of layout and fields; expected at most a quarter of "
                f"max_message_bytes, which is {self.config.max_message_bytes}."
            )
        self.identity.fingerprint = fingerprint
        self.identity.fields = dict(fields)
        self.identity.layout = layout

    def start(self) -> Self:
        """Starts the control thread; safe to call twice."""
        with self._lock:
            self._check_usable()
            if not self._started:
                self._started = True
                self.control.start()
        return self

    def close(self) -> None:
        """Stops jobs, says good-bye, frees everything, within two seconds; safe to call
        twice. [blocks]"""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if os.getpid() != self.identity.process.pid:
            return  # the parent's threads and devices are not ours to close
        if self._status is not None:
            self._status.close()
        self.control.stop(_STOP_TIMEOUT_S)
        try:
            left = self.fabric.close(_SETTLE_TIMEOUT_S)
        except StaleHandle as problem:
            _log.error("%s could not be closed: %s", self.session, problem)
            return
        if left:
            _log.warning("%s closed with %d jobs in flight", self.session, left)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- memory and peers -------------------------------------------------------------

    def register(self, buffer: Any, access: int = ACCESS_ALL) -> Region:
        """Makes memory reachable: a numpy array, torch tensor, writable buffer or
        ``(address, length_bytes)``.  Raises `RegistrationError`. [blocks]"""
        self._check_usable()
        return self._book.register(buffer, access)

    def rotate_regions(self, timeout_s: float = 0.0) -> int:
        """Gives all memory that peers may write fresh keys.  Returns the epoch that begins
        with them: whatever peers have in flight from before it cannot land any more.  0:
        in use, call again. [blocks]"""
        self._check_usable()
        return self._book.rotate_writable(timeout_s)

    def connect(self, session: str, timeout_s: float | None = None) -> Peer:
        """The peer at ``host:port``, after one round trip if it is new; idempotent.

        Raises `PeerUnreachable`, `PeerRefused`, `LayoutMismatch` or `ConfigError`. [blocks]
        """
        self._check_usable()
        peer = self._peers.get(session)
        if peer is not None and peer.handle.state is SessionState.READY:
            return peer
        if self.control.is_current:
            raise LocalProtocolError("connect would wait for its own thread; use control.connect.")
        self.start()
        timeout_s = self.config.handshake_timeout_s if timeout_s is None else timeout_s
        answer = self.control.find(session)
        try:
            handle = answer.result(timeout_s)
        except FutureTimeoutError:
            raise PeerUnreachable(
                f"Found no answer from {session} within {timeout_s:g} s.", peer=session
            ) from None
        peer = self._peers.get(session)
        if peer is None or peer.handle is not handle:
            if len(self._peers) > self.config.max_peers:
                self._peers.clear()
            peer = self._peers[session] = Peer(handle)
        return peer

    def fence_peer(self, peer: Peer) -> PeerFence:
        """Has the peer keep out what failed on the way to it (`JobResult.stray`): once the
        fence holds, nothing that was posted to this incarnation before lands.  Never
        blocks."""

        def ask() -> Future[bool]:
            self._check_usable()
            return self._fencing.ask(peer.session, peer.incarnation)

        return PeerFence(ask)

    def warmup(self, session: str | Peer, timeout_s: float | None = None) -> None:
        """Resolves every pair of devices before the first transfer. [blocks]"""
        peer = self._peer(session)
        timeout_s = self.config.transfer_timeout_s if timeout_s is None else timeout_s
        self.fabric.peer_warm(peer.handle.peer_id, timeout_s)

    # ---- transfers --------------------------------------------------------------------

    def write(
        self,
        peer: Peer | str,
        local: Any,
        remote: Any,
        lengths: Any,
        *,
        timeout_s: float | None = None,
        notice: Notice | None = None,
    ) -> Job:
        """Writes local memory to the peer's: absolute addresses and bytes, uint64 arrays
        (or sequences) of equal length.  Raises `AddressError` for memory that is not
        registered here or there, `FabricBusy` when too much is queued, `PeerError`."""
        return self._move(peer, WRITE, local, remote, lengths, timeout_s, notice)

    def read(
        self,
        peer: Peer | str,
        local: Any,
        remote: Any,
        lengths: Any,
        *,
        timeout_s: float | None = None,
        notice: Notice | None = None,
    ) -> Job:
        """Reads the peer's memory into local memory; like `write` otherwise."""
        return self._move(peer, READ, local, remote, lengths, timeout_s, notice)

    def write_paged(
        self,
        peer: Peer | str,
        rows: RowArray,
        local_blocks: Any,
        remote_blocks: Any,
        *,
        operation: int = WRITE,
        timeout_s: float | None = None,
        notice: Notice | None = None,
    ) -> Job:
        """Moves block pair i of every row (dtype `ROW_DTYPE`); blocks are uint32."""
        target = self._peer(peer)
        rows = np.array(rows, copy=True)
        local_array = unsigned(local_blocks, np.uint32, "local blocks").copy()
        remote_array = unsigned(remote_blocks, np.uint32, "remote blocks").copy()

        def attempt(peer_id: int, deadline_s: float, polled: bool, token: int) -> int:
            return self.fabric.submit_paged(
                peer_id,
                operation,
                rows,
                local_array,
                remote_array,
                deadline_s=deadline_s,
                polled=polled,
                notice=notice,
                user_data=token,
            )

        return self._submit(target, attempt, timeout_s)

    def notices(self) -> list[Notice]:
        """Notices that peers sent behind the last byte of a job, each once.  One thread
        may call this."""
        return self.fabric.notices()

    def counters(self) -> list[RailCounters]:
        """What each network device did since the engine opened."""
        return self.fabric.counters()

    def state(self) -> EngineState:
        """How the engine, its devices and its peers stand. [blocks]"""
        self._check_usable()
        return self.observer.state()

    def health(self) -> Health:
        """Whether it lives and is ready, and why not. [blocks]"""
        self._check_usable()
        return self.observer.health()

    def trace(self) -> TraceDocument:
        """What is remembered of its transfers and requests. [blocks]"""
        self._check_usable()
        return self.observer.trace()

    # ---- inside -----------------------------------------------------------------------

    def _move(
        self,
        peer: Peer | str,
        operation: int,
        local: Any,
        remote: Any,
        lengths: Any,
        timeout_s: float | None,
        notice: Notice | None,
    ) -> Job:
        target = self._peer(peer)
        arrays = [
            unsigned(values, np.uint64, what)
            for values, what in (
                (local, "local addresses"),
                (remote, "remote addresses"),
                (lengths, "lengths"),
            )
        ]

        def attempt(peer_id: int, deadline_s: float, polled: bool, token: int) -> int:
            return self.fabric.submit(
                peer_id,
                operation,
                *arrays,
                deadline_s=deadline_s,
                polled=polled,
                notice=notice,
                user_data=token,
            )

        return self._submit(target, attempt, timeout_s)

    def _submit(self, peer: Peer, attempt: Attempt, timeout_s: float | None) -> Job:
        timeout_s = self.config.transfer_timeout_s if timeout_s is None else timeout_s
        if not 0 < timeout_s < float("inf"):
            raise TransferTimeout(f"Found a timeout of {timeout_s} s; expected more than 0.")
        handle = peer.handle
        polled = inside_event_loop()
        job = Job(
            self.fabric,
            self.control,
            peer.session,
            polled=polled,
            on_access_refused=lambda: self._refresh(handle),
        )
        try:
            job.attach(attempt(handle.peer_id, timeout_s, polled, job.token))
        except AddressError as problem:
            if problem.code != Code.EREMOTEREGION:
                raise
            self._submit_after_refresh(job, handle, attempt, time.monotonic() + timeout_s, problem)
        except StaleHandle:
            if handle.usable:
                raise
            raise handle.error() from None
        return job

    def _submit_after_refresh(
        self,
        job: Job,
        handle: SessionHandle,
        attempt: Attempt,
        deadline: float,
        problem: AddressError,
    ) -> None:
        """The peer may have registered memory since we last heard: asks once, then again."""

        def learned(answered: bool) -> None:
            remaining_s = deadline - time.monotonic()
            if job.canceled or not answered or remaining_s <= 0 or not handle.usable:
                job.fail(problem if handle.usable else handle.error())
                return
            try:
                job.attach(attempt(handle.peer_id, remaining_s, bool(job.token), job.token))
            except EfaKvError as second:
                job.fail(second)

        job.defer()
        self.control.later(lambda _now: self.control.refresh_regions(handle, learned))

    def _refresh(self, handle: SessionHandle) -> None:
        """A key of the peer was refused: the next job shall find the new one."""
        try:
            self.control.later(
                lambda _now: self.control.refresh_regions(handle, lambda _answered: None)
            )
        except EfaKvError as problem:
            _log.debug("regions of %s are not refreshed: %s", handle.session, problem)

    def _peer(self, peer: Peer | str) -> Peer:
        self._check_usable()
        target = self.connect(peer) if isinstance(peer, str) else peer
        if not target.handle.usable:
            raise target.handle.error()
        return target

    def _publish(self, change: Change) -> None:
        self.control.publish(change)

    def _check_usable(self) -> None:
        if os.getpid() != self.identity.process.pid:
            raise ForkedError(
                f"The engine {self.session} was opened in process {self.identity.process.pid} "
                f"and is used in its child {os.getpid()}."
            )
        if self._closed:
            raise StaleHandle(f"The engine {self.session} is closed.", code=Code.ECLOSED)

    def _check_not_started(self) -> None:
        self._check_usable()
        if self._started:
            raise LocalProtocolError("The engine has started; this belongs before its start.")
