"""What is known of peers' memory, and how it is kept right."""

from __future__ import annotations

import pytest

from efa_kv.errors import AddressError, RemoteProtocolError
from efa_kv.runtime.peers import PeerTable
from efa_kv.runtime.regions import RegionBook
from efa_kv.types import KeyRecord, Neighbour, Nic, NicRecord, ProcessRecord, RegionRecord
from efa_kv.wire.messages import Card, Regions

HERE = ProcessRecord("boot", "pid:[1]", 10, 20)


class FakeFabric:
    def __init__(self) -> None:
        self.peers: dict[int, bool] = {}
        self.neighbours: dict[int, Neighbour | None] = {}
        self.regions: dict[tuple[int, int], RegionRecord] = {}
        self.next = 1
        self.refused: set[int] = set()
        self.nics: dict[int, tuple[NicRecord, ...]] = {}

    def peer_add(
        self,
        nics: tuple[NicRecord, ...],
        incarnation: int,
        same_process: bool,
        neighbour: Neighbour | None = None,
        peer: str = "",
    ) -> int:
        peer_id, self.next = self.next, self.next + 1
        self.neighbours[peer_id] = neighbour
        self.peers[peer_id] = same_process
        return peer_id

    def peer_nics(self, peer_id: int, nics: tuple[NicRecord, ...]) -> None:
        self.nics[peer_id] = nics

    def peer_region_add(self, peer_id: int, region: RegionRecord) -> None:
        if region.region in self.refused:
            raise AddressError("refused")
        assert (peer_id, region.region) not in self.regions
        self.regions[peer_id, region.region] = region

    def peer_region_remove(self, peer_id: int, region: int) -> None:
        del self.regions[peer_id, region]

    def peer_remove(self, peer_id: int) -> None:
        del self.peers[peer_id]


def record(number: int, key: int = 1) -> RegionRecord:
    return RegionRecord(number, 4096 * number, 4096, 0, 3, (KeyRecord(0, key, 0, 0, 4096),))


def card(incarnation: int = 5, *regions: RegionRecord, epoch: int = 1, **more: object) -> Card:
    values: dict[str, object] = {
        "process": ProcessRecord("other", "n", 1, 1),
        "nics": (),
        **more,
    }
    return Card(
        session="h:1",
        incarnation=incarnation,
        regions=regions,
        regions_epoch=epoch,
        **values,  # type: ignore[arg-type]
    )


def table(fabric: FakeFabric, **changes: object) -> PeerTable:
    values: dict[str, object] = {"near": True, "max_regions": 8}
    return PeerTable(fabric, HERE, **{**values, **changes})  # type: ignore[arg-type]


def test_one_peer_for_all_sessions_of_an_incarnation() -> None:
    fabric = FakeFabric()
    peers = table(fabric)
    one, two = peers.acquire(card(5, record(1))), peers.acquire(card(5, record(1)))
    assert one is two
    assert len(peers) == len(fabric.peers) == 1
    peers.release(one)
    assert fabric.peers
    peers.release(one)
    assert not fabric.peers
    assert len(peers) == 0


def test_changes_are_applied_in_order_and_a_gap_is_noticed() -> None:
    fabric = FakeFabric()
    peers = table(fabric)
    peer = peers.acquire(card(5, record(1)))
    assert peers.apply(peer, Regions(query=0, epoch=2, regions=(record(2),))) is None
    assert set(peer.regions) == {1, 2}
    assert peers.apply(peer, Regions(query=0, epoch=2, removed=(2,))) is None
    assert set(peer.regions) == {1, 2}, "a repeated change is ignored"
    assert peers.apply(peer, Regions(query=0, epoch=4, removed=(1,))) == 0
    assert set(peer.regions) == {1, 2}
    assert peers.apply(peer, Regions(query=0, epoch=3, removed=(1,))) is None
    assert set(peer.regions) == {2}
    assert {number for _, number in fabric.regions} == {2}


def test_a_new_key_replaces_the_old() -> None:
    fabric = FakeFabric()
    peers = table(fabric)
    peer = peers.acquire(card(5, record(1)))
    peers.apply(peer, Regions(query=0, epoch=2, regions=(record(1, key=9),)))
    assert fabric.regions[peer.peer_id, 1].keys[0].key == 9


def test_refresh_in_pieces() -> None:
    fabric, answers = FakeFabric(), []
    peers = table(fabric)
    peer = peers.acquire(card(5, record(1)))
    peer.waiters.append(answers.append)
    query = peers.begin_refresh(peer)
    piece = Regions(query=query, epoch=7, regions=(record(2), record(3)), complete=False)
    assert peers.apply(peer, piece) == 3
    assert set(peer.regions) == {1}, "nothing changes before the last piece"
    assert peers.apply(peer, Regions(query=query + 1, epoch=9)) is None
    assert peers.apply(peer, Regions(query=query, epoch=7, regions=(record(4),))) is None
    assert set(peer.regions) == {2, 3, 4}
    assert (peer.epoch, answers) == (7, [True])
    assert peers.apply(peer, Regions(query=query, epoch=7)) is None, "a late repetition"
    assert set(peer.regions) == {2, 3, 4}


