"""Scratch memory that a running engine lends to whoever tries the way to it.

`Lender` is a handler of the control plane; its ``on_*`` run on the control thread.  It
registers and withdraws its one region on a thread of its own, because both can take long;
that thread hands its result over by `ControlThread.later`.  What is lent when,
`efa_kv.wire.scratch` decides; the other side is `efa_kv.runtime.borrower`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from efa_kv.errors import EfaKvError, FabricBusy, StaleHandle
from efa_kv.runtime.control import ControlThread, SessionHandle, SessionState
from efa_kv.runtime.directory import Directory
from efa_kv.runtime.regions import Region, RegionBook
from efa_kv.types import RegionRecord, Result
from efa_kv.wire.envelope import Message
from efa_kv.wire.scratch import (
    Effect,
    Prepare,
    ScratchAsk,
    ScratchDesk,
    ScratchReturn,
    TakeBack,
    Tell,
)

_log = logging.getLogger(__name__)

_WITHDRAW_TIMEOUT_S: Final = 1.0


class Lender:
    """Lends scratch memory of this engine; owner of the desk: the control thread."""

    message_types: tuple[type[Message], ...] = (ScratchAsk, ScratchReturn)

    def __init__(self, control: ControlThread, book: RegionBook, limit_bytes: int) -> None:
        self._control = control
        self._book = book
        self._desk = ScratchDesk(limit_bytes)
        self._directory = Directory()
        self._region: Region | None = None

    def on_message(self, session: SessionHandle, message: Message, now: float) -> None:
        """An ask or a return."""
        if isinstance(message, ScratchAsk):
            self._directory.note(session)
            self._run(self._desk.asked(session.incarnation, message, now))
        elif isinstance(message, ScratchReturn):
            self._run(self._desk.returned(session.incarnation, message.number))

    def on_session(
        self, session: SessionHandle, state: SessionState, reason: str | None, now: float
    ) -> None:
        """A borrower that is gone has nothing to return."""
        if session.over and self._directory.forget(session):
            self._run(self._desk.peer_gone(session.incarnation))

    def on_job(self, job: int, result: Result, now: float) -> None:
        """The lender moves no bytes."""

    def on_timer(self, now: float) -> float | None:
        """Takes back what was lent for too long."""
        self._run(self._desk.on_timer(now))
        return self._desk.next_deadline()

    def _run(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Tell():
                    session = self._directory.find(effect.peer)
                    if session is not None:
                        self._control.send(session, effect.message)
                case Prepare():
                    self._start(self._prepare, effect.length_bytes)
                case TakeBack():
                    self._start(self._withdraw, self._region)

    @staticmethod
    def _start(work: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, name="efa-kv-scratch", daemon=True)
        thread.start()

    def _prepare(self, length_bytes: int) -> None:
        """On a thread of its own: makes the region and says so."""
        try:
            region = self._book.register(np.zeros(length_bytes, np.uint8))
            record = self._record(region)
        except (EfaKvError, MemoryError) as problem:
            text = str(problem)
            self._report(lambda: self._desk.failed(f"cannot make scratch memory: {text}"))
            return

        def lend() -> list[Effect]:
            self._region = region
            return self._desk.prepared(record)

        self._report(lend)

    def _record(self, region: Region) -> RegionRecord:
        for record in self._book.published.regions:
            if record.region == region.region:
                return record
        raise StaleHandle("The scratch region was withdrawn while it was made.")

    def _withdraw(self, region: Region) -> None:
        """On a thread of its own: takes the keys back; the memory goes with the region."""
        while True:
            try:
                region.deregister(_WITHDRAW_TIMEOUT_S)
            except FabricBusy:
                continue
            except EfaKvError as problem:
                _log.debug("scratch memory is not withdrawn: %s", problem)
                return
            break

        def clear() -> list[Effect]:
            self._region = None
            return self._desk.withdrawn()

        self._report(clear)

    def _report(self, step: Callable[[], list[Effect]]) -> None:
        """Has the control thread take a step; an engine that closes needs it no more."""
        with contextlib.suppress(EfaKvError):
            self._control.later(lambda _now: self._run(step()))
            self._control.later(lambda _now: self._control.wake_timer())
