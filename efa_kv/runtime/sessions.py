"""The directory of sessions: executes what the session machines decide.

Owner: the control thread.  A `SessionHandle` is one incarnation of a peer behind one
address; when the peer restarts, its handle ends and a new one takes the address.

Every table here is bounded: sessions by ``max_peers``, connections by a few per session,
queues by the sockets.  What strangers send creates nothing unless it is a greeting.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Final, Protocol

from efa_kv.config import EngineConfig
from efa_kv.errors import (
    ConfigError,
    EfaKvError,
    FabricBusy,
    LocalProtocolError,
    PeerUnreachable,
    RemoteProtocolError,
)
from efa_kv.memory import Change
from efa_kv.observe.state import PeerView
from efa_kv.runtime import greeting
from efa_kv.runtime.greeting import Greeter
from efa_kv.runtime.handle import SessionHandle, Waiter
from efa_kv.runtime.links import Links
from efa_kv.runtime.peers import PeerTable
from efa_kv.runtime.rendezvous import Resolver
from efa_kv.runtime.router import Route, Router
from efa_kv.runtime.timers import Timers
from efa_kv.types import Address
from efa_kv.wire import messages as wire
from efa_kv.wire import session as steps
from efa_kv.wire.envelope import Message
from efa_kv.wire.session import SessionMachine, SessionState, SessionTimes

_log = logging.getLogger(__name__)

_WARNINGS_EVERY_S: Final = 5.0
#: How much later than asked for a session's clock may strike, as a share of its heartbeat.
_GRAIN_SHARE: Final = 0.1


class SessionWatcher(Protocol):
    """What the directory tells its owner."""

    def on_message(self, handle: SessionHandle, message: Message, now: float) -> None:
        """A message that is not the session's own business."""

    def on_session(self, handle: SessionHandle, reason: str | None, now: float) -> None:
        """``handle.state`` changed."""

    def later(self, call: Callable[[float], None]) -> None:
        """Runs ``call(now)`` on the control thread; any thread."""


