"""Finds the hold that an ask means: by transfer id, else by the producer's request id.

Request ids differ on the two sides and several samples of one request share a transfer
id, so a transfer id names a queue of sibling holds, served first in, first out.  What
is gone leaves a tombstone, so that a late or repeated ask hears why at once.
"""

from __future__ import annotations

import re
from collections import OrderedDict

from efa_kv.wire.handoff import Ask, Reason, Release
from efa_kv.wire.holds import Handoff, Hold, State, Transfer

#: Tombstones kept per live handoff allowed.
TOMBSTONES_PER_HANDOFF = 4


class Park(Exception):  # noqa: N818 - an answer, not an error
    """The hold is not there yet but may come."""


class Refuse(Exception):  # noqa: N818 - an answer, not an error
    """The ask cannot be served; ``reason`` says why."""

    def __init__(self, reason: str, text: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.text = text


def parent_of(request_id: str) -> str:
    """The request that a parallel sample belongs to: the id without a leading "<n>_"."""
    return re.sub(r"^\d+_", "", request_id, count=1)


class Tombstones:
    """Remembers why the last ``limit`` ids went."""

    def __init__(self, limit: int) -> None:
        self._reasons: OrderedDict[str, str] = OrderedDict()
        self._limit = limit

    def __len__(self) -> int:
        return len(self._reasons)

    def note(self, key: str, reason: str) -> None:
        self._reasons[key] = reason
        self._reasons.move_to_end(key)
        while len(self._reasons) > self._limit:
            self._reasons.popitem(last=False)

    def take(self, key: str) -> str | None:
        return self._reasons.pop(key, None)

    def get(self, key: str) -> str | None:
        return self._reasons.get(key)


def key_of(transfer_id: str, request_id: str) -> str:
    """What holds, parked asks and tombstones are filed under."""
    return f"t:{transfer_id}" if transfer_id else f"r:{request_id}"


class HoldIndex:
    """All live holds of a producer, and what is known of the dead ones."""

    def __init__(self, engine_id: str, limit: int) -> None:
        self.engine_id = engine_id
        self.handoffs: dict[int, Handoff] = {}
        self.by_request: dict[str, Handoff] = {}
        self.transfers: dict[str, Transfer] = {}
        self.expected: OrderedDict[str, str] = OrderedDict()
        self.tombstones = Tombstones(limit * TOMBSTONES_PER_HANDOFF)
        self._limit = limit

    def expect(self, transfer_id: str, request_id: str, generation: int) -> bool:
        """Notes that a request is being computed; False when another owns the id."""
        key = key_of(transfer_id, request_id)
        transfer = self._transfer(key, request_id)
        if transfer is None:
            return False
        self.tombstones.take(key)
        transfer.expected[request_id] = generation
        self.expected[request_id] = key
        while len(self.expected) > self._limit:
            self.forget_expected(next(iter(self.expected)))
        return True

    def forget_expected(self, request_id: str) -> str | None:
        """The key under which a request was expected, if it was."""
        key = self.expected.pop(request_id, None)
        if key is not None:
            self.transfers[key].expected.pop(request_id, None)
            self._drop_if_empty(key)
        return key

    def add(self, handoff: Handoff) -> bool:
        """Files a new hold; False when another live request owns its transfer id."""
        hold = handoff.hold
        key = key_of(hold.transfer_id, hold.request_id)
        transfer = self._transfer(key, hold.request_id)
        if transfer is None:
            return False
        self.tombstones.take(key)
        transfer.hold_ids.append(handoff.hold_id)
        transfer.expected.pop(hold.request_id, None)
        self.expected.pop(hold.request_id, None)
        self.handoffs[handoff.hold_id] = handoff
        self.by_request[hold.request_id] = handoff
        return True

    def remove(self, handoff: Handoff, reason: str) -> None:
        """Takes a released hold out and leaves a tombstone under its ids."""
        hold = handoff.hold
        del self.handoffs[handoff.hold_id]
        del self.by_request[hold.request_id]
        key = key_of(hold.transfer_id, hold.request_id)
        self.transfers[key].hold_ids.remove(handoff.hold_id)
        self.bury(key, reason)
        if hold.transfer_id:
            self.bury(key_of("", hold.request_id), reason)

    def bury(self, key: str, reason: str) -> None:
        """Leaves a tombstone unless something under the key still lives."""
        self._drop_if_empty(key)
        if key not in self.transfers:
            self.tombstones.note(key, reason)

    def find(self, wanted: Ask | Release) -> Handoff:
        """The hold that serves an ask or a release; raises `Park` or `Refuse`."""
        if isinstance(wanted, Ask) and wanted.engine_id not in ("", self.engine_id):
            raise Refuse(
                Reason.WRONG_ENGINE,
                f"asked for engine {wanted.engine_id!r}; this is {self.engine_id!r}",
            )
        key = key_of(wanted.transfer_id, wanted.request_id)
        transfer = self.transfers.get(key)
        if transfer is None and not wanted.transfer_id:
            owner = self.by_request.get(wanted.request_id)
            if owner is not None:
                key = key_of(owner.hold.transfer_id, owner.hold.request_id)
                transfer = self.transfers[key]
        if transfer is None:
            reason = self.tombstones.get(key)
            if reason is not None:
                raise Refuse(reason)
            if wanted.early or wanted.request_id in self.expected:
                raise Park
            raise Refuse(Reason.UNKNOWN)
        return self._choose(transfer, wanted)

    def _choose(self, transfer: Transfer, wanted: Ask | Release) -> Handoff:
        live = [self.handoffs[hold_id] for hold_id in transfer.hold_ids]
        generations = {handoff.hold.generation for handoff in live} | {*transfer.expected.values()}
        if wanted.generation and wanted.generation not in generations:
            raise Refuse(
                Reason.STALE,
                f"asked for generation {wanted.generation}; alive: {sorted(generations)}",
            )
        free = [handoff for handoff in live if handoff.state is State.HELD]
        for handoff in free:
            if handoff.hold.request_id == wanted.request_id and _same_prompt(handoff.hold, wanted):
                return handoff
        if transfer.ambiguous:
            digest = _digest(wanted)
            free = [h for h in free if digest and h.hold.prompt_digest == digest]
            if not free:
                raise Refuse(Reason.AMBIGUOUS, "two live requests claim this transfer id")
        if not free:
            if transfer.expected:
                raise Park
            raise Refuse(Reason.CONSUMED)
        for handoff in free:
            if _same_prompt(handoff.hold, wanted):
                return handoff
        raise Refuse(Reason.MISMATCH, "the prompt of the ask is not the prompt of the hold")

    def _transfer(self, key: str, request_id: str) -> Transfer | None:
        parent = parent_of(request_id)
        transfer = self.transfers.setdefault(key, Transfer(parent))
        if transfer.parent != parent:
            transfer.ambiguous = True
            return None
        return transfer

    def _drop_if_empty(self, key: str) -> None:
        transfer = self.transfers.get(key)
        if transfer is not None and not transfer.hold_ids and not transfer.expected:
            del self.transfers[key]


def _digest(wanted: Ask | Release) -> bytes:
    return wanted.prompt_digest if isinstance(wanted, Ask) else b""


def _same_prompt(hold: Hold, wanted: Ask | Release) -> bool:
    """Whether the prompts are equal, as far as both sides named them."""
    digest = _digest(wanted)
    return not digest or not hold.prompt_digest or digest == hold.prompt_digest
