"""Run a command on simulated EFA NICs: the set-up of its environment, and the run itself.

The simulation is a libfabric provider (`native/simnic`) that libfabric finds through
`FI_PROVIDER_PATH` and that takes everything else from `EFA_KV_SIM_*` variables. The command, and
whatever it starts, needs no change and no knowledge of it. The environment is handed in and
handed back; this module reads none.
"""

import contextlib
import importlib.metadata
import os
import subprocess  # the user's own argument list is run, never a shell line
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

import efa_kv
from efa_kv.errors import ConfigError

PROVIDER_FILE: Final = "libefa_kv_simnic-fi.so"
PREFIX: Final = "EFA_KV_SIM_"

_INSTALLED: Final = Path("efa_kv") / "_simnic" / PROVIDER_FILE
_BUILD_FOLDER: Final = Path("build") / "simnic"
_SIGNAL_BASE: Final = 128  # a shell's exit status for "ended by signal n" is 128 + n


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """What to simulate; None leaves a value to the provider (native/simnic/README.md)."""

    nics: int | None = None
    instance: str | None = None
    rate_gbps: float | None = None
    op_rate: float | None = None
    latency_us: float | None = None
    unresponsive_ms: float | None = None
    reorder: int | None = None
    seed: int | None = None
    transmit_depth: int | None = None
    host: str | None = None
    fabrics: str | None = None
    sysfs: Path | None = None
    max_region_bytes: int | None = None
    max_registered_bytes: int | None = None
    no_copy: bool = False
    device_memory: bool = False
    statistics: bool = False
    check_threads: bool | None = None
    faults: tuple[str, ...] = ()

    def variables(self) -> dict[str, str]:
        """The environment variables that say the same to the provider."""
        values: dict[str, object] = {
            f"{PREFIX}NICS": self.nics,
            f"{PREFIX}INSTANCE": self.instance,
            f"{PREFIX}RATE_GBPS": self.rate_gbps,
            f"{PREFIX}OP_RATE": self.op_rate,
            f"{PREFIX}LATENCY_US": self.latency_us,
            f"{PREFIX}UNRESPONSIVE_MS": self.unresponsive_ms,
            f"{PREFIX}REORDER": self.reorder,
            f"{PREFIX}SEED": self.seed,
            "FI_EFA_TX_SIZE": self.transmit_depth,
            f"{PREFIX}HOST": self.host,
            f"{PREFIX}FABRICS": self.fabrics,
            f"{PREFIX}SYSFS": self.sysfs,
            f"{PREFIX}MAX_REGION_BYTES": self.max_region_bytes,
            f"{PREFIX}MAX_REGISTERED_BYTES": self.max_registered_bytes,
            f"{PREFIX}NO_COPY": 1 if self.no_copy else None,
            f"{PREFIX}HMEM": 1 if self.device_memory else None,
            f"{PREFIX}STATS": 1 if self.statistics else None,
            f"{PREFIX}CHECK_THREADS": None
            if self.check_threads is None
            else int(self.check_threads),
            f"{PREFIX}FAULTS": ";".join(self.faults) or None,
            # The engine looks for its devices' places where the provider writes them.
            "EFA_KV_SYSFS_ROOT": self.sysfs,
        }
        return {name: str(value) for name, value in values.items() if value is not None}


def _provider_places() -> Iterable[Path]:
    """Where an installed, an editable and a source-tree package have the provider."""
    for root in efa_kv.__path__:
        yield Path(root).parent / _INSTALLED
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        yield Path(str(importlib.metadata.distribution("efa-kv").locate_file(_INSTALLED)))
    for root in efa_kv.__path__:
        yield Path(root).parent / _BUILD_FOLDER / PROVIDER_FILE


def find_provider(explicit: str | None = None) -> Path:
    """The provider's file; `explicit` is a file or folder that the user named."""
    if explicit:
        named = Path(explicit)
        named = named / PROVIDER_FILE if named.is_dir() else named
        if named.name != PROVIDER_FILE or not named.is_file():
            raise ConfigError(f"there is no {PROVIDER_FILE} at {explicit}")
        return named.absolute()
    for place in _provider_places():
        if place.is_file():
            return place.absolute()
    raise ConfigError(
        f"{PROVIDER_FILE} is missing from this installation; "
        "build it with: cmake -S native/simnic -B build/simnic && cmake --build build/simnic"
    )


def environment(base: Mapping[str, str], simulation: Simulation, provider: Path) -> dict[str, str]:
    """The environment for a simulated command.

    Settings of another simulation are dropped, so that the options alone decide what is run.
    """
    kept = {name: value for name, value in base.items() if not name.startswith(PREFIX)}
    return {**kept, "FI_PROVIDER_PATH": str(provider.parent), **simulation.variables()}


def run(
    command: Sequence[str],
    simulation: Simulation,
    base: Mapping[str, str],
    provider: str | None = None,
) -> int:
    """Run the command to its end on simulated NICs; gives its exit status as a shell would."""
    if not command:
        raise ConfigError("give a command to run, after --")
    place = find_provider(provider or base.get(f"{PREFIX}PROVIDER"))
    try:
        process = subprocess.Popen(list(command), env=environment(base, simulation, place))
    except OSError as error:
        raise ConfigError(
            f"cannot run {command[0]}: {os.strerror(error.errno or 0) or error}"
        ) from error
    while True:
        try:
            status = process.wait()
            break
        except KeyboardInterrupt:
            # The terminal sent the signal to the command too; its answer is the result.
            continue
    return status if status >= 0 else _SIGNAL_BASE - status
