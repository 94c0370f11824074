"""Memory: the lock limit, huge pages and shared memory."""

from efa_kv.tools.checks.finding import Finding, Severity, good
from efa_kv.tools.host import Host
from efa_kv.tools.output import gibibytes

# A server registers its host-side pools and each rail pins its own queues and bounce buffers; a
# limit below this has been seen to abort the provider at start (-12, provider code 4112).
SMALL_MEMLOCK_BYTES = 16 << 30

# Docker's default of 64 MiB is what must be caught; the servers and NCCL need far more.
SMALL_SHM_BYTES = 1 << 30

# A device's page table holds about 24 million entries (read on p5en), so this much can be
# registered per device when the pages are 4 KiB.
FOUR_KIB_REGISTRATION_BYTES = 24_000_000 * 4096


def memlock(host: Host) -> list[Finding]:
    """The limit on locked memory, which every registration counts against."""
    if not host.efa_devices:
        return []
    soft = host.memory.memlock_soft_bytes
    if soft is None:
        return [good("memory.memlock", "memlock unlimited")]
    return [
        Finding(
            id="memory.memlock",
            severity=Severity.PROBLEM if soft < SMALL_MEMLOCK_BYTES else Severity.WARNING,
            found=f"memlock {gibibytes(soft)}",
            expected="unlimited",
            why="registering memory beyond the limit fails with ENOMEM, at start or under load",
            mend=_memlock_mend(host),
        )
    ]


def _memlock_mend(host: Host) -> str:
    if host.machine.container:
        return "docker run --ulimit memlock=-1:-1 …"
    if host.memory.memlock_hard_bytes is None:
        return "ulimit -l unlimited"
    return "echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/efa.conf; log in again"


def huge_pages(host: Host) -> list[Finding]:
    """Huge pages, for the provider's own buffers and for large host pools."""
    if not host.efa_devices:
        return []
    memory = host.memory
    if memory.huge_pages_free:
        size = gibibytes(memory.huge_pages_free * memory.huge_page_bytes)
        return [good("memory.huge-pages", f"{size} of huge pages free")]
    asked = host.environment.get("FI_EFA_USE_HUGE_PAGE") == "1"
    return [
        Finding(
            id="memory.huge-pages",
            severity=Severity.WARNING if asked else Severity.NOTE,
            found=f"none free of {memory.huge_pages_total}",
            expected="some, as the EFA installer sets up",
            why=(
                "with 4 KiB pages one device registers about "
                f"{gibibytes(FOUR_KIB_REGISTRATION_BYTES)} of host memory at most, and the "
                "provider's buffers cost more translations"
            ),
            mend=_huge_pages_mend(host),
        )
    ]


def _huge_pages_mend(host: Host) -> str:
    if host.machine.container == "kubernetes":
        return "resources: {limits: {hugepages-2Mi: 5120Mi}}"
    return "sudo sysctl -w vm.nr_hugepages=5128"


def shared_memory(host: Host) -> list[Finding]:
    """Shared memory in /dev/shm, for the servers' workers, NCCL and libfabric's shm provider."""
    total = host.memory.shm_total_bytes
    if total >= SMALL_SHM_BYTES:
        return [good("memory.shm", f"{gibibytes(total)} in /dev/shm")]
    if not host.machine.container and not host.gpus:
        return []
    return [
        Finding(
            id="memory.shm",
            severity=Severity.WARNING,
            found=f"{gibibytes(total)} in /dev/shm",
            expected=f"{gibibytes(SMALL_SHM_BYTES)} or more",
            why="workers of one server and ranks of one host stop with a bus error when it is full",
            mend=_shm_mend(host),
        )
    ]


def _shm_mend(host: Host) -> str:
    if host.machine.container == "kubernetes":
        return "mount an emptyDir with medium: Memory at /dev/shm"
    if host.machine.container:
        return "docker run --shm-size=16g …  (or --ipc=host)"
    return "sudo mount -o remount,size=50% /dev/shm"
