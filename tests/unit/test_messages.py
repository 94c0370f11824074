"""Frames and messages: limits first, then content."""

from __future__ import annotations

import pickle

import msgspec
import pytest

from efa_kv.errors import LocalProtocolError, RemoteProtocolError
from efa_kv.types import KeyRecord, NicRecord, ProcessRecord, RegionRecord
from efa_kv.wire import messages
from efa_kv.wire.envelope import HEADER_BYTES, MAGIC, WIRE_VERSION, seal
from efa_kv.wire.messages import Card, Hello, Ping, Regions, decode, encode, fitting_regions


def make_card(incarnation: int = 7, **changes: object) -> Card:
    values: dict[str, object] = {
        "session": "127.0.0.1:5000",
        "incarnation": incarnation,
        "process": ProcessRecord("boot", "pid:[1]", 1, 2),
        "nics": (NicRecord("eth0", "net", "tcp", b"\x01\x02", 10**11, 0),),
        "regions": (region(1),),
        "regions_epoch": 1,
        "fingerprint": b"\xff" * 32,
        "fields": {"model": "tiny"},
        "layout": b"\x00opaque",
    }
    return Card(**{**values, **changes})  # type: ignore[arg-type]


def region(number: int, address: int = 0x7F0000000000) -> RegionRecord:
    return RegionRecord(number, address, 4096, 0, 3, (KeyRecord(0, 2**64 - 1, 0, 0, 4096),))


def test_every_message_survives_the_wire() -> None:
    samples = [
        Hello(card=make_card()),
        messages.Welcome(to=2**64 - 1, card=make_card()),
        messages.Reject(to=1, incarnation=2, reason="layout", text="no", fields={"a": "b"}),
        Ping(incarnation=3, regions_epoch=4),
        messages.Pong(incarnation=3),
        messages.NotGreeted(incarnation=3),
        messages.Bye(incarnation=3),
        messages.RegionsQuery(query=1, after=9),
        Regions(query=0, epoch=2, regions=(region(1),), removed=(4, 5)),
    ]
    assert {type(sample) for sample in samples} == set(messages.SESSION_TYPES)
    for sample in samples:
        assert decode(encode(sample)) == sample


def test_tags_are_unique() -> None:
    tags = [kind.__struct_config__.tag for kind in messages.MESSAGE_TYPES]
    assert len(set(tags)) == len(tags)


def _frame(body: object) -> bytes:
    return seal(msgspec.msgpack.encode(body))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"EKV1",
        MAGIC + b"\x01\x00\x00",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        MAGIC + (WIRE_VERSION + 1).to_bytes(2, "little") + b"\0\0" + b"\x80",
        seal(b""),
        seal(b"\xc1"),
        seal(b"\xff" * 100),
        seal(b"\x91" * 100_000),
        pickle.dumps({"type": "hello"}),
        seal(pickle.dumps({"type": "hello"})),
        _frame(None),
        _frame([1, 2, 3]),
        _frame({"type": "unknown"}),
        _frame({"type": 5}),
        _frame({"type": "ping"}),
        _frame({"type": "ping", "incarnation": "x"}),
        _frame({"type": "ping", "incarnation": -1}),
        _frame({"type": "hello", "card": None}),
        _frame({"type": "regions", "query": 0, "epoch": 1, "regions": [[1, 2]]}),
        _frame({"type": "regions", "query": 0, "epoch": 1, "removed": [2**63, "a"]}),
    ],
)
def test_malformed_frames_raise_one_error_only(frame: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="found"):
        decode(frame)


def test_size_is_checked_before_the_body() -> None:
    frame = encode(Ping(incarnation=1))
    assert decode(frame, len(frame)) == Ping(incarnation=1)
    with pytest.raises(RemoteProtocolError, match="at most"):
        decode(frame, len(frame) - 1)


def test_a_full_message_is_sent_and_one_byte_more_is_not() -> None:
    message = messages.Reject(to=1, incarnation=1, reason="x", text="y" * 1000)
    size = len(encode(message))
    assert len(encode(message, size)) == size
    with pytest.raises(LocalProtocolError, match="at most"):
        encode(message, size - 1)


def test_unknown_fields_of_a_newer_peer_are_ignored() -> None:
    body = {"type": "ping", "incarnation": 3, "regions_epoch": 0, "mood": "good"}
    assert decode(_frame(body)) == Ping(incarnation=3)


def test_hostile_cards_are_refused() -> None:
    raw = msgspec.to_builtins(Hello(card=make_card()), str_keys=True)
    for place, value in [
        (("session",), "x" * 1000),
        (("incarnation",), 0),
        (("nics",), [["n" * 64, "f", "p", b"a"]]),
        (("nics",), [["n", "f", "p", b"a" * 129]]),
        (("nics",), [["n", "f", "p", b""]]),
        (("nics",), [["n", "f", "p", b"a"]] * 257),
        (("regions",), [[0, 1, 1, 0, 3, []]]),
        (("regions",), [[1, -1, 1, 0, 3, []]]),
        (("fingerprint",), b"x" * 257),
    ]:
        card = {**raw["card"], place[0]: value}
        with pytest.raises(RemoteProtocolError):
            decode(_frame({"type": "hello", "card": card}))


def test_regions_are_cut_to_fit() -> None:
    regions = tuple(region(number) for number in range(1, 101))
    all_bytes = sum(len(msgspec.msgpack.encode(entry)) for entry in regions)
    assert fitting_regions(regions, all_bytes) == (regions, True)
    fitting, complete = fitting_regions(regions, all_bytes - 1)
    assert (len(fitting), complete) == (99, False)
    assert fitting_regions(regions, 0) == ((), False)


def test_header_size() -> None:
    assert HEADER_BYTES == 8


def test_the_gate_of_a_card_is_a_descriptor_or_none() -> None:
    told = decode(encode(Hello(card=make_card(gate=12))))
    assert isinstance(told, Hello)
    assert told.card.gate == 12
    body = msgspec.msgpack.decode(encode(Hello(card=make_card()))[HEADER_BYTES:])
    assert body["card"].pop("gate") == -1
    silent = decode(_frame(body))
    assert isinstance(silent, Hello)
    assert silent.card.gate == -1, "a peer that says nothing offers nothing"
    for wrong in (-2, 1 << 31, "3"):
        body["card"]["gate"] = wrong
        with pytest.raises(RemoteProtocolError):
            decode(_frame(body))
