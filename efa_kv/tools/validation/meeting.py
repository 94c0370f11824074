"""Finding each other: how the hosts learn where rank 0's engine is, and which address is theirs."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from efa_kv.tools.validation.place import AtAddress, AtFile, AtStore, Place, PlaceError, Rendezvous
from efa_kv.types import Address

_POLL_S: Final = 0.05
_ANY_PORT: Final = 9  # nothing is sent there: the system is only asked for its way


def engine_address(place: Place, host: str) -> tuple[str, int]:
    """Host and port for this process's engine; ``host`` wins over the guess.

    The guess is the address from which this host reaches the meeting point. Raises `PlaceError`.
    """
    where = place.rendezvous
    port = where.port if place.leads and isinstance(where, AtAddress) else 0
    if host:
        return host, port
    return ("127.0.0.1" if isinstance(where, AtFile) else _way_to(where.host)), port


def _way_to(host: str) -> str:
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as problem:
        raise PlaceError(
            f"no way to {host}: {problem}; name this host's address by --host"
        ) from None


def publish(where: Rendezvous, session: str) -> None:
    """Rank 0 tells where its engine is. Raises `PlaceError`."""
    if isinstance(where, AtStore):
        _store(where, 30.0).set(where.key, session)
    elif isinstance(where, AtFile):
        path = Path(where.path)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            draft.write_text(session)
            draft.replace(path)
        except OSError as problem:
            raise PlaceError(f"{path}: {problem.strerror or problem}") from problem


def find(where: Rendezvous, timeout_s: float) -> str:
    """Where rank 0's engine is, or will be. Raises `PlaceError`. [blocks]"""
    if isinstance(where, AtAddress):
        return str(Address(where.host, where.port))
    if isinstance(where, AtStore):
        try:
            return str(_store(where, timeout_s).get(where.key).decode())
        except RuntimeError as problem:
            raise PlaceError(f"the store at {where.host}:{where.port}: {problem}") from problem
    deadline = time.monotonic() + timeout_s
    path = Path(where.path)
    while not path.exists():
        if time.monotonic() >= deadline:
            raise PlaceError(f"rank 0 did not write {path} within {timeout_s:g} s")
        time.sleep(_POLL_S)
    return path.read_text().strip()


def _store(where: AtStore, timeout_s: float) -> Any:
    """The store that torchrun's agent keeps."""
    try:
        from torch.distributed import TCPStore

        return TCPStore(
            where.host,
            where.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
    except (ImportError, RuntimeError) as problem:
        raise PlaceError(f"the store at {where.host}:{where.port}: {problem}") from problem
