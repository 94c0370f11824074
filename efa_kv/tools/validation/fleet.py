"""Many hosts on one machine: a process for each, as a launcher would start them.

What rank 0 prints and how it ends is the result; another process that fails is told with what it
said.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final

from efa_kv.tools.output import EXIT_COULD_NOT_RUN

#: Under `efa-kv sim` each process is a host of its own with this name; faults can name it.
HOST_VARIABLE: Final = "EFA_KV_SIM_HOST"
_POLL_S: Final = 0.05
#: Rank 0 may say itself what is wrong with another one; it has this long to do so.
_GRACE_S: Final = 10.0
_END_TIMEOUT_S: Final = 10.0
_COMPLAINT_CHARACTERS: Final = 2000


def label(rank: int) -> str:
    """The name of a host of the fleet."""
    return f"host-{rank}"


def run(
    hosts: int, words: Sequence[str], leader_words: Sequence[str], base: Mapping[str, str]
) -> tuple[int, str]:
    """Starts ``hosts`` processes of `efa-kv validate` with ``words``, rank 0 with ``leader_words``
    too; the exit status, and what to complain about. [blocks]"""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="efa-kv-validate-"))
        meeting = Path(folder) / "session"
        complaints = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(hosts)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(hosts):
                own = ["--rank", str(rank), "--of", str(hosts), "--label", label(rank)]
                processes.append(
                    subprocess.Popen(
                        [
                            *(sys.executable, "-m", "efa_kv.cli", "validate"),
                            *own,
                            f"--rendezvous=file:{meeting}",
                            *words,
                            *(leader_words if rank == 0 else ()),
                        ],
                        stdout=None if rank == 0 else subprocess.DEVNULL,
                        stderr=None if rank == 0 else complaints[rank],
                        env={**base, HOST_VARIABLE: label(rank)},
                    )
                )
            return _watch(processes, complaints)
        finally:
            for process in processes:
                _end(process)


def _watch(
    processes: Sequence[subprocess.Popen[bytes]], complaints: Sequence[IO[bytes]]
) -> tuple[int, str]:
    """Waits for rank 0; when another one fails before, for a while longer only."""
    leader = processes[0]
    failed = 0
    deadline = float("inf")
    while leader.poll() is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        if not failed:
            failed = next((rank for rank, one in enumerate(processes) if rank and one.poll()), 0)
            deadline = time.monotonic() + _GRACE_S if failed else deadline
    if leader.returncode is not None:
        status = leader.returncode
        return (status, "") if not failed or status == 0 else (status, _said(complaints, failed))
    return EXIT_COULD_NOT_RUN, _said(complaints, failed)


def _said(complaints: Sequence[IO[bytes]], rank: int) -> str:
    complaints[rank].seek(0)
    text = complaints[rank].read().decode(errors="replace").strip()[-_COMPLAINT_CHARACTERS:]
    return f"{label(rank)}: {text or 'it ended without a word'}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Hosts end by themselves once rank 0 has said so, or is gone."""
    try:
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
