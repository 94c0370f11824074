"""The control plane's sockets: frames in, frames out, nothing about their meaning.

Owner: the control thread, alone; ZeroMQ sockets must not be shared.  Two ROUTER sockets:
``inbound`` is bound to the engine's address, ``outbound`` dials peers.  One socket for all
dialled peers keeps the cost of a peer to one TCP connection.

Nothing here blocks: sends to a peer whose queue is full or that is gone are dropped and
reported, receives return what is there.  Messages are single frames.

With a shared secret both sockets speak CURVE: both sides prove that they know the secret,
because both key pairs are derived from it, and everything is encrypted.
"""

from __future__ import annotations

import hashlib
import logging

import msgspec
import zmq
from zmq.utils import z85

from efa_kv.errors import ConfigError
from efa_kv.runtime.rendezvous import port_holder
from efa_kv.types import Address

_log = logging.getLogger(__name__)

_AUTH_ENDPOINT = "inproc://zeromq.zap.01"
_LISTEN_BACKLOG = 512
_LAST_WORDS_MS = 100
_RECONNECT_MS = 100
_RECONNECT_MAX_MS = 500
# A connection whose data is not acknowledged for this long is renewed, so that a host
# that went away without a word does not hold a dead connection for a quarter of an hour.
_UNACKNOWLEDGED_MAX_MS = 10_000
# Two file descriptors a peer and some for the rest; ZeroMQ's own default is 1023 sockets.
_SOCKETS_MAX = 65_536


class Route(msgspec.Struct, frozen=True):
    """A way to a peer: a connection it made to us, or one that we dialled."""

    outbound: bool
    identity: bytes


class KeyPair(msgspec.Struct, frozen=True):
    """A CURVE key pair in Z85."""

    public: bytes
    secret: bytes


def derive_key_pair(secret: bytes, role: str) -> KeyPair:
    """The key pair of ``role`` ("server" or "client") that a shared secret gives."""
    # A slow hash, because people choose short secrets and the public key is visible.
    raw = hashlib.scrypt(
        secret, salt=b"efa-kv control plane " + role.encode(), n=1 << 14, r=8, p=1, dklen=32
    )
    encoded: bytes = z85.encode(raw)
    public: bytes = zmq.curve_public(encoded)
    return KeyPair(public, encoded)


