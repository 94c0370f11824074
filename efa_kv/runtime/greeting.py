"""What this engine says about itself in greetings, and whether a peer's card fits.

Owner: the control thread, once it runs; before that, whoever sets the engine up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from efa_kv.errors import EfaKvError, LayoutMismatch, PeerRefused
from efa_kv.memory import Published
from efa_kv.types import Nic, ProcessRecord, Session
from efa_kv.wire.messages import Card, Hello, Reject, Welcome, fitting_regions

#: Codes of a refusal.
REASON_LAYOUT: Final = "layout"
REASON_FABRIC: Final = "fabric"
REASON_FULL: Final = "full"
REASON_ADDRESS: Final = "address"

_ABSENT: Final = "(not set)"


def this_process() -> ProcessRecord:
    """Which process this is, such that no other one gives the same answer."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # The name of the executable may hold spaces and brackets; the rest may not.
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return ProcessRecord(boot, os.readlink("/proc/self/ns/pid"), os.getpid(), int(stat[19]))


def first_difference(local: Mapping[str, str], remote: Mapping[str, str]) -> LayoutMismatch:
    """The first field in which the two sides differ, as an error."""
    for name in sorted({*local, *remote}):
        here, there = local.get(name, _ABSENT), remote.get(name, _ABSENT)
        if here != there:
            return LayoutMismatch(name, here, there)
    return LayoutMismatch("fingerprint", "another one", "another one")


class Identity(msgspec.Struct, kw_only=True):
    """What stays the same while an engine runs; set up before its control thread starts."""

    session: Session
    incarnation: int
    process: ProcessRecord
    nics: tuple[Nic, ...]
    gate: int = -1
    fingerprint: bytes = b""
    fields: dict[str, str] = msgspec.field(default_factory=dict)
    layout: bytes | None = None
    #: Whether this engine only tries the way to others (`efa_kv.wire.messages.Card`).
    visitor: bool = False


class Greeter:
    """Makes this engine's greetings and judges those of others."""

    def __init__(
        self, identity: Identity, published: Callable[[], Published], max_message_bytes: int
    ) -> None:
        self.identity = identity
        self.published = published
        # Half of a message for regions: the rest holds NICs, fields and layout.
        self._regions_bytes = max_message_bytes // 2

    @property
    def epoch(self) -> int:
        """The number of the last change of our regions."""
        return self.published().epoch

    def card(self) -> Card:
        """What we tell about ourselves now."""
        identity, published = self.identity, self.published()
        fitting, complete = fitting_regions(published.regions, self._regions_bytes)
        return Card(
            session=identity.session,
            incarnation=identity.incarnation,
            process=identity.process,
            gate=identity.gate,
            nics=published.nics,
            regions=fitting,
            regions_epoch=published.epoch,
            complete=complete,
            fingerprint=identity.fingerprint,
            fields=identity.fields,
            layout=identity.layout,
            visitor=identity.visitor,
        )

    def hello(self, probe: bool = False) -> Hello:
        return Hello(card=self.card(), probe=probe)

    def welcome(self, to: int) -> Welcome:
        return Welcome(to=to, card=self.card())

    def reject(self, to: int, reason: str, text: str) -> Reject:
        """The refusal of a greeting, with our side of what was compared."""
        identity = self.identity
        fields = identity.fields if reason == REASON_LAYOUT else {}
        return Reject(
            to=to, incarnation=identity.incarnation, reason=reason, text=text, fields=fields
        )

    def misfit(self, card: Card) -> LayoutMismatch | None:
        """Why a peer with this card cannot work with us, or None."""
        if card.visitor or self.identity.visitor:
            return None
        if card.fingerprint == self.identity.fingerprint:
            return None
        return first_difference(self.identity.fields, card.fields)

    def refusal(self, reject: Reject, peer: str) -> EfaKvError:
        """A REJECT of a peer as the error that callers here get."""
        if reject.reason == REASON_LAYOUT:
            return first_difference(self.identity.fields, reject.fields)
        return PeerRefused(
            f"{peer} refused the connection: {reject.text or reject.reason}",
            peer=peer,
            reason=reject.reason,
        )
