"""The HTTP registry that routers query to find prefill workers, and its client.

``GET /query`` answers ``{"<dp>": {"engine_id": ..., "worker_addr": {"<tp>": {"<pp>":
"tcp://host:port"}}}}``; ``POST /register`` adds a worker.  An engine that restarted has
a new engine id and takes the place of the old one.

Owner of the thread "efa-kv-http" and its asyncio loop: `HttpThread`.  Server and client
live on it, so a slow or silent address costs nobody else anything.  aiohttp is imported
only here, when it is used: vLLM brings it, the rest of the package does without.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from efa_kv.errors import ConfigError, EfaKvError, PeerRefused, PeerUnreachable, RemoteProtocolError
from efa_kv.runtime.rendezvous import port_holder
from efa_kv.types import Address, Session

if TYPE_CHECKING:
    from aiohttp import ClientSession, web

_log = logging.getLogger(__name__)

_REQUEST_BYTES_MAX: Final = 4096
_ANSWER_BYTES_MAX: Final = 1 << 20
_ENTRIES_MAX: Final = 4096
_ADDRESSES_MAX: Final = 1024
_BACK_OFF_S: Final = 0.5
_STOP_TIMEOUT_S: Final = 1.0
_SCHEME: Final = "tcp://"

Rank = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """One worker; ``addr`` is "tcp://host:port" of its engine."""

    engine_id: Text
    dp_rank: Rank = 0
    tp_rank: Rank = 0
    pp_rank: Rank = 0
    addr: Text


class Workers(msgspec.Struct, frozen=True):
    """The workers of one data-parallel rank: tensor rank, then pipeline rank, as texts."""

    engine_id: str
    worker_addr: dict[str, dict[str, str]]

    def session(self, tp_rank: int, pp_rank: int) -> Session | None:
        """Where the engine of a worker is, or None."""
        text = self.worker_addr.get(str(tp_rank), {}).get(str(pp_rank))
        return None if text is None else Session(text.removeprefix(_SCHEME))


Registry = dict[str, Workers]
Answer = Callable[[Registry | EfaKvError], None]


class HttpThread:
    """A daemon thread with an asyncio loop.  Methods are for any thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="efa-kv-http", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine without waiting for it."""
        asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        """Runs a coroutine and waits for its result. [blocks]"""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    def close(self) -> None:
        """Ends the loop; safe to call twice. [blocks]"""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(_STOP_TIMEOUT_S)


class Registrations:
    """The registry's content: pure, so that it can be tested alone."""

    def __init__(self) -> None:
        self._engines: dict[int, str] = {}
        self._addresses: dict[tuple[int, int, int], str] = {}

    def add(self, entry: Registration) -> None:
        """Adds a worker; repeating one is fine, another address for it is `PeerRefused`."""
        Address.parse(entry.addr.removeprefix(_SCHEME))
        key = (entry.dp_rank, entry.tp_rank, entry.pp_rank)
        if self._engines.get(entry.dp_rank) != entry.engine_id:
            for old in [known for known in self._addresses if known[0] == entry.dp_rank]:
                del self._addresses[old]
            self._engines[entry.dp_rank] = entry.engine_id
        known = self._addresses.get(key, entry.addr)
        if known != entry.addr:
            raise PeerRefused(
                f"Found worker {key} of engine {entry.engine_id} at {entry.addr}; "
                f"it is registered at {known}. Give every worker its own rank.",
                reason="duplicate",
            )
        if key not in self._addresses and len(self._addresses) >= _ENTRIES_MAX:
            raise PeerRefused(f"Found {_ENTRIES_MAX} workers, the most allowed.", reason="full")
        self._addresses[key] = entry.addr

    def table(self) -> Registry:
        """What ``GET /query`` answers."""
        table: Registry = {}
        for (dp, tp, pp), address in sorted(self._addresses.items()):
            workers = table.setdefault(str(dp), Workers(self._engines[dp], {}))
            workers.worker_addr.setdefault(str(tp), {})[str(pp)] = address
        return table


class BootstrapServer:
    """Serves the registry at ``host:port``; raises `ConfigError` when it cannot. [blocks]"""

    def __init__(self, http: HttpThread, host: str, port: int) -> None:
        self._http = http
        self._registrations = Registrations()
        self._runner: web.AppRunner | None = None
        self.port = port
        try:
            self.port = http.run(self._start(host, port), _STOP_TIMEOUT_S * 5)
        except OSError as problem:
            raise ConfigError(
                f"found bootstrap_port = {port} of {host}, which cannot be bound ({problem}); it "
                f"is in use by {port_holder(port)}. Choose a free port."
            ) from None
        self._host = host

    @property
    def address(self) -> str:
        """What routers are given: "http://host:port"."""
        return f"http://{Address(self._host, self.port)}"

    def add(self, entry: Registration) -> None:
        """Registers a worker of this process; raises `PeerRefused`. [blocks]"""

        async def add() -> None:
            self._registrations.add(entry)

        self._http.run(add(), _STOP_TIMEOUT_S)

    def close(self) -> None:
        """Stops serving. [blocks]"""
        runner, self._runner = self._runner, None
        if runner is not None:
            self._http.run(runner.cleanup(), _STOP_TIMEOUT_S)

    async def _start(self, host: str, port: int) -> int:
        from aiohttp import web

        application = web.Application(client_max_size=_REQUEST_BYTES_MAX)
        application.router.add_get("/query", self._on_query)
        application.router.add_post("/register", self._on_register)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except BaseException:
            await runner.cleanup()
            raise
        self._runner = runner
        return int(runner.addresses[0][1])

    async def _on_query(self, _request: web.Request) -> web.Response:
        from aiohttp import web

        body = msgspec.json.encode(self._registrations.table())
        return web.Response(body=body, content_type="application/json")

    async def _on_register(self, request: web.Request) -> web.Response:
        from aiohttp import web

        try:
            entry = msgspec.json.decode(await request.read(), type=Registration)
            self._registrations.add(entry)
        except (msgspec.DecodeError, UnicodeDecodeError, ConfigError) as problem:
            return web.Response(status=400, text=f"{problem}")
        except PeerRefused as problem:
            _log.warning("a registration is refused: %s", problem)
            return web.Response(status=409, text=f"{problem}")
        return web.Response(text="ok")


