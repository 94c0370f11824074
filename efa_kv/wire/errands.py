"""What a consumer owes a producer out of courtesy: renewals and releases.

A *renewal* keeps the lease of a hold alive while our request waits for its turn; a
*release* lets a hold go that nobody will ask for.  No memory of ours depends on either:
if they are lost, the producer's lease ends a little early or a little late.  So both are
bounded and simply dropped when they take too long.  Pure: ``now`` is an argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

import msgspec

from efa_kv.wire.envelope import Message
from efa_kv.wire.handoff import RENEWALS_LIMIT, Drained, Release, Renew
from efa_kv.wire.pulls import Connect, Tell

__all__ = ["Errands", "Reference"]

#: Renewals per lease.
RENEWALS_PER_LEASE: Final = 3
#: Leases after which a renewal that nobody stopped is forgotten.
LEASES_LIMIT: Final = 40
#: Seconds between two sendings of a release.
RELEASE_AGAIN_S: Final = 1.0


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """A hold of the producer at ``address``, as named by what the router passed on."""

    address: str
    transfer_id: str
    remote_request_id: str
    generation: int = 0
    early: bool = False


@dataclass(slots=True)
class _Release:
    reference: Reference
    until: float
    send_at: float


@dataclass(slots=True)
class _Renewal:
    until: float
    count: int = 1


@dataclass(slots=True)
class _Place:
    """One address: who is there, and what is renewed there."""

    peer: int = 0
    renew_at: float = math.inf
    renewals: dict[tuple[str, str], _Renewal] = field(default_factory=dict)


class Errands:
    """Renewals and releases of one engine.  One owner calls everything."""

    def __init__(self, lease_s: float, limit: int) -> None:
        self.dropped = 0
        self._lease_s = lease_s
        self._limit = limit
        self._places: dict[str, _Place] = {}
        self._releases: dict[int, _Release] = {}

    def renew(self, reference: Reference, now: float) -> list[Connect | Tell]:
        """Keeps renewing until `stop` is called as often for the same reference."""
        place = self._places.setdefault(reference.address, _Place())
        key = (reference.transfer_id, reference.remote_request_id)
        known = place.renewals.get(key)
        until = now + self._lease_s * LEASES_LIMIT
        if known is not None:
            known.count += 1
            known.until = until
            return []
        if sum(len(other.renewals) for other in self._places.values()) >= self._limit:
            self.dropped += 1
            return []
        place.renewals[key] = _Renewal(until)
        place.renew_at = min(place.renew_at, now)
        return self.on_timer(now) if place.peer else [Connect(reference.address)]

    def stop(self, reference: Reference) -> None:
        """The request was asked for, or is not wanted: one renewal less."""
        place = self._places.get(reference.address)
        key = (reference.transfer_id, reference.remote_request_id)
        known = place.renewals.get(key) if place else None
        if place is None or known is None:
            return
        known.count -= 1
        if known.count <= 0:
            del place.renewals[key]
            self._drop_if_idle(reference.address)

    def release(self, pull_id: int, reference: Reference, now: float) -> list[Connect | Tell]:
        """Lets one hold go; said again until it is answered or a lease has passed."""
        if len(self._releases) >= self._limit:
            self.dropped += 1
            return []
        self._releases[pull_id] = _Release(reference, now + self._lease_s, now)
        place = self._places.setdefault(reference.address, _Place())
        return self.on_timer(now) if place.peer else [Connect(reference.address)]

    def peer_ready(self, address: str, peer: int, now: float) -> list[Connect | Tell]:
        place = self._places.get(address)
        if place is None:
            return []
        place.peer = peer
        return self.on_timer(now)

    def peer_failed(self, address: str) -> None:
        """Nobody usable is there; what was owed to it is dropped."""
        self._places.pop(address, None)
        for pull_id in [p for p, r in self._releases.items() if r.reference.address == address]:
            del self._releases[pull_id]

    def peer_gone(self, peer: int) -> None:
        for address in [a for a, place in self._places.items() if place.peer == peer]:
            self.peer_failed(address)

    def on_message(self, peer: int, message: Message) -> None:
        if isinstance(message, Drained):
            release = self._releases.get(message.pull_id)
            if release is not None and self._peer_of(release) == peer:
                del self._releases[message.pull_id]
                self._drop_if_idle(release.reference.address)

    def next_deadline(self) -> float | None:
        at = min(
            (place.renew_at for place in self._places.values() if place.peer), default=math.inf
        )
        for release in self._releases.values():
            at = min(at, release.until)
            if self._peer_of(release):
                at = min(at, release.send_at)
        return None if at == math.inf else at

    def on_timer(self, now: float) -> list[Connect | Tell]:
        effects: list[Connect | Tell] = []
        for pull_id, release in list(self._releases.items()):
            peer = self._peer_of(release)
            if release.until <= now:
                del self._releases[pull_id]
                self.dropped += 1
                self._drop_if_idle(release.reference.address)
            elif peer and release.send_at <= now:
                release.send_at = now + RELEASE_AGAIN_S
                effects.append(Tell(peer, _release_message(pull_id, release.reference)))
        for address, place in list(self._places.items()):
            if place.peer and place.renew_at <= now:
                effects += self._renew_all(address, place, now)
        return effects

    def _renew_all(self, address: str, place: _Place, now: float) -> list[Connect | Tell]:
        for key in [key for key, renewal in place.renewals.items() if renewal.until <= now]:
            del place.renewals[key]
            self.dropped += 1
        effects: list[Connect | Tell] = []
        keys = list(place.renewals)
        for start in range(0, len(keys), RENEWALS_LIMIT):
            part = keys[start : start + RENEWALS_LIMIT]
            renew = Renew(
                transfer_ids=tuple(transfer for transfer, _ in part if transfer),
                request_ids=tuple(request for transfer, request in part if not transfer),
            )
            effects.append(Tell(place.peer, renew))
        place.renew_at = now + self._lease_s / RENEWALS_PER_LEASE if keys else math.inf
        self._drop_if_idle(address)
        return effects

    def _peer_of(self, release: _Release) -> int:
        place = self._places.get(release.reference.address)
        return place.peer if place else 0

    def _drop_if_idle(self, address: str) -> None:
        place = self._places.get(address)
        if place is None or place.renewals:
            return
        if not any(r.reference.address == address for r in self._releases.values()):
            del self._places[address]


def _release_message(pull_id: int, reference: Reference) -> Release:
    return Release(
        pull_id=pull_id,
        transfer_id=reference.transfer_id,
        request_id=reference.remote_request_id,
        generation=reference.generation,
        early=reference.early,
    )
