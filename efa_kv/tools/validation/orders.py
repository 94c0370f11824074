"""What rank 0 tells the hosts to do and what they answer, as texts of notes between engines."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from efa_kv.tools.validation.outside import Tool
from efa_kv.tools.validation.place import MAX_HOSTS
from efa_kv.tools.validation.samples import HostFacts, Sample
from efa_kv.tools.validation.schedule import Kind

#: The name of every note of a run.
NOTE_NAME: Final = "efa-kv-validate"
#: Longest output of a program that travels, in characters.
OUTPUT_CHARACTERS: Final = 30000


class OrderError(ValueError):
    """A note that is none of ours, or of another release."""


class Order(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all orders; ``number`` is repeated in the answer."""

    number: int


class Meet(Order, frozen=True, kw_only=True):
    """You are host number ``position``: get to know every engine, and try every pair of
    devices."""

    position: int
    sessions: Annotated[tuple[str, ...], Meta(max_length=MAX_HOSTS)]


class Measure(Order, frozen=True, kw_only=True):
    """Send to ``targets`` for ``duration_s``; compare bytes first where ``verify`` says so."""

    kind: Kind
    repeat: int
    targets: tuple[int, ...]
    duration_s: Annotated[float, Meta(gt=0, le=3600)]
    verify: bool = False


class Run(Order, frozen=True, kw_only=True):
    """Run a tool to its end."""

    tool: Tool


class End(Order, frozen=True, kw_only=True):
    """The run is over."""


class Joined(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A host that has found rank 0."""

    facts: HostFacts


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What came of an order: a sample, a program's status and output (of which only the end
    travels), or an error."""

    number: int
    sample: Sample | None = None
    status: int | None = None
    output: str = ""
    error: str = ""


AnyOrder = Meet | Measure | Run | End
AnyAnswer = Joined | Answer


def text_of(value: AnyOrder | AnyAnswer) -> str:
    """The note's text."""
    return msgspec.json.encode(value).decode()


def read_order(text: str) -> AnyOrder:
    """Raises `OrderError`."""
    order: AnyOrder = _read(text, AnyOrder)
    return order


def read_answer(text: str) -> AnyAnswer:
    """Raises `OrderError`."""
    answer: AnyAnswer = _read(text, AnyAnswer)
    return answer


def _read(text: str, kind: Any) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as problem:
        raise OrderError(f"found a note that is none of this release's: {problem}") from None
