"""Runs a state machine that is written down as a table.

A table maps (state, event) to a `Move`: the next state and the names of the actions
to take on the way.  A pair that is not in the table cannot happen; if it does, that is
a bug on this side and raises `LocalProtocolError` before anything changed.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Generic, TypeVar

import msgspec

from efa_kv.errors import LocalProtocolError

State = TypeVar("State", bound=enum.Enum)
Event = TypeVar("Event", bound=enum.Enum)


class Move(msgspec.Struct, Generic[State], frozen=True):
    """Where an event leads, and the actions to take, in order."""

    state: State
    actions: tuple[str, ...] = ()


Table = Mapping[tuple[State, Event], Move[State]]


def look_up(name: str, table: Table[State, Event], state: State, event: Event) -> Move[State]:
    """The move for ``event`` in ``state``; raises `LocalProtocolError`.

    ``name`` says which machine this is, for the error's text.
    """
    move = table.get((state, event))
    if move is None:
        allowed = ", ".join(sorted(known.name for (at, known) in table if at is state))
        raise LocalProtocolError(
            f"{name}: found event {event.name} in state {state.name}; "
            f"expected one of {allowed or 'none'}."
        )
    return move
