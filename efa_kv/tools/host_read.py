"""Fill a `Host` from the running machine: sysfs, procfs and the output of a few commands.

Every reader takes an `Access`, so that tests give it a made-up root directory and made-up command
output. What cannot be read is left empty: an absent fact is for the checks to judge.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess  # only fixed argument lists are run, see run_command
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from efa_kv.tools import host as records

_COMMAND_TIMEOUT_S = 20
_FI_INFO_PLACES = ("opt/amazon/efa/bin/fi_info", "usr/bin/fi_info", "usr/local/bin/fi_info")
_LIBFABRIC_PLACES = (
    "opt/amazon/efa/lib",
    "opt/amazon/efa/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
)
_GPU_CLASSES = ("0x0300", "0x0302")
_NVIDIA_VENDOR = "0x10de"
_MIB = 1 << 20


class CommandResult(msgspec.Struct, frozen=True):
    """Exit status and both outputs of a command that could be started."""

    status: int
    output: str
    errors: str


def run_command(arguments: Sequence[str]) -> CommandResult | None:
    """Run a command with a time limit; None where it is missing or does not end."""
    try:
        done = subprocess.run(
            list(arguments),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMMAND_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return CommandResult(done.returncode, done.stdout, done.stderr)


def installed_version(*distributions: str) -> str:
    """Version of the first of these Python packages that is installed here, or nothing."""
    for distribution in distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """The ways to look at a machine; the defaults look at this one."""

    root: Path = Path("/")
    run: Callable[[Sequence[str]], CommandResult | None] = run_command
    installed: Callable[..., str] = installed_version
    package_folders: tuple[str, ...] = tuple(sys.path)

    def text(self, path: str) -> str:
        """The stripped content of a file under the root, or nothing."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def number(self, path: str, base: int = 10) -> int | None:
        try:
            return int(self.text(path), base)
        except ValueError:
            return None

    def children(self, path: str) -> list[Path]:
        try:
            return sorted((self.root / path).iterdir())
        except OSError:
            return []


def read_live(environment: Mapping[str, str], access: Access | None = None) -> records.Host:
    """The machine this runs on, with the environment of the caller."""
    access = access or Access()
    return records.Host(
        machine=_machine(access, environment),
        memory=_memory(access),
        cpu=_cpu(access),
        versions=_versions(access),
        libraries=_libraries(access),
        fabric=_fabric(access),
        rdma_devices=tuple(_rdma_devices(access)),
        device_nodes=tuple(_device_nodes(access)),
        gpus=tuple(_gpus(access)),
        environment=records.relevant_environment(environment),
    )


def process_environment(access: Access | None = None) -> dict[str, str]:
    """The environment this process was started with, as the kernel keeps it.

    The checks judge what the user exported, not a setting of this program, so they read it where
    they read every other fact of the machine.
    """
    variables = (access or Access()).text("proc/self/environ").split("\0")
    pairs = (variable.partition("=") for variable in variables if "=" in variable)
    return {name: value for name, _, value in pairs}


def _machine(access: Access, environment: Mapping[str, str]) -> records.Machine:
    system = re.search(r'^PRETTY_NAME="?([^"\n]*)', access.text("etc/os-release"), re.M)
    modules = [line.split()[0] for line in access.text("proc/modules").splitlines() if line.split()]
    # Nitro instances carry their type in the firmware tables, so no metadata request is needed.
    vendor = access.text("sys/class/dmi/id/sys_vendor")
    instance_type = access.text("sys/class/dmi/id/product_name") if "Amazon" in vendor else ""
    return records.Machine(
        kernel=access.text("proc/sys/kernel/osrelease"),
        system=system.group(1) if system else "",
        instance_type=instance_type,
        container=_container(access, environment),
        ptrace_scope=access.number("proc/sys/kernel/yama/ptrace_scope"),
        kernel_modules=tuple(sorted(modules)),
    )


def _container(access: Access, environment: Mapping[str, str]) -> str:
    if "KUBERNETES_SERVICE_HOST" in environment:
        return "kubernetes"
    if (access.root / ".dockerenv").exists():
        return "docker"
    if (access.root / "run/.containerenv").exists():
        return "podman"
    if "ENROOT_ROOTFS" in environment or (access.root / "etc/enroot").exists():
        return "enroot"
    return ""


def _memory(access: Access) -> records.Memory:
    meminfo = dict(re.findall(r"^(\w+):\s+(\d+)", access.text("proc/meminfo"), re.M))
    soft, hard = _memlock(access)
    shm_total, shm_free = _file_system_bytes(access.root / "dev/shm")
    return records.Memory(
        total_bytes=int(meminfo.get("MemTotal", 0)) << 10,
        memlock_soft_bytes=soft,
        memlock_hard_bytes=hard,
        huge_page_bytes=int(meminfo.get("Hugepagesize", 2048)) << 10,
        huge_pages_total=int(meminfo.get("HugePages_Total", 0)),
        huge_pages_free=int(meminfo.get("HugePages_Free", 0)),
        shm_total_bytes=shm_total,
        shm_free_bytes=shm_free,
    )


