"""One transfer from submission to the proof that it is over.

The rule that everything here serves: an answer is given only when no operation of the
transfer can move a byte any more.  Where even waiting does not bring that proof, the
transfer goes into quarantine: its session is refused until it has settled.

Over software providers a write that failed may still land: there the peer is asked to
keep it out (`TransferEngine.fence_peer`), and then everything is written once more, since
a broken connection is nothing that a caller should hear of.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from typing import Any, Final

import numpy as np

from efa_kv.errors import (
    AccessRefused,
    AddressError,
    Code,
    EfaKvError,
    FabricBusy,
    PeerRestarted,
    TransferTimeout,
)
from efa_kv.fabric import unsigned
from efa_kv.runtime.engine import Peer, TransferEngine
from efa_kv.runtime.fencing import PeerFence
from efa_kv.runtime.job import Job
from efa_kv.types import READ, JobResult, U64Array

_log = logging.getLogger(__name__)

# Back-pressure clears within the time that some operations need.
_BUSY_PAUSE_S: Final = (0.0005, 0.02)
_RESTARTS_MAX: Final = 3
# A peer whose keys change, or that loses bytes, again and again is a broken one.
_REPEATS_MAX: Final = 3
# A peer that lives answers at once.
_FENCE_ANSWER_S: Final = 2.0
# The core ends a job at its own deadline; this is how much later we stop believing it.
_DEADLINE_SLACK_S: Final = 1.0
# A long transfer gets more time: 1 GB/s at the least.
_SECONDS_PER_BYTE: Final = 1e-9


def pieces(local: Any, remote: Any, lengths: Any) -> tuple[U64Array, U64Array, U64Array]:
    """The three columns of a transfer as arrays, without the empty pieces.

    Takes lists, numpy arrays and tensors; raises `AddressError`.
    """
    columns: list[U64Array] = [
        unsigned(_to_host(values), np.uint64, what)
        for values, what in (
            (local, "buffers"),
            (remote, "peer buffer addresses"),
            (lengths, "lengths"),
        )
    ]
    sizes = {len(column) for column in columns}
    if len(sizes) != 1:
        raise AddressError(
            f"Found {len(columns[0])} buffers, {len(columns[1])} peer buffer addresses and "
            f"{len(columns[2])} lengths; expected equally many.",
            code=Code.EINVAL,
        )
    wanted = columns[2] != 0
    if not wanted.all():
        columns = [column[wanted] for column in columns]
    return columns[0], columns[1], columns[2]


def _to_host(values: Any) -> Any:
    """A tensor as numpy's array, wherever it lies; everything else as it is."""
    return values.detach().cpu().numpy() if hasattr(values, "untyped_storage") else values


class Quarantine:
    """Transfers that failed and could not be proven to be over, by session.

    Any thread; a deque and a dict's own methods are all the locking that is needed.
    """

    def __init__(self) -> None:
        self._held: dict[str, deque[Transfer]] = {}

    def put(self, transfer: Transfer) -> None:
        """Keeps it, and with it its session refused, until it has settled."""
        self._held.setdefault(transfer.session, deque()).append(transfer)

    def check(self, session: str) -> None:
        """Raises `TransferTimeout` while something of a session may still land."""
        held = self._held.get(session)
        if not held:
            return
        for transfer in list(held):
            if transfer.settled():
                try:
                    held.remove(transfer)
                except ValueError:
                    continue  # another thread saw it too
                _log.warning("the transfer with %s in quarantine has settled", session)
        if held:
            raise TransferTimeout(
                f"{session} is refused while {len(held)} failed transfers with it may still "
                "move bytes.",
                advice="Restart the peer if it stays like this.",
            )


