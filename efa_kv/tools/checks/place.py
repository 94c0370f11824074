"""Where things are: cores per rank, NUMA nodes, the nearest EFA devices of each GPU, line rate."""

import math
import re

from efa_kv.tools import instances
from efa_kv.tools.checks.finding import Finding, Severity, good, listed
from efa_kv.tools.host import Gpu, Host, RdmaDevice, cpu_set
from efa_kv.tools.output import gigabytes

# With one core per rank collectives were measured at a quarter to a tenth of their rate.
STARVED_CORES = 2

# Yama's value 1: a process may be entered by those it names itself, or by its parents.
_ONLY_WITH_CONSENT = 1

# Tasks on this node, from launchers that give each task cores of its own. Slurm writes "8(x2)"
# for eight on each of two nodes. torchrun is not among them: its ranks share all cores.
_TASK_VARIABLES = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_NTASKS_PER_NODE",
)


def visible_gpus(host: Host) -> tuple[Gpu, ...]:
    """The GPUs this process may use, by CUDA_VISIBLE_DEVICES where that holds plain numbers."""
    listing = host.environment.get("CUDA_VISIBLE_DEVICES", "")
    words = [word.strip() for word in listing.split(",") if word.strip()]
    if not words or not all(word.isdigit() for word in words):
        return host.gpus
    chosen = {int(word) for word in words}
    return tuple(gpu for gpu in host.gpus if gpu.index in chosen)


def usable_cores(host: Host) -> int:
    """Cores by the affinity mask and by the control group's limit, whichever is less."""
    by_mask = len(cpu_set(host.cpu.usable))
    quota = host.cpu.quota_cores
    return by_mask if quota is None else min(by_mask, max(1, math.floor(quota)))


def _tasks_here(host: Host) -> int:
    """How many tasks share this node's GPUs, each with its own cores; 1 without a launcher."""
    for name in _TASK_VARIABLES:
        found = re.match(r"[1-9]\d*", host.environment.get(name, ""))
        if found:
            return int(found.group())
    return 1


def cores(host: Host) -> list[Finding]:
    """Cores for each rank against the node's vCPUs divided by its GPUs."""
    if not host.gpus:
        return []
    instance = instances.find(host.machine.instance_type)
    per_rank = instance.cores_per_gpu if instance else host.cpu.online // len(host.gpus)
    ranks = max(1, math.ceil(len(visible_gpus(host)) / _tasks_here(host)))
    here = usable_cores(host)
    if here >= per_rank * ranks:
        return [good("cpu.cores", f"{here} cores for {ranks} ranks")]
    each = here / ranks
    starved = each < STARVED_CORES
    return [
        Finding(
            id="cpu.cores",
            severity=Severity.PROBLEM if starved else _shortage(each, per_rank),
            found=f"{here} cores for {ranks} ranks, {each:.3g} each",
            expected=f"{per_rank} cores per rank: the node's vCPUs divided by its GPUs",
            why=(
                "with one core per rank an all-reduce fell to a quarter and an all-to-all to a "
                "tenth of its rate, with EFA itself in order"
            ),
            mend=_cores_mend(host, per_rank, ranks),
        )
    ]


def _shortage(each: float, per_rank: int) -> Severity:
    return Severity.WARNING if each < per_rank / 2 else Severity.NOTE


def _cores_mend(host: Host, per_rank: int, ranks: int) -> str:
    if host.machine.container == "kubernetes":
        return f"resources: {{requests: {{cpu: {per_rank * ranks}}}}}"
    if host.machine.container and host.cpu.quota_cores is not None:
        return f"docker run --cpus={per_rank * ranks} …"
    return f"srun --cpus-per-task={per_rank} …"


def numa(host: Host) -> list[Finding]:
    """GPUs on a NUMA node of which this process may use no core."""
    if not host.gpus or not host.cpu.numa_nodes:
        return []
    usable = cpu_set(host.cpu.usable)
    covered = {node.index for node in host.cpu.numa_nodes if usable & cpu_set(node.cpus)}
    remote = [gpu for gpu in visible_gpus(host) if gpu.numa_node not in covered | {-1}]
    if not remote:
        return [good("cpu.numa", f"cores on NUMA node {listed([str(n) for n in sorted(covered)])}")]
    return [
        Finding(
            id="cpu.numa",
            severity=Severity.WARNING,
            found=f"no core on the NUMA node of GPU {listed([str(gpu.index) for gpu in remote])}",
            expected="cores on the node of every GPU in use",
            why="the progress thread and the staging memory sit across the socket link",
            mend=f"numactl --cpunodebind={remote[0].numa_node} …",
        )
    ]


