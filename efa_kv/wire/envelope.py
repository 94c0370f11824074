"""The frame around every control message, and the base class of the messages.

A frame is an 8-byte header followed by a msgpack body:

    bytes 0-3   magic "EKV1"
    bytes 4-5   wire version, little-endian
    bytes 6-7   reserved, 0

Magic, version and size are checked before a byte of the body is decoded.

Wire versions:
    1   first version
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from efa_kv.errors import RemoteProtocolError

WIRE_VERSION: Final = 1
MAGIC: Final = b"EKV1"
MAX_MESSAGE_BYTES: Final = 1 << 20

_HEADER: Final = struct.Struct("<4sHH")
HEADER_BYTES: Final = _HEADER.size


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all control messages; subclasses give ``tag="name"``.

    Fields are only ever appended, with defaults; unknown fields are ignored, so that a
    newer peer of the same wire version is understood.
    """


def seal(body: bytes) -> bytes:
    """The frame that carries ``body``."""
    return _HEADER.pack(MAGIC, WIRE_VERSION, 0) + body


def open_frame(frame: bytes | memoryview, max_bytes: int = MAX_MESSAGE_BYTES) -> memoryview:
    """The body of a frame; raises `RemoteProtocolError` and nothing else."""
    size = len(frame)
    if size < HEADER_BYTES:
        raise RemoteProtocolError(
            f"found a frame of {size} bytes; expected at least {HEADER_BYTES}."
        )
    if size > max_bytes:
        raise RemoteProtocolError(f"found a frame of {size} bytes; expected at most {max_bytes}.")
    magic, version, _reserved = _HEADER.unpack_from(frame)
    if magic != MAGIC:
        raise RemoteProtocolError(
            f"found a frame that begins with {magic!r}; expected {MAGIC!r}. "
            "Something that is not efa-kv talks to this port."
        )
    if version != WIRE_VERSION:
        raise RemoteProtocolError(
            f"found wire version {version}; expected {WIRE_VERSION}. "
            "Run the same release of efa-kv on both sides."
        )
    return memoryview(frame)[HEADER_BYTES:]