class Transfer:
    """One call's worth of pieces on the way to or from one session.

    Belongs to one thread at a time: the caller's, or whoever took its batch id.
    """

    def __init__(
        self,
        engine: TransferEngine,
        quarantine: Quarantine,
        session: str,
        operation: int,
        columns: tuple[U64Array, U64Array, U64Array],
    ) -> None:
        self.session = session
        self.operation = operation
        self.columns = columns
        self.bytes = int(columns[2].sum())
        self.started = time.monotonic()
        self._engine = engine
        self._quarantine = quarantine
        timeout_s = engine.config.transfer_timeout_s + self.bytes * _SECONDS_PER_BYTE
        self._deadline = self.started + timeout_s
        self._job: Job | None = None
        self._peer: Peer | None = None
        self._lost: PeerFence | None = None
        self._repeats = 0

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.started

    @property
    def verb(self) -> str:
        return "read" if self.operation == READ else "write"

    def start(self) -> None:
        """Submits it.  Waits while the engine is full; raises `EfaKvError`, and then
        nothing was posted."""
        if not len(self.columns[0]):
            return
        self._quarantine.check(self.session)
        pause_s, restarts = _BUSY_PAUSE_S[0], 0
        while True:
            remaining_s = self._deadline - time.monotonic()
            if remaining_s <= 0:
                raise TransferTimeout(
                    f"The engine was full for {self.seconds:.1f} s; nothing was moved."
                )
            try:
                self._job = self._submit(remaining_s)
                return
            except FabricBusy:
                time.sleep(min(pause_s, remaining_s))
                pause_s = min(2 * pause_s, _BUSY_PAUSE_S[1])
            except PeerRestarted:
                # Found out only now, before anything was posted: greet the new process.
                restarts += 1
                if restarts > _RESTARTS_MAX:
                    raise

    def wait(self) -> None:
        """Returns when every byte has landed; raises `EfaKvError` when that will not be,
        and then no byte can move any more, or the session is in quarantine."""
        while self._job is not None:
            result = self._settle(self._job)
            if result.stray and result.fenced:
                self._fence().wait(_FENCE_ANSWER_S)
            if self._finish(result):
                return

    def poll(self) -> bool:
        """Like `wait`, but returns False where that would wait for the network."""
        job = self._job
        if job is None:
            return True
        result = job.result()
        if result is None and time.monotonic() < self._deadline + _DEADLINE_SLACK_S:
            return False
        if result is None or not result.fenced:
            try:
                result = job.wait(0.0, fenced=True)
            except TransferTimeout:
                if time.monotonic() < self._deadline + self._engine.config.transfer_timeout_s:
                    return False
                result = self._give_up(job)
        if result.stray and result.fenced and not self._fence().answered:
            return False
        return self._finish(result)

    def settled(self) -> bool:
        """Whether no byte can move any more.  Never blocks."""
        if self._job is None:
            return True
        try:
            result = self._job.wait(0.0, fenced=True)
            return result.fenced and (not result.stray or self._fence().holds())
        except TransferTimeout:
            return False
        except EfaKvError:
            return True  # the engine is closed, and with it its endpoints

    # ---- inside -----------------------------------------------------------------------

    def _submit(self, timeout_s: float) -> Job:
        self._peer = peer = self._engine.connect(self.session)
        move = self._engine.read if self.operation == READ else self._engine.write
        return move(peer, *self.columns, timeout_s=timeout_s)

    def _settle(self, job: Job) -> JobResult:
        """The result of a job that is over, or that had to be given up."""
        try:
            result = job.wait(max(0.0, self._deadline - time.monotonic()) + _DEADLINE_SLACK_S)
        except TransferTimeout:
            job.cancel()
        else:
            if result.fenced:
                return result
        try:
            return job.wait(self._engine.config.transfer_timeout_s, fenced=True)
        except TransferTimeout:
            return self._give_up(job)

    def _give_up(self, job: Job) -> JobResult:
        job.cancel()
        self._quarantine.put(self)
        _log.error(
            "a %s of %d bytes with %s failed and could not be fenced within %.0f s: bytes may "
            "still land there; the session is refused until they have",
            self.verb,
            self.bytes,
            self.session,
            self._engine.config.transfer_timeout_s,
        )
        error = TransferTimeout("The deadline passed, and operations are still in flight.")
        return JobResult(0, 0, False, error)

    def _finish(self, result: JobResult) -> bool:
        """True when all has landed, False when it goes on with fresh keys; raises otherwise."""
        error = result.error
        if error is None:
            self._job = None
            return True
        again = False
        if result.fenced and result.stray:
            again = self._keep_out(error)
        elif result.fenced and isinstance(error, AccessRefused):
            again = self._learn_keys()
        if again:
            self.start()
            return False
        if result.fenced:
            self._job = None
        raise error

    def _fence(self) -> PeerFence:
        """The question to the peer whether it keeps out what was lost on the way."""
        if self._lost is None:
            assert self._peer is not None
            self._lost = self._engine.fence_peer(self._peer)
        return self._lost

    def _keep_out(self, error: EfaKvError) -> bool:
        """Whether the peer keeps out what was lost and it makes sense to write again; with
        the transfer in quarantine, and ``error`` raised, when it does not say so."""
        if not self._fence().holds():
            self._quarantine.put(self)
            _log.error(
                "a write of %d bytes to %s failed and the peer does not say that it keeps the "
                "lost bytes out; the session is refused until it does",
                self.bytes,
                self.session,
            )
            raise error
        self._lost = None
        return self._may_repeat()

    def _may_repeat(self) -> bool:
        """Pieces that landed are written again, which does no harm: same bytes, same place."""
        self._repeats += 1
        return self._repeats <= _REPEATS_MAX and time.monotonic() < self._deadline

    def _learn_keys(self) -> bool:
        """Whether the peer told its present keys."""
        if not self._may_repeat():
            return False
        _log.info("the memory keys of %s changed; asking for the present ones", self.session)
        remaining_s = max(0.0, self._deadline - time.monotonic())
        return refresh(self._engine, self._engine.connect(self.session), remaining_s)


def refresh(engine: TransferEngine, peer: Peer, timeout_s: float) -> bool:
    """Asks a peer for its regions; whether it answered in time. [blocks]"""
    answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
    engine.control.later(lambda _now: engine.control.refresh_regions(peer.handle, answers.put))
    try:
        return answers.get(timeout=timeout_s)
    except queue.Empty:
        return False
