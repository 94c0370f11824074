"""GPU memory: whether a device can reach it, and allocators whose memory must not be registered."""

from efa_kv.tools.checks.finding import Finding, Severity, good
from efa_kv.tools.checks.versions import number
from efa_kv.tools.host import Host

# The kernel's verbs layer registers dmabuf memory from this version on.
DMABUF_KERNEL = (5, 12)

PEER_MEMORY_MODULES = ("efa_nv_peermem", "nvidia_peermem", "nv_peer_mem")

# PyTorch reads both; the second is the newer spelling.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def direct(host: Host) -> list[Finding]:
    """The way from the NIC into GPU memory: dmabuf, or a peer-memory module."""
    if not host.gpus or not host.efa_devices:
        return []
    loaded = [name for name in PEER_MEMORY_MODULES if name in host.machine.kernel_modules]
    dmabuf = host.versions.nvidia_open and number(host.machine.kernel)[:2] >= DMABUF_KERNEL
    if dmabuf or loaded:
        ways = ["dmabuf"] if dmabuf else []
        return [good("gpu.direct", f"GPU memory reachable by {' and '.join(ways + loaded)}")]
    if host.versions.nvidia_open is None:
        return [
            Finding(
                id="gpu.direct",
                severity=Severity.NOTE,
                found="the GPU driver does not show in /proc/driver/nvidia",
                expected="dmabuf or a peer-memory module",
                why="without either, transfers of GPU memory go through host memory",
                mend="cat /proc/driver/nvidia/version; lsmod | grep peermem",
            )
        ]
    return [
        Finding(
            id="gpu.direct",
            severity=Severity.PROBLEM,
            found=f"closed GPU driver {host.versions.nvidia_driver}, no peer-memory module",
            expected="the open kernel module on Linux 5.12 or later, or efa_nv_peermem",
            why="registering GPU memory fails, or every transfer is copied through host memory",
            mend="sudo modprobe efa_nv_peermem || sudo modprobe nvidia-peermem",
        )
    ]


def allocators(host: Host) -> list[Finding]:
    """Allocators that map GPU memory piecewise, so that a registered range does not stay whole."""
    findings = []
    for variable in ALLOCATOR_VARIABLES:
        options = host.environment.get(variable, "").replace(" ", "").split(",")
        for option in options:
            name, _, value = option.partition(":")
            if name == "expandable_segments" and value.lower() in ("true", "1"):
                findings.append(_expandable(variable))
            if name == "backend" and value == "cudaMallocAsync":
                findings.append(_asynchronous(variable))
    if "memory_saver" in host.environment.get("LD_PRELOAD", ""):
        findings.append(_memory_saver())
    if host.environment.get("SGLANG_MOONCAKE_CUSTOM_MEM_POOL"):
        findings.append(_memory_pool(host.environment["SGLANG_MOONCAKE_CUSTOM_MEM_POOL"]))
    if not findings and host.gpus:
        return [good("gpu.allocator", "no remapping GPU allocator in the environment")]
    return findings


def _expandable(variable: str) -> Finding:
    return Finding(
        id="gpu.allocator",
        severity=Severity.PROBLEM,
        found=f"{variable} holds expandable_segments:True",
        expected="expandable segments off in a server that registers GPU memory",
        why=(
            "the segments grow and move by mapping pages: a registration covers only the first "
            "piece, and the first transfer fails or reads pages that moved away"
        ),
        mend=f"unset {variable}",
    )


def _asynchronous(variable: str) -> Finding:
    return Finding(
        id="gpu.allocator",
        severity=Severity.PROBLEM,
        found=f"{variable} holds backend:cudaMallocAsync",
        expected="PyTorch's own allocator",
        why="memory of the asynchronous pools is mapped piecewise and cannot be registered whole",
        mend=f"unset {variable}",
    )


def _memory_saver() -> Finding:
    return Finding(
        id="gpu.allocator",
        severity=Severity.WARNING,
        found="LD_PRELOAD brings a memory saver, which pauses and remaps GPU memory",
        expected="no remapping of the KV cache while it is registered",
        why="after a pause the addresses hold other pages than the registration",
        mend="start the server without memory saver or sleep mode",
    )


def _memory_pool(value: str) -> Finding:
    return Finding(
        id="gpu.allocator",
        severity=Severity.WARNING,
        found=f"SGLANG_MOONCAKE_CUSTOM_MEM_POOL={value}",
        expected="unset on EFA",
        why="that pool maps GPU memory for another transport; EFA cannot register it",
        mend="unset SGLANG_MOONCAKE_CUSTOM_MEM_POOL",
    )
