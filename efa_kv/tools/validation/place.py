"""Which process of a launched job this is, from the launcher's variables.  Pure.

One process per host takes part: the others of a host end at once, well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec

#: Where rank 0 listens when the launcher names a host and no port.
DEFAULT_PORT: Final = 29511
#: More hosts than this are refused: a run over all pairs would take hours.
MAX_HOSTS: Final = 512

_FILE_PREFIX: Final = "file:"


class PlaceError(ValueError):
    """The launcher's variables, or the flags, do not say enough; the text says what is missing."""


class AtAddress(msgspec.Struct, frozen=True):
    """Rank 0's engine listens there; the others greet it."""

    host: str
    port: int


class AtStore(msgspec.Struct, frozen=True):
    """A TCPStore of torch, kept by torchrun's agent, knows under ``key`` where rank 0's engine
    is."""

    host: str
    port: int
    key: str


class AtFile(msgspec.Struct, frozen=True):
    """Rank 0 writes where its engine is into this file, which all can read."""

    path: str


Rendezvous = AtAddress | AtStore | AtFile


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """``rank`` among all processes, ``hosts`` that take part, and where they meet.

    ``local_rank`` is not 0 for the processes that have nothing to do. ``mpi`` tells whether
    programs started here can find each other by MPI, one of them per host.
    """

    rank: int
    hosts: int
    local_rank: int = 0
    launcher: str
    rendezvous: Rendezvous
    mpi: bool = False

    @property
    def takes_part(self) -> bool:
        return self.local_rank == 0

    @property
    def leads(self) -> bool:
        return self.rank == 0


def by_flags(rank: int, hosts: int, rendezvous: str) -> Place:
    """The place that flags name; raises `PlaceError`."""
    if not 0 <= rank < hosts:
        raise PlaceError(f"found rank {rank} of {hosts}; expected 0 to {hosts - 1}")
    if not rendezvous:
        raise PlaceError("expected --rendezvous host:port or file:PATH beside --rank")
    return _checked(
        Place(rank=rank, hosts=hosts, launcher="flags", rendezvous=parse_rendezvous(rendezvous))
    )


def by_launcher(environment: Mapping[str, str], rendezvous: str = "") -> Place | None:
    """The place that torchrun, mpirun or srun gave this process; None without one of them.

    ``rendezvous`` wins over what the launcher says. Raises `PlaceError`.
    """
    for read in (_torchrun, _open_mpi, _slurm, _pmi):
        place = read(environment, rendezvous)
        if place is not None:
            return _checked(place)
    return None


def parse_rendezvous(text: str) -> Rendezvous:
    """Reads ``host:port``, ``host`` or ``file:PATH``; raises `PlaceError`."""
    if text.startswith(_FILE_PREFIX):
        return AtFile(text.removeprefix(_FILE_PREFIX).removeprefix("//"))
    bracketed = re.fullmatch(r"\[([^\]]+)\](?::(\d+))?", text)
    plain = re.fullmatch(r"([^:\s/]+)(?::(\d+))?", text)
    found = bracketed or plain
    if not found or int(found.group(2) or 1) not in range(1, 65536):
        raise PlaceError(f"found the rendezvous {text!r}; expected host:port or file:PATH")
    return AtAddress(found.group(1), int(found.group(2) or DEFAULT_PORT))


def first_host(nodes: str) -> str:
    """The first name of Slurm's list of nodes: ``p5-[003-007,9],q1`` begins with ``p5-003``."""
    head = re.match(r"[^,\[]+(?:\[([^\]]+)\][^,\[]*)*", nodes)
    if not head:
        raise PlaceError(f"found the list of nodes {nodes!r}; expected names")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", head.group())


def _checked(place: Place) -> Place:
    if place.hosts > MAX_HOSTS:
        raise PlaceError(f"found {place.hosts} hosts; expected at most {MAX_HOSTS}")
    return place


