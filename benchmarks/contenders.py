"""Who is measured: how each one is started for a cell, and why it may be missing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import machine
from plan import Cell

from efa_kv.errors import EfaKvError
from efa_kv.tools.sim import Simulation, environment, find_provider

TIMEOUT_S = 120.0
_DRIVERS = Path(__file__).resolve().parent / "peers"


class MissingError(Exception):
    """A contender cannot run here; the text says why."""


class FailedError(Exception):
    """A contender ran and gave no result."""


@dataclass(frozen=True)
class Contender:
    """One program over one provider."""

    name: str
    title: str
    command: Callable[[Cell, float], list[str]]
    #: Variables for it; raises `MissingError` where it cannot run.
    variables: Callable[[], dict[str, str]] = field(default=dict)

    def run(self, cell: Cell, seconds: float) -> dict:
        """One measurement, as `efa-kv bench --json` gives it."""
        return run_json(self.command(cell, seconds), self.variables())


def run_json(command: list[str], variables: dict[str, str]) -> dict:
    """Runs a command that ends its standard output with JSON: over several lines, or in one
    that may begin with "@"."""
    base = {name: value for name, value in os.environ.items() if not name.startswith("EFA_KV_")}
    # Mooncake's and libfabric's words would drown the progress lines.
    base |= {"GLOG_minloglevel": "2", "NIXL_LOG_LEVEL": "ERROR", "IPATH_NO_BACKTRACE": "1"}
    try:
        finished = subprocess.run(
            command,
            env={**base, **variables},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise FailedError(f"no result within {TIMEOUT_S:g} s") from None
    start = max((m.end() - 1 for m in re.finditer(r"^@?\{", finished.stdout, re.M)), default=-1)
    if start >= 0:
        return json.loads(finished.stdout[start:])
    words = (finished.stderr or finished.stdout).strip().splitlines()
    raise FailedError(words[-1] if words else f"exit status {finished.returncode} and no word")


def efa_kv_command(name: str) -> list[str]:
    """One of this package's own commands."""
    return [sys.executable, "-m", "efa_kv.cli", name]


def efa_kv_python(code: str) -> list[str]:
    """A command that runs this package's own code."""
    return [sys.executable, "-c", code]


def _ours(protocol: str, *, near: bool = False) -> Callable[[Cell, float], list[str]]:
    def command(cell: Cell, seconds: float) -> list[str]:
        return [
            *efa_kv_command("bench"),
            "--loopback",
            f"--protocol={protocol}",
            f"--operation={cell.operation}",
            f"--block-size={cell.size_bytes}",
            f"--batch-size={cell.batch}",
            f"--threads={cell.in_flight}",
            f"--pattern={cell.pattern}",
            f"--buffer-size={cell.buffer_bytes}",
            f"--duration={seconds}",
            "--use-vram=false",
            "--near" if near else "--no-near",
            "--json=/dev/stdout",
        ]

    return command


def _raw(
    provider: Callable[[], str], *, nics: int = 1, placed: bool = True
) -> Callable[..., list[str]]:
    def command(cell: Cell, seconds: float) -> list[str]:
        options = {
            "provider": provider(),
            "nics": nics,
            "landed": int(placed),
            **_load_options(cell, seconds),
        }
        return [
            str(machine.RAW_PROGRAM),
            *(str(w) for k, v in options.items() for w in (f"--{k}", v)),
        ]

    return command


def _load_options(cell: Cell, seconds: float) -> dict[str, object]:
    return {
        "operation": cell.operation,
        "size": cell.size_bytes,
        "batch": cell.batch,
        "in-flight": cell.in_flight,
        "pattern": cell.pattern,
        "buffer": cell.buffer_bytes,
        "seconds": seconds,
    }


def peer_command(driver: str, *more: str) -> list[str]:
    """A driver script in the peers' environment; raises `MissingError`."""
    if not machine.PEER_PYTHON.exists():
        raise MissingError("the environment for benchmarks is not there (make benchmarks makes it)")
    return [str(machine.PEER_PYTHON), str(_DRIVERS / f"{driver}.py"), *more]


def _peer(driver: str, *more: str) -> Callable[[Cell, float], list[str]]:
    def command(cell: Cell, seconds: float) -> list[str]:
        options = _load_options(cell, seconds)
        words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        return peer_command(driver, *words, *more)

    return command


# ---- surroundings ---------------------------------------------------------------------


@cache
def native_tcp_provider() -> str:
    """The name of libfabric's own endpoint over TCP: "net" before 1.18, then "tcp"."""
    version = machine.libfabric_version("libfabric.so.1")
    if version is None:
        raise MissingError("libfabric is not installed")
    return "tcp" if version >= (1, 18) else "net"


