"""Handoffs as a part of the control plane: hands events to the two halves.

Owner: the control thread. The halves share nothing but the directory of sessions.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from efa_kv.config import EngineConfig
from efa_kv.errors import FabricBusy, StaleHandle
from efa_kv.plan.layout import KvLayout
from efa_kv.runtime.directory import Directory
from efa_kv.runtime.handle import SessionHandle
from efa_kv.runtime.outbox import Outbox
from efa_kv.runtime.places import Asker, Places
from efa_kv.runtime.pulling import Pulling
from efa_kv.runtime.serving import Serving
from efa_kv.types import Result
from efa_kv.wire import holds, pulls
from efa_kv.wire.consumer import ConsumerTable
from efa_kv.wire.envelope import Message
from efa_kv.wire.errands import Errands
from efa_kv.wire.handoff import HANDOFF_TYPES, TO_CONSUMER
from efa_kv.wire.producer import ProducerTable
from efa_kv.wire.session import SessionState

if TYPE_CHECKING:
    from efa_kv.runtime.engine import TransferEngine

_log = logging.getLogger(__name__)


class Handoffs:
    """The handler that an `efa_kv.runtime.agent.Agent` adds to its engine."""

    message_types: tuple[type[Message], ...] = HANDOFF_TYPES

    def __init__(
        self,
        engine: TransferEngine,
        layout: KvLayout,
        engine_id: str,
        outbox: Outbox,
        asker: Callable[[], Asker],
    ) -> None:
        config = engine.config
        self._control = engine.control
        self._directory = Directory()
        self.serving = Serving(
            ProducerTable(engine_id, _producer_limits(config, layout)),
            engine.control,
            self,
            layout,
            self._directory,
            outbox,
            engine.journal,
        )
        self.pulling = Pulling(
            ConsumerTable(_consumer_limits(config, layout)),
            Errands(config.lease_s, config.max_handoffs),
            engine,
            self._directory,
            outbox,
        )
        self._places = Places(engine.control, self.pulling, asker, (layout.tp_rank, 0))
        self.pulling.places = self._places

    def on_message(self, session: SessionHandle, message: Message, now: float) -> None:
        self._directory.note(session)
        if isinstance(message, TO_CONSUMER):
            self.pulling.on_message(session.incarnation, message, now)
            return
        # Behind what the server has said until now: a consumer that heard of a transfer
        # from the server may ask before this thread has come to the hold in its queue.
        peer = session.incarnation
        try:
            self._control.later(lambda at: self._serve(peer, message, at))
        except (FabricBusy, StaleHandle) as problem:
            _log.warning("a message of %s is dropped: %s", session.session, problem)

    def _serve(self, peer: int, message: Message, now: float) -> None:
        self.serving.run(self.serving.table.on_message(peer, message, now), now)
        self._control.wake_timer()

    def on_session(
        self, session: SessionHandle, state: SessionState, reason: str | None, now: float
    ) -> None:
        if session.usable:
            self._directory.note(session)
        elif session.over and self._directory.forget(session):
            self.serving.peer_gone(session.incarnation, now)
            self.pulling.peer_gone(session.incarnation, now)
        self._places.on_session(session, now)

    def on_job(self, job: int, result: Result, now: float) -> None:
        self.serving.on_job(job, result, now)

    def on_timer(self, now: float) -> float | None:
        due = [self.serving.on_timer(now), self.pulling.on_timer(now)]
        return min((deadline for deadline in due if deadline is not None), default=None)


def _producer_limits(config: EngineConfig, layout: KvLayout) -> holds.Limits:
    return holds.Limits(
        lease_s=config.lease_s,
        unsolicited_s=config.unsolicited_s,
        handoffs=config.max_handoffs,
        granularity_tokens=math.lcm(*(group.block_size_tokens for group in layout.groups)),
    )


def _consumer_limits(config: EngineConfig, layout: KvLayout) -> pulls.Limits:
    return pulls.Limits(
        transfer_timeout_s=config.transfer_timeout_s,
        pulls=config.max_handoffs,
        quarantine_blocks=int(config.quarantine_share * layout.num_blocks),
    )
