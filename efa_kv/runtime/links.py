"""Which connection leads to which session, and sending over the right one.

Owner: the control thread.  A session can be reached over connections that the peer made
and over the one that we dialled; the one on which the peer was heard last is used, and
ours is the fallback.
"""

from __future__ import annotations

import logging

from efa_kv.errors import LocalProtocolError
from efa_kv.runtime.greeting import Greeter
from efa_kv.runtime.handle import SessionHandle
from efa_kv.runtime.router import Route, Router
from efa_kv.types import Address
from efa_kv.wire.envelope import Message
from efa_kv.wire.messages import NotGreeted, encode
from efa_kv.wire.session import SessionState

_log = logging.getLogger(__name__)


class Links:
    """The connections of all sessions.  No method blocks."""

    def __init__(self, router: Router, greeter: Greeter, max_message_bytes: int) -> None:
        self._router = router
        self._greeter = greeter
        self._max_message_bytes = max_message_bytes
        self._by_route: dict[Route, SessionHandle] = {}

    def find(self, route: Route) -> SessionHandle | None:
        """The session that greeted, or was dialled, on this connection."""
        return self._by_route.get(route)

    def dial(self, handle: SessionHandle, address: Address) -> Route:
        """Makes our own connection to a session, to a literal address."""
        handle.dialled = self._router.dial(address)
        self._by_route[handle.dialled] = handle
        return handle.dialled

    def note(self, handle: SessionHandle, route: Route) -> None:
        """The peer was heard on ``route``, so it is the one to answer on."""
        routes = handle.routes
        if routes and routes[-1] == route:
            return
        if route in routes:
            routes.remove(route)
        elif len(routes) == routes.maxlen:
            dropped = routes.popleft()
            if dropped != handle.dialled:
                self._by_route.pop(dropped, None)
        routes.append(route)
        self._by_route[route] = handle

    def forget(self, handle: SessionHandle) -> None:
        """Drops every connection of a session that is over."""
        for route in {*handle.routes, handle.dialled}:
            if route is not None and self._by_route.get(route) is handle:
                del self._by_route[route]
                if route.outbound:
                    self._router.hang_up(route)
        handle.routes.clear()
        handle.dialled = None

    def inherit(self, old: SessionHandle, new: SessionHandle) -> None:
        """The connection that we dialled now leads to the peer's next incarnation."""
        if old.dialled is not None:
            new.dialled, old.dialled = old.dialled, None
            self._by_route[new.dialled] = new
            if new.dialled in old.routes:
                old.routes.remove(new.dialled)
        self.forget(old)

    # ---- sending ----------------------------------------------------------------------

    def transmit(self, route: Route, message: Message) -> bool:
        """Queues a message on one connection; False when it was dropped."""
        try:
            frame = encode(message, self._max_message_bytes)
        except LocalProtocolError:
            _log.exception("a message is too large to send")
            return False
        return self._router.send(route, frame)

    def ask_for_greeting(self, route: Route) -> None:
        """Tells whoever is there that we don't know it."""
        self.transmit(route, NotGreeted(incarnation=self._greeter.identity.incarnation))

    def send(self, handle: SessionHandle, message: Message) -> bool:
        """Queues a message for a session; False when it was dropped."""
        while handle.routes:
            route = handle.routes[-1]
            if self.transmit(route, message):
                return True
            if route.outbound and self._router.is_dialled(route):
                return False  # the peer does not take what is queued for it
            # The connection is gone, or the peer made it and it is stuck.
            handle.routes.pop()
            self._drop(handle, route)
        dialled = handle.dialled or self._redial(handle)
        if dialled is None:
            return False
        if self.transmit(dialled, message):
            return True
        if not self._router.is_dialled(dialled):
            self._drop(handle, dialled)  # the next message dials again
        return False

    def _drop(self, handle: SessionHandle, route: Route) -> None:
        self._by_route.pop(route, None)
        if handle.dialled == route:
            handle.dialled = None

    def probe(self, handle: SessionHandle) -> None:
        """Greets the session's own address, whoever answers there."""
        dialled = handle.dialled
        if dialled is None:
            self._redial(handle)
        else:
            self.transmit(dialled, self._greeter.hello(probe=True))

    def _redial(self, handle: SessionHandle) -> Route | None:
        """Our own connection to a session that only the peer had connected so far."""
        if handle.state is SessionState.GREETING:
            return None  # its name is still being looked up
        address = Address.parse(handle.session)
        if not address.is_literal:
            return None
        route = self.dial(handle, address)
        self.transmit(route, self._greeter.hello())
        return route
