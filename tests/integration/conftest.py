"""Engines in processes of their own."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from child_process import ChildProcess, start_process

PROGRAM = Path(__file__).with_name("engine_child.py")


class Spares:
    """Processes started ahead of their use, because importing takes longer than most tests."""

    def __init__(self) -> None:
        self._waiting = [start_process(PROGRAM)]

    def take(self) -> subprocess.Popen[str]:
        self._waiting.append(start_process(PROGRAM))
        return self._waiting.pop(0)

    def close(self) -> None:
        for process in self._waiting:
            process.communicate("")


class ChildEngine(ChildProcess):
    """An engine there; any method name is a request (see engine_child.py)."""

    def __init__(self, process: subprocess.Popen[str], **config: Any) -> None:
        super().__init__(process)
        self.session = ""
        self.incarnation = 0
        if config:
            self.open(**config)

    def open(self, **config: Any) -> None:
        opened = self.ask("open", **{"near": False, **config})
        self.session, self.incarnation = opened["session"], opened["incarnation"]


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
