"""Whatever arrives, decoding gives a message or RemoteProtocolError."""

from __future__ import annotations

import contextlib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from efa_kv.errors import RemoteProtocolError
from efa_kv.types import KeyRecord, NicRecord, ProcessRecord, RegionRecord
from efa_kv.wire import messages
from efa_kv.wire.envelope import Message, seal
from efa_kv.wire.messages import Card, decode, encode

u64 = st.integers(0, 2**64 - 1)
incarnations = st.integers(1, 2**64 - 1)
names = st.text(max_size=63)
keys = st.builds(KeyRecord, st.integers(0, 65535), u64, u64, u64, u64)
regions = st.builds(
    RegionRecord,
    incarnations,
    u64,
    u64,
    st.integers(0, 1),
    st.integers(0, 3),
    st.lists(keys, max_size=4).map(tuple),
)
region_tuples = st.lists(regions, max_size=4).map(tuple)
nics = st.builds(
    NicRecord,
    names,
    names,
    names,
    st.binary(min_size=1, max_size=128),
    u64,
    st.integers(-1, 65535),
)
cards = st.builds(
    Card,
    session=st.text(max_size=300),
    incarnation=incarnations,
    process=st.builds(ProcessRecord, names, names, u64, u64),
    nics=st.lists(nics, max_size=4).map(tuple),
    regions=region_tuples,
    regions_epoch=u64,
    complete=st.booleans(),
    fingerprint=st.binary(max_size=256),
    fields=st.dictionaries(st.text(), st.text(), max_size=4),
    layout=st.none() | st.binary(max_size=100),
)
any_message = st.one_of(
    st.builds(messages.Hello, card=cards),
    st.builds(messages.Welcome, to=u64, card=cards),
    st.builds(
        messages.Reject,
        to=u64,
        incarnation=u64,
        reason=st.text(),
        text=st.text(),
        fields=st.dictionaries(st.text(), st.text(), max_size=4),
    ),
    st.builds(messages.Ping, incarnation=u64, regions_epoch=u64),
    st.builds(messages.Pong, incarnation=u64, regions_epoch=u64),
    st.builds(messages.NotGreeted, incarnation=u64),
    st.builds(messages.Bye, incarnation=u64),
    st.builds(messages.RegionsQuery, query=u64, after=u64),
    st.builds(
        messages.Regions,
        query=u64,
        epoch=u64,
        after=u64,
        complete=st.booleans(),
        regions=region_tuples,
        removed=st.lists(u64, max_size=4).map(tuple),
    ),
)


@given(any_message)
def test_round_trip(message: Message) -> None:
    assert decode(encode(message)) == message


@given(st.binary(max_size=2000), st.booleans())
def test_noise(noise: bytes, sealed: bool) -> None:
    with contextlib.suppress(RemoteProtocolError):
        decode(seal(noise) if sealed else noise)


@given(any_message, st.data())
def test_damaged_frames(message: Message, data: Any) -> None:
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 8))):
        place = data.draw(st.integers(0, len(frame) - 1))
        match data.draw(st.sampled_from(("change", "cut", "repeat"))):
            case "change":
                frame[place] = data.draw(st.integers(0, 255))
            case "cut":
                del frame[place:]
            case _:
                frame[place:place] = frame[place : place + 16]
        if not frame:
            break
    with contextlib.suppress(RemoteProtocolError):
        decode(bytes(frame))