def _memlock(access: Access) -> tuple[int | None, int | None]:
    """Soft and hard limit on locked memory, in bytes; None means unlimited."""
    found = re.search(r"^Max locked memory\s+(\S+)\s+(\S+)", access.text("proc/self/limits"), re.M)
    if not found:
        return None, None
    soft, hard = (None if word == "unlimited" else int(word) for word in found.groups())
    return soft, hard


def _file_system_bytes(path: Path) -> tuple[int, int]:
    try:
        state = os.statvfs(path)
    except OSError:
        return 0, 0
    return state.f_frsize * state.f_blocks, state.f_frsize * state.f_bavail


def _cpu(access: Access) -> records.Cpu:
    status = access.text("proc/self/status")
    usable = re.search(r"^Cpus_allowed_list:\s*(\S+)", status, re.M)
    online = records.cpu_set(access.text("sys/devices/system/cpu/online"))
    nodes = []
    for folder in access.children("sys/devices/system/node"):
        name = re.fullmatch(r"node(\d+)", folder.name)
        if name:
            cpus = access.text(f"sys/devices/system/node/{folder.name}/cpulist")
            nodes.append(records.NumaNode(index=int(name.group(1)), cpus=cpus))
    return records.Cpu(
        online=len(online) or (os.cpu_count() or 1),
        usable=usable.group(1) if usable else access.text("sys/devices/system/cpu/online"),
        quota_cores=_quota_cores(access),
        numa_nodes=tuple(sorted(nodes, key=lambda node: node.index)),
    )


def _quota_cores(access: Access) -> float | None:
    """The processor limit of this control group in cores, from either version of cgroup."""
    limit, _, period = access.text("sys/fs/cgroup/cpu.max").partition(" ")
    if limit.isdigit() and period.isdigit():
        return int(limit) / int(period)
    quota_us = access.number("sys/fs/cgroup/cpu/cpu.cfs_quota_us")
    period_us = access.number("sys/fs/cgroup/cpu/cpu.cfs_period_us")
    if quota_us and period_us and quota_us > 0:
        return quota_us / period_us
    return None


def _rdma_devices(access: Access) -> list[records.RdmaDevice]:
    devices = []
    for entry in access.children("sys/class/infiniband"):
        pci = _resolved(entry / "device")
        place = f"sys/class/infiniband/{entry.name}"
        driver = _resolved(entry / "device/driver")
        state = access.text(f"{place}/ports/1/state").partition(":")[2].strip()
        rate = re.match(r"[\d.]+", access.text(f"{place}/ports/1/rate"))
        uverbs = sorted(path.name for path in _listed(entry / "device/infiniband_verbs"))
        numa_node = access.number(f"{place}/device/numa_node")
        devices.append(
            records.RdmaDevice(
                name=entry.name,
                driver=driver.name if driver else "",
                vendor=access.number(f"{place}/device/vendor", 16) or 0,
                device=access.number(f"{place}/device/device", 16) or 0,
                pci_path=_pci_path(pci),
                numa_node=-1 if numa_node is None else numa_node,
                port_state=state,
                rate_gbps=float(rate.group()) if rate else 0.0,
                device_node=f"/dev/infiniband/{uverbs[0]}" if uverbs else "",
            )
        )
    return devices


def _resolved(path: Path) -> Path | None:
    try:
        return path.resolve(strict=True)
    except OSError:
        return None


def _listed(path: Path) -> list[Path]:
    try:
        return list(path.iterdir())
    except OSError:
        return []


def _pci_path(device: Path | None) -> tuple[str, ...]:
    """PCI addresses on the way from the root port to the device, as sysfs nests them."""
    if device is None:
        return ()
    address = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]", re.I)
    return tuple(part for part in device.parts if address.fullmatch(part))


def _device_nodes(access: Access) -> list[records.DeviceNode]:
    nodes = []
    for path in access.children("dev/infiniband"):
        if path.name.startswith("uverbs"):
            nodes.append(
                records.DeviceNode(
                    path=f"/dev/infiniband/{path.name}",
                    readable=os.access(path, os.R_OK),
                    writable=os.access(path, os.W_OK),
                )
            )
    return nodes


def _gpus(access: Access) -> list[records.Gpu]:
    named = _nvidia_smi(access)
    gpus: list[records.Gpu] = []
    for entry in access.children("sys/bus/pci/devices"):
        place = f"sys/bus/pci/devices/{entry.name}"
        is_gpu = access.text(f"{place}/class")[:6] in _GPU_CLASSES
        if not is_gpu or access.text(f"{place}/vendor") != _NVIDIA_VENDOR:
            continue
        name, memory_bytes = named.get(entry.name[-10:].lower(), ("", 0))
        numa_node = access.number(f"{place}/numa_node")
        gpus.append(
            records.Gpu(
                index=len(gpus),
                name=name,
                pci_path=_pci_path(_resolved(entry)),
                numa_node=-1 if numa_node is None else numa_node,
                memory_bytes=memory_bytes,
            )
        )
    return gpus