def simulated(nics: int, *, needs_newer: bool = False, **more: object) -> dict[str, str]:
    """The surroundings of a command on simulated NICs, the same for every contender."""
    try:
        provider = find_provider(os.environ.get("EFA_KV_SIM_PROVIDER"))
    except EfaKvError as problem:
        raise MissingError(str(problem)) from problem
    variables = environment({}, Simulation(nics=nics, **more), provider)
    newer = machine.libfabric_for_efa()
    if newer is not None:
        variables |= {"LD_LIBRARY_PATH": str(newer.parent), "EFA_KV_LIBFABRIC": str(newer)}
    elif needs_newer:
        found = machine.libfabric_version("libfabric.so.1")
        raise MissingError(
            f"found libfabric {'.'.join(map(str, found or ()))}; Mooncake's EFA wheel needs "
            f"{'.'.join(map(str, machine.LEAST_FOR_EFA))} or later on the provider efa"
        )
    return variables


@cache
def simulated_devices(nics: int) -> str:
    """Names of the simulated devices, as libibverbs would list them."""
    code = (
        "from efa_kv.config import EngineConfig; from efa_kv.fabric import list_nics; import json;"
        "print(json.dumps({'names': [n.name for n in list_nics(EngineConfig(), 'efa')]}))"
    )
    names = run_json(efa_kv_python(code), simulated(nics))["names"]
    return ",".join(name.removesuffix("-rdm") for name in names)


def mooncake_simulated(nics: int, **more: object) -> dict[str, str]:
    """Mooncake's EFA transport on simulated NICs."""
    return {
        **simulated(nics, needs_newer=True, **more),
        "EFA_SHIM_DEVICES": simulated_devices(nics),
        "LD_PRELOAD": str(machine.SHIM),
    }


def _mooncake_over_tcp() -> dict[str, str]:
    """Mooncake's EFA transport over a software provider of the system's libfabric."""
    return {
        "EFA_SHIM_DEVICES": "rdmap0s0",
        "EFA_SHIM_PROVIDER": "tcp;ofi_rxm",
        "FI_PROVIDER": "tcp,ofi_rxm",
        "LD_PRELOAD": str(machine.SHIM),
    }


def _ucx(transports: str) -> Callable[[], dict[str, str]]:
    return lambda: {"UCX_TLS": transports, "UCX_NET_DEVICES": "lo", "UCX_LOG_LEVEL": "fatal"}


def _on_simnic(nics: int) -> list[Contender]:
    title = f"on {nics} simulated NICs without copying"
    return [
        Contender(
            f"ours-simnic-{nics}",
            f"efa-kv {title}",
            _ours("efa"),
            lambda: simulated(nics, no_copy=True),
        ),
        Contender(
            f"raw-simnic-{nics}",
            f"bare loop {title}",
            _raw(lambda: "efa", nics=nics),
            lambda: simulated(nics, no_copy=True),
        ),
        Contender(
            f"mooncake-simnic-{nics}",
            f"Mooncake's EFA transport {title}",
            _peer("drive_mooncake", "--protocol", "efa", "--no-check"),
            lambda: mooncake_simulated(nics, no_copy=True),
        ),
    ]


_ALL = [
    Contender("ours-tcp", "efa-kv over TCP", _ours("tcp")),
    Contender("ours-shm", "efa-kv over libfabric's shm", _ours("shm")),
    Contender("ours-near", "efa-kv, the short way within a host", _ours("tcp", near=True)),
    Contender("raw-tcp", "bare loop over TCP", _raw(native_tcp_provider)),
    Contender(
        "raw-tcp-unplaced",
        "bare loop over TCP, completions without placement",
        _raw(native_tcp_provider, placed=False),
    ),
    Contender("raw-shm", "bare loop over libfabric's shm", _raw(lambda: "shm")),
    Contender("mooncake-tcp", "Mooncake's TCP transport", _peer("drive_mooncake")),
    Contender(
        "mooncake-efa-tcp",
        "Mooncake's EFA transport over tcp;ofi_rxm",
        _peer("drive_mooncake", "--protocol", "efa"),
        _mooncake_over_tcp,
    ),
    Contender("nixl-tcp", "NIXL, UCX over TCP", _peer("drive_nixl"), _ucx("tcp,self")),
    Contender(
        "nixl-shm",
        "NIXL, UCX over shared memory",
        _peer("drive_nixl", "--target-progress-thread", "0"),
        # UCX greets over TCP and then takes the fastest way between processes of one host.
        _ucx("tcp,cma,posix,sysv,self"),
    ),
    *_on_simnic(2),
    *_on_simnic(16),
]
CONTENDERS = {contender.name: contender for contender in _ALL}
