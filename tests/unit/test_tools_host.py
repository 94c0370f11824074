"""The host record and the reader that fills it from a machine."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from efa_kv.tools import host as records
from efa_kv.tools import host_read

RECORDED = sorted((Path(__file__).parents[1] / "hosts").glob("*.json"))

FI_INFO = """\
provider: efa
    fabric: efa
    domain: rdmap79s0-rdm
    version: 201.0
    type: FI_EP_RDM
    protocol: FI_PROTO_EFA
provider: efa
    fabric: efa-direct
    domain: rdmap79s0-rdm
    version: 201.0
provider: efa
    fabric: efa
    domain: rdmap79s0-dgrm
    version: 201.0
"""

PACKAGES = """\
# EFA installer version: 1.43.2
# Debug packages installed: no
# Packages installed:
efa-config_1.18_all efa-profile_1.7_all libfabric-aws-bin_2.1.0amzn5.0_amd64
libfabric1-aws_2.1.0amzn5.0_amd64 libnccl-ofi_1.16.3-1_amd64 efa_2.17.2-1.amzn1_amd64
"""

FILES = {
    "etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 22.04.5 LTS"\n',
    "proc/modules": "efa 110592 1 - Live 0x0\nib_uverbs 163840 1 efa, Live 0x0\n",
    "proc/sys/kernel/osrelease": "6.8.0-1033-aws\n",
    "proc/sys/kernel/yama/ptrace_scope": "1\n",
    "proc/meminfo": (
        "MemTotal: 2097152 kB\nHugePages_Total: 5128\nHugePages_Free: 5000\nHugepagesize: 2048 kB\n"
    ),
    "proc/self/limits": (
        "Limit                     Soft Limit           Hard Limit           Units\n"
        "Max locked memory         8388608              unlimited            bytes\n"
    ),
    "proc/self/status": "Name:\tpython\nCpus_allowed_list:\t0-3,8\n",
    "proc/self/environ": "NCCL_NET=IB\0HOME=/home/ubuntu\0EFA_KV_SECRET=hush\0",
    "proc/driver/nvidia/version": (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.172.08  Release Build\n"
        "GCC version:  gcc version 12.3.0\n"
    ),
    "proc/41/comm": "python\n",
    "proc/41/maps": (
        "7f00-7f01 r-xp 0 08:01 11 /opt/amazon/efa/lib/libfabric.so.1.27.0\n"
        "7f01-7f02 r-xp 0 08:01 11 /opt/amazon/efa/lib/libfabric.so.1.27.0\n"
        "7f02-7f03 r-xp 0 08:01 12 /venv/nixl_cu12.libs/libfabric-0a1b2c.so.1\n"
    ),
    "proc/42/maps": "7f00-7f01 r-xp 0 08:01 13 /usr/lib/libc.so.6\n",
    "sys/class/dmi/id/sys_vendor": "Amazon EC2\n",
    "sys/class/dmi/id/product_name": "p5.48xlarge\n",
    "sys/devices/system/cpu/online": "0-15\n",
    "sys/devices/system/node/node0/cpulist": "0-7\n",
    "sys/devices/system/node/node1/cpulist": "8-15\n",
    "sys/fs/cgroup/cpu.max": "350000 100000\n",
    "sys/module/efa/version": "2.17.2g\n",
    "opt/amazon/efa_installed_packages": PACKAGES,
    "opt/amazon/efa/bin/fi_info": "",
    "opt/amazon/efa/lib/libfabric.so.1": "",
    "usr/local/cuda/version.json": '{"cuda": {"name": "CUDA SDK", "version": "12.9.1"}}',
    "dev/infiniband/uverbs0": "",
    "dev/infiniband/rdma_cm": "",
    "packages/nixl_cu12.libs/libfabric-0a1b2c.so.1": "",
}


def device(root: Path, address: str, parent: str, files: dict[str, str]) -> Path:
    """A PCI device below a bridge, reachable from the bus folder as in sysfs."""
    place = root / "sys/devices/pci0000:4c" / parent / address
    place.mkdir(parents=True)
    for name, content in files.items():
        (place / name).write_text(content)
    bus = root / "sys/bus/pci/devices"
    bus.mkdir(parents=True, exist_ok=True)
    (bus / address).symlink_to(place)
    return place


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    nic_files = {
        "vendor": "0x1d0f\n",
        "device": "0xefa1\n",
        "numa_node": "0\n",
        "class": "0x020000",
    }
    nic = device(tmp_path, "0000:4f:00.0", "0000:4c:01.0", nic_files)
    driver = tmp_path / "sys/bus/pci/drivers/efa"
    driver.mkdir(parents=True)
    (nic / "driver").symlink_to(driver)
    (nic / "infiniband_verbs/uverbs0").mkdir(parents=True)
    verbs = tmp_path / "sys/class/infiniband/rdmap79s0"
    (verbs / "ports/1").mkdir(parents=True)
    (verbs / "device").symlink_to(nic)
    (verbs / "ports/1/state").write_text("4: ACTIVE\n")
    (verbs / "ports/1/rate").write_text("100 Gb/sec (4X EDR)\n")
    gpu_files = {"vendor": "0x10de\n", "class": "0x030200\n", "numa_node": "0\n"}
    device(tmp_path, "0000:53:00.0", "0000:4c:01.0", gpu_files)
    return tmp_path


def answers(arguments: Sequence[str]) -> host_read.CommandResult | None:
    """The commands of a machine with the EFA software and one GPU."""
    if arguments[0] == "nvidia-smi":
        line = "00000000:53:00.0, NVIDIA H100 80GB HBM3, 81559\n"
        return host_read.CommandResult(0, line, "")
    if list(arguments[1:]) == ["--version"]:
        text = "fi_info: 2.1.0amzn5.0\nlibfabric: 2.1.0amzn5.0\nlibfabric api: 2.1\n"
        return host_read.CommandResult(0, text, "")
    return host_read.CommandResult(0, FI_INFO, "")


def access(root: Path, run: object = answers) -> host_read.Access:
    return host_read.Access(
        root=root,
        run=run,  # type: ignore[arg-type]
        installed=lambda *names: "2.27.7" if "nvidia-nccl-cu12" in names else "",
        package_folders=(str(root / "packages"),),
    )


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_hosts_survive_a_round_trip(path: Path) -> None:
    host = records.decode(path.read_bytes())
    assert records.decode(records.encode(host)) == host


def test_a_record_of_another_format_is_refused() -> None:
    text = RECORDED[0].read_text().replace(records.FORMAT, "efa-kv host 99")
    with pytest.raises(records.RecordError, match="efa-kv host 99"):
        records.decode(text)


def test_an_unknown_field_is_refused_by_name() -> None:
    text = RECORDED[0].read_text().replace('"kernel"', '"kernal"', 1)
    with pytest.raises(records.RecordError, match="machine"):
        records.decode(text)


def test_values_of_secrets_are_not_recorded() -> None:
    kept = records.relevant_environment(
        {
            "EFA_KV_SECRET": "hush",
            "VLLM_API_KEY": "hush",
            "FI_PROVIDER": "efa",
            "HOME": "/home/ubuntu",
        }
    )
    assert kept == {"EFA_KV_SECRET": "(set)", "VLLM_API_KEY": "(set)", "FI_PROVIDER": "efa"}


def test_a_kernel_list_of_processors_is_expanded() -> None:
    assert records.cpu_set("0-2,8\n") == {0, 1, 2, 8}
    assert records.cpu_set("") == frozenset()


def test_the_reader_fills_machine_memory_and_processors(machine: Path) -> None:
    host = host_read.read_live({}, access(machine))
    assert host.machine == records.Machine(
        kernel="6.8.0-1033-aws",
        system="Ubuntu 22.04.5 LTS",
        instance_type="p5.48xlarge",
        ptrace_scope=1,
        kernel_modules=("efa", "ib_uverbs"),
    )
    assert host.memory.total_bytes == 2 << 30
    assert (host.memory.memlock_soft_bytes, host.memory.memlock_hard_bytes) == (8 << 20, None)
    assert (host.memory.huge_pages_total, host.memory.huge_pages_free) == (5128, 5000)
    assert host.cpu.usable == "0-3,8"
    assert (host.cpu.online, host.cpu.quota_cores) == (16, 3.5)
    assert [node.cpus for node in host.cpu.numa_nodes] == ["0-7", "8-15"]


def test_the_reader_fills_devices_and_gpus(machine: Path) -> None:
    host = host_read.read_live({}, access(machine))
    (nic,) = host.rdma_devices
    assert nic.is_efa
    assert (nic.name, nic.port_state, nic.rate_gbps) == ("rdmap79s0", "ACTIVE", 100.0)
    assert nic.pci_path == ("0000:4c:01.0", "0000:4f:00.0")
    assert nic.device_node == "/dev/infiniband/uverbs0"
    (node,) = host.device_nodes
    assert (node.path, node.readable, node.writable) == (nic.device_node, True, True)
    (gpu,) = host.gpus
    assert (gpu.name, gpu.memory_bytes) == ("NVIDIA H100 80GB HBM3", 81559 << 20)
    assert gpu.pci_path == ("0000:4c:01.0", "0000:53:00.0")


def test_the_reader_asks_libfabric_and_finds_versions(machine: Path) -> None:
    host = host_read.read_live({}, access(machine))
    offered = [(one.domain, one.fabric) for one in host.fabric.domains]
    assert offered == [
        ("rdmap79s0-rdm", "efa"),
        ("rdmap79s0-rdm", "efa-direct"),
        ("rdmap79s0-dgrm", "efa"),
    ]
    assert host.versions == records.Versions(
        efa_driver="2.17.2g",
        efa_installer="1.43.2",
        libfabric="2.1.0amzn5.0",
        ofi_nccl="1.16.3",
        nccl="2.27.7",
        cuda="12.9.1",
        nvidia_driver="570.172.08",
        nvidia_open=True,
    )


def test_the_reader_finds_every_copy_of_libfabric(machine: Path) -> None:
    libraries = host_read.read_live({}, access(machine)).libraries
    assert libraries.libfabric_path == "/opt/amazon/efa/lib/libfabric.so.1"
    assert [Path(path).name for path in libraries.bundled] == ["libfabric-0a1b2c.so.1"]
    (process,) = libraries.processes
    assert (process.pid, process.command) == (41, "python")
    assert len(process.paths) == 2


def test_an_error_of_libfabric_is_kept(machine: Path) -> None:
    def fails(arguments: Sequence[str]) -> host_read.CommandResult | None:
        return host_read.CommandResult(61, "", "fi_getinfo: -61 (No data available)\n")

    fabric = host_read.read_live({}, access(machine, fails)).fabric
    assert fabric.error == "fi_getinfo: -61 (No data available)"
    assert fabric.domains == ()


def test_without_fi_info_the_installer_names_the_version(machine: Path) -> None:
    (machine / "opt/amazon/efa/bin/fi_info").unlink()
    host = host_read.read_live({}, access(machine))
    assert host.fabric.asked_with == ""
    assert host.versions.libfabric == "2.1.0amzn5.0"


def test_an_empty_root_gives_an_empty_host(tmp_path: Path) -> None:
    host = host_read.read_live({}, access(tmp_path, lambda _arguments: None))
    assert host.rdma_devices == ()
    assert host.gpus == ()
    assert host.machine.instance_type == ""
    assert records.decode(records.encode(host)) == host


@pytest.mark.parametrize(
    ("marker", "environment", "kind"),
    [
        (".dockerenv", {}, "docker"),
        ("run/.containerenv", {}, "podman"),
        ("etc/enroot", {}, "enroot"),
        ("etc/hosts", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ("etc/hosts", {}, ""),
    ],
)
def test_containers_are_recognised(
    tmp_path: Path, marker: str, environment: dict[str, str], kind: str
) -> None:
    path = tmp_path / marker
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    host = host_read.read_live(environment, access(tmp_path, lambda _arguments: None))
    assert host.machine.container == kind


def test_the_quota_of_the_older_cgroup_is_read(machine: Path) -> None:
    (machine / "sys/fs/cgroup/cpu.max").unlink()
    folder = machine / "sys/fs/cgroup/cpu"
    folder.mkdir()
    (folder / "cpu.cfs_quota_us").write_text("200000\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert host_read.read_live({}, access(machine)).cpu.quota_cores == 2.0
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    assert host_read.read_live({}, access(machine)).cpu.quota_cores is None


def test_the_environment_comes_from_the_kernel(machine: Path) -> None:
    environment = host_read.process_environment(access(machine))
    assert environment["NCCL_NET"] == "IB"
    host = host_read.read_live(environment, access(machine))
    assert host.environment == {"EFA_KV_SECRET": "(set)", "NCCL_NET": "IB"}


def test_this_machine_can_be_read_and_recorded() -> None:
    host = host_read.read_live(host_read.process_environment())
    assert host.cpu.online >= 1
    assert host.memory.total_bytes > 0
    assert msgspec.json.decode(records.encode(host))["format"] == records.FORMAT


def test_a_missing_command_is_no_error() -> None:
    assert host_read.run_command(["/nonexistent/command"]) is None
