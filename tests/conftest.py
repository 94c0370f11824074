"""What all tests share: the folder that a test lies in says what kind it is."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
E2E_TIMEOUT_S = 900

# Before anybody imports it: its asserts are to say what they compared.
pytest.register_assert_rewrite("runs")

# The folder's marker, and for model servers the time that their start takes.
MARKS_BY_FOLDER = {
    "integration": [pytest.mark.integration],
    "faults": [pytest.mark.faults],
    "e2e": [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(E2E_TIMEOUT_S)],
}


def pytest_sessionstart() -> None:
    """libfabric's shared memory outlives a killed process, under its number: whoever gets
    the number again could not open an endpoint."""
    for path in Path("/dev/shm").glob("*:*:*"):
        process = path.name.partition(":")[0]
        if process.isdecimal() and not Path("/proc", process).exists():
            with contextlib.suppress(OSError):
                path.unlink()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.path.is_relative_to(TESTS):
            continue
        folder = item.path.relative_to(TESTS).parts[0]
        for mark in MARKS_BY_FOLDER.get(folder, []):
            # Behind the test's own marks, so that its own time limit wins.
            item.add_marker(mark, append=True)