def test_refresh_without_an_answer() -> None:
    answers: list[bool] = []
    peers = table(FakeFabric())
    peer = peers.acquire(card())
    peer.waiters.append(answers.append)
    peers.begin_refresh(peer)
    peers.fail_refresh(peer)
    assert (answers, peer.query) == ([False], 0)


def test_limits() -> None:
    fabric = FakeFabric()
    peers = table(fabric, max_regions=2)
    peer = peers.acquire(card(5, record(1), record(2), record(3)))
    assert len(fabric.regions) == 2
    query = peers.begin_refresh(peer)
    with pytest.raises(RemoteProtocolError, match="max_regions"):
        peers.apply(peer, Regions(query=query, epoch=2, regions=(record(1), record(2), record(3))))


def test_a_region_that_the_core_refuses_costs_only_itself() -> None:
    fabric = FakeFabric()
    fabric.refused = {2}
    peer = table(fabric).acquire(card(5, record(1), record(2), record(3)))
    assert set(peer.regions) == {1, 3}


def test_an_older_card_does_not_undo_what_is_known() -> None:
    peers = table(FakeFabric())
    peer = peers.acquire(card(5, record(1), epoch=5))
    peers.learn(peer, card(5, record(2), epoch=4))
    assert set(peer.regions) == {1}
    peers.learn(peer, card(5, record(2), epoch=6))
    assert set(peer.regions) == {2}


class FakeMemory:
    def region_add(self, *_ignored: object) -> int:
        return 50

    def region_keys(self, _region: int) -> tuple[KeyRecord, ...]:
        return ()

    def region_remove(self, *_ignored: object) -> None:
        return

    region_rotate = region_remove

    def rails(self) -> tuple[Nic, ...]:
        return ()

    def rail_reset(self, _rail: int) -> None:
        return


def test_same_process_is_believed_only_with_proof_and_then_only_our_own_books() -> None:
    fabric = FakeFabric()
    forged = table(fabric).acquire(card(6, record(1), process=HERE))
    assert fabric.peers[forged.peer_id] is False, "no such engine lives here"
    book = RegionBook(FakeMemory(), 7, lambda change: None, lambda: 0)
    region = book.register(bytearray(100))
    near = table(fabric).acquire(card(7, record(1), process=HERE))
    assert fabric.peers[near.peer_id] is True
    [known] = near.regions.values()
    assert known.address == region.address, "what the message claimed is not used"
    far = table(fabric, near=False).acquire(card(7, record(1), process=HERE))
    assert fabric.peers[far.peer_id] is False


def test_new_addresses_of_nics_reach_the_fabric_however_they_are_told() -> None:
    def nic(address: bytes) -> NicRecord:
        return NicRecord("nic0", "fabric", "provider", address)

    fabric = FakeFabric()
    peers = table(fabric)
    peer = peers.acquire(card(5, record(1), nics=(nic(b"a"),)))
    assert fabric.nics == {}, "the peer was added with it"
    peers.apply(peer, Regions(query=0, epoch=2, nics=(nic(b"b"),)))
    assert fabric.nics == {peer.peer_id: (nic(b"b"),)}
    fabric.nics.clear()
    peers.apply(peer, Regions(query=0, epoch=3, regions=(record(2),)))
    assert fabric.nics == {}, "nothing was said of NICs"
    query = peers.begin_refresh(peer)
    peers.apply(peer, Regions(query=query, epoch=5, regions=(record(2),), nics=(nic(b"c"),)))
    assert fabric.nics == {peer.peer_id: (nic(b"c"),)}
    peers.learn(peer, card(5, record(1), epoch=6, nics=(nic(b"d"),)))
    assert fabric.nics == {peer.peer_id: (nic(b"d"),)}


@pytest.mark.parametrize(
    ("process", "near", "expected"),
    [
        (ProcessRecord("boot", "pid:[1]", 11, 20), True, Neighbour(11, 20, 7)),
        # The number means another process in a namespace of ours: it is not passed on.
        (ProcessRecord("boot", "pid:[2]", 11, 20), True, Neighbour(0, 20, 7)),
        (ProcessRecord("elsewhere", "pid:[1]", 11, 20), True, None),
        (ProcessRecord("boot", "pid:[1]", 11, 20), False, None),
    ],
)
def test_neighbours_are_processes_of_the_same_host(
    process: ProcessRecord, near: bool, expected: Neighbour | None
) -> None:
    fabric = FakeFabric()
    peer = table(fabric, near=near).acquire(card(5, process=process, gate=7))
    assert fabric.neighbours[peer.peer_id] == expected
    assert not peer.same_process


def test_hosts_without_a_name_have_no_neighbours() -> None:
    fabric = FakeFabric()
    nameless = ProcessRecord("", "pid:[1]", 10, 20)
    peers = PeerTable(fabric, nameless, near=True, max_regions=8)
    peer = peers.acquire(card(5, process=ProcessRecord("", "pid:[1]", 11, 20), gate=7))
    assert fabric.neighbours[peer.peer_id] is None
