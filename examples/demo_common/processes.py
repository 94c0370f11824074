"""Processes and ports that are given back whatever happens."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

LOOPBACK = "127.0.0.1"
STOP_GRACE_S = 20.0
POLL_S = 0.25
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


class ServerError(Exception):
    """A server died, or did not become ready."""


class ReservedPorts:
    """Free ports that nobody else on this machine is given while we hold them.

    Each is a bound socket that does not listen. A server that sets SO_REUSEADDR, as
    servers do, can still bind and listen on it, while the kernel hands it to no other
    process that asks for just any port.
    """

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def take(self) -> int:
        reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._sockets.append(reserved)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((LOOPBACK, 0))
        return int(reserved.getsockname()[1])

    def __enter__(self) -> ReservedPorts:
        return self

    def __exit__(self, *_: object) -> None:
        for reserved in self._sockets:
            reserved.close()


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class ManagedProcess:
    """A process in a group of its own, so that stopping it also stops what it started."""

    def __init__(
        self, name: str, command: Sequence[str], environment: dict[str, str], log: Path
    ) -> None:
        self.name = name
        self.log = log
        self._command = list(command)
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._asked_to_stop = False

    def start(self) -> None:
        if self.alive:
            raise ServerError(
                f"found: {self.name} already runs as process {self.process_id}; "
                "expected: a stopped server; what to do: stop it first"
            )
        self._asked_to_stop = False
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    @property
    def process_id(self) -> int:
        if self._process is None:
            raise ServerError(
                f"found: {self.name} was never started; expected: a running server; "
                "what to do: call start() first"
            )
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def signal_group(self, number: signal.Signals) -> None:
        """Signals the process and everything it started that stayed in its group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process_id, number)

    def _group_is_gone(self) -> bool:
        self.alive  # noqa: B018  # collects the leader, so that it is no zombie in its group
        try:
            os.killpg(self.process_id, 0)
        except ProcessLookupError:
            return True
        return False

    def ask_to_stop(self) -> None:
        """Asks once: a second time means "at once" to many servers."""
        if self._process is not None and not self._asked_to_stop:
            self._asked_to_stop = True
            self.say_stop()
            self.signal_group(signal.SIGCONT)  # one that was paused cannot hear otherwise

    def say_stop(self) -> None:
        self.signal_group(signal.SIGTERM)

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Returns when no process of the group is left."""
        if self._process is None:
            return
        self.ask_to_stop()
        if not wait_until(self._group_is_gone, grace_s):
            self.kill()

    def kill(self) -> None:
        """Ends the whole group at once, with no chance to say goodbye."""
        self.signal_group(signal.SIGKILL)
        wait_until(self._group_is_gone, STOP_GRACE_S)

    def pause(self) -> None:
        self.signal_group(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal_group(signal.SIGCONT)

    def log_lines(self) -> list[str]:
        try:
            return self.log.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return []

    def last_words(self, count: int = 25) -> str:
        """Where to read on: the log's name, its first failure and its last lines."""
        lines = self.log_lines()
        cause = first_failure(lines)
        return "\n".join(
            [
                f"read its log, {self.log}",
                *([f"which first says: {cause}"] if cause else []),
                "which ends:" if lines else "which is empty",
                *lines[-count:],
            ]
        )

    def __enter__(self) -> ManagedProcess:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


# What vLLM puts before each line of a traceback that it logs.
LOG_PREFIX = re.compile(r"^\(\w+[^)]*\) (?:\w+ \S+ \S+ \[[^\]]*\] ?)?")


def first_failure(lines: Sequence[str]) -> str | None:
    """The last line of the first traceback: what started it all.

    A server of several processes dies in turns, and its last words are seldom the reason.
    """
    inside = False
    for line in lines:
        message = LOG_PREFIX.sub("", line)
        if message.startswith("Traceback (most recent call last)"):
            inside = True
        elif inside and message and not message.startswith(" "):
            return message
    return None


def stop_together(processes: Sequence[ManagedProcess]) -> None:
    """Stops several at once, since each may take seconds to say goodbye."""
    for process in processes:
        process.ask_to_stop()
    for process in processes:
        process.stop()


def wait_until(condition: Callable[[], bool], timeout_s: float, poll_s: float = POLL_S) -> bool:
    """Whether the condition became true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True
