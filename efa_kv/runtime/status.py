"""The HTTP endpoint of an engine, off unless ``http_port`` is set, and where to find it.

``/healthz`` is 200 while the process need not be restarted, ``/readyz`` while it should get
requests; both answer 503 otherwise, with the checks as JSON.  ``/metrics`` is for
Prometheus, ``/state`` and ``/trace`` are JSON for `efa-kv top` and `efa-kv report`.

Owner of the thread "efa-kv-status" and of one short-lived thread per connection: at most
eight, each for at most ten seconds and one request; more are turned away.  Nothing of it
touches the server's step.  A small file under a folder of this user's tells tools of the
same user where endpoints are; those of dead processes are swept.
"""

from __future__ import annotations

import contextlib
import http.server
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from efa_kv.config import runtime_folder
from efa_kv.errors import ConfigError, EfaKvError
from efa_kv.metrics import CountedEngine, EngineCollector
from efa_kv.runtime.observer import Observer
from efa_kv.types import Address

_log = logging.getLogger(__name__)

_CONNECTIONS_MAX: Final = 8
_REQUEST_S: Final = 10.0
#: Workers of one host that were given the same port take the next ones.
_PORTS: Final = 64
_STOP_S: Final = 2.0
_JSON: Final = "application/json"
_NOTES_MAX: Final = 1024
_NOTE_BYTES_MAX: Final = 4096


class Note(msgspec.Struct, frozen=True):
    """What the file of an endpoint says."""

    process: int
    session: str
    url: str


class StatusServer:
    """Serves one engine's endpoint; raises `ConfigError` when no port is free."""

    def __init__(self, engine: CountedEngine, observer: Observer, host: str, port: int) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(engine))
        pages: Mapping[str, Callable[[], _Page]] = MappingProxyType(
            {
                "/healthz": lambda: _verdict(health := observer.health(), health.live),
                "/readyz": lambda: _verdict(health := observer.health(), health.ready),
                "/state": lambda: _Page(msgspec.json.encode(observer.state())),
                "/trace": lambda: _Page(msgspec.json.encode(observer.trace())),
                "/metrics": lambda: _Page(
                    generate_latest(self._registry), content_type=CONTENT_TYPE_LATEST
                ),
            }
        )
        self._server = _bind(host, port, pages)
        bound = self._server.server_address[1]
        self.url = f"http://{Address(host, int(bound))}"
        self._note = _leave_note(Note(os.getpid(), engine.session, self.url))
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="efa-kv-status", daemon=True
        )
        self._thread.start()
        _log.info("engine %s: health and metrics at %s", engine.session, self.url)

    def close(self) -> None:
        """Ends the endpoint. [blocks]"""
        if self._note is not None:
            with contextlib.suppress(OSError):
                self._note.unlink()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_STOP_S)


class _Page(msgspec.Struct, frozen=True):
    body: bytes
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = _JSON


def _verdict(health: Any, good: bool) -> _Page:
    status = HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE
    return _Page(msgspec.json.encode(health), status)


class _Server(http.server.ThreadingHTTPServer):
    """Turns connections away beyond the most it may serve at once."""

    daemon_threads = True
    request_queue_size = 16

    def __init__(
        self, family: int, address: tuple[str, int], pages: Mapping[str, Callable[[], _Page]]
    ) -> None:
        self.address_family = family
        self.pages = pages
        self._room = threading.BoundedSemaphore(_CONNECTIONS_MAX)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            with contextlib.suppress(OSError):
                request.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a request for the status failed", exc_info=True)


class _Handler(http.server.BaseHTTPRequestHandler):
    """One request of a connection, which then ends."""

    timeout: ClassVar[float] = _REQUEST_S
    server: _Server
    server_version = "efa-kv"
    sys_version = ""

    def do_GET(self) -> None:
        page = self.server.pages.get(self.path.partition("?")[0])
        if page is None:
            known = ", ".join(self.server.pages)
            self._answer(
                _Page(f"known here: {known}\n".encode(), HTTPStatus.NOT_FOUND, "text/plain")
            )
            return
        try:
            self._answer(page())
        except EfaKvError as problem:
            text = f"{problem}\n".encode()
            self._answer(_Page(text, HTTPStatus.SERVICE_UNAVAILABLE, "text/plain"))

    do_HEAD = do_GET  # noqa: N815 - as above

    def _answer(self, page: _Page) -> None:
        self.send_response(page.status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(page.body)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - theirs too
        _log.debug(format, *arguments)


def _bind(host: str, port: int, pages: Mapping[str, Callable[[], _Page]]) -> _Server:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    last = min(port + _PORTS, 1 << 16)
    for candidate in range(port, last):
        try:
            return _Server(family, (host, candidate), pages)
        except OSError as error:
            problem = error
    raise ConfigError(
        f"found no free port from http_port = {port} to {last - 1} at {host} ({problem}). Name "
        "another one, or 0 for none."
    )


# ---- where endpoints are ---------------------------------------------------------------


def _leave_note(note: Note) -> Path | None:
    """Tools find the endpoint without it too, when they are told its address."""
    folder = runtime_folder()
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        _check_ours(folder)
        for _ in _living(folder):
            pass  # looking sweeps
        path = folder / f"{note.process}-{note.url.rpartition(':')[2]}.json"
        path.write_bytes(msgspec.json.encode(note))
    except OSError as problem:
        _log.info("%s is not listed for efa-kv top: %s", note.url, problem)
        return None
    return path


def find_notes() -> list[Note]:
    """The endpoints of engines of this user on this host."""
    folder = runtime_folder()
    try:
        _check_ours(folder)
        return [note for note in _living(folder) if note.url.startswith("http://")]
    except OSError:
        return []


def _check_ours(folder: Path) -> None:
    found = folder.lstat()
    if found.st_uid != os.getuid() or not folder.is_dir() or folder.is_symlink():
        raise PermissionError(f"{folder} is not a folder of this user")


def _living(folder: Path) -> Iterator[Note]:
    for path in sorted(folder.glob("*.json"))[:_NOTES_MAX]:
        try:
            with path.open("rb") as file:
                note = msgspec.json.decode(file.read(_NOTE_BYTES_MAX), type=Note)
        except (OSError, msgspec.DecodeError):
            continue
        if Path(f"/proc/{note.process}").exists():
            yield note
        else:
            with contextlib.suppress(OSError):
                path.unlink()