def _number(environment: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        found = re.match(r"\d+", environment.get(name, ""))
        if found:
            return int(found.group())
    return None


def _hosts(size: int, local_size: int | None, launcher: str) -> int:
    """Hosts of a job of ``size`` processes; all must have the same number of them."""
    each = local_size or 1
    if size % each:
        raise PlaceError(
            f"{launcher} started {size} processes, {each} of them here; expected the same number "
            "on every host: start one per host"
        )
    return size // each


def _torchrun(environment: Mapping[str, str], rendezvous: str) -> Place | None:
    """torchrun's variables, which other launchers and people by hand set too."""
    rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    if rank is None or size is None:
        return None
    local_size = _number(environment, "LOCAL_WORLD_SIZE")
    where: Rendezvous
    if rendezvous:
        where = parse_rendezvous(rendezvous)
    else:
        host = environment.get("MASTER_ADDR", "")
        port = _number(environment, "MASTER_PORT")
        if not host or not port:
            raise PlaceError(
                "found RANK without MASTER_ADDR and MASTER_PORT; set them, or give "
                "--rendezvous host:port"
            )
        has_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        # A restarted job finds the store as its predecessor left it.
        restart = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        key = f"efa-kv-validate/{restart}"
        where = AtStore(host, port, key) if has_store else AtAddress(host, port)
    return Place(
        rank=rank,
        hosts=_hosts(size, local_size, "torchrun"),
        local_rank=_number(environment, "LOCAL_RANK") or 0,
        launcher="torchrun",
        rendezvous=where,
    )


def _open_mpi(environment: Mapping[str, str], rendezvous: str) -> Place | None:
    rank = _number(environment, "OMPI_COMM_WORLD_RANK")
    size = _number(environment, "OMPI_COMM_WORLD_SIZE")
    if rank is None or size is None:
        return None
    local_size = _number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE")
    return _mpi_place(
        environment,
        rendezvous,
        rank=rank,
        size=size,
        local_rank=_number(environment, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_size=local_size,
    )


def _pmi(environment: Mapping[str, str], rendezvous: str) -> Place | None:
    """MPICH and Intel MPI."""
    rank, size = _number(environment, "PMI_RANK"), _number(environment, "PMI_SIZE")
    if rank is None or size is None:
        return None
    return _mpi_place(
        environment,
        rendezvous,
        rank=rank,
        size=size,
        local_rank=_number(environment, "MPI_LOCALRANKID"),
        local_size=_number(environment, "MPI_LOCALNRANKS"),
    )


def _mpi_place(
    environment: Mapping[str, str],
    rendezvous: str,
    *,
    rank: int,
    size: int,
    local_rank: int | None,
    local_size: int | None,
) -> Place:
    hosts = _hosts(size, local_size, "mpirun")
    host = environment.get("MASTER_ADDR", "127.0.0.1" if hosts == 1 else "")
    if not rendezvous and not host:
        raise PlaceError(
            "mpirun does not tell where rank 0 is; expected --rendezvous host:port, or "
            "mpirun -x MASTER_ADDR=…"
        )
    port = _number(environment, "MASTER_PORT") or DEFAULT_PORT
    return Place(
        rank=rank,
        hosts=hosts,
        local_rank=local_rank or 0,
        launcher="mpirun",
        rendezvous=parse_rendezvous(rendezvous) if rendezvous else AtAddress(host, port),
        mpi=local_size == 1,
    )


def _slurm(environment: Mapping[str, str], rendezvous: str) -> Place | None:
    """A step of srun; the variables of a batch script alone do not say which process this is."""
    rank = _number(environment, "SLURM_PROCID")
    size = _number(environment, "SLURM_STEP_NUM_TASKS")
    if rank is None or size is None:
        return None
    hosts = _number(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES") or 1
    if rendezvous:
        where = parse_rendezvous(rendezvous)
    else:
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
        host = environment.get("MASTER_ADDR") or first_host(nodes)
        where = AtAddress(host, _number(environment, "MASTER_PORT") or DEFAULT_PORT)
    return Place(
        rank=rank,
        hosts=hosts,
        local_rank=_number(environment, "SLURM_LOCALID") or 0,
        launcher="srun",
        rendezvous=where,
        mpi=size == hosts,
    )