def shared_switches(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """How many PCI bridges, from the root port down, two devices have in common."""
    count = 0
    for left, right in zip(one[:-1], other[:-1], strict=False):
        if left != right:
            break
        count += 1
    return count


def nearest(gpu: Gpu, devices: tuple[RdmaDevice, ...]) -> tuple[str, list[RdmaDevice]]:
    """The devices nearest to a GPU and what they share with it: "switch", "node" or nothing."""
    most = max((shared_switches(gpu.pci_path, one.pci_path) for one in devices), default=0)
    if most:
        near = [one for one in devices if shared_switches(gpu.pci_path, one.pci_path) == most]
        return "switch", near
    near = [one for one in devices if one.numa_node == gpu.numa_node != -1]
    return ("node", near) if near else ("", list(devices))


def gpu_nic_map(host: Host) -> list[Finding]:
    """Which EFA devices each GPU has next to it."""
    if not host.gpus or not host.efa_devices:
        return []
    lines, far = [], []
    for gpu in host.gpus:
        level, near = nearest(gpu, host.efa_devices)
        names = ",".join(one.name for one in near)
        lines.append(f"GPU {gpu.index}: {names} ({level or 'nothing shared'})")
        if not level:
            far.append(str(gpu.index))
    if not far:
        return [good("place.gpu-nic", "; ".join(lines))]
    return [
        Finding(
            id="place.gpu-nic",
            severity=Severity.WARNING,
            found=f"no EFA device near GPU {listed(far)}",
            expected="a device under the same PCI switch, or on the same NUMA node",
            why="traffic crosses the socket link; with half the devices remote the rate halves",
            mend="lspci -tv; show the PCI tree to the container, or set devices for this rank",
        )
    ]


def near_peers(host: Host) -> list[Finding]:
    """Whether processes of one host may copy between each other's memory in one step."""
    scope = host.machine.ptrace_scope
    # A process of another container has no name here that the kernel would copy to.
    whose = "processes of one user"
    if host.machine.container:
        whose += " that share this container's pid namespace"
    if not scope:
        return [good("place.near", f"{whose} may copy between each other's memory")]
    if scope == _ONLY_WITH_CONSENT:
        text = (
            f"{whose} may copy between each other's memory where the other side consents: "
            "near_consent is true there"
        )
        return [good("place.near", text)]
    return [
        Finding(
            id="place.near",
            severity=Severity.NOTE,
            found=f"kernel.yama.ptrace_scope is {scope}",
            expected="0 or 1",
            why="peers on one host cannot use cross-memory attach; their bytes take the provider",
            mend="sudo sysctl -w kernel.yama.ptrace_scope=1, and set near_consent",
        )
    ]


def line_rate(host: Host) -> list[Finding]:
    """The instance type and what its network can carry."""
    instance = instances.find(host.machine.instance_type)
    if instance is None:
        if not host.efa_devices:
            return []
        return [
            Finding(
                id="place.instance",
                severity=Severity.NOTE,
                found=f"instance type {host.machine.instance_type or 'not shown'} is not known",
                expected="a type whose line rate is known",
                why="measured rates cannot be set against the line rate",
                mend="name the type when planning: efa-kv plan --instance …",
            )
        ]
    if not instance.rdma_write:
        return [_no_device_writes(instance)]
    total = gigabytes(instance.line_rate_bytes_per_s)
    share = gigabytes(instance.gpu_share_bytes_per_s)
    text = f"{instance.name}: {instance.nics} x {instance.nic_gbps} Gb/s = {total}/s"
    return [good("place.instance", f"{text}, {share}/s per GPU")]


def _no_device_writes(instance: instances.Instance) -> Finding:
    return Finding(
        id="place.instance",
        severity=Severity.WARNING,
        found=f"the EFA devices of {instance.name} cannot write remote memory by themselves",
        expected="a type of the p5 or p6 families",
        why="libfabric emulates every write with messages, which the remote processor copies",
        mend="plan for less than the line rate, or move to p5 or later",
    )
