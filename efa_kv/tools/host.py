"""One machine as the checks see it: a frozen record that can be saved, sent and checked later.

The checks never look at the machine themselves. `host_read.read_live` fills a `Host` from sysfs,
procfs and a few commands; `decode` reads one back from JSON. `docs/tools/host-record.md` explains
the format to people who send one.
"""

from collections.abc import Mapping

import msgspec

FORMAT = "efa-kv host 1"

AMAZON_VENDOR = 0x1D0F
MELLANOX_VENDOR = 0x15B3


class RecordError(ValueError):
    """A host record that cannot be read; the text says where."""


class RdmaDevice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A verbs device of the kernel, from /sys/class/infiniband.

    `pci_path` is the chain of PCI addresses from the root port down to the device itself.
    `numa_node` is -1 where the firmware does not say. `rate_gbps` is 0 where it is not given.
    """

    name: str
    driver: str
    vendor: int
    device: int
    pci_path: tuple[str, ...] = ()
    numa_node: int = -1
    port_state: str = ""
    rate_gbps: float = 0.0
    device_node: str = ""

    @property
    def is_efa(self) -> bool:
        return self.vendor == AMAZON_VENDOR and self.driver == "efa"


class Gpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPU, from the PCI bus and, where it is installed, nvidia-smi."""

    index: int
    name: str = ""
    pci_path: tuple[str, ...] = ()
    numa_node: int = -1
    memory_bytes: int = 0


class DeviceNode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file under /dev/infiniband and what this process may do with it."""

    path: str
    readable: bool
    writable: bool


class FabricDomain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of libfabric's answer for the provider `efa`."""

    domain: str
    fabric: str = "efa"
    provider: str = "efa"


class FabricAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What libfabric itself offers. `asked_with` is empty when nobody could be asked."""

    asked_with: str = ""
    error: str = ""
    domains: tuple[FabricDomain, ...] = ()


class Versions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Versions as their own tools print them; empty where the thing is not installed.

    `nvidia_open` tells whether the GPU driver is the open kernel module, the one that can export
    GPU memory as dmabuf; None where there is no driver or it does not say.
    """

    efa_driver: str = ""
    efa_installer: str = ""
    libfabric: str = ""
    ofi_nccl: str = ""
    nccl: str = ""
    cuda: str = ""
    nvidia_driver: str = ""
    nvidia_open: bool | None = None


class MappedProcess(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A running process and the libfabric files mapped into it."""

    pid: int
    command: str
    paths: tuple[str, ...]


class Libraries(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Copies of libfabric: the one in use, those inside Python packages, those now mapped."""

    libfabric_path: str = ""
    bundled: tuple[str, ...] = ()
    processes: tuple[MappedProcess, ...] = ()


class Memory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory and its limits, in bytes. A memlock limit of None means unlimited."""

    total_bytes: int
    memlock_soft_bytes: int | None = None
    memlock_hard_bytes: int | None = None
    huge_page_bytes: int = 2 << 20
    huge_pages_total: int = 0
    huge_pages_free: int = 0
    shm_total_bytes: int = 0
    shm_free_bytes: int = 0


class NumaNode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A NUMA node and its processors, written as the kernel does: "0-47,96-143"."""

    index: int
    cpus: str


class Cpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Processors of the machine and those this process may use.

    `usable` is the affinity mask as a kernel list. `quota_cores` is the cgroup's limit in cores,
    None where there is none.
    """

    online: int
    usable: str
    quota_cores: float | None = None
    numa_nodes: tuple[NumaNode, ...] = ()


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The machine and the place in it where the record was taken.

    `container` names the kind ("docker", "kubernetes", …) and is empty on the host itself.
    `ptrace_scope` is Yama's rule for looking into other processes, None without Yama.
    """

    kernel: str
    system: str = ""
    instance_type: str = ""
    container: str = ""
    ptrace_scope: int | None = None
    kernel_modules: tuple[str, ...] = ()


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the checks of `efa-kv doctor` take into account."""

    machine: Machine
    memory: Memory
    cpu: Cpu
    versions: Versions = Versions()
    libraries: Libraries = Libraries()
    fabric: FabricAnswer = FabricAnswer()
    rdma_devices: tuple[RdmaDevice, ...] = ()
    device_nodes: tuple[DeviceNode, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    environment: dict[str, str] = {}

    @property
    def efa_devices(self) -> tuple[RdmaDevice, ...]:
        return tuple(device for device in self.rdma_devices if device.is_efa)

    @property
    def foreign_devices(self) -> tuple[RdmaDevice, ...]:
        """Verbs devices that are not EFA, which the fabric must leave alone."""
        return tuple(device for device in self.rdma_devices if not device.is_efa)


class HostRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file: the format's name, a remark by whoever took it, and the host."""

    format: str
    host: Host
    remark: str = ""


def encode(host: Host, remark: str = "") -> bytes:
    """The record as indented JSON, ready to be sent."""
    record = HostRecord(format=FORMAT, remark=remark, host=host)
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"


def decode(text: bytes | str) -> Host:
    """A host from its JSON record; RecordError names the field that is wrong."""
    try:
        record = msgspec.json.decode(text, type=HostRecord)
    except msgspec.DecodeError as error:
        raise RecordError(f"not a host record: {error}") from error
    if record.format != FORMAT:
        raise RecordError(f"format {record.format!r}, this version reads {FORMAT!r}")
    return record.host


def cpu_set(text: str) -> frozenset[int]:
    """The processors of a kernel list such as "0-3,8"; empty text means none."""
    chosen: set[int] = set()
    for part in text.strip().split(","):
        if not part:
            continue
        first, _, last = part.partition("-")
        chosen.update(range(int(first), int(last or first) + 1))
    return frozenset(chosen)


_KEPT_PREFIXES = (
    "EFA_KV_",
    "FI_",
    "LD_",
    "MC_",
    "MOONCAKE_",
    "NCCL_",
    "NIXL_",
    "OFI_NCCL_",
    "PYTORCH_",
    "RDMAV_",
    "SGLANG_",
    "UCX_",
    "VLLM_",
)
_KEPT_NAMES = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "SLURM_NTASKS_PER_NODE",
        "SLURM_STEP_TASKS_PER_NODE",
    }
)
_SECRET_WORDS = ("SECRET", "TOKEN", "PASSWORD", "API_KEY", "CREDENTIAL")


def relevant_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables the checks look at; values of anything secret are never recorded."""
    kept = {}
    for name, value in sorted(environment.items()):
        if not (name.startswith(_KEPT_PREFIXES) or name in _KEPT_NAMES):
            continue
        secret = any(word in name.upper() for word in _SECRET_WORDS)
        kept[name] = "(set)" if secret else value
    return kept
