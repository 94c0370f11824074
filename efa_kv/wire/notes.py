"""Notes: short texts that one engine's user sends to another's, each delivered once.

NOTE -> NOTE_TAKEN    sent again until it is answered; idempotent by (sender, number)
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from efa_kv.types import U64
from efa_kv.wire.envelope import Message

#: Longest name and text in characters.
NAME_CHARACTERS_LIMIT: Final = 512
TEXT_CHARACTERS_LIMIT: Final = 65536


class Note(Message, frozen=True, kw_only=True, tag="note"):
    """A text for the user of the engine that receives it."""

    number: U64
    name: Annotated[str, Meta(max_length=NAME_CHARACTERS_LIMIT)]
    text: Annotated[str, Meta(max_length=TEXT_CHARACTERS_LIMIT)]


class NoteTaken(Message, frozen=True, kw_only=True, tag="note_taken"):
    """The note of this number is kept for the user."""

    number: U64


NOTE_TYPES: Final[tuple[type[Message], ...]] = (Note, NoteTaken)
