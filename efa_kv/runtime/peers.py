"""Peers as the fabric knows them, one per incarnation, and what is known of their memory.

Owner: the control thread.  `RemotePeer.regions` is replaced, never changed, so other
threads may read it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, Protocol

from efa_kv.errors import EfaKvError, RemoteProtocolError
from efa_kv.runtime import regions
from efa_kv.types import Neighbour, NicRecord, ProcessRecord, RegionRecord
from efa_kv.wire.messages import Card, Regions

_log = logging.getLogger(__name__)

_NO_REGIONS: Final[Mapping[int, RegionRecord]] = MappingProxyType({})


class PeerFabric(Protocol):
    """The part of `efa_kv.fabric.Fabric` that deals with peers."""

    def peer_add(
        self,
        nics: tuple[NicRecord, ...],
        incarnation: int,
        same_process: bool,
        neighbour: Neighbour | None = None,
        peer: str = "",
    ) -> int: ...
    def peer_nics(self, peer_id: int, nics: tuple[NicRecord, ...]) -> None: ...
    def peer_region_add(self, peer_id: int, region: RegionRecord) -> None: ...
    def peer_region_remove(self, peer_id: int, region: int) -> None: ...
    def peer_remove(self, peer_id: int) -> None: ...


class RemotePeer:
    """One incarnation of a peer.  ``users`` counts the sessions that lead to it.

    ``epoch`` is that of the last change seen; ``complete`` is false while regions are
    missing.  ``query`` is the number of the refresh in progress, 0 if none.
    """

    def __init__(self, peer_id: int, card: Card, same_process: bool) -> None:
        self.peer_id = peer_id
        self.incarnation = card.incarnation
        self.same_process = same_process
        self.nics = card.nics
        self.regions: Mapping[int, RegionRecord] = _NO_REGIONS
        self.epoch = 0
        self.complete = True
        self.users = 0
        self.query = 0
        self.collected: dict[int, RegionRecord] = {}
        self.waiters: list[Callable[[bool], None]] = []


def neighbour_of(here: ProcessRecord, card: Card) -> Neighbour | None:
    """How the core finds the engine of a card in another process of this host, or None."""
    there = card.process
    if not here.boot or there.boot != here.boot:
        return None
    visible = there.pid_namespace == here.pid_namespace
    return Neighbour(there.pid if visible else 0, there.start_ticks, card.gate)


class PeerTable:
    """All peers of one engine."""

    def __init__(
        self, fabric: Any, process: ProcessRecord, *, near: bool, max_regions: int
    ) -> None:
        self._fabric: PeerFabric = fabric
        self._process = process
        self._near = near
        self._max_regions = max_regions
        self._peers: dict[int, RemotePeer] = {}
        self._queries = 0

    def __len__(self) -> int:
        return len(self._peers)

    def acquire(self, card: Card) -> RemotePeer:
        """The peer of a card, added to the fabric if it is new; raises `EfaKvError`."""
        peer = self._peers.get(card.incarnation)
        if peer is None:
            same_process = (
                self._near
                and card.process == self._process
                and regions.neighbour(card.incarnation) is not None
            )
            neighbour = (
                neighbour_of(self._process, card) if self._near and not same_process else None
            )
            peer_id = self._fabric.peer_add(
                card.nics, card.incarnation, same_process, neighbour, peer=card.session
            )
            peer = RemotePeer(peer_id, card, same_process)
            self._peers[card.incarnation] = peer
        peer.users += 1
        self.learn(peer, card)
        return peer

    def release(self, peer: RemotePeer) -> None:
        """One session less leads to the peer; the last one retires it in the fabric."""
        peer.users -= 1
        if peer.users > 0:
            return
        self._peers.pop(peer.incarnation, None)
        self.fail_refresh(peer)
        try:
            self._fabric.peer_remove(peer.peer_id)
        except EfaKvError as problem:
            _log.debug("removing a peer: %s", problem)

    # ---- regions --------------------------------------------------------------------

    def learn(self, peer: RemotePeer, card: Card) -> None:
        """Takes the regions of a card, unless newer ones are known."""
        if card.regions_epoch < peer.epoch or (card.regions_epoch == peer.epoch and peer.regions):
            return
        self._move_nics(peer, card.nics)
        self._replace(peer, {region.region: region for region in card.regions}, card.complete)
        peer.epoch = card.regions_epoch
        peer.complete = card.complete

    def begin_refresh(self, peer: RemotePeer) -> int:
        """The number for a new query of all regions of the peer."""
        self._queries += 1
        peer.query = self._queries
        peer.collected = {}
        return peer.query

    def apply(self, peer: RemotePeer, message: Regions) -> int | None:
        """Takes a REGIONS message.

        Returns None when nothing is left to do, the id after which to ask for more, or 0
        when a change was missed and everything must be asked for.
        """
        if message.query == 0:
            if message.epoch <= peer.epoch:
                return None  # late or repeated
            if message.epoch != peer.epoch + 1 or not peer.complete:
                return 0
            self._move_nics(peer, message.nics)
            known = dict(peer.regions)
            for number in message.removed:
                known.pop(number, None)
            known.update((region.region, region) for region in message.regions)
            self._replace(peer, known, True)
            peer.epoch = message.epoch
            return None
        if message.query != peer.query:
            return None
        self._move_nics(peer, message.nics)
        for region in message.regions:
            peer.collected[region.region] = region
        if len(peer.collected) > self._max_regions:
            raise RemoteProtocolError(
                f"found more than {self._max_regions} regions of one peer; "
                "raise max_regions if it really has that many."
            )
        if not message.complete and message.regions:
            return max(region.region for region in message.regions)
        self._replace(peer, peer.collected, True)
        peer.epoch, peer.complete, peer.query, peer.collected = message.epoch, True, 0, {}
        waiters, peer.waiters = peer.waiters, []
        for waiter in waiters:
            waiter(True)
        return None

    def fail_refresh(self, peer: RemotePeer) -> None:
        """The refresh in progress got no answer."""
        peer.query, peer.collected = 0, {}
        waiters, peer.waiters = peer.waiters, []
        for waiter in waiters:
            waiter(False)

    def _move_nics(self, peer: RemotePeer, nics: tuple[NicRecord, ...]) -> None:
        if nics and nics != peer.nics and self._quietly(self._fabric.peer_nics, peer.peer_id, nics):
            peer.nics = nics

    def _replace(self, peer: RemotePeer, wanted: Mapping[int, RegionRecord], whole: bool) -> None:
        if peer.same_process:
            # Copies inside this process go where the process's own books say, whatever
            # the message says.
            book = regions.neighbour(peer.incarnation)
            published = book.published.regions if book is not None else ()
            wanted = {region.region: region for region in published}
        wanted = dict(list(wanted.items())[: self._max_regions])
        for number, region in peer.regions.items():
            if wanted.get(number) != region and (whole or number in wanted):
                self._quietly(self._fabric.peer_region_remove, peer.peer_id, number)
        known = dict(wanted) if whole else {**peer.regions, **wanted}
        added = {}
        for number, region in known.items():
            if peer.regions.get(number) == region or self._quietly(
                self._fabric.peer_region_add, peer.peer_id, region
            ):
                added[number] = region
        peer.regions = MappingProxyType(added)

    @staticmethod
    def _quietly(call: Callable[..., None], *arguments: Any) -> bool:
        """What the core refuses of a peer's words must not cost the rest."""
        try:
            call(*arguments)
        except EfaKvError as problem:
            _log.warning("a region or NIC of a peer is left out: %s", problem)
            return False
        return True
