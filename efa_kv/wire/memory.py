"""What a producer remembers of pulls that are over, so that nothing is served twice."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from efa_kv.wire.handoff import Drained, Reason, Refused

#: A pull: the consumer's incarnation and its number for the pull.
PullKey = tuple[int, int]

#: Consumers whose lowest acceptable pull is remembered.
FLOORS_LIMIT = 4096


@dataclass(slots=True)
class _Answer:
    message: Refused | Drained
    closed: bool


class Answers:
    """The last word said about each pull, bounded.

    Pull ids of one consumer count up.  When an answer is forgotten, every pull of that
    consumer up to it becomes stale: an ask that was aborted long ago and arrives now is
    refused, never served into memory that has another owner.
    """

    def __init__(self, limit: int) -> None:
        self._answers: OrderedDict[PullKey, _Answer] = OrderedDict()
        self._floors: OrderedDict[int, int] = OrderedDict()
        self._limit = limit

    def __len__(self) -> int:
        return len(self._answers)

    def note(self, key: PullKey, message: Refused | Drained, closed: bool) -> None:
        """``closed`` forbids further attempts of the pull."""
        self._answers[key] = _Answer(message, closed)
        self._answers.move_to_end(key)
        while len(self._answers) > self._limit:
            (peer, pull_id), _ = self._answers.popitem(last=False)
            self._floors[peer] = max(pull_id, self._floors.get(peer, -1))
            self._floors.move_to_end(peer)
        while len(self._floors) > FLOORS_LIMIT:
            self._floors.popitem(last=False)

    def answer_to(self, key: PullKey, attempt: int) -> Refused | Drained | None:
        """What to say to a repeated, outdated or aborted attempt; None for a new one."""
        answer = self._answers.get(key)
        if answer is not None:
            if answer.closed or attempt <= answer.message.attempt:
                return answer.message
            return None
        peer, pull_id = key
        if pull_id <= self._floors.get(peer, -1):
            text = "the pull is older than what is remembered of it"
            return Refused(pull_id=pull_id, attempt=attempt, reason=Reason.STALE, text=text)
        return None

    def close(self, key: PullKey) -> Drained:
        """Forbids every further attempt of a pull that is not running; the proof of it."""
        answer = self._answers.get(key)
        said = answer.message if answer else None
        attempt = said.attempt if said else 0
        drained = Drained(
            pull_id=key[1],
            attempt=attempt,
            reason=said.reason if said else Reason.UNKNOWN,
            text=said.text if said else "",
            bytes=said.bytes if isinstance(said, Drained) else 0,
            stray=isinstance(said, Drained) and said.stray,
        )
        self.note(key, drained, True)
        return drained
