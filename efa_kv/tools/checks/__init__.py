"""The checks of `efa-kv doctor`: pure functions from a `Host` to findings, in the order shown."""

from efa_kv.tools.checks import devices, gpu, memory, place, settings, versions
from efa_kv.tools.checks.finding import Check, Finding, Severity

ALL: tuple[Check, ...] = (
    place.line_rate,
    devices.present,
    devices.link,
    devices.foreign,
    devices.nodes,
    devices.fabric,
    versions.libfabric,
    versions.plugin,
    versions.cuda,
    versions.copies,
    memory.memlock,
    memory.huge_pages,
    memory.shared_memory,
    gpu.direct,
    gpu.allocators,
    place.cores,
    place.numa,
    place.gpu_nic_map,
    place.near_peers,
    settings.environment,
)

__all__ = ["ALL", "Check", "Finding", "Severity"]