def _nvidia_smi(access: Access) -> dict[str, tuple[str, int]]:
    """Name and memory in bytes of each GPU, by the last ten characters of its PCI address."""
    result = access.run(
        ["nvidia-smi", "--query-gpu=pci.bus_id,name,memory.total", "--format=csv,noheader,nounits"]
    )
    named = {}
    for line in result.output.splitlines() if result and result.status == 0 else ():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and fields[2].isdigit():
            named[fields[0][-10:].lower()] = (fields[1], int(fields[2]) * _MIB)
    return named


def _fi_info(access: Access) -> str:
    for place in _FI_INFO_PLACES:
        if (access.root / place).exists():
            return str(access.root / place)
    return shutil.which("fi_info") or "" if access.root == Path("/") else ""


def _fabric(access: Access) -> records.FabricAnswer:
    tool = _fi_info(access)
    result = access.run([tool, "-p", "efa"]) if tool else None
    if result is None:
        return records.FabricAnswer()
    found: dict[tuple[str, str], records.FabricDomain] = {}
    provider = fabric = ""
    for line in result.output.splitlines():
        key, _, value = line.strip().partition(": ")
        if key == "provider":
            provider = value
        elif key == "fabric":
            fabric = value
        elif key == "domain":
            domain = records.FabricDomain(domain=value, fabric=fabric, provider=provider)
            found.setdefault((value, fabric), domain)
    error = result.errors.strip() if result.status != 0 else ""
    return records.FabricAnswer(
        asked_with="fi_info -p efa", error=error, domains=tuple(found.values())
    )


def _versions(access: Access) -> records.Versions:
    packages = access.text("opt/amazon/efa_installed_packages")
    nvidia = access.text("proc/driver/nvidia/version")
    installer = re.search(r"EFA installer version: (\S+)", packages)
    driver = re.search(r"^NVRM version:.*?\b(\d{3}\.[\d.]+)", nvidia, re.M)
    return records.Versions(
        efa_driver=access.text("sys/module/efa/version"),
        efa_installer=installer.group(1) if installer else "",
        libfabric=_libfabric_version(access, packages),
        ofi_nccl=_package_version(packages, "libnccl-ofi"),
        nccl=access.installed("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
        cuda=_cuda_version(access),
        nvidia_driver=driver.group(1) if driver else "",
        nvidia_open="Open Kernel Module" in nvidia if nvidia else None,
    )


def _package_version(packages: str, name: str) -> str:
    """Version of a package in the installer's list, which names .deb and .rpm files alike."""
    found = re.search(rf"\b{re.escape(name)}[_-](\d[0-9A-Za-z.]*)", packages)
    return found.group(1) if found else ""


def _libfabric_version(access: Access, packages: str) -> str:
    tool = _fi_info(access)
    result = access.run([tool, "--version"]) if tool else None
    found = re.search(r"^libfabric: (\S+)", result.output, re.M) if result else None
    if found:
        return found.group(1)
    return _package_version(packages, "libfabric1-aws") or _package_version(
        packages, "libfabric-aws"
    )


def _cuda_version(access: Access) -> str:
    try:
        toolkit = msgspec.json.decode(access.text("usr/local/cuda/version.json"))
        return str(toolkit["cuda"]["version"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return access.installed(
            "nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12"
        )


def _libraries(access: Access) -> records.Libraries:
    system = [
        place for place in _LIBFABRIC_PLACES if (access.root / place / "libfabric.so.1").exists()
    ]
    bundled: set[str] = set()
    for folder in access.package_folders:
        # Wheels that carry their own shared libraries keep them in a folder "<name>.libs".
        bundled.update(str(path) for path in Path(folder or ".").glob("*.libs/libfabric*.so*"))
    return records.Libraries(
        libfabric_path=f"/{system[0]}/libfabric.so.1" if system else "",
        bundled=tuple(sorted(bundled)),
        processes=tuple(_mapped(access)),
    )


def _mapped(access: Access) -> list[records.MappedProcess]:
    """Processes that map libfabric; those of other users are passed over."""
    found = []
    for folder in access.children("proc"):
        if not folder.name.isdigit():
            continue
        maps = access.text(f"proc/{folder.name}/maps")
        paths = sorted(set(re.findall(r"(/\S*/libfabric[^/\s]*\.so[^\s]*)", maps)))
        if paths:
            found.append(
                records.MappedProcess(
                    pid=int(folder.name),
                    command=access.text(f"proc/{folder.name}/comm"),
                    paths=tuple(paths),
                )
            )
    return found
