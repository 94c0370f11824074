"""The sockets: bounded, never blocking, single frames, authenticated if asked for."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from efa_kv.errors import ConfigError, PeerUnreachable
from efa_kv.runtime.rendezvous import Resolver, port_holder, resolve, resolve_own
from efa_kv.runtime.router import Route, Router, derive_key_pair
from efa_kv.types import Address

Open = Callable[..., Router]


@pytest.fixture
def open_router() -> Iterator[Open]:
    opened: list[Router] = []

    def make(
        host: str = "127.0.0.1", port: int = 0, secret: bytes | None = None, queue: int = 10
    ) -> Router:
        router = Router(Address(host, port), secret=secret, queue_messages=queue, max_bytes=1 << 16)
        opened.append(router)
        return router

    yield make
    for router in opened:
        router.close()


def _receive(router: Router, count: int = 1, timeout_s: float = 3.0) -> list[tuple[Route, bytes]]:
    found: list[tuple[Route, bytes]] = []
    deadline = time.monotonic() + timeout_s
    while len(found) < count and time.monotonic() < deadline:
        if router.auth is not None:
            router.answer_auth()
        found += router.receive(100)
        time.sleep(0.002)
    return found


def _pump(*routers: Router, seconds: float = 0.5) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for router in routers:
            if router.auth is not None:
                router.answer_auth()
        time.sleep(0.002)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_there_and_back(open_router: Open, host: str) -> None:
    here, there = open_router(host), open_router(host)
    route = here.dial(Address(host, there.port))
    assert here.send(route, b"hello")
    [(back, frame)] = _receive(there)
    assert (frame, back.outbound) == (b"hello", False)
    assert there.send(back, b"welcome")
    assert _receive(here) == [(route, b"welcome")]


def test_sends_to_nobody_are_reported(open_router: Open) -> None:
    router = open_router()
    assert not router.send(Route(False, b"\0nobody"), b"x")
    assert not router.send(Route(True, b"\1nobody"), b"x")


def test_a_full_queue_is_reported_and_other_peers_are_not_affected(open_router: Open) -> None:
    here, there = open_router(), open_router()
    with zmq.Context() as context, context.socket(zmq.STREAM) as silent:
        silent.linger = 0
        port = silent.bind_to_random_port("tcp://127.0.0.1")
        dead = here.dial(Address("127.0.0.1", port))
        alive = here.dial(Address("127.0.0.1", there.port))
        begun = time.monotonic()
        sent = [here.send(dead, b"x" * 60_000) for _ in range(1000)]
        assert time.monotonic() - begun < 1
        assert not sent[-1]
        assert here.send(alive, b"y")
        assert [frame for _, frame in _receive(there)] == [b"y"]
        here.hang_up(dead)
        assert not here.send(dead, b"x")


def test_messages_of_several_frames_are_dropped(open_router: Open) -> None:
    router = open_router()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(f"tcp://127.0.0.1:{router.port}")
        dealer.send_multipart([b"a", b"b"])
        dealer.send(b"c")
        assert [frame for _, frame in _receive(router)] == [b"c"]


def test_frames_above_the_limit_do_not_arrive(open_router: Open) -> None:
    here, there = open_router(), open_router()
    here.send(here.dial(Address("127.0.0.1", there.port)), b"x" * ((1 << 16) + 1))
    assert _receive(there, timeout_s=0.3) == []


def test_a_port_in_use_names_its_holder(open_router: Open) -> None:
    router = open_router()
    assert str(os.getpid()) in port_holder(router.port)
    with pytest.raises(ConfigError, match=f"port {router.port}.*process {os.getpid()}"):
        open_router(port=router.port)
    with pytest.raises(ConfigError, match="cannot be bound"):
        open_router(host="192.0.2.1")


@pytest.mark.parametrize(
    ("mine", "theirs", "arrives"),
    [
        (b"right", b"right", True),
        (b"right", b"wrong", False),
        (b"right", None, False),
        (None, b"right", False),
    ],
)
def test_secrets(
    open_router: Open, mine: bytes | None, theirs: bytes | None, arrives: bool
) -> None:
    here, there = open_router(secret=mine), open_router(secret=theirs)
    here.send(here.dial(Address("127.0.0.1", there.port)), b"hello")
    found = _receive(there, timeout_s=3.0 if arrives else 0.4)
    assert [frame for _, frame in found] == ([b"hello"] if arrives else [])


def test_the_client_key_is_checked_too(open_router: Open) -> None:
    router = open_router(secret=b"right")
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.curve_serverkey = derive_key_pair(b"right", "server").public
        dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
        dealer.connect(f"tcp://127.0.0.1:{router.port}")
        dealer.sndtimeo = 500  # there is nobody to send to once it was refused
        with contextlib.suppress(zmq.Again):
            dealer.send(b"hello")
        _pump(router)
        assert router.receive(10) == []


def test_keys_depend_on_secret_and_role() -> None:
    keys = {derive_key_pair(secret, role).public for secret in (b"a", b"b") for role in ("x", "y")}
    assert len(keys) == 4
    assert derive_key_pair(b"a", "x") == derive_key_pair(b"a", "x")


def test_names() -> None:
    assert resolve(Address("10.1.2.3", 5)) == Address("10.1.2.3", 5)
    assert resolve(Address("localhost", 5)).host in ("127.0.0.1", "::1")
    assert resolve_own("127.0.0.1") == "127.0.0.1"
    with pytest.raises(PeerUnreachable, match="no_such"):
        resolve(Address("no_such.invalid", 5))
    with pytest.raises(ConfigError, match="no_such"):
        resolve_own("no_such.invalid")


def test_look_ups_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "efa_kv.runtime.rendezvous.resolve", lambda address: time.sleep(0.5) or address
    )
    resolver, answers = Resolver(), []
    for number in range(1, 21):
        resolver.start(Address("slow", number), answers.append)
    assert len([answer for answer in answers if isinstance(answer, PeerUnreachable)]) == 4
    deadline = time.monotonic() + 5
    while len(answers) < 20 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(answers) == 20
