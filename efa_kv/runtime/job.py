"""One transfer.  Safe from any thread.

A `Job` that is dropped early gives the native job back; the transfer itself goes on.  The
engine keeps registered memory alive, so neither has to be held until the bytes have landed.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from efa_kv.errors import (
    AccessRefused,
    EfaKvError,
    StaleHandle,
    TransferAborted,
    TransferTimeout,
)
from efa_kv.fabric import Fabric, result_error
from efa_kv.types import JobResult, Result

if TYPE_CHECKING:
    from efa_kv.runtime.control import ControlThread


def inside_event_loop() -> bool:
    """Whether the caller runs in an asyncio event loop, so that it will rather await."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class Job:
    """A batch of descriptors on its way.

    ``polled`` jobs are told to the control thread by the core, which wakes awaiting
    coroutines; others are waited for inside the core.
    """

    def __init__(
        self,
        fabric: Fabric,
        control: ControlThread,
        peer: str,
        *,
        polled: bool,
        on_access_refused: Callable[[], None],
    ) -> None:
        self._fabric = fabric
        self._control = control
        self._peer = peer
        self._on_access_refused = on_access_refused
        self._lock = threading.Lock()
        self._submitted: threading.Event | None = None
        self._id = 0
        self._result: JobResult | None = None
        self._canceled = False
        self._token = control.track(self._weak_callback()) if polled else 0
        self._wakers: list[Callable[[], object]] = []

    # ---- public -----------------------------------------------------------------------

    def done(self) -> bool:
        """Whether the job ended, well or not.  Never blocks."""
        if self._result is None and self._id:
            with suppress(StaleHandle):
                self._take(self._fabric.job_result(self._id))
        return self._result is not None

    def result(self) -> JobResult | None:
        """The result of a job that is done, else None.  Never blocks."""
        return self._result if self.done() else None

    def wait(self, timeout: float | None = None, *, fenced: bool = False) -> JobResult:
        """Waits for the job to be done, or fenced, without the interpreter lock.

        Raises `TransferTimeout` when ``timeout`` seconds passed first, which says nothing
        about the job.  What went wrong with the job itself is in the result's ``error``.
        """
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        if self._submitted is not None and not self._submitted.wait(timeout):
            raise self._still_running(timeout)
        result = self._result
        if result is not None and (result.fenced or not fenced):
            return result
        try:
            remaining_s = max(0.0, deadline - time.monotonic())
            raw = self._fabric.job_wait(self._id, remaining_s, until_fenced=fenced)
        except StaleHandle:
            return self._abandon()
        if raw is None:
            raise self._still_running(timeout)
        return self._take(raw) or self._abandon()

    def cancel(self) -> None:
        """Stops posting; the job is done when what is in flight has settled."""
        with self._lock:
            self._canceled = True
            job = self._id
        if job:
            with suppress(StaleHandle):
                self._fabric.job_cancel(job)

    def __await__(self) -> Generator[Any, None, JobResult]:
        return self._wait_in_loop().__await__()

    def __del__(self) -> None:
        # Interpreter shutdown and a closed engine both end here; neither matters.
        with suppress(Exception):
            if self._token:
                self._control.untrack(self._token)
            if self._id:
                self._fabric.job_release(self._id)

    # ---- for the engine ---------------------------------------------------------------

    @property
    def token(self) -> int:
        """The user data to submit a polled job with, else 0."""
        return self._token

    @property
    def canceled(self) -> bool:
        """Whether `cancel` was called, maybe before the core had the job."""
        return self._canceled

    def defer(self) -> None:
        """The core gets the job later, from another thread: a missing region is asked for."""
        self._submitted = threading.Event()

    def attach(self, job: int) -> None:
        """The core has the job."""
        with self._lock:
            self._id = job
            canceled = self._canceled
        if self._submitted is not None:
            self._submitted.set()
        if canceled:
            self.cancel()

    def fail(self, error: EfaKvError) -> None:
        """The job ended before the core had it: nothing was posted."""
        self._finish(JobResult(0, 0, True, error))
        if self._token:
            self._control.untrack(self._token)

    # ---- inside -----------------------------------------------------------------------

    def _weak_callback(self) -> Callable[[Result, float], None]:
        """Takes results without keeping the job alive."""
        method = weakref.WeakMethod(self._on_result)

        def callback(result: Result, _now: float) -> None:
            take = method()
            if take is not None:
                take(result)

        return callback

    def _on_result(self, result: Result) -> None:
        self._take(result)

    def _take(self, raw: Result) -> JobResult | None:
        if not raw.done:
            return None
        error = result_error(raw, self._peer)
        result = JobResult(raw.bytes, raw.descriptors, raw.fenced, error, raw.stray)
        if isinstance(result.error, AccessRefused) and self._result is None:
            self._on_access_refused()
        self._finish(result)
        return result

    def _finish(self, result: JobResult) -> None:
        with self._lock:
            if self._result is None or not self._result.fenced:
                self._result = result
            wakers, self._wakers = self._wakers, []
        if self._submitted is not None:
            self._submitted.set()
        for waker in wakers:
            with suppress(RuntimeError):  # the loop is closed
                waker()

    def _abandon(self) -> JobResult:
        """The engine closed under the job: what became of it cannot be known any more."""
        if self._result is None:
            error = TransferAborted("The engine was closed before the job was done.")
            self._finish(JobResult(0, 0, False, error))
        assert self._result is not None
        return self._result

    def _still_running(self, timeout: float | None) -> TransferTimeout:
        return TransferTimeout(f"The job is not done after {timeout or 0:g} s; it goes on.")

    async def _wait_in_loop(self) -> JobResult:
        loop = asyncio.get_running_loop()
        if not self._token:
            return await loop.run_in_executor(None, self.wait)
        future: asyncio.Future[None] = loop.create_future()

        def settle() -> None:
            if not future.done():
                future.set_result(None)

        with self._lock:
            if self._result is None:
                self._wakers.append(lambda: loop.call_soon_threadsafe(settle))
            else:
                settle()
        await future
        assert self._result is not None
        return self._result