class Sessions:
    """All sessions of one engine.  Every method: control thread only; none blocks."""

    def __init__(
        self,
        config: EngineConfig,
        router: Router,
        greeter: Greeter,
        peers: PeerTable,
        watcher: SessionWatcher,
        timers: Timers,
    ) -> None:
        self._config = config
        self._greeter = greeter
        self._peers = peers
        self._watcher = watcher
        self._times = SessionTimes(
            handshake_timeout_s=config.handshake_timeout_s,
            heartbeat_interval_s=config.heartbeat_interval_s,
            suspect_after_s=config.suspect_after_s,
            idle_after_s=config.idle_after_s,
            forget_after_s=config.forget_after_s,
        )
        self._by_address: dict[str, SessionHandle] = {}
        self._links = Links(router, greeter, config.max_message_bytes)
        self._timers = timers
        self._resolver = Resolver()
        self._warned_at = float("-inf")
        # Clocks of many sessions strike together, so that a thousand cost few wake-ups.
        self._grain_s = config.heartbeat_interval_s * _GRAIN_SHARE

    # ---- what the engine and the handlers ask for -------------------------------------

    def connect(self, text: str, now: float, waiter: Waiter | None = None) -> SessionHandle:
        """The session at ``host:port``, greeting it if it is new.

        ``waiter`` is called once, with None when it is READY or with the reason why it
        never will be.  Raises `ConfigError` for a malformed address, `FabricBusy` when
        there are too many peers.
        """
        address = Address.parse(text)
        key = str(address)
        handle = self._by_address.get(key)
        # A refusal is remembered for a while, so that asking again and again costs nothing.
        if handle is None or (handle.over and handle.state is not SessionState.REJECTED):
            handle = self._open(key, now)
        if waiter is not None:
            if handle.state is SessionState.READY:
                waiter(None)
            elif handle.over:
                waiter(handle.error())
            else:
                handle.waiters.append(waiter)
        if handle.state is SessionState.IDLE and not address.is_literal:
            self._look_up(handle, address)
        elif handle.state is SessionState.IDLE:
            self._links.dial(handle, address)
        self._run(handle, handle.machine.connect(now), now)
        return handle

    def send(self, handle: SessionHandle, message: Message, now: float) -> bool:
        """Queues a message for a usable session; False when it was dropped."""
        if not handle.usable:
            return False
        handle.machine.use(now)
        self._arm(handle, now)
        return self._links.send(handle, message)

    def refresh(self, handle: SessionHandle, done: Callable[[bool], None], now: float) -> None:
        """Asks the peer for its regions once; ``done(False)`` when no answer comes."""
        peer = handle.peer
        if peer is None or not handle.usable:
            done(False)
            return
        peer.waiters.append(done)
        if peer.query == 0:
            self._begin_refresh(handle, now)

    def broadcast(self, change: Change) -> None:
        """Tells every peer about a change of our regions; who misses it asks."""
        message = wire.Regions(
            query=0,
            epoch=change.epoch,
            regions=change.added,
            removed=change.removed,
            nics=change.nics,
        )
        for handle in list(self._by_address.values()):
            if handle.usable:
                self._links.send(handle, message)

    def settle(self, handle: SessionHandle, now: float) -> None:
        """A job with the peer ended."""
        handle.jobs -= 1
        self._settle(handle, now)

    def close(self, now: float) -> None:
        """Says good-bye to everybody."""
        for handle in list(self._by_address.values()):
            self._run(handle, handle.machine.close(now), now)

    def __len__(self) -> int:
        return len(self._by_address)

    def view(self) -> tuple[PeerView, ...]:
        """All sessions, for people."""
        return tuple(
            PeerView(
                session=handle.session,
                state=handle.state.value,
                reason=handle.reason or "",
                jobs=handle.jobs,
            )
            for handle in self._by_address.values()
        )

    def _arm(self, handle: SessionHandle, now: float) -> None:
        """Has the machine's clock called in time."""
        due = handle.machine.next_timer(now)
        if due is not None:
            due = math.ceil(due / self._grain_s) * self._grain_s
        if due is None or (handle.wakes_at is not None and handle.wakes_at <= due):
            return

        def wake(at: float) -> None:
            if handle.wakes_at == due:  # not superseded by an earlier one
                handle.wakes_at = None
                self._run(handle, handle.machine.on_timer(at), at)

        handle.wakes_at = due
        self._timers.at(due, wake)

    # ---- frames -----------------------------------------------------------------------

    def on_frame(self, route: Route, frame: bytes, now: float) -> None:
        """A frame from the network; whatever it holds, nothing is raised."""
        try:
            message = wire.decode(frame, self._config.max_message_bytes)
            self._on_message(route, message, now)
        except (RemoteProtocolError, ConfigError) as problem:
            self._warn("a message was ignored: %s", problem, now)
        except LocalProtocolError:
            _log.exception("a message was ignored")

    def _warn(self, text: str, value: object, now: float) -> None:
        if now - self._warned_at >= _WARNINGS_EVERY_S:
            self._warned_at = now
            _log.warning(text, value)
        else:
            _log.debug(text, value)

    def _on_message(self, route: Route, message: Message, now: float) -> None:
        handle = self._links.find(route)
        if isinstance(message, wire.Hello):
            self._on_hello(route, message, now)
        elif handle is None:
            # Everything else needs a greeting first; an answer to an answer would loop.
            if not isinstance(message, wire.NotGreeted | wire.Reject | wire.Pong | wire.Bye):
                self._links.ask_for_greeting(route)
        elif isinstance(message, wire.Welcome | wire.Reject | wire.NotGreeted):
            self._on_answer(handle, route, message, now)
        elif isinstance(message, wire.Ping | wire.Pong | wire.Bye):
            self._on_heartbeat(handle, route, message, now)
        elif not handle.usable:
            self._links.ask_for_greeting(route)
        else:
            self._links.note(handle, route)
            self._run(handle, handle.machine.heard(now), now)
            if isinstance(message, wire.RegionsQuery):
                self._answer_query(route, message)
            elif isinstance(message, wire.Regions):
                self._on_regions(handle, message, now)
            else:
                handle.machine.use(now)
                self._watcher.on_message(handle, message, now)

    def _on_hello(self, route: Route, hello: wire.Hello, now: float) -> None:
        card = hello.card
        key = str(Address.parse(card.session))
        own = self._greeter.identity
        if key == own.session and card.incarnation != own.incarnation:
            self._refuse(
                route, card, greeting.REASON_ADDRESS, f"{key} is the address of the engine asked"
            )
            return
        handle = self._by_address.get(key)
        if handle is None or handle.over:
            try:
                handle = self._open(key, now)
            except FabricBusy as problem:
                self._refuse(route, card, greeting.REASON_FULL, str(problem))
                return
        misfit = self._greeter.misfit(card)
        known = handle.incarnation
        if misfit is None and known not in (0, card.incarnation):
            handle.stranger = (route, card)
        elif misfit is None:
            self._links.note(handle, route)
        if misfit is not None and known == 0:
            handle.problem = misfit
        text = None if misfit is None else str(misfit)
        effects = handle.machine.hello(card, now, text, hello.probe)
        self._run(handle, effects, now, route, card)
        if known == card.incarnation and handle.peer is not None:
            self._peers.learn(handle.peer, card)

    def _on_answer(
        self,
        handle: SessionHandle,
        route: Route,
        message: wire.Welcome | wire.Reject | wire.NotGreeted,
        now: float,
    ) -> None:
        if isinstance(message, wire.Welcome):
            misfit = self._greeter.misfit(message.card)
            if misfit is not None:
                handle.problem = misfit
            self._links.note(handle, route)
            text = None if misfit is None else str(misfit)
            known = handle.incarnation
            effects = handle.machine.welcome(message.card, message.to, now, text)
            self._run(handle, effects, now, route, message.card)
            if known == message.card.incarnation and handle.peer is not None:
                self._peers.learn(handle.peer, message.card)
        elif isinstance(message, wire.Reject):
            if message.to == self._greeter.identity.incarnation:
                handle.problem = self._greeter.refusal(message, handle.session)
            reason = message.text or message.reason
            self._run(handle, handle.machine.reject(message.to, reason, now), now, route)
        else:
            self._run(handle, handle.machine.not_greeted(now), now, route)

    def _on_heartbeat(
        self,
        handle: SessionHandle,
        route: Route,
        message: wire.Ping | wire.Pong | wire.Bye,
        now: float,
    ) -> None:
        incarnation = message.incarnation
        if isinstance(message, wire.Bye):
            self._run(handle, handle.machine.bye(incarnation, now), now, route)
            return
        if incarnation == handle.incarnation:
            self._links.note(handle, route)
        if isinstance(message, wire.Ping):
            self._run(handle, handle.machine.ping(incarnation, now), now, route)
        else:
            self._run(handle, handle.machine.heard(now, incarnation), now, route)
        peer = handle.peer
        if peer is not None and message.regions_epoch > peer.epoch and peer.query == 0:
            self._begin_refresh(handle, now)

    # ---- regions ----------------------------------------------------------------------

    def _answer_query(self, route: Route, message: wire.RegionsQuery) -> None:
        published = self._greeter.published()
        wanted = tuple(region for region in published.regions if region.region > message.after)
        fitting, complete = wire.fitting_regions(wanted, self._config.max_message_bytes // 2)
        answer = wire.Regions(
            query=message.query,
            epoch=published.epoch,
            after=message.after,
            regions=fitting,
            complete=complete,
            nics=() if message.after else published.nics,
        )
        self._links.transmit(route, answer)

    def _on_regions(self, handle: SessionHandle, message: wire.Regions, now: float) -> None:
        assert handle.peer is not None
        after = self._peers.apply(handle.peer, message)
        if after == 0:
            if handle.peer.query == 0:
                self._begin_refresh(handle, now)
        elif after is not None:
            self._links.send(handle, wire.RegionsQuery(query=message.query, after=after))

    def _begin_refresh(self, handle: SessionHandle, now: float) -> None:
        peer = handle.peer
        assert peer is not None
        query = self._peers.begin_refresh(peer)
        if not self._links.send(handle, wire.RegionsQuery(query=query)):
            self._peers.fail_refresh(peer)
            return

        def give_up(_now: float) -> None:
            if peer.query == query:
                self._peers.fail_refresh(peer)

        self._timers.at(now + self._config.handshake_timeout_s, give_up)

    # ---- sessions -----------------------------------------------------------------------

    def _open(self, key: str, now: float) -> SessionHandle:
        """A fresh handle for an address, in place of one that is over."""
        old = self._by_address.get(key)
        if old is None and len(self._by_address) >= self._config.max_peers:
            self._make_room(now)
        machine = SessionMachine(key, self._greeter.identity.incarnation, self._times)
        handle = SessionHandle(key, machine)
        if old is not None:
            self._links.forget(old)
        self._by_address[key] = handle
        return handle

    def _make_room(self, now: float) -> None:
        """Gives up the peer that matters least; raises `FabricBusy` when all matter.

        A peer that is not used is not watched either, so it may be long gone.
        """
        ranks = (SessionState.CLOSED, SessionState.REJECTED, SessionState.SUSPECT)
        unused_since = now - self._config.idle_after_s
        candidates = [
            (
                ranks.index(handle.state) if handle.state in ranks else len(ranks),
                handle.machine.used_at,
                key,
            )
            for key, handle in self._by_address.items()
            if handle.jobs == 0
            and (
                handle.state in ranks
                or (handle.state is SessionState.READY and handle.machine.used_at < unused_since)
            )
        ]
        if candidates:
            key = min(candidates)[2]
            handle = self._by_address[key]
            self._run(handle, handle.machine.close(now, "forgotten"), now)
            self._by_address.pop(key, None)
            return
        raise FabricBusy(
            f"Found {len(self._by_address)} peers, the most allowed. Raise max_peers, or close "
            "engines that are not needed."
        )

    def _look_up(self, handle: SessionHandle, address: Address) -> None:
        def found(result: Address | PeerUnreachable) -> None:
            self._watcher.later(lambda now: self._on_resolved(handle, result, now))

        self._resolver.start(address, found)

    def _on_resolved(
        self, handle: SessionHandle, result: Address | PeerUnreachable, now: float
    ) -> None:
        if handle.state is not SessionState.GREETING:
            return
        if isinstance(result, PeerUnreachable):
            handle.problem = result
            self._run(handle, handle.machine.close(now, "unknown name"), now)
            return
        self._links.dial(handle, result)
        self._links.send(handle, self._greeter.hello())

    def _refuse(self, route: Route, card: wire.Card, reason: str, text: str) -> None:
        _log.warning("%s is refused: %s", card.session, text)
        self._links.transmit(route, self._greeter.reject(card.incarnation, reason, text))

    # ---- effects ------------------------------------------------------------------------

    def _run(
        self,
        handle: SessionHandle,
        effects: list[steps.Effect],
        now: float,
        route: Route | None = None,
        card: wire.Card | None = None,
    ) -> None:
        """Carries out what a machine decided; ``route`` and ``card`` are of the message
        that made it decide, if one did."""
        for effect in effects:
            match effect:
                case steps.Send():
                    self._run_send(handle, effect, route, card)
                case steps.AddPeer():
                    if not self._add_peer(handle, effect.card, route, now):
                        break
                case steps.RemovePeer():
                    self._remove_peer(handle)
                case steps.Announce():
                    self._announce(handle, effect.reason, now)
                case steps.Probe():
                    self._links.probe(handle)
                case steps.Succeed():
                    self._succeed(handle, effect.card, now, route)
        self._settle(handle, now)
        self._arm(handle, now)

    def _run_send(
        self,
        handle: SessionHandle,
        effect: steps.Send,
        route: Route | None,
        card: wire.Card | None,
    ) -> None:
        identity = self._greeter.identity
        message: Message
        match effect.kind:
            case "hello":
                message = self._greeter.hello()
            case "welcome":
                message = self._greeter.welcome(0 if card is None else card.incarnation)
            case "reject":
                to = 0 if card is None else card.incarnation
                message = self._greeter.reject(to, greeting.REASON_LAYOUT, effect.reason)
            case "not_greeted":
                message = wire.NotGreeted(incarnation=identity.incarnation)
            case "ping" | "pong":
                kind = wire.Ping if effect.kind == "ping" else wire.Pong
                message = kind(incarnation=identity.incarnation, regions_epoch=self._greeter.epoch)
            case "bye":
                message = wire.Bye(incarnation=identity.incarnation)
        # A greeting that was asked for has to go back over the connection that is unknown.
        if route is not None and (effect.answer or effect.kind == "hello"):
            self._links.transmit(route, message)
        else:
            self._links.send(handle, message)

    def _add_peer(
        self, handle: SessionHandle, card: wire.Card, route: Route | None, now: float
    ) -> bool:
        """Makes the peer known to the fabric; False when that failed and ended the session."""
        try:
            handle.peer = self._peers.acquire(card)
        except EfaKvError as problem:
            handle.problem = problem
            if route is not None:
                self._refuse(route, card, greeting.REASON_FABRIC, str(problem))
            # The refusal says it all; a good-bye behind it would say less.
            effects = handle.machine.close(now, str(problem))
            quiet: list[steps.Effect] = [
                effect for effect in effects if not isinstance(effect, steps.Send)
            ]
            self._run(handle, quiet, now)
            return False
        handle.card = card
        handle.problem = None
        if not handle.peer.complete and handle.peer.query == 0:
            peer = handle.peer
            self._watcher.later(lambda at: self._complete(handle, at) if peer.users else None)
        return True

    def _complete(self, handle: SessionHandle, now: float) -> None:
        """Fetches the regions that did not fit into the greeting."""
        if handle.usable and handle.peer is not None and handle.peer.query == 0:
            self._begin_refresh(handle, now)

    def _remove_peer(self, handle: SessionHandle) -> None:
        peer, handle.peer = handle.peer, None
        if peer is not None:
            self._peers.release(peer)

    def _announce(self, handle: SessionHandle, reason: str | None, now: float) -> None:
        state = handle.state
        level = logging.WARNING if state is SessionState.REJECTED else logging.INFO
        text = handle.problem or reason
        _log.log(
            level, "session %s is %s%s", handle.session, state.value, f": {text}" if text else ""
        )
        if state is SessionState.READY or handle.over:
            waiters, handle.waiters = handle.waiters, []
            error = None if state is SessionState.READY else handle.error()
            for waiter in waiters:
                waiter(error)
        self._watcher.on_session(handle, reason, now)
        if state is SessionState.CLOSED and self._by_address.get(handle.session) is handle:
            self._links.forget(handle)
            del self._by_address[handle.session]

    def _succeed(
        self, handle: SessionHandle, card: wire.Card, now: float, route: Route | None
    ) -> None:
        """The next incarnation of a peer takes the address."""
        machine = SessionMachine(handle.session, self._greeter.identity.incarnation, self._times)
        new = SessionHandle(handle.session, machine)
        self._by_address[handle.session] = new
        self._links.inherit(handle, new)
        if handle.stranger is not None and handle.stranger[1].incarnation == card.incarnation:
            route, card = handle.stranger
            handle.stranger = None
        if route is not None:
            self._links.note(new, route)
        self._run(new, machine.hello(card, now), now, route, card)

    def _settle(self, handle: SessionHandle, now: float) -> None:
        if handle.state is SessionState.DRAINING and handle.jobs == 0:
            self._run(handle, handle.machine.settled(now), now)
