"""The engine's registered memory, safe from any thread.

Owner of the lock: `RegionBook`; it is held while the core registers, which can take
long for large memory, and never by the control thread's network work: that reads the
immutable ``published`` only.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

from efa_kv.errors import FabricBusy, StaleHandle
from efa_kv.memory import ACCESS_ALL, Change, Published, RegionFabric, Registry, span_of

_REMOVE_TIMEOUT_S: Final = 1.0

#: The books of all engines of this process by incarnation.  A peer that claims to live in
#: this process is believed only if it is here, and then its regions are read from here:
#: what such a peer says is turned into plain memory copies.
_neighbours: weakref.WeakValueDictionary[int, RegionBook] = weakref.WeakValueDictionary()


def neighbour(incarnation: int) -> RegionBook | None:
    """The regions of another engine of this process, or None."""
    return _neighbours.get(incarnation)


class Region:
    """Memory that peers may reach; it stays registered until `deregister`.

    The engine keeps the buffer alive as long, so a job never outlives its memory.
    Deregistering gives back one use; views of one storage share a registration.
    """

    def __init__(self, book: RegionBook, region: int, address: int, length_bytes: int) -> None:
        self._book: RegionBook | None = book
        self.region = region
        self.address = address
        self.length_bytes = length_bytes

    def deregister(self, timeout_s: float = _REMOVE_TIMEOUT_S) -> None:
        """No peer can write here after it returned.  Raises `FabricBusy` while jobs use
        the region: it is refused to new jobs, and the call can be repeated. [blocks]"""
        book = self._book
        if book is None:
            return
        book.remove(self.region, timeout_s)
        self._book = None

    def __repr__(self) -> str:
        return f"Region({self.address:#x}, {self.length_bytes} bytes)"


class RegionBook:
    """All regions of one engine.  Methods are for any thread."""

    def __init__(
        self,
        fabric: RegionFabric,
        incarnation: int,
        announce: Callable[[Change], None],
        peers: Callable[[], int],
    ) -> None:
        """``announce`` is called with every change, in order, from the thread that made it;
        ``peers`` says how many may be writing here."""
        self._registry = Registry(fabric)
        self._announce = announce
        self._peers = peers
        self._lock = threading.Lock()
        _neighbours[incarnation] = self

    @property
    def published(self) -> Published:
        """What peers may know now."""
        return self._registry.published

    def register(self, buffer: Any, access: int = ACCESS_ALL) -> Region:
        """Registers a buffer's whole storage; raises `RegistrationError`. [blocks]"""
        span = span_of(buffer)
        with self._lock:
            region, change = self._registry.add(span, access)
            if change is not None:
                self._announce(change)
        return Region(self, region, span.address, span.length_bytes)

    def remove(self, region: int, timeout_s: float) -> None:
        """See `Region.deregister`. [blocks]"""
        with self._lock:
            change = self._registry.retract(region)
            if change is not None:
                self._announce(change)
            writable = region in self._registry.remotely_writable()
            self._registry.remove(region, timeout_s)
            if writable and region not in self._registry.remotely_writable() and self._peers():
                self._fence()

    def rails_changed(self) -> None:
        """Tells the peers when the core gave NICs new addresses by itself."""
        with self._lock:
            self._announce_rails()

    def rotate_writable(self, timeout_s: float) -> int:
        """Gives every region that peers may write fresh keys, ``timeout_s`` for each.

        Returns the epoch from which on peers know them: what was asked of peers in an
        earlier one cannot land any more.  0: local operations still use a region; nothing
        can be said, call again. [blocks]
        """
        with self._lock:
            for region in self._registry.remotely_writable():
                try:
                    change = self._registry.rotate(region, timeout_s)
                except (FabricBusy, StaleHandle):
                    return 0
                if change is not None:
                    self._announce(change)
            self._fence()
            return self.published.epoch

    def fence(self) -> None:
        """Nothing that was on its way here and has not ended well lands from now on. [blocks]"""
        with self._lock:
            self._fence()

    def _fence(self) -> None:
        self._registry.reset_loose_rails()
        self._announce_rails()

    def _announce_rails(self) -> None:
        change = self._registry.rails_changed()
        if change is not None:
            self._announce(change)
