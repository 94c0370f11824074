"""What the figures were measured on, and where things are in this repository."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
BUILD = REPOSITORY / "build" / "benchmarks"
PEER_ENVIRONMENT = REPOSITORY / ".venv-benchmarks"
PEER_PYTHON = PEER_ENVIRONMENT / "bin" / "python"
RAW_PROGRAM = BUILD / "raw_rma"
SHIM = BUILD / "efa_shim.so"
#: The oldest libfabric whose interface Mooncake's EFA wheel asks an EFA device for.
LEAST_FOR_EFA = (1, 18)
LIBFABRICS = (
    Path("/opt/amazon/efa/lib/libfabric.so.1"),
    Path("/opt/amazon/efa/lib64/libfabric.so.1"),
    PEER_ENVIRONMENT / "lib" / "libfabric.so.1",
)


def build_programs() -> None:
    """Compiles the bare loop and the shim where they are older than their sources."""
    BUILD.mkdir(parents=True, exist_ok=True)
    here = Path(__file__).resolve().parent
    _compile(here / "raw_rma.c", RAW_PROGRAM, [], ["-lfabric"])
    # Linked against libfabric, so that its functions are found behind the shim's.
    libraries = ["-Wl,--no-as-needed", "-lfabric", "-ldl"]
    _compile(here / "peers" / "efa_shim.c", SHIM, ["-shared", "-fPIC"], libraries)


def _compile(source: Path, result: Path, flags: list[str], libraries: list[str]) -> None:
    if result.exists() and result.stat().st_mtime > source.stat().st_mtime:
        return
    compiler = os.environ.get("CC", "cc")
    command = [compiler, "-O2", "-Wall", "-Wextra", *flags, "-o", str(result), str(source)]
    subprocess.run([*command, *libraries], check=True)


def libfabric_version(path: Path | str) -> tuple[int, int] | None:
    """Version of a copy of libfabric, or None when it cannot be loaded."""
    try:
        version = ctypes.CDLL(str(path)).fi_version()
    except (OSError, AttributeError):
        return None
    return version >> 16 & 0xFFFF, version & 0xFFFF


def libfabric_for_efa() -> Path | None:
    """A libfabric that is new enough for every contender, or None: the system's is used."""
    for path in LIBFABRICS:
        version = libfabric_version(path) if path.exists() else None
        if version is not None and version >= LEAST_FOR_EFA:
            return path
    return None


def _first_line(path: str, key: str) -> str:
    try:
        for line in Path(path).read_text().splitlines():
            if line.startswith(key):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return "unknown"


def describe() -> dict[str, str]:
    """The machine in words; nothing in it names the host."""
    version = libfabric_version("libfabric.so.1")
    newer = libfabric_for_efa()
    versions = [".".join(map(str, version)) if version else "none"]
    if newer is not None:
        number = libfabric_version(newer)
        versions.append(".".join(map(str, number or ())) + " for EFA and the simulated NIC")
    return {
        "processor": _first_line("/proc/cpuinfo", "model name"),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": _first_line("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "Python": platform.python_version(),
        "libfabric": ", ".join(versions),
        "load average at the start": f"{os.getloadavg()[0]:.1f}",
    }
