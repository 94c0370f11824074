"""A process that answers requests in lines of JSON, seen from both ends.

The test's end is `ChildProcess`: a request is a method's name and its arguments.  The
child's end is `serve`: a program calls it with the object whose methods they are.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

ANSWER_TIMEOUT_S = 40.0
EXIT_TIMEOUT_S = 5.0
HERE = Path(__file__).resolve().parent


class ChildError(Exception):
    """The child answered with an exception, or ended; ``kind`` is the exception's type."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


def start_process(
    program: Path,
    *,
    without: tuple[str, ...] = ("EFA_KV_",),
    environment: Mapping[str, str] | None = None,
    quiet: bool = False,
) -> subprocess.Popen[str]:
    """Starts a program that calls `serve`, without the inherited settings so begun."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(without)}
    return subprocess.Popen(
        [sys.executable, str(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if quiet else None,
        env={**kept, "PYTHONPATH": str(HERE), **(environment or {})},
        text=True,
    )


class ChildProcess:
    """Drives one child."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def send(self, request: str, /, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([request, arguments]) + "\n")
        self.process.stdin.flush()

    def receive(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
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
        """Lets the child end by itself, and ends it where it does not."""
        self.process.send_signal(signal.SIGCONT)  # one that was paused cannot read
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # what a dead child did not take is still buffered
            self.process.stdin.close()
        try:
            self.process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


def serve(requests: object) -> None:
    """Answers each request with what the method of its name returns or raises, until the
    test's end closes the pipe."""
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"value": getattr(requests, name)(**arguments)}
        except Exception as problem:
            answer = {"error": type(problem).__name__, "text": str(problem)}
        print(json.dumps(answer), flush=True)
