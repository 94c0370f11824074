"""Engines in processes of their own."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("engine_child.py")


class ChildError(Exception):
    """The child answered with an exception; ``kind`` is its type's name."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


def _start_process() -> subprocess.Popen[str]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("EFA_KV_")
    }
    return subprocess.Popen(
        [sys.executable, str(PROGRAM)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )


class Spares:
    """Processes started ahead of their use, because importing takes longer than most tests."""

    def __init__(self) -> None:
        self._waiting = [_start_process()]

    def take(self) -> subprocess.Popen[str]:
        self._waiting.append(_start_process())
        return self._waiting.pop(0)

    def close(self) -> None:
        for process in self._waiting:
            process.communicate("")


class ChildEngine:
    """Drives one child process; any method name is a request (see engine_child.py)."""

    def __init__(self, process: subprocess.Popen[str], **config: Any) -> None:
        self.process = process
        self.session = ""
        self.incarnation = 0
        if config:
            self.open(**config)

    def open(self, **config: Any) -> None:
        opened = self.ask("open", **{"near": False, **config})
        self.session, self.incarnation = opened["session"], opened["incarnation"]

    def send(self, request: str, /, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([request, arguments]) + "\n")
        self.process.stdin.flush()

    def receive(self, timeout_s: float = 40.0) -> Any:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], timeout_s)[0]:
            raise TimeoutError(f"the child did not answer within {timeout_s} s")
        line = self.process.stdout.readline()
        if not line:
            raise ChildError("EOF", "the child ended")
        answer = json.loads(line)
        if "error" in answer:
            raise ChildError(answer["error"], answer["text"])
        return answer["value"]

    def ask(self, request: str, /, **arguments: Any) -> Any:
        self.send(request, **arguments)
        return self.receive()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="session")
def spares() -> Iterator[Spares]:
    kept = Spares()
    yield kept
    kept.close()


@pytest.fixture
def child(spares: Spares) -> Iterator[Callable[..., ChildEngine]]:
    """Starts a child; with settings its engine is opened at once."""
    children: list[ChildEngine] = []

    def start(**config: Any) -> ChildEngine:
        children.append(ChildEngine(spares.take(), **config))
        return children[-1]

    yield start
    for one in children:
        one.end()


@pytest.fixture
def wait_until() -> Callable[..., None]:
    """Waits for a condition, and says which one never came."""

    def wait(condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"waited {timeout_s} s in vain"
            time.sleep(0.01)

    return wait


@pytest.fixture
def child_error() -> type[ChildError]:
    return ChildError
