"""What a connector's worker calls: hold and pull requests' KV by id, never waiting.

    agent = Agent(config, layout, fields, engine_id)
    producer: expect -> hold -> (report.sent)            or withdraw
    consumer: queue -> pull -> (report.received or .failed)   or release, abort

Every method belongs to the server's one thread and returns at once; `poll` is called
once per engine step and says what has ended. The server's thread owns the map of
pending pulls, so that each id is reported exactly once whatever the network repeats; the
control thread owns the tables of `efa_kv.wire`. Between them are a bounded queue of
calls and an `Outbox`; the producer's notice behind the last byte comes past both, from
the native core straight into `poll`.

Block tables are per group of layers, uint32, and start at token 0 of the request: entry
``i`` holds the tokens ``[i * block_size, (i + 1) * block_size)``, also on a consumer that
has the first blocks already (it says so with ``first_token``).
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np

from efa_kv.config import EngineConfig
from efa_kv.errors import FabricBusy, LocalProtocolError, StaleHandle
from efa_kv.plan import compat, layout
from efa_kv.runtime.announce import warn_servers
from efa_kv.runtime.engine import TransferEngine
from efa_kv.runtime.handoffs import Handoffs
from efa_kv.runtime.outbox import Asked, Ended, Given, Lost, Outbox
from efa_kv.runtime.places import key_of
from efa_kv.runtime.registry import RegistryAccess
from efa_kv.types import Notice, Session, U32Array
from efa_kv.wire.envelope import WIRE_VERSION
from efa_kv.wire.errands import Reference
from efa_kv.wire.handoff import Reason, pack_blocks
from efa_kv.wire.holds import Hold
from efa_kv.wire.pulls import PullRequest

__all__ = ["Agent", "AgentStats", "Hold", "Pull", "Report"]

_log = logging.getLogger(__name__)

#: Reasons with which a hold ends without anything being wrong.
_GOOD_ENDS: Final = frozenset({"", "declined", Reason.EXPIRED, Reason.ABORTED})


class Pull(msgspec.Struct, frozen=True, kw_only=True):
    """A request whose KV is to be fetched.

    ``request_id`` is this server's own, ``remote_request_id`` the producer's (or empty).
    ``address`` is "host:port" of the producer's engine, or "http://host:port" of its
    registry. ``early``: the producer may not have heard of the transfer yet.
    ``generation`` 0 takes any. The tokens ``[first_token, first_token + token_count)``
    are wanted; ``first_token`` is the start of a block.
    """

    request_id: str
    transfer_id: str
    remote_request_id: str
    remote_engine_id: str
    generation: int
    address: str
    early: bool
    first_token: int
    token_count: int
    block_ids: tuple[U32Array, ...]
    prompt_digest: bytes = b""


@dataclass(slots=True)
class Report:
    """What ended since the last `Agent.poll`; every id once.

    ``sent``: blocks of these holds may go. ``received``: the KV is there. ``failed``:
    it is not, and nobody can write to the blocks any more. ``doomed``: it will not be,
    but the blocks are not safe yet; ``failed`` follows. Values are reasons in words.
    """

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    doomed: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class AgentStats:
    """What happened since the last `Agent.stats`; ``failures`` counts by reason code."""

    provider: str = ""
    received_bytes: int = 0
    received_requests: int = 0
    sent_bytes: int = 0
    sent_requests: int = 0
    expired: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    transfer_seconds: list[float] = field(default_factory=list)

    def fail(self, reason: str) -> None:
        self.failures[reason] = self.failures.get(reason, 0) + 1


@dataclass(slots=True)
class _Pending:
    """A pull that was not reported yet; ``lost`` is why it cannot succeed any more."""

    request_id: str
    generation: int
    began: float
    peer: int = 0
    lost: str = ""


class Agent:
    """See the module's head. The constructor raises what is wrong with the set-up."""

    def __init__(
        self,
        config: EngineConfig,
        own_layout: layout.KvLayout,
        fingerprint_fields: Mapping[str, str],
        engine_id: str,
    ) -> None:
        layout.validate(own_layout)
        self._layout = own_layout
        self._engine = TransferEngine(config)
        self._outbox = Outbox()
        self._pull_ids = itertools.count(2, 2)
        self._pending: dict[int, _Pending] = {}
        self._pull_of: dict[str, int] = {}
        self._refused: dict[str, tuple[str, str]] = {}
        self._calls: deque[Callable[[float], None]] = deque()
        self._stats = AgentStats()
        self._registry = RegistryAccess(self._engine, engine_id, own_layout.tp_rank)
        try:
            fields = {
                **fingerprint_fields,
                **compat.layout_fields(own_layout),
                "wire.version": str(WIRE_VERSION),
            }
            self._engine.describe(
                fingerprint=compat.fingerprint(fields),
                fields=fields,
                layout=layout.encode(own_layout),
            )
            for region in own_layout.regions:
                self._engine.register(region)
            self._handoffs = Handoffs(
                self._engine, own_layout, engine_id, self._outbox, self._registry.client
            )
            self._engine.add_handler(self._handoffs)
            self._engine.start()
            warn_servers(self._engine)
            self._registry.serve()
        except BaseException:
            self.close()
            raise

    # ---- who we are -------------------------------------------------------------------

    @property
    def session(self) -> Session:
        """This worker's engine on the network, "host:port"."""
        return self._engine.session

    @property
    def provider(self) -> str:
        """The libfabric provider that moves the bytes."""
        rails = self._engine.rails
        return rails[0].provider if rails else self._engine.protocol

    @property
    def bootstrap_address(self) -> str | None:
        """The registry that routers query, "http://host:port", if this worker serves it."""
        return self._registry.address

    @property
    def engine(self) -> TransferEngine:
        """The engine below, for counters and traces."""
        return self._engine

    # ---- producer ---------------------------------------------------------------------

    def expect(self, transfer_id: str, request_id: str, generation: int) -> None:
        """The request is being computed here: asks for it wait. Say it as soon as the
        request is scheduled: a consumer may hear of the transfer before `hold` is called."""
        serving = self._handoffs.serving
        self._engine.journal.note(request_id, "computing")
        self._call(
            lambda now: serving.run(
                serving.table.expect(transfer_id, request_id, generation, now), now
            )
        )

    def hold(self, hold: Hold) -> None:
        """Lends the blocks of a finished prefill; ends in exactly one ``sent``."""
        serving = self._handoffs.serving
        self._engine.journal.note(hold.request_id, "held")
        self._call(lambda now: serving.run(serving.table.hold(hold, now), now))

    def extend(self, hold: Hold) -> None:
        """More of a request that is still being computed can be written: ``hold`` describes
        everything up to the end of the last finished chunk. `hold` or `withdraw` follows."""
        serving = self._handoffs.serving
        self._call(lambda now: serving.run(serving.table.extend(hold, now), now))

    def withdraw(self, request_id: str) -> None:
        """The request ended without KV worth having, or its blocks are wanted back. If it
        was held it is still reported as sent, when nothing reads its blocks any more."""
        serving = self._handoffs.serving
        self._call(lambda now: serving.run(serving.table.withdraw(request_id, now), now))

    # ---- consumer ---------------------------------------------------------------------

    def queue(
        self,
        request_id: str,
        address: str,
        transfer_id: str,
        remote_request_id: str,
        remote_engine_id: str = "",
    ) -> None:
        """A request that will `pull` waits here: its lease is renewed until `pull` or
        `release` is called with the same reference."""
        _log.debug("request %s waits; its lease is renewed", request_id)
        reference = Reference(
            address=key_of(address, remote_engine_id),
            transfer_id=transfer_id,
            remote_request_id=remote_request_id,
        )
        self._call(lambda now: self._handoffs.pulling.renew(reference, now))

    def pull(self, pull: Pull) -> None:
        """Fetches a request's KV; ends in exactly one ``received`` or ``failed``. Raises
        `LocalProtocolError` when the request is being pulled already."""
        if pull.request_id in self._pull_of or pull.request_id in self._refused:
            raise LocalProtocolError(f"found a second pull for request {pull.request_id}.")
        problem = self._misfit(pull)
        if problem:
            self._refused[pull.request_id] = (Reason.BAD_BLOCKS, problem)
            return
        pull_id = next(self._pull_ids)
        key = key_of(pull.address, pull.remote_engine_id)
        named = key != pull.address
        request = PullRequest(
            pull_id=pull_id,
            address=key,
            transfer_id=pull.transfer_id,
            remote_request_id=pull.remote_request_id,
            # A registry was asked for this engine; routers may remember its former id.
            engine_id="" if named else pull.remote_engine_id,
            generation=pull.generation,
            early=pull.early,
            first_token=pull.first_token,
            token_count=pull.token_count,
            block_ids=pack_blocks(pull.block_ids),
            block_count=sum(len(np.unique(table)) for table in self._wanted(pull)),
            prompt_digest=pull.prompt_digest,
        )
        references = tuple(
            Reference(
                address=address,
                transfer_id=pull.transfer_id,
                remote_request_id=pull.remote_request_id,
            )
            for address in {key, key_of(pull.address, "")}
        )
        self._pending[pull_id] = _Pending(pull.request_id, pull.generation, time.monotonic())
        self._pull_of[pull.request_id] = pull_id
        self._engine.journal.note(pull.request_id, "asked")
        self._call(lambda now: self._handoffs.pulling.start(request, references, now))

    def release(
        self,
        address: str,
        transfer_id: str,
        remote_request_id: str,
        generation: int,
        remote_engine_id: str = "",
        early: bool = False,
    ) -> None:
        """Nothing is wanted of this transfer, and nothing was asked: its blocks may go."""
        reference = Reference(
            address=key_of(address, remote_engine_id),
            transfer_id=transfer_id,
            remote_request_id=remote_request_id,
            generation=generation,
            early=early,
        )
        pull_id = next(self._pull_ids)
        self._call(lambda now: self._handoffs.pulling.release(pull_id, reference, now))

    def abort(self, request_id: str) -> None:
        """The request of a pull is gone. It is still reported once, as failed, when its
        blocks are safe; unknown ids are ignored."""
        pull_id = self._pull_of.get(request_id)
        if pull_id is not None:
            self._pending[pull_id].lost = Reason.ABORTED
            self._call(lambda now: self._handoffs.pulling.abort(pull_id, now))

    # ---- both -------------------------------------------------------------------------

    def poll(self) -> Report:
        """What ended since the last call; every id once. Never waits."""
        report = Report()
        try:
            # Before the outbox: whoever may notice us was put there before being asked.
            notices = self._engine.notices()
        except StaleHandle:
            notices = []
        for word in self._outbox.take():
            match word:
                case Asked():
                    if word.pull_id in self._pending:
                        self._pending[word.pull_id].peer = word.peer
                case Lost():
                    self._doom(word, report)
                case Ended():
                    self._end(word.pull_id, word.reason, word.text, word.bytes, report)
                case Given():
                    self._give(word, report)
        for notice in notices:
            self._land(notice, report)
        for request_id, (reason, text) in self._refused.items():
            report.failed[request_id] = f"{reason}: {text}"
            self._stats.fail(reason)
        self._refused.clear()
        self._flush()
        return report

    def stats(self) -> AgentStats:
        """What happened since the last call."""
        stats, self._stats = self._stats, AgentStats()
        stats.provider = self.provider
        return stats

    def close(self) -> None:
        """Ends everything within two seconds; safe to call twice. What was pending is not
        reported any more: closing the devices is its fence."""
        self._registry.close()
        self._engine.close()

    # ---- inside -----------------------------------------------------------------------

    def _call(self, call: Callable[[float], None]) -> None:
        """Hands a call to the control thread, in order; kept here while its queue is full."""
        control = self._engine.control

        def run(now: float) -> None:
            call(now)
            control.wake_timer()  # what was begun may have a deadline

        self._calls.append(run)
        self._flush()

    def _flush(self) -> None:
        while self._calls:
            try:
                self._engine.control.later(self._calls[0])
            except FabricBusy:
                return
            except StaleHandle:
                self._calls.clear()
                return
            self._calls.popleft()

    def _misfit(self, pull: Pull) -> str:
        """Why a pull cannot be meant like this, or an empty text."""
        groups = self._layout.groups
        if len(pull.block_ids) != len(groups):
            return f"block tables for {len(pull.block_ids)} groups; the cache has {len(groups)}"
        if pull.first_token < 0 or pull.token_count < 1:
            return f"tokens {pull.first_token} + {pull.token_count} are no range"
        for group, table in zip(groups, pull.block_ids, strict=True):
            end = -(-(pull.first_token + pull.token_count) // group.block_size_tokens)
            if pull.first_token % group.block_size_tokens:
                return f"token {pull.first_token} does not begin a block"
            if len(table) < end:
                return f"a block table of {len(table)} entries; {end} are needed from token 0 on"
            if len(table) and int(table.max()) >= self._layout.num_blocks:
                return f"block {int(table.max())} of a cache of {self._layout.num_blocks}"
        return ""

    def _wanted(self, pull: Pull) -> Sequence[U32Array]:
        """The blocks that the pull may write, per group."""
        return [
            table[pull.first_token // group.block_size_tokens :]
            for group, table in zip(self._layout.groups, pull.block_ids, strict=True)
        ]

    def _land(self, notice: Notice, report: Report) -> None:
        """The producer's word behind the last byte, if it is for us and from whom we asked."""
        pull_id, incarnation = notice.transfer
        pending = self._pending.get(pull_id)
        if pending is None or incarnation != self._engine.incarnation or notice.status:
            return
        if notice.sender != pending.peer or pending.generation not in (0, notice.generation):
            _log.warning("a notice for request %s is not from its producer", pending.request_id)
            return
        self._call(lambda now: self._handoffs.pulling.landed(pull_id, notice.bytes, now))
        self._end(pull_id, pending.lost, "", notice.bytes, report)

    def _end(self, pull_id: int, reason: str, text: str, byte_count: int, report: Report) -> None:
        pending = self._pending.pop(pull_id, None)
        if pending is None:
            return  # reported before, by the other of the two ways
        del self._pull_of[pending.request_id]
        reason = reason or pending.lost
        self._engine.journal.note(pending.request_id, "lost" if reason else "received")
        if reason:
            report.doomed.pop(pending.request_id, None)
            report.failed[pending.request_id] = f"{reason}: {text}" if text else reason
            self._stats.fail(reason)
            return
        report.received.add(pending.request_id)
        self._stats.received_requests += 1
        self._stats.received_bytes += byte_count
        self._stats.transfer_seconds.append(time.monotonic() - pending.began)

    def _doom(self, word: Lost, report: Report) -> None:
        pending = self._pending.get(word.pull_id)
        if pending is not None and not pending.lost:
            pending.lost = word.reason
            report.doomed[pending.request_id] = f"{word.reason}: {word.text}"

    def _give(self, word: Given, report: Report) -> None:
        report.sent.add(word.request_id)
        self._engine.journal.note(word.request_id, "sent")
        if not word.reason:
            self._stats.sent_requests += 1
            self._stats.sent_bytes += word.bytes
        elif word.reason == Reason.EXPIRED:
            self._stats.expired += 1
        if word.reason not in _GOOD_ENDS:
            self._stats.fail(word.reason)
