"""Other people's tools in a run: which of them make sense here, and what their output says.  Pure.

`fi_pingpong` (libfabric) times messages between two hosts; `all_reduce_perf` and `alltoall_perf`
(nccl-tests) move GPU memory with NCCL, over the network that the training or serving image will
use. The latter find each other by MPI, so they run on several hosts only where srun or mpirun
started one process on each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from efa_kv.tools import nccl_log
from efa_kv.tools.validation.place import Place
from efa_kv.tools.validation.samples import HostFacts
from efa_kv.tools.validation.series import Series
from efa_kv.types import Address

Provider = Literal["efa", "tcp"]

PINGPONG: Final = "fi_pingpong"
NCCL_TESTS: Final[tuple[Literal["all_reduce_perf", "alltoall_perf"], ...]] = (
    "all_reduce_perf",
    "alltoall_perf",
)
PROGRAMS: Final = (PINGPONG, *NCCL_TESTS)

PINGPONG_TIMEOUT_S: Final = 30.0
NCCL_TIMEOUT_S: Final = 600.0
CLIENT_TRIES: Final = 15
_PINGPONG_BYTES: Final = 64
_PINGPONG_ITERATIONS: Final = 1000
_UNITS: Final = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


class ToolError(ValueError):
    """A tool that cannot be run as it was told."""


class OutputError(ValueError):
    """A tool's output that holds no result; the text shows its end."""


class PingpongServer(msgspec.Struct, frozen=True, tag=True):
    """`fi_pingpong` waiting for a client."""

    provider: Provider


class PingpongClient(msgspec.Struct, frozen=True, tag=True):
    """`fi_pingpong` with the server on host number ``server``."""

    provider: Provider
    server: Annotated[int, Meta(ge=0)]


class Collective(msgspec.Struct, frozen=True, tag=True):
    """A program of nccl-tests, started on every host at the same time."""

    program: Literal["all_reduce_perf", "alltoall_perf"]
    gpus: Annotated[int, Meta(ge=1, le=64)]


#: What a host can be told to run. Hosts hear it over the network, so it holds no free text: the
#: command line is made here.
Tool = PingpongServer | PingpongClient | Collective


class Exchange(msgspec.Struct, frozen=True):
    """`fi_pingpong` from host ``client`` to host ``server``."""

    server: int
    client: int
    provider: Provider

    @property
    def tools(self) -> dict[int, Tool]:
        """What each of the two runs."""
        return {
            self.server: PingpongServer(self.provider),
            self.client: PingpongClient(self.provider, self.server),
        }


def arguments(tool: Tool, addresses: Mapping[int, Address]) -> tuple[str, ...]:
    """The command line of a tool; ``addresses`` by host. Raises `ToolError`."""
    words: tuple[str, ...]
    match tool:
        case Collective():
            # The log tells which network NCCL took; it never fails for want of a fast one.
            sizes = ("-b", "8M", "-e", "1G", "-f", "2", "-g", str(tool.gpus))
            return ("env", "NCCL_DEBUG=INFO", tool.program, *sizes)
        case PingpongServer() | PingpongClient():
            words = (PINGPONG, "-p", tool.provider, "-e", "rdm")
            words += ("-I", str(_PINGPONG_ITERATIONS), "-S", str(_PINGPONG_BYTES))
    if isinstance(tool, PingpongServer):
        return words
    address = addresses.get(tool.server)
    if address is None or not address.is_literal:
        raise ToolError(f"found host {tool.server} at {address}; expected one with an IP address")
    return (*words, *(("-6",) if address.is_ipv6 else ()), address.host)


def timeout_s(tool: Tool) -> float:
    """How long a tool may take."""
    return NCCL_TIMEOUT_S if isinstance(tool, Collective) else PINGPONG_TIMEOUT_S


def tries(tool: Tool) -> int:
    """How often it may fail: a client may come before its server listens."""
    return CLIENT_TRIES if isinstance(tool, PingpongClient) else 1


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is run, and for what is not, the reason."""

    exchanges: tuple[Exchange, ...] = ()
    collectives: tuple[Collective, ...] = ()
    skipped: tuple[str, ...] = ()


def plan(there: Sequence[str], hosts: Sequence[HostFacts], place: Place) -> Plan:
    """What to run, where the programs ``there`` were found on rank 0's PATH."""
    skipped = [f"{program}: not on PATH" for program in PROGRAMS if program not in there]
    exchanges: list[Exchange] = []
    if PINGPONG in there:
        # Neighbours are enough for a baseline: the pairs are timed by our own engine.
        provider: Provider = "efa" if hosts[0].protocol.startswith("efa") else "tcp"
        exchanges = [
            Exchange(server=(one + 1) % len(hosts), client=one, provider=provider)
            for one in range(len(hosts))
        ]
    collectives: list[Collective] = []
    for program in NCCL_TESTS:
        if program not in there:
            continue
        gpus = {host.gpus for host in hosts}
        if not place.mpi:
            skipped.append(
                f"{program}: started by {place.launcher}; expected srun or mpirun with "
                "one process per host"
            )
        elif gpus == {0} or len(gpus) > 1:
            counts = ", ".join(str(host.gpus) for host in hosts)
            skipped.append(f"{program}: the hosts have {counts} GPUs; expected as many on each")
        else:
            collectives.append(Collective(program, gpus.pop()))
    return Plan(exchanges=tuple(exchanges), collectives=tuple(collectives), skipped=tuple(skipped))


