"""The other side of a measurement: an engine that registers memory and lets peers come.

`serve` is that side.  `Target` runs it in a child process, so that one command can measure
both; the child ends with its parent, because it reads until its standard input closes.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from efa_kv import EngineConfig, TransferEngine
from efa_kv.errors import EfaKvError, FabricUnavailable
from efa_kv.tools import bench_memory
from efa_kv.types import RailCounters

_STOP_TIMEOUT_S: Final = 10.0
_CPUCLOCK_SCHED: Final = 2


class TargetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a target needs; ``engine`` goes to `EngineConfig.load`."""

    engine: dict[str, Any]
    buffer_size_bytes: int
    gpus: tuple[int, ...] = ()
    #: The text to fill the buffers with (`bench_load.pattern_bytes`); None leaves zeros, and
    #: ``touch`` False whatever the system gives.
    seed: int | None = None
    touch: bool = True


class TargetReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a target says about itself at its end."""

    rails: list[RailCounters]
    memory_bytes: int


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """A target's first line: where it is, or why it is not."""

    session: str = ""
    error: str = ""


def cpu_seconds(pid: int = 0) -> float:
    """CPU time of a process so far, all threads; of this one by default."""
    if not pid:
        return time.process_time()
    # The kernel's number for "CPU clock of that process"; see clock_getcpuclockid(3).
    return time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)


def peak_memory_bytes() -> int:
    """The most memory this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def serve(
    settings: TargetSettings, ready: Callable[[str], None], wait: Callable[[], object]
) -> TargetReport:
    """Registers memory, calls ``ready`` with the session, and stays until ``wait`` returns."""
    with TransferEngine(EngineConfig.load(settings.engine)) as engine:
        buffers = bench_memory.allocate(settings.buffer_size_bytes, settings.gpus)
        for buffer in buffers:
            if settings.touch:
                bench_memory.fill(buffer, settings.seed)
            engine.register(buffer.whole)
        ready(engine.session)
        wait()
        return TargetReport(rails=engine.counters(), memory_bytes=peak_memory_bytes())


def serve_until_signal(settings: TargetSettings, ready: Callable[[str], None]) -> TargetReport:
    """`serve` until SIGINT or SIGTERM.

    The signals are blocked before the engine's threads start, so that none of those takes one
    in place of this thread, which would go on waiting.
    """
    ends = (signal.SIGINT, signal.SIGTERM)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    try:
        return serve(settings, ready, lambda: signal.sigwait(ends))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Target:
    """A target in a child process; use it in a ``with`` statement."""

    def __init__(self, settings: TargetSettings) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "efa_kv.tools.loopback", msgspec.json.encode(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.report: TargetReport | None = None

    def __enter__(self) -> Self:
        """Waits for the child; raises `FabricUnavailable` with its reason when it cannot run."""
        try:
            ready = msgspec.json.decode(self._line(), type=Ready)
        except msgspec.DecodeError:
            ready = Ready(error=f"it ended with status {self._end()}")
        if ready.error:
            self._end()
            raise FabricUnavailable(f"The target did not start: {ready.error}")
        self.session = ready.session
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> TargetReport | None:
        """Ends the child and takes its report; safe to call twice."""
        if self._process.poll() is None and self._process.stdin and self.report is None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            with contextlib.suppress(msgspec.DecodeError):
                self.report = msgspec.json.decode(self._line(), type=TargetReport)
        self._end()
        return self.report

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def _end(self) -> int:
        with contextlib.suppress(OSError):
            if self._process.stdin:
                self._process.stdin.close()
        try:
            return self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
        finally:
            if self._process.stdout:
                self._process.stdout.close()


def _say(value: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    """The child: settings as its one argument, two lines of JSON as its answer."""
    settings = msgspec.json.decode(sys.argv[1], type=TargetSettings)
    try:
        report = serve(settings, lambda session: _say(Ready(session=session)), sys.stdin.read)
    except EfaKvError as problem:
        _say(Ready(error=str(problem)))
        return
    with contextlib.suppress(BrokenPipeError):  # the parent ended without asking
        _say(report)


if __name__ == "__main__":
    main()
