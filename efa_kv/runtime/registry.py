"""A worker's dealings with HTTP registries: serving its own, asking those of others.

The HTTP thread and its client are made when they are first needed, so that a pair that
only knows engines by ``host:port`` needs neither.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from efa_kv.runtime.bootstrap import BootstrapClient, BootstrapServer, HttpThread, Registration

if TYPE_CHECKING:
    from efa_kv.runtime.engine import TransferEngine


class RegistryAccess:
    """Owner of the HTTP thread of one agent."""

    def __init__(self, engine: TransferEngine, engine_id: str, tp_rank: int) -> None:
        self.address: str | None = None
        self._engine = engine
        self._engine_id = engine_id
        self._tp_rank = tp_rank
        self._lock = threading.Lock()
        self._http: HttpThread | None = None
        self._server: BootstrapServer | None = None
        self._client: BootstrapClient | None = None

    def serve(self) -> None:
        """Starts the registry of this worker where a port is set, and enters the worker.
        Raises `ConfigError` when the port cannot be bound. [blocks]"""
        config = self._engine.config
        if not config.bootstrap_port or self._tp_rank:
            return
        self._server = BootstrapServer(self._thread(), config.host, config.bootstrap_port)
        self._server.add(
            Registration(
                engine_id=self._engine_id,
                tp_rank=self._tp_rank,
                addr=f"tcp://{self._engine.session}",
            )
        )
        self.address = self._server.address

    def client(self) -> BootstrapClient:
        """Asks the registries of others; made on first use, from any thread."""
        with self._lock:
            if self._client is None:
                timeout_s = self._engine.config.handshake_timeout_s
                self._client = BootstrapClient(self._thread_locked(), timeout_s)
            return self._client

    def close(self) -> None:
        """Ends server, client and thread; safe to call twice. [blocks]"""
        with self._lock:
            server, self._server = self._server, None
            client, self._client = self._client, None
            http, self._http = self._http, None
        if server is not None:
            server.close()
        if client is not None:
            client.close()
        if http is not None:
            http.close()

    def _thread(self) -> HttpThread:
        with self._lock:
            return self._thread_locked()

    def _thread_locked(self) -> HttpThread:
        if self._http is None:
            self._http = HttpThread()
        return self._http