# ---- reading --------------------------------------------------------------------------


class PingpongRow(msgspec.Struct, frozen=True):
    """One size of fi_pingpong: megabytes (10^6) per second, microseconds per one-way transfer."""

    size_bytes: int
    megabytes_per_s: float
    transfer_us: float


def read_pingpong(text: str) -> list[PingpongRow]:
    """The table of fi_pingpong; raises `OutputError` when there is none."""
    row = re.compile(
        r"^(?P<size>[\d.]+)(?P<unit>[kmg]?)\s+\d+\S*\s+=\d+\S*\s+\S+\s+[\d.]+s"
        r"\s+(?P<rate>[\d.]+)\s+(?P<time>[\d.]+)\s+[\d.]+\s*$",
        re.M,
    )
    rows = [
        PingpongRow(
            round(float(found["size"]) * _UNITS.get(found["unit"], 1)),
            float(found["rate"]),
            float(found["time"]),
        )
        for found in row.finditer(text)
    ]
    if not rows:
        raise OutputError(_tail(PINGPONG, text))
    return rows


class NcclRow(msgspec.Struct, frozen=True):
    """One size of nccl-tests, out of place: microseconds, and gigabytes (10^9) per second.

    ``wrong`` counts wrong elements; None where the program did not look.
    """

    size_bytes: int
    time_us: float
    algorithm_gb_per_s: float
    bus_gb_per_s: float
    wrong: int | None


class NcclOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A program of nccl-tests: its rows, and what the log says about the network."""

    rows: tuple[NcclRow, ...]
    log: nccl_log.Report

    @property
    def fastest(self) -> NcclRow:
        return max(self.rows, key=lambda row: row.algorithm_gb_per_s)


def read_nccl_tests(text: str) -> NcclOutput:
    """The output of a program of nccl-tests, old or new; raises `OutputError`.

    Its rows begin with size, count and type; what follows differs between programs and releases
    (operation, root), and the last eight columns are two groups of time, algbw, busbw and wrong
    elements, or the error in older ones.
    """
    rows = []
    for line in text.splitlines():
        # mpirun --tag-output puts a name before each line.
        words = re.sub(r"^\[[^\]]*\](<\w+>)?:?", "", line).split()
        if len(words) < 11 or not words[0].isdigit() or not words[1].isdigit():
            continue
        try:
            time_us, algorithm, bus = (float(word) for word in words[-8:-5])
        except ValueError:
            continue
        wrong = words[-5]
        rows.append(
            NcclRow(int(words[0]), time_us, algorithm, bus, int(wrong) if wrong.isdigit() else None)
        )
    if not rows:
        raise OutputError(_tail("nccl-tests", text))
    return NcclOutput(rows=tuple(rows), log=nccl_log.read(text))


def _tail(program: str, text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return f"{program} gave no result: {' / '.join(lines[-3:]) or 'no output'}"


def pingpong_series(exchange: Exchange, rows: Sequence[PingpongRow]) -> dict[str, Series]:
    """Its series, under a name of its own."""
    name = f"{PINGPONG} {exchange.client}>{exchange.server}"
    return {name: Series("us", (rows[0].transfer_us,), less_is_better=True)}


def nccl_series(program: str, found: NcclOutput) -> dict[str, Series]:
    """The largest size's rate, as the guide to EFA networks gives it (algbw)."""
    return {program: Series("bytes/s", (found.rows[-1].algorithm_gb_per_s * 1e9,))}


def nccl_problems(program: str, found: NcclOutput) -> list[str]:
    """What is wrong with a run of nccl-tests, in words."""
    problems = [
        f"{program}: {row.wrong} wrong elements at {row.size_bytes} bytes"
        for row in found.rows
        if row.wrong
    ]
    if not found.log.uses_efa:
        problems.append(f"{program}: {found.log.verdict}")
    return problems + [f"{program}: {problem}" for problem in found.log.problems]