class BootstrapClient:
    """Asks registries.  Methods are for any thread and never block; answers come on the
    HTTP thread.

    Questions to one address are answered together, and an address that failed is left
    alone for a moment, so that a dead one is cheap however many requests name it.
    """

    def __init__(self, http: HttpThread, timeout_s: float) -> None:
        self._http = http
        self._timeout_s = timeout_s
        self._waiting: dict[str, list[Answer]] = {}
        self._failed: dict[str, tuple[float, EfaKvError]] = {}
        self._client: ClientSession | None = None

    def query(self, url: str, answer: Answer) -> None:
        """Calls ``answer`` once with the registry at ``url`` or with what went wrong."""
        self._http.spawn(self._query(url.rstrip("/"), answer))

    def register(self, url: str, entry: Registration, give_up_s: float) -> None:
        """Registers a worker at another process's registry, trying again until it is there."""
        self._http.spawn(self._register(url.rstrip("/"), entry, give_up_s))

    def close(self) -> None:
        """Closes the connections. [blocks]"""
        client, self._client = self._client, None
        if client is not None:
            self._http.run(client.close(), _STOP_TIMEOUT_S)

    async def _query(self, url: str, answer: Answer) -> None:
        failed_at, problem = self._failed.get(url, (float("-inf"), PeerUnreachable("")))
        if time.monotonic() - failed_at < _BACK_OFF_S:
            self._tell([answer], problem)
            return
        waiting = self._waiting.get(url)
        if waiting is not None:
            waiting.append(answer)
            return
        self._waiting[url] = [answer]
        result: Registry | EfaKvError
        try:
            result = await self._fetch(url)
            self._failed.pop(url, None)
        except EfaKvError as problem:
            result = problem
            if len(self._failed) >= _ADDRESSES_MAX:
                self._failed.clear()
            self._failed[url] = (time.monotonic(), problem)
        self._tell(self._waiting.pop(url), result)

    @staticmethod
    def _tell(waiting: list[Answer], result: Registry | EfaKvError) -> None:
        for answer in waiting:
            try:
                answer(result)
            except Exception:
                _log.exception("an answer of a registry was not taken")

    async def _open_client(self) -> ClientSession:
        if self._client is None:
            from aiohttp import ClientSession, ClientTimeout

            self._client = ClientSession(timeout=ClientTimeout(total=self._timeout_s))
        return self._client

    async def _fetch(self, url: str) -> Registry:
        from aiohttp import ClientError, InvalidURL

        client = await self._open_client()
        try:
            async with client.get(f"{url}/query", allow_redirects=False) as response:
                body = bytearray()
                async for piece in response.content.iter_chunked(1 << 16):
                    body += piece
                    if len(body) > _ANSWER_BYTES_MAX:
                        raise RemoteProtocolError(
                            f"found an answer of {url} of more than {_ANSWER_BYTES_MAX} bytes."
                        )
                if response.status != 200:
                    raise PeerRefused(
                        f"{url} answered with HTTP status {response.status}.",
                        peer=url,
                        reason="status",
                    )
        except (TimeoutError, ClientError, InvalidURL, OSError, ValueError) as problem:
            text = str(problem) or type(problem).__name__
            raise PeerUnreachable(f"{url} cannot be asked: {text}.", peer=url) from None
        try:
            return msgspec.json.decode(bytes(body), type=Registry)
        except (msgspec.DecodeError, UnicodeDecodeError) as problem:
            raise RemoteProtocolError(
                f"found an answer of {url} that is no registry: {problem}."
            ) from None

    async def _register(self, url: str, entry: Registration, give_up_s: float) -> None:
        from aiohttp import ClientError, InvalidURL

        deadline = time.monotonic() + give_up_s
        wait_s = _BACK_OFF_S
        while True:
            try:
                client = await self._open_client()
                async with client.post(
                    f"{url}/register", data=msgspec.json.encode(entry), allow_redirects=False
                ) as response:
                    text = await response.text()
                    if response.status == 200:
                        _log.info("worker %s is registered at %s", entry.addr, url)
                        return
                    if response.status in (400, 409):
                        _log.error("worker %s is refused by %s: %s", entry.addr, url, text)
                        return
                    problem = f"HTTP status {response.status}"
            except (TimeoutError, ClientError, InvalidURL, OSError, ValueError) as error:
                problem = str(error) or type(error).__name__
            if time.monotonic() + wait_s > deadline:
                _log.error("worker %s could not be registered at %s: %s", entry.addr, url, problem)
                return
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, 5.0)
