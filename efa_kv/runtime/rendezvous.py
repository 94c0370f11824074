"""From names to addresses, and from a port to the process that holds it.

Owner of the threads that look names up: `Resolver`, which belongs to the control thread.
Name services can be slow or dead, so nobody else waits for them.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from efa_kv.errors import ConfigError, PeerUnreachable
from efa_kv.types import Address

_LISTEN_STATE = "0A"
_LOOKUPS_MAX = 16


def resolve(address: Address) -> Address:
    """``address`` with its host as an IP address; blocks; raises `PeerUnreachable`."""
    if address.is_literal:
        return address
    try:
        found = socket.getaddrinfo(address.host, address.port or None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as problem:
        raise PeerUnreachable(
            f"found no address for the name {address.host!r}: {problem}.", peer=str(address)
        ) from None
    # IPv4 first, because a name that has both is most often only served on that.
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return Address(str(found[0][4][0]), address.port)


def resolve_own(host: str) -> str:
    """The address to bind for the setting ``host``; blocks; raises `ConfigError`."""
    try:
        return resolve(Address(host, 0)).host
    except PeerUnreachable as problem:
        raise ConfigError(
            f"found host = {host!r}, which has no address ({problem.args[0]}) "
            "Set it to an address of this machine."
        ) from None


class Resolver:
    """Resolves names in the background.  Methods are for its owner's thread.

    The threads are daemons, one for each name in progress and a few at most, because a
    dead name service must not hold up the end of the process.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def start(self, address: Address, done: Callable[[Address | PeerUnreachable], None]) -> None:
        """Calls ``done`` (in any thread) with the literal address or the error."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if len(self._threads) >= _LOOKUPS_MAX:
            done(
                PeerUnreachable(
                    f"found {_LOOKUPS_MAX} names being looked up already; {address} has to wait.",
                    peer=str(address),
                )
            )
            return

        def look_up() -> None:
            try:
                done(resolve(address))
            except PeerUnreachable as problem:
                done(problem)

        thread = threading.Thread(target=look_up, name="efa-kv-resolver", daemon=True)
        thread.start()
        self._threads.append(thread)


def port_holder(port: int) -> str:
    """Who listens on TCP ``port`` of this machine, in words."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            columns = line.split()
            if columns[3] == _LISTEN_STATE and int(columns[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{columns[9]}]")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            links = {os.readlink(entry) for entry in os.scandir(process / "fd")}
            if links & inodes:
                name = (process / "comm").read_text().strip()
                return f"process {process.name} ({name})"
        except OSError:
            continue  # it ended, or belongs to another user
    return "a process that cannot be seen from here"
