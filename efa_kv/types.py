"""Small values shared by all layers: addresses, what a NIC or a region is, results.

All are immutable and hold no resource.  Structs that end in a ``Record`` travel in
control messages, so their fields are only ever appended.
"""

from __future__ import annotations

import ipaddress
from typing import Annotated, Final, NewType

import msgspec
import numpy as np
from numpy.typing import NDArray

from efa_kv.errors import ConfigError, EfaKvError

#: An engine's name on the network, "host:port" or "[v6]:port".
Session = NewType("Session", str)
#: A remote NIC, "host:port@nic".
NicAddress = NewType("NicAddress", str)

#: Numbers and texts of peers, checked while they are decoded.
U64 = Annotated[int, msgspec.Meta(ge=0)]
Incarnation = Annotated[int, msgspec.Meta(ge=1)]
Index = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Name = Annotated[str, msgspec.Meta(max_length=63)]

U64Array = NDArray[np.uint64]
U32Array = NDArray[np.uint32]
RowArray = NDArray[np.void]

#: One row of a paged job (``ekv_row``): block b of a layer lies at
#: ``address + b * stride_bytes`` on its own side and is ``length_bytes`` long.
ROW_DTYPE: Final = np.dtype(
    [
        ("local_address", np.uint64),
        ("remote_address", np.uint64),
        ("local_stride_bytes", np.uint64),
        ("remote_stride_bytes", np.uint64),
        ("length_bytes", np.uint64),
    ]
)

WRITE: Final = 0
READ: Final = 1

MEMORY_HOST: Final = 0
MEMORY_CUDA: Final = 1

ACCESS_REMOTE_WRITE: Final = 1
ACCESS_REMOTE_READ: Final = 2


class Address(msgspec.Struct, frozen=True):
    """A host and a port.  ``host`` has no brackets; names are kept as they are."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Reads "host:port" or "[v6]:port"; raises `ConfigError`.

        The port is required: two engines of one host differ in nothing else.
        """
        expected = 'expected "host:port" or "[v6]:port" with a port from 1 to 65535'
        if not isinstance(text, str):
            raise ConfigError(f"found an address of type {type(text).__name__}; {expected}.")
        host, separator, port_text = text.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        if bracketed:
            host = host[1:-1]
        wrong = not separator or not host or (":" in host) != bracketed
        if wrong or any(character.isspace() or character in "/@[]" for character in host):
            raise ConfigError(f"found the address {text!r}; {expected}.")
        if not (port_text.isascii() and port_text.isdigit() and 1 <= int(port_text) <= 65535):
            raise ConfigError(f"found the port {port_text!r} in {text!r}; {expected}.")
        return cls(host, int(port_text))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def session(self) -> Session:
        """The address as a session name."""
        return Session(str(self))

    @property
    def is_literal(self) -> bool:
        """Whether ``host`` is an IP address, so that no name service is needed."""
        return ip_of(self.host) is not None

    @property
    def is_ipv6(self) -> bool:
        return ":" in self.host


def ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """``host`` as an IP address (a scope such as %eth0 is allowed), or None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def nic_address(session: str, nic: str) -> NicAddress:
    """The key of a NIC of the engine ``session``."""
    return NicAddress(f"{session}@{nic}")


class Nic(msgspec.Struct, frozen=True, kw_only=True):
    """One local rail as the core sees it.

    ``fences``: taking a key away also stops a write that has begun under it.  Where it
    does not, only a new endpoint keeps late bytes out.  ``reaches_gpus``: GPU memory is
    registered with it; otherwise it goes through host memory.  ``down``: out after a
    failure; ``resets``: how often it got a new endpoint.
    """

    name: str
    fabric: str
    provider: str
    pci: str
    numa_node: int
    flags: int
    queue_depth: int
    provider_queue_depth: int
    completion_queue_size: int
    speed_bits_per_second: int
    address: bytes
    fences: bool = True
    reaches_gpus: bool = False
    down: bool = False
    resets: int = 0

    def record(self) -> NicRecord:
        """The part of it that peers need."""
        return NicRecord(
            self.name,
            self.fabric,
            self.provider,
            self.address,
            self.speed_bits_per_second,
            self.numa_node,
        )


class NicRecord(msgspec.Struct, frozen=True, array_like=True):
    """A NIC as it is told to peers; ``address`` is the raw endpoint address."""

    name: Name
    fabric: Name
    provider: Name
    address: Annotated[bytes, msgspec.Meta(min_length=1, max_length=128)]
    speed_bits_per_second: U64 = 0
    numa_node: Annotated[int, msgspec.Meta(ge=-1, le=65535)] = -1


class KeyRecord(msgspec.Struct, frozen=True, array_like=True):
    """The key of (a part of) a region on NIC number ``nic`` of its owner."""

    nic: Index
    key: U64
    base: U64
    offset_bytes: U64
    length_bytes: U64


class RegionRecord(msgspec.Struct, frozen=True, array_like=True):
    """A region as it is told to peers.  ``region`` is its owner's id for it."""

    region: Incarnation
    address: U64
    length_bytes: U64
    kind: Index
    access: Index
    keys: tuple[KeyRecord, ...]


