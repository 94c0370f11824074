"""Servers that answer over HTTP: when they are ready, and all of a demo's together."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from demo_common.processes import (
    LOOPBACK,
    POLL_S,
    ManagedProcess,
    ReservedPorts,
    ServerError,
    stop_together,
)

READY_TIMEOUT_S = 600.0
HEALTH_TIMEOUT_S = 2.0

Progress = Callable[[Sequence[ManagedProcess], Sequence[ManagedProcess]], None]


class HttpServer(ManagedProcess):
    """A managed process that answers at a health address when it is ready."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: dict[str, str],
        log: Path,
        port: int,
    ) -> None:
        super().__init__(name, command, environment, log)
        self.url = f"http://{LOOPBACK}:{port}"
        self.port = port

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=HEALTH_TIMEOUT_S) as answer:
                return bool(answer.status == 200)
        except OSError:  # refused, reset, timed out, or an error status
            return False


class RoutedServers:
    """Model servers and the router in front of them, all of them or none.

    ``ports`` are those that the servers were made with; they are given back at the end.
    """

    def __init__(
        self,
        models: Sequence[HttpServer],
        router: HttpServer,
        ports: ReservedPorts,
        progress: Progress | None = None,
    ) -> None:
        self.router = router
        self._models = tuple(models)
        self._ports = ports
        self._progress = progress

    @property
    def servers(self) -> tuple[HttpServer, ...]:
        return (*self._models, self.router)

    def __enter__(self) -> Self:
        try:
            # All at once: most of the time goes into imports, one processor each.
            for server in self._models:
                server.start()
            wait_until_ready(self._models, progress=self._progress)
            # The router asks its servers who they are as it starts, and gives up on those
            # that take long, so it comes last.
            self.router.start()
            wait_until_ready([self.router], progress=self._progress)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        with self._ports:
            stop_together(self.servers)


def require_alive(servers: Sequence[HttpServer]) -> None:
    for server in servers:
        if not server.alive:
            raise ServerError(
                f"found: the {server.name} server has ended; "
                "expected: a server that answers; "
                f"what to do: {server.last_words()}"
            )


def wait_until_ready(
    servers: Sequence[HttpServer],
    timeout_s: float = READY_TIMEOUT_S,
    progress: Progress | None = None,
) -> None:
    """Returns when all are ready; says which one died, and its last words."""
    deadline = time.monotonic() + timeout_s
    ready: list[HttpServer] = []
    while len(ready) < len(servers):
        require_alive(servers)
        ready += [server for server in servers if server not in ready and server.ready()]
        waiting = [server for server in servers if server not in ready]
        if progress is not None:
            progress(servers, waiting)
        if waiting and time.monotonic() > deadline:
            slowest = waiting[0]
            raise ServerError(
                f"found: the {slowest.name} server not ready after {timeout_s:.0f} s; "
                "expected: a server that answers; "
                f"what to do: {slowest.last_words()}"
            )
        if waiting:
            time.sleep(POLL_S)