class Router:
    """The sockets of one engine.  All methods: control thread only, except the
    constructor, which may run before that thread starts.

    Raises `ConfigError` when the address cannot be bound.
    """

    def __init__(
        self, address: Address, *, secret: bytes | None, queue_messages: int, max_bytes: int
    ) -> None:
        """``address.host`` is an IP address; port 0 takes a free one."""
        self._queue_messages = queue_messages
        self._max_bytes = max_bytes
        self._context = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, _SOCKETS_MAX)
        self._server = derive_key_pair(secret, "server") if secret else None
        self._client = derive_key_pair(secret, "client") if secret else None
        self._auth = self._open_auth() if secret else None
        self._endpoints: dict[bytes, str] = {}
        self._dialled = 0
        try:
            self.inbound = self._open_socket(address.is_ipv6)
            self.outbound = self._open_socket(True)
            self.port = self._bind(address)
        except BaseException:
            self.close()
            raise

    # ---- sockets --------------------------------------------------------------------

    def _open_socket(self, ipv6: bool) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, int(ipv6))
        socket.setsockopt(zmq.SNDHWM, self._queue_messages)
        socket.setsockopt(zmq.RCVHWM, self._queue_messages)
        socket.setsockopt(zmq.MAXMSGSIZE, self._max_bytes)
        socket.setsockopt(zmq.BACKLOG, _LISTEN_BACKLOG)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        socket.setsockopt(zmq.TCP_MAXRT, _UNACKNOWLEDGED_MAX_MS)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
        # A send to a peer that is gone or full is an error that we see, not silence.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        return socket

    def _bind(self, address: Address) -> int:
        if self._server is not None:
            self.inbound.setsockopt(zmq.CURVE_SERVER, 1)
            self.inbound.setsockopt(zmq.CURVE_SECRETKEY, self._server.secret)
            self.inbound.setsockopt(zmq.ZAP_DOMAIN, b"efa-kv")
        if self._server is not None and self._client is not None:
            self.outbound.setsockopt(zmq.CURVE_SERVERKEY, self._server.public)
            self.outbound.setsockopt(zmq.CURVE_SECRETKEY, self._client.secret)
            self.outbound.setsockopt(zmq.CURVE_PUBLICKEY, self._client.public)
        host = f"[{address.host}]" if address.is_ipv6 else address.host
        port = str(address.port) if address.port else "*"
        try:
            self.inbound.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as problem:
            if problem.errno == zmq.EADDRINUSE:
                holder = port_holder(address.port)
                raise ConfigError(
                    f"found port {address.port} of {address.host} in use by {holder}; expected "
                    "it to be free. Choose another port, or 0 for any."
                ) from None
            raise ConfigError(
                f"found the address {address}, which cannot be bound: {problem}. "
                "Set host to an address of this machine."
            ) from None
        endpoint = self.inbound.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return int(endpoint.rstrip(b"\0").rpartition(b":")[2])

    def close(self) -> None:
        """Closes everything; what is queued has a moment to leave."""
        self._context.destroy(linger=_LAST_WORDS_MS)

    # ---- peers ----------------------------------------------------------------------

    def dial(self, address: Address) -> Route:
        """Begins to connect to a literal address; sends are queued until it is there."""
        self._dialled += 1
        # The leading zero byte belongs to ZeroMQ's own identities.
        identity = b"\1" + self._dialled.to_bytes(8, "little")
        endpoint = f"tcp://{address}"
        self.outbound.setsockopt(zmq.CONNECT_ROUTING_ID, identity)
        self.outbound.connect(endpoint)
        self._endpoints[identity] = endpoint
        return Route(True, identity)

    def hang_up(self, route: Route) -> None:
        """Drops a dialled connection and what is queued for it."""
        endpoint = self._endpoints.pop(route.identity, None)
        if endpoint is not None:
            try:
                self.outbound.disconnect(endpoint)
            except zmq.ZMQError as problem:
                _log.debug("disconnect from %s: %s", endpoint, problem)

    # ---- frames ---------------------------------------------------------------------

    def send(self, route: Route, frame: bytes) -> bool:
        """Queues a frame; False when the peer's queue is full or the route is gone."""
        socket = self.outbound if route.outbound else self.inbound
        try:
            socket.send_multipart((route.identity, frame), flags=zmq.NOBLOCK)
        except zmq.ZMQError as problem:
            if route.outbound and problem.errno == zmq.EHOSTUNREACH:
                self._endpoints.pop(route.identity, None)
            return False
        return True

    def is_dialled(self, route: Route) -> bool:
        """Whether a connection that we made still exists (hanging up another one to the
        same address takes it along)."""
        return route.identity in self._endpoints

    def receive(self, budget: int) -> list[tuple[Route, bytes]]:
        """At most ``budget`` frames from each socket, in order.

        A message of several frames is nothing that we send and is dropped.
        """
        frames: list[tuple[Route, bytes]] = []
        for socket, outbound in ((self.inbound, False), (self.outbound, True)):
            for _ in range(budget):
                try:
                    parts = socket.recv_multipart(flags=zmq.NOBLOCK)
                except zmq.ZMQError:
                    break
                if len(parts) == 2:
                    frames.append((Route(outbound, parts[0]), parts[1]))
        return frames

    # ---- authentication -------------------------------------------------------------

    @property
    def auth(self) -> zmq.Socket[bytes] | None:
        """The socket on which ZeroMQ asks whether a client's key is welcome, if any."""
        return self._auth

    def _open_auth(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.REP)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(_AUTH_ENDPOINT)
        return socket

    def answer_auth(self) -> None:
        """Answers the questions that wait on `auth`: only our own client key is welcome."""
        assert self._auth is not None
        assert self._client is not None
        expected = z85.decode(self._client.public)
        while True:
            try:
                parts = self._auth.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            version, request, mechanism = parts[0], parts[1], parts[5]
            known = mechanism == b"CURVE" and parts[6:7] == [expected]
            if not known:
                _log.warning("refused a connection from %r: its secret is another one", parts[3])
            status, text = (b"200", b"OK") if known else (b"400", b"unknown key")
            self._auth.send_multipart((version, request, status, text, b"", b""))
