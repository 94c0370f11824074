"""The HTTP registry: what it answers, what it refuses, and that dead ones are cheap."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from efa_kv.errors import (
    ConfigError,
    EfaKvError,
    PeerRefused,
    PeerUnreachable,
    RemoteProtocolError,
)
from efa_kv.runtime.bootstrap import (
    BootstrapClient,
    BootstrapServer,
    HttpThread,
    Registration,
    Registrations,
    Workers,
)


def entry(engine: str = "e1", dp: int = 0, tp: int = 0, pp: int = 0, port: int = 5000) -> Any:
    return Registration(
        engine_id=engine, dp_rank=dp, tp_rank=tp, pp_rank=pp, addr=f"tcp://127.0.0.1:{port}"
    )


@pytest.fixture
def http() -> Iterator[HttpThread]:
    thread = HttpThread()
    yield thread
    thread.close()
    thread.close()


@pytest.fixture
def server(http: HttpThread) -> Iterator[BootstrapServer]:
    opened = BootstrapServer(http, "127.0.0.1", 0)
    yield opened
    opened.close()
    opened.close()


@pytest.fixture
def ask(http: HttpThread) -> Iterator[Callable[[str], Any]]:
    client = BootstrapClient(http, 0.5)

    def query(url: str) -> Any:
        answers: list[Any] = []
        done = threading.Event()

        def take(result: Any) -> None:
            answers.append(result)
            done.set()

        client.query(url, take)
        assert done.wait(5)
        return answers[0]

    query.client = client  # type: ignore[attr-defined]
    yield query
    client.close()


def test_table_in_the_shape_that_routers_read(server: BootstrapServer) -> None:
    server.add(entry(tp=0, port=5000))
    server.add(entry(tp=1, port=5001))
    server.add(entry("e2", dp=1, port=5002))
    with urllib.request.urlopen(f"{server.address}/query") as response:
        assert json.load(response) == {
            "0": {
                "engine_id": "e1",
                "worker_addr": {
                    "0": {"0": "tcp://127.0.0.1:5000"},
                    "1": {"0": "tcp://127.0.0.1:5001"},
                },
            },
            "1": {"engine_id": "e2", "worker_addr": {"0": {"0": "tcp://127.0.0.1:5002"}}},
        }


def test_repeating_is_fine_a_duplicate_is_refused_and_a_restart_replaces() -> None:
    registrations = Registrations()
    registrations.add(entry())
    registrations.add(entry())
    with pytest.raises(PeerRefused, match=r"5001.*5000"):
        registrations.add(entry(port=5001))
    registrations.add(entry(tp=1, port=5001))
    registrations.add(entry("restarted", port=6000))
    assert registrations.table() == {
        "0": Workers("restarted", {"0": {"0": "tcp://127.0.0.1:6000"}})
    }
    with pytest.raises(ConfigError):
        registrations.add(Registration(engine_id="x", addr="tcp://nonsense"))


def test_the_number_of_workers_is_bounded() -> None:
    registrations = Registrations()
    for number in range(4096):
        registrations.add(entry(tp=number))
    with pytest.raises(PeerRefused, match="most allowed"):
        registrations.add(entry(tp=4096))


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"nonsense", 400),
        (b"{}", 400),
        (b'{"engine_id": "a", "addr": "b"}', 400),
        (b'{"engine_id": "a", "addr": "h:1", "dp_rank": -1}', 400),
        (b'{"engine_id": "a", "addr": "h:1", "pad": "' + b"x" * 5000 + b'"}', 413),
    ],
)
def test_malformed_registrations(server: BootstrapServer, body: bytes, status: int) -> None:
    request = urllib.request.Request(f"{server.address}/register", data=body)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    assert caught.value.code == status
    with urllib.request.urlopen(f"{server.address}/query") as response:
        assert json.load(response) == {}


def test_a_worker_of_another_process_registers(
    server: BootstrapServer, ask: Callable[[str], Any]
) -> None:
    ask.client.register(server.address, entry(port=7000), 5.0)  # type: ignore[attr-defined]
    deadline = time.monotonic() + 5
    while not ask(server.address) and time.monotonic() < deadline:
        time.sleep(0.01)
    workers = ask(server.address)["0"]
    assert workers.session(0, 0) == "127.0.0.1:7000"
    assert workers.session(1, 0) is None


def test_a_port_in_use_is_named(http: HttpThread, server: BootstrapServer) -> None:
    with pytest.raises(ConfigError, match=str(server.port)):
        BootstrapServer(http, "127.0.0.1", server.port)


def test_a_silent_address_fails_in_time_and_is_left_alone(ask: Callable[[str], Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        begun = time.monotonic()
        assert isinstance(ask(url), PeerUnreachable)
        assert 0.3 < time.monotonic() - begun < 2
        begun = time.monotonic()
        for _ in range(50):
            assert isinstance(ask(url), PeerUnreachable)
        assert time.monotonic() - begun < 0.4


@pytest.mark.parametrize("url", ["nonsense", "http://", "http://127.0.0.1:1", "ftp://127.0.0.1:1"])
def test_addresses_that_cannot_be_asked(ask: Callable[[str], Any], url: str) -> None:
    assert isinstance(ask(url), EfaKvError)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", RemoteProtocolError),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 2\r\n\r\n{}", PeerRefused),
        (b"HTTP/1.1 302 Go\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n", PeerRefused),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9999999\r\n\r\n" + b" " * 9999999, Exception),
        (b"\0\1\2nonsense", PeerUnreachable),
    ],
)
def test_hostile_answers(ask: Callable[[str], Any], answer: bytes, kind: type) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                try:
                    connection.sendall(answer)
                except OSError:
                    return

        thread = threading.Thread(target=serve)
        thread.start()
        result = ask(f"http://127.0.0.1:{server.getsockname()[1]}")
        thread.join()
    assert isinstance(result, kind)
    assert isinstance(result, EfaKvError)
