"""A typed wrapper of the native engine: no threads, no policy.

Owner: whoever opened it.  Methods may be called from any thread, except `poll`, `notices`,
`log_records` and `trace`, which reuse their arrays and so belong to one thread each.
Methods marked [blocks] may wait for a progress thread; the others only touch rings and
tables.  All raise `EfaKvError` subclasses; after `close` it is `StaleHandle`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Self

import numpy as np

from efa_kv._cffi import check, failure, ffi, lib, new_error, new_struct, text_of
from efa_kv._structs import new_array, nic_of, options_struct, remote_nics, result_of
from efa_kv.config import EngineConfig, keep_crash_handlers
from efa_kv.errors import (
    AddressError,
    Code,
    EfaKvError,
    FabricError,
    FabricUnavailable,
    StaleHandle,
)
from efa_kv.types import (
    ROW_DTYPE,
    KeyRecord,
    LogRecord,
    Neighbour,
    Nic,
    NicRecord,
    Notice,
    RailCounters,
    RegionRecord,
    Result,
    RowArray,
    TraceRecord,
    U32Array,
    U64Array,
)

__all__ = ["ROW_DTYPE", "Fabric", "choose_protocol", "library_version", "list_nics"]

_POLL_CAPACITY: Final = 256
_LOG_CAPACITY: Final = 64
_NOTICES_MAX: Final = 1 << 16
_NIC_CAPACITY: Final = 256
# Waits in the core are cut into pieces, so that closing never waits long for a waiter.
_WAIT_PIECE_S: Final = 0.2
_CLOSE_STEP_S: Final = 0.002


def library_version(config: EngineConfig) -> str:
    """Version and path of the libfabric in use, loading it if needed. [blocks]"""
    keep_crash_handlers()
    text = ffi.new("char[]", 1024)
    path = ffi.new("char[]", config.libfabric.encode()) if config.libfabric else ffi.NULL
    error = new_error()
    check(lib.ekv_fabric_library(path, text, 1024, error), error)
    return text_of(text)


def list_nics(config: EngineConfig, protocol: str) -> list[Nic]:
    """The NICs that an engine with these settings would use. [blocks]"""
    keep_crash_handlers()
    options, _keep_alive = options_struct(config, protocol, config.host, 1)
    nics = new_array("ekv_nic", _NIC_CAPACITY)
    count = ffi.new("size_t *")
    error = new_error()
    check(lib.ekv_fabric_list(options, nics, _NIC_CAPACITY, count, error), error)
    return [nic_of(nics[index]) for index in range(min(count[0], _NIC_CAPACITY))]


def choose_protocol(config: EngineConfig) -> str:
    """The protocol that "auto" means here; raises `FabricUnavailable` when ``require``
    forbids what is there. [blocks]"""
    chosen = config.protocol
    if chosen == "auto":
        try:
            chosen = "efa" if list_nics(config, "efa") else "tcp"
        except FabricUnavailable:
            chosen = "tcp"
        if config.require and chosen != config.require:
            if config.require == "efa":
                raise FabricUnavailable(
                    "Found no EFA device; expected one, because require is efa.",
                    code=Code.ENODEVICE,
                    advice="Check the instance type, the driver and that the container sees "
                    "/dev/infiniband, or choose another protocol.",
                )
            chosen = config.require
    return chosen


def unsigned(values: object, dtype: type[np.uint64] | type[np.uint32], what: str) -> Any:
    """``values`` as a contiguous unsigned array without a copy where possible.

    Raises `AddressError` for negative, fractional or too large numbers, which numpy would
    wrap around in silence.
    """
    if (
        isinstance(values, np.ndarray)
        and values.dtype == dtype
        and values.ndim == 1
        and values.flags.c_contiguous
    ):
        return values  # the form that is wanted, as on every hot path
    try:
        array = np.atleast_1d(np.asarray(values))
        if array.size == 0:
            return np.empty(0, dtype)
        wrong = array.ndim != 1 or array.dtype.kind not in "iu"
        limit = np.iinfo(dtype)
        if not wrong and array.dtype != dtype:
            wrong = int(array.min()) < 0 or int(array.max()) > limit.max
    except (TypeError, ValueError, OverflowError):
        wrong = True
    if wrong:
        raise AddressError(
            f"Found {what} that are not whole numbers from 0 to {np.iinfo(dtype).max} in one row.",
            code=Code.EINVAL,
        )
    return np.ascontiguousarray(array, dtype)


class Fabric:
    """One open native engine."""

    def __init__(self, config: EngineConfig, protocol: str, host: str, incarnation: int) -> None:
        """Opens it with a chosen protocol and a literal local address. [blocks]"""
        keep_crash_handlers()
        options, _keep_alive = options_struct(config, protocol, host, incarnation)
        pointer = ffi.new("ekv_engine **")
        error = new_error()
        check(lib.ekv_engine_open(options, pointer, error), error)
        self._engine: Any = pointer[0]
        # One entry per call in progress.  Appending and popping are atomic, so `close`
        # can wait for the calls of other threads without a lock on the hot path.
        self._calls: deque[None] = deque()
        self._results = new_array("ekv_result", _POLL_CAPACITY)
        self._notices = new_array("ekv_notice", _POLL_CAPACITY)
        self._polled_notices = new_array("ekv_notice", _POLL_CAPACITY)
        self._collected: deque[Notice] = deque(maxlen=_NOTICES_MAX)
        self._logs = new_array("ekv_log_record", _LOG_CAPACITY)
        self.protocol = protocol
        self.incarnation = incarnation
        self.event_fd: int = check(self._call(lib.ekv_engine_event_fd))

    @classmethod
    def open(
        cls, config: EngineConfig, incarnation: int, *, protocol: str = "", host: str = ""
    ) -> Self:
        """Opens an engine; protocol and host default to the settings. [blocks]"""
        return cls(config, protocol or choose_protocol(config), host or config.host, incarnation)

    def _call(self, function: Callable[..., int], *arguments: Any) -> int:
        calls = self._calls
        calls.append(None)
        try:
            engine = self._engine
            if engine is None:
                raise StaleHandle("The engine is closed.", code=Code.ECLOSED)
            return function(engine, *arguments)
        finally:
            calls.pop()

    def close(self, timeout_s: float) -> int:
        """Cancels every job, waits at most ``timeout_s`` for what is in flight, frees the
        engine; returns how many jobs had not settled.  Safe to call twice. [blocks]"""
        engine, self._engine = self._engine, None
        if engine is None:
            return 0
        deadline = time.monotonic() + timeout_s + 2 * _WAIT_PIECE_S
        while self._calls:
            if time.monotonic() > deadline:
                # Freeing it under a call in progress would crash; leaking it does not.
                raise StaleHandle("Another thread is still inside the engine.", code=Code.EBUSY)
            time.sleep(_CLOSE_STEP_S)
        return int(lib.ekv_engine_close(engine, timeout_s))

    @property
    def closed(self) -> bool:
        return self._engine is None

    def rails(self) -> tuple[Nic, ...]:
        """The local NICs, in the order of their indices."""
        nics = new_array("ekv_nic", _NIC_CAPACITY)
        count = ffi.new("size_t *")
        check(self._call(lib.ekv_engine_rails, nics, _NIC_CAPACITY, count))
        return tuple(nic_of(nics[index]) for index in range(min(count[0], _NIC_CAPACITY)))

    def rail_reset(self, rail: int) -> None:
        """Gives a rail a new endpoint and address: nothing that was on its way over the
        old one, in either direction, can move a byte any more. [blocks]"""
        error = new_error()
        check(self._call(lib.ekv_rail_reset, rail, error), error)

    def resets(self) -> int:
        """How often any rail got a new address; each time, ``event_fd`` is readable."""
        count = ffi.new("uint64_t *")
        check(self._call(lib.ekv_engine_resets, count))
        return int(count[0])

    def gate(self) -> int:
        """The descriptor through which processes of this host get at this engine's memory;
        -1 if it has none."""
        gate = new_struct("ekv_gate")
        code = self._call(lib.ekv_engine_gate, gate)
        if code != Code.ENOTSUP:
            check(code)
        return int(gate.gate)

    # ---- regions --------------------------------------------------------------------

    def region_add(
        self, address: int, length_bytes: int, kind: int, device: int, access: int
    ) -> int:
        """Registers memory on every rail; the region's id. [blocks]"""
        memory = new_struct("ekv_memory")
        memory.kind = kind
        memory.address = address
        memory.length_bytes = length_bytes
        memory.device = device
        memory.access = access
        region = ffi.new("ekv_region_id *")
        error = new_error()
        check(self._call(lib.ekv_region_add, memory, region, error), error)
        return int(region[0])

    def region_keys(self, region: int) -> tuple[KeyRecord, ...]:
        """The keys that peers need, ``nic`` being the index of the rail."""
        count = ffi.new("size_t *")
        capacity = _NIC_CAPACITY
        while True:
            keys = new_array("ekv_region_key", capacity)
            check(self._call(lib.ekv_region_keys, region, keys, capacity, count))
            if count[0] <= capacity:
                break
            capacity = count[0]
        return tuple(
            KeyRecord(key.rail, key.key, key.base, key.offset_bytes, key.length_bytes)
            for key in (keys[index] for index in range(count[0]))
        )

    def region_remove(self, region: int, timeout_s: float) -> None:
        """Deregisters; `FabricBusy` while it is in use, then call again. [blocks]"""
        error = new_error()
        check(self._call(lib.ekv_region_remove, region, float(timeout_s), error), error)

    def region_rotate(self, region: int, timeout_s: float) -> None:
        """Gives it fresh keys; no write can begin under an old one, and on NICs that fence
        none can go on.  `FabricBusy` when local operations did not end in time and nothing
        changed. [blocks]"""
        error = new_error()
        check(self._call(lib.ekv_region_rotate, region, float(timeout_s), error), error)

    # ---- peers ----------------------------------------------------------------------

    def peer_add(
        self,
        nics: Sequence[NicRecord],
        incarnation: int,
        same_process: bool,
        neighbour: Neighbour | None = None,
        peer: str = "",
    ) -> int:
        """Makes a peer known; ``neighbour`` if it is in another process of this host,
        ``peer`` is its name in errors. [blocks]"""
        array = remote_nics(nics)
        options = new_struct("ekv_peer_options")
        options.same_process = int(same_process)
        options.incarnation = incarnation
        if neighbour is not None:
            options.same_host = 1
            options.process = neighbour.process
            options.start_ticks = neighbour.start_ticks
            options.gate = neighbour.gate
        peer_id = ffi.new("ekv_peer_id *")
        error = new_error()
        code = self._call(lib.ekv_peer_add, options, array, len(nics), peer_id, error)
        check(code, error, peer=peer)
        return int(peer_id[0])

    def peer_nics(self, peer_id: int, nics: Sequence[NicRecord]) -> None:
        """Tells the core the addresses that the peer's NICs have now. [blocks]"""
        error = new_error()
        check(self._call(lib.ekv_peer_nics, peer_id, remote_nics(nics), len(nics), error), error)

    def peer_region_add(self, peer_id: int, region: RegionRecord) -> None:
        """Tells the core where memory of a peer is. [blocks]"""
        keys = new_array("ekv_remote_key", max(len(region.keys), 1))
        for index, key in enumerate(region.keys):
            entry = keys[index]
            entry.struct_size = ffi.sizeof("ekv_remote_key")
            entry.nic = key.nic
            entry.key = key.key
            entry.base = key.base
            entry.offset_bytes = key.offset_bytes
            entry.length_bytes = key.length_bytes
        error = new_error()
        code = self._call(
            lib.ekv_peer_region_add,
            peer_id,
            region.region,
            region.address,
            region.length_bytes,
            keys,
            len(region.keys),
            error,
        )
        check(code, error)

    def peer_region_remove(self, peer_id: int, region: int) -> None:
        """Forgets memory of a peer, by the peer's own id for it. [blocks]"""
        error = new_error()
        check(self._call(lib.ekv_peer_region_remove, peer_id, region, error), error)

    def peer_warm(self, peer_id: int, timeout_s: float) -> None:
        """Resolves every pair of NICs and sends an empty message over each. [blocks]"""
        error = new_error()
        check(self._call(lib.ekv_peer_warm, peer_id, float(timeout_s), error), error)

    def peer_remove(self, peer_id: int) -> None:
        """Fails the peer's jobs once they have settled; new ones are refused at once."""
        check(self._call(lib.ekv_peer_remove, peer_id))

    # ---- jobs -----------------------------------------------------------------------

    @staticmethod
    def _job_options(
        peer_id: int,
        operation: int,
        deadline_s: float,
        polled: bool,
        notice: Notice | None,
        user_data: int,
    ) -> Any:
        options = new_struct("ekv_job_options")
        options.operation = operation
        options.peer = peer_id
        options.user_data = user_data
        options.deadline_s = float(deadline_s)
        options.flags = lib.EKV_JOB_POLLED if polled else 0
        if notice is not None:
            options.flags |= lib.EKV_JOB_NOTICE
            options.notice.struct_size = ffi.sizeof("ekv_notice")
            try:
                options.notice.status = notice.status
                options.notice.transfer[0] = notice.transfer[0]
                options.notice.transfer[1] = notice.transfer[1]
                options.notice.generation = notice.generation
            except (OverflowError, TypeError) as problem:
                raise FabricError(f"Found {notice}: {problem}.", code=Code.EINVAL) from None
        return options

    def submit(
        self,
        peer_id: int,
        operation: int,
        local: U64Array,
        remote: U64Array,
        lengths: U64Array,
        *,
        deadline_s: float,
        polled: bool = False,
        notice: Notice | None = None,
        user_data: int = 0,
    ) -> int:
        """Takes absolute addresses and lengths in bytes, uint64, equally many; the arrays
        are copied.  Returns the job's id.  Empty arrays send a bare notice."""
        local = unsigned(local, np.uint64, "local addresses")
        remote = unsigned(remote, np.uint64, "remote addresses")
        lengths = unsigned(lengths, np.uint64, "lengths")
        if not len(local) == len(remote) == len(lengths):
            raise AddressError(
                f"Found {len(local)} local addresses, {len(remote)} remote addresses and "
                f"{len(lengths)} lengths; expected equally many.",
                code=Code.EINVAL,
            )
        options = self._job_options(peer_id, operation, deadline_s, polled, notice, user_data)
        job = ffi.new("ekv_job_id *")
        error = new_error()
        code = self._call(
            lib.ekv_submit,
            options,
            ffi.from_buffer("uint64_t[]", local),
            ffi.from_buffer("uint64_t[]", remote),
            ffi.from_buffer("uint64_t[]", lengths),
            len(local),
            job,
            error,
        )
        check(code, error)
        return int(job[0])

    def submit_paged(
        self,
        peer_id: int,
        operation: int,
        rows: RowArray,
        local_blocks: U32Array,
        remote_blocks: U32Array,
        *,
        deadline_s: float,
        polled: bool = False,
        notice: Notice | None = None,
        user_data: int = 0,
    ) -> int:
        """Block pair i of every row; ``rows`` has dtype `ROW_DTYPE`, the blocks are uint32,
        equally many.  Returns the job's id."""
        if rows.dtype != ROW_DTYPE or rows.ndim != 1:
            raise AddressError(
                f"Found rows of dtype {rows.dtype}; expected one dimension of ROW_DTYPE.",
                code=Code.EINVAL,
            )
        rows = np.ascontiguousarray(rows)
        local_blocks = unsigned(local_blocks, np.uint32, "local blocks")
        remote_blocks = unsigned(remote_blocks, np.uint32, "remote blocks")
        if len(local_blocks) != len(remote_blocks):
            raise AddressError(
                f"Found {len(local_blocks)} local and {len(remote_blocks)} remote blocks; "
                "expected equally many.",
                code=Code.EINVAL,
            )
        options = self._job_options(peer_id, operation, deadline_s, polled, notice, user_data)
        job = ffi.new("ekv_job_id *")
        error = new_error()
        code = self._call(
            lib.ekv_submit_paged,
            options,
            ffi.cast("ekv_row *", ffi.from_buffer(rows.view(np.uint8))),
            len(rows),
            ffi.from_buffer("uint32_t[]", local_blocks),
            ffi.from_buffer("uint32_t[]", remote_blocks),
            len(local_blocks),
            job,
            error,
        )
        check(code, error)
        return int(job[0])

    def job_result(self, job: int) -> Result:
        """The job's present state."""
        result = new_struct("ekv_result")
        check(self._call(lib.ekv_job_result, job, result))
        return result_of(result)

    def job_wait(self, job: int, timeout_s: float, *, until_fenced: bool = False) -> Result | None:
        """Waits without the interpreter lock until the job is done (or fenced); None when
        ``timeout_s`` passed first, which says nothing about the job. [blocks]"""
        result = new_struct("ekv_result")
        deadline = time.monotonic() + timeout_s
        while True:
            piece_s = min(_WAIT_PIECE_S, max(0.0, deadline - time.monotonic()))
            code = self._call(lib.ekv_job_wait, job, piece_s, int(until_fenced), result)
            if code != Code.EDEADLINE:
                check(code)
                return result_of(result)
            if time.monotonic() >= deadline:
                return None

    def job_cancel(self, job: int) -> None:
        """Stops posting; the job is done when what is in flight has settled."""
        check(self._call(lib.ekv_job_cancel, job))

    def job_release(self, job: int) -> None:
        """Forgets the job; a running one goes on."""
        check(self._call(lib.ekv_job_release, job))

    # ---- what happened --------------------------------------------------------------

    def poll(self) -> list[Result]:
        """Results of polled jobs: each once when done and, if it was not fenced then, once
        more when it is."""
        count = check(self._call(lib.ekv_poll, self._results, _POLL_CAPACITY))
        return [result_of(self._results[index]) for index in range(count)]

    def notices(self) -> list[Notice]:
        """Notices that peers sent here, each once; those not collected yet are taken from
        the core directly, so nobody else has to run first."""
        found: list[Notice] = []
        while self._collected:
            found.append(self._collected.popleft())
        found.extend(self._take_notices(self._notices))
        return found

    def collect_notices(self) -> None:
        """Moves notices out of the core's table for `notices`, so that its event descriptor
        rests; for the thread that polls."""
        self._collected.extend(self._take_notices(self._polled_notices))

    def _take_notices(self, array: Any) -> list[Notice]:
        count = check(self._call(lib.ekv_notices, array, _POLL_CAPACITY))
        return [
            Notice(
                (entry.transfer[0], entry.transfer[1]),
                entry.generation,
                entry.status,
                entry.bytes,
                entry.sender,
            )
            for entry in (array[index] for index in range(count))
        ]

    def counters(self) -> list[RailCounters]:
        """Counters of every rail since the engine opened."""
        counters = new_array("ekv_rail_counters", _NIC_CAPACITY)
        count = ffi.new("size_t *")
        check(self._call(lib.ekv_counters, counters, _NIC_CAPACITY, count))
        rails = self.rails()
        numbers = [name for name in RailCounters.__struct_fields__ if name not in _LABELS]
        return [
            RailCounters(
                name=rails[index].name,
                provider=rails[index].provider,
                **{name: getattr(counters[index], name) for name in numbers},
            )
            for index in range(min(count[0], len(rails)))
        ]

    def log_records(self) -> list[LogRecord]:
        """The core's log lines since the last call, some at a time."""
        count = check(self._call(lib.ekv_log_read, self._logs, _LOG_CAPACITY))
        return [
            LogRecord(entry.level, entry.time_ns, entry.dropped, text_of(entry.text))
            for entry in (self._logs[index] for index in range(count))
        ]

    def trace(self, capacity: int = 1024) -> list[TraceRecord]:
        """The oldest trace records not yet read, at most ``capacity``."""
        records = new_array("ekv_trace_record", capacity)
        count = check(self._call(lib.ekv_trace_read, records, capacity))
        names = TraceRecord.__struct_fields__
        return [
            TraceRecord(*(getattr(records[index], name) for name in names))
            for index in range(count)
        ]


_LABELS: Final = ("name", "provider")


def result_error(result: Result, peer: str = "") -> EfaKvError | None:
    """The exception a result stands for, or None when every byte has landed."""
    if result.status == Code.OK:
        return None
    error = failure(result.status, peer=peer)
    if result.text:
        error.args = (f"{str(error.args[0]).rstrip('.')}: {result.text}.",)
    return error
