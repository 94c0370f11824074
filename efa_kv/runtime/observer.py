"""Collects what an engine can be seen to do: its state, its health and its trace.

Whoever asks does the work, and nothing is collected for nobody: the core keeps its newest
trace records in a ring, the server's milestones lie in a bounded row.  The lock is held
while the ring is emptied; asking the control thread waits a bounded time, so this is for
probes and people, never for the server's step.
"""

from __future__ import annotations

import importlib.metadata
import threading
import time
from collections import deque
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Final, Protocol

from efa_kv.errors import FabricBusy, StaleHandle
from efa_kv.fabric import Fabric
from efa_kv.memory import Published
from efa_kv.observe import trace
from efa_kv.observe.state import (
    EngineState,
    Health,
    LastTransfers,
    PeerView,
    RailState,
    judge,
)
from efa_kv.observe.trace import TraceDocument, TracedRail
from efa_kv.runtime.control import ControlThread
from efa_kv.runtime.greeting import Identity
from efa_kv.runtime.journal import Journal
from efa_kv.types import Nic, RailCounters, Session, TraceRecord

#: How long the control thread has for an answer; it is idle at most one second at a time.
_CONTROL_ANSWER_S: Final = 2.0
_RECORDS_MAX: Final = 32768
_RING_STEP: Final = 4096
_VERSION: Final = importlib.metadata.version("efa-kv")


class Observed(Protocol):
    """The parts of an engine that are looked at."""

    identity: Identity
    fabric: Fabric
    control: ControlThread
    journal: Journal

    @property
    def session(self) -> Session: ...
    @property
    def protocol(self) -> str: ...
    @property
    def rails(self) -> tuple[Nic, ...]: ...
    @property
    def published(self) -> Published: ...
    @property
    def started(self) -> bool: ...
    @property
    def closed(self) -> bool: ...


class Observer:
    """Looks at one engine.  Methods are for any thread but the control thread. [blocks]"""

    def __init__(self, engine: Observed) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._records: deque[TraceRecord] = deque(maxlen=_RECORDS_MAX)
        self._landed = self._failed = 0
        self._landed_ns: int | None = None
        self._failed_ns: int | None = None

    def state(self) -> EngineState:
        """How the engine stands; raises `StaleHandle` when it is closed."""
        engine = self._engine
        peers, answered = self._peers()
        self._collect()
        now_ns = time.monotonic_ns()
        nics, counters = engine.fabric.rails(), engine.fabric.counters()
        published = engine.published
        return EngineState(
            session=engine.session,
            protocol=engine.protocol,
            process=engine.identity.process.pid,
            version=_VERSION,
            started=engine.started,
            control_answered=answered,
            rails=tuple(
                _rail(nic, numbers, now_ns) for nic, numbers in zip(nics, counters, strict=True)
            ),
            peers=peers,
            regions=len(published.regions),
            registered_bytes=sum(region.length_bytes for region in published.regions),
            transfers=LastTransfers(
                landed_age_s=_age_s(self._landed_ns, now_ns),
                failed_age_s=_age_s(self._failed_ns, now_ns),
                landed=self._landed,
                failed=self._failed,
            ),
        )

    def health(self) -> Health:
        """The verdict on `state`."""
        return judge(self.state())

    def trace(self) -> TraceDocument:
        """What is remembered of transfers and requests; asking again gives it again."""
        engine = self._engine
        records = self._collect()
        rails = tuple(TracedRail(nic.name, nic.speed_bits_per_second) for nic in engine.rails)
        return TraceDocument(
            session=engine.session,
            protocol=engine.protocol,
            process=engine.identity.process.pid,
            wall_clock_offset_s=time.time() - time.monotonic(),
            rails=rails,
            spans=trace.build_spans(records, engine.journal.milestones()),
            marks=trace.build_marks(records, rails),
        )

    def _collect(self) -> tuple[TraceRecord, ...]:
        with self._lock:
            while True:
                step = self._engine.fabric.trace(_RING_STEP)
                for record in step:
                    self._note(record)
                if len(step) < _RING_STEP:
                    return tuple(self._records)

    def _note(self, record: TraceRecord) -> None:
        self._records.append(record)
        if record.event == trace.LANDED:
            self._landed += 1
            self._landed_ns = record.time_ns
        elif record.event == trace.FAILED:
            self._failed += 1
            self._failed_ns = record.time_ns

    def _peers(self) -> tuple[tuple[PeerView, ...], bool | None]:
        """The sessions, and whether the control thread told them; None: it has not begun."""
        if not self._engine.started:
            return (), None
        answer: Future[tuple[PeerView, ...]] = Future()
        sessions = self._engine.control.sessions
        try:
            self._engine.control.later(lambda _now: answer.set_result(sessions.view()))
            return answer.result(_CONTROL_ANSWER_S), True
        except (FutureTimeoutError, FabricBusy):
            return (), False
        except StaleHandle:
            if self._engine.closed:
                raise
            return (), False  # it ended by an error


def _age_s(then_ns: int | None, now_ns: int) -> float | None:
    return None if then_ns is None else max(0.0, (now_ns - then_ns) / 1e9)


def _rail(nic: Nic, numbers: RailCounters, now_ns: int) -> RailState:
    return RailState(
        name=nic.name,
        provider=nic.provider,
        speed_bits_per_second=nic.speed_bits_per_second,
        down=nic.down,
        resets=nic.resets,
        failures=numbers.failures,
        in_flight=numbers.in_flight,
        bytes_written=numbers.bytes_written,
        bytes_read=numbers.bytes_read,
        bytes_near=numbers.bytes_near,
        bytes_staged=numbers.bytes_staged,
        operations_settled=numbers.operations_settled,
        operations_failed=numbers.operations_failed,
        turned_age_s=max(0.0, (now_ns - numbers.turned_ns) / 1e9) if numbers.turned_ns else 0.0,
    )
