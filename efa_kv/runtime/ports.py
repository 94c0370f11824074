"""What is behind a TCP port: a free one to take, and who it is that answers at another.

Only for the moments before an engine runs and after a greeting failed.  All calls block
for a bounded time; there is no state.
"""

from __future__ import annotations

import json
import random
import socket
import struct
import time
from typing import Final

from efa_kv.errors import ConfigError, PeerUnreachable
from efa_kv.runtime.rendezvous import resolve
from efa_kv.types import Address

_TRIES: Final = 256
_ANSWER_MAX_BYTES: Final = 1 << 20
# ZeroMQ speaks first, with ten bytes that begin and end like this.
_ZMQ_FIRST: Final = 0xFF
_ZMQ_TENTH: Final = 0x7F
_ZMQ_SIGNATURE_BYTES: Final = 10
# Mooncake's daemon waits for a frame: length, kind, JSON.  Kind 1 asks who it is.
_MOONCAKE_FRAME: Final = struct.Struct("<QB")
_MOONCAKE_LENGTH: Final = struct.Struct("<Q")
_MOONCAKE_ASK: Final = 1
_SPEAKS_FIRST_S: Final = 0.3

NOBODY: Final = "nobody"
ZMQ: Final = "zmq"
MOONCAKE: Final = "mooncake"
UNKNOWN: Final = "unknown"


def free_port(host: str, low: int, high: int) -> int:
    """A port of ``host`` from ``low`` to ``high`` that nobody listens on; raises
    `ConfigError`.  Somebody else may take it before it is bound again."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ports = range(low, high + 1)
    # Random, because the engines of one host start together.
    for port in random.sample(ports, min(_TRIES, len(ports))):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise ConfigError(
        f"found no free port from {low} to {high} at {host}; widen MC_MIN_RPC_PORT and "
        "MC_MAX_RPC_PORT, or check that the address is one of this machine."
    )


def who_listens(session: str, timeout_s: float) -> tuple[str, str]:
    """Who answers at ``host:port``: one of the words above, and a sentence."""
    deadline = time.monotonic() + timeout_s
    try:
        address = resolve(Address.parse(session))
        connection = socket.create_connection((address.host, address.port), timeout_s)
    except (OSError, ConfigError, PeerUnreachable) as problem:
        return NOBODY, f"nobody answers there: {problem}"
    with connection:
        try:
            return _identify(connection, deadline)
        except OSError as problem:
            return UNKNOWN, f"what listens there broke the connection off: {problem}"


def _identify(connection: socket.socket, deadline: float) -> tuple[str, str]:
    connection.settimeout(_SPEAKS_FIRST_S)
    try:
        first = _receive(connection, _ZMQ_SIGNATURE_BYTES)
    except TimeoutError:
        first = b""
    if len(first) == _ZMQ_SIGNATURE_BYTES and (first[0], first[9]) == (_ZMQ_FIRST, _ZMQ_TENTH):
        return ZMQ, (
            "a ZeroMQ socket listens there that did not greet back: another program, an efa-kv "
            "with another secret, or one that is stopped"
        )
    if first:
        return UNKNOWN, "what listens there speaks another protocol"
    connection.settimeout(max(_SPEAKS_FIRST_S, deadline - time.monotonic()))
    body = b"{}"
    connection.sendall(_MOONCAKE_FRAME.pack(len(body) + 1, _MOONCAKE_ASK) + body)
    head = _receive(connection, _MOONCAKE_LENGTH.size)
    if len(head) < _MOONCAKE_LENGTH.size:
        return UNKNOWN, "what listens there closed the connection"
    (length,) = _MOONCAKE_LENGTH.unpack(head)
    if not 2 < length <= _ANSWER_MAX_BYTES:
        return UNKNOWN, "what listens there speaks another protocol"
    return _read_mooncake(_receive(connection, length))


def _read_mooncake(answer: bytes) -> tuple[str, str]:
    try:
        card = json.loads(answer[1:])  # behind the byte that says what kind of answer it is
    except ValueError:
        return UNKNOWN, "what listens there speaks another protocol"
    if not isinstance(card, dict) or not {"protocol", "devices", "buffers"} & card.keys():
        return UNKNOWN, "what listens there speaks another protocol"
    return MOONCAKE, (
        f"a Mooncake transfer engine listens there (protocol {card.get('protocol')!r}), which "
        "efa-kv cannot talk to; run efa-kv on both sides, or Mooncake on both"
    )


def _receive(connection: socket.socket, size: int) -> bytes:
    """``size`` bytes, or fewer when the other side closed; raises TimeoutError."""
    received = bytearray()
    while len(received) < size:
        piece = connection.recv(size - len(received))
        if not piece:
            break
        received += piece
    return bytes(received)