class ProcessRecord(msgspec.Struct, frozen=True, array_like=True):
    """Which process an engine lives in; equal for two engines of one process only."""

    boot: Name
    pid_namespace: Name
    pid: U64
    start_ticks: U64


class Neighbour(msgspec.Struct, frozen=True):
    """An engine in another process of this host, as the core is told of it.

    ``process`` is 0 where its id means nothing here (another pid namespace); ``gate`` is
    the number of a file descriptor there, -1 if it offers no memory to other processes.
    """

    process: int
    start_ticks: int
    gate: int


class Result(msgspec.Struct, frozen=True):
    """State of a job as the core reports it (``ekv_result``).

    ``status`` is an error code, 0 when every byte has landed.  ``fenced`` means that no
    operation of the job uses memory here any more.  ``stray``: bytes that failed may still
    land at the target, until that fences itself.
    """

    job: int
    user_data: int
    status: int
    bytes: int
    descriptors: int
    done: bool
    fenced: bool
    provider_code: int = 0
    notice_status: int = 0
    text: str = ""
    stray: bool = False


class JobResult(msgspec.Struct, frozen=True):
    """What became of a job.

    ``bytes`` have landed for certain, ``descriptors`` counts operations after merging
    and cutting, ``error`` is None when everything has landed; ``fenced`` and ``stray`` are
    as in `Result`.
    """

    bytes: int
    descriptors: int
    fenced: bool
    error: EfaKvError | None = None
    stray: bool = False


class Notice(msgspec.Struct, frozen=True):
    """A notice that a peer's core sent behind the last byte of a job.

    ``transfer`` and ``generation`` mean what the two sides agreed on, ``sender`` is the
    sending engine's incarnation, ``bytes`` the size of the job.
    """

    transfer: tuple[int, int]
    generation: int
    status: int = 0
    bytes: int = 0
    sender: int = 0


class RailCounters(msgspec.Struct, frozen=True):
    """Counters of one rail since the engine opened (``ekv_rail_counters``)."""

    name: str
    provider: str
    in_flight: int
    operations_posted: int
    operations_settled: int
    operations_failed: int
    operations_resent: int
    bytes_written: int
    bytes_read: int
    again: int
    in_flight_peak: int
    failures: int
    notices_sent: int
    notices_received: int
    notices_dropped: int
    stray_completions: int
    progress_wakeups: int
    operations_near: int
    bytes_near: int
    near_refused_namespace: int
    near_refused_permission: int
    near_refused_identity: int
    near_refused_system: int
    near_refused_memory: int
    operations_staged: int
    bytes_staged: int
    turned_ns: int


class LogRecord(msgspec.Struct, frozen=True):
    """A line of the core's log; ``dropped`` lines were lost before it."""

    level: int
    time_ns: int
    dropped: int
    text: str


class TraceRecord(msgspec.Struct, frozen=True):
    """A moment in a job's life; ``time_ns`` is CLOCK_MONOTONIC.  Of what one rail carried it
    has the begin and the number of operations too."""

    event: int
    time_ns: int
    job: int
    user_data: int
    bytes: int
    rail: int
    status: int
    begun_ns: int
    operations: int
