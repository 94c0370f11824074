"""`efa-kv doctor` on recorded hosts, and each check on the facts it is about."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from efa_kv.tools import checks, doctor
from efa_kv.tools import host as records
from efa_kv.tools.checks import devices, gpu, memory, place, versions
from efa_kv.tools.checks.finding import Finding, Severity

HOSTS = Path(__file__).parents[1] / "hosts"

# Everything that is not "good", by recorded host: these findings and no others.
EXPECTED: dict[str, set[tuple[str, str]]] = {
    "p5": set(),
    "p5en": set(),
    "p6-b200": {("devices.foreign", "note")},
    "p6-b300": set(),
    "plain-vm": {("devices.efa", "note")},
    "container-old-libfabric": {("versions.libfabric", "problem"), ("memory.shm", "warning")},
    "pod-without-infiniband": {("nodes.missing", "problem")},
}

app = typer.Typer()
app.command("doctor")(doctor.command)
runner = CliRunner()


def recorded(name: str) -> records.Host:
    return records.decode((HOSTS / f"{name}.json").read_bytes())


def changed(host: records.Host, part: str, **values: Any) -> records.Host:
    """The host with some fields of one part replaced."""
    new = msgspec.structs.replace(getattr(host, part), **values)
    return msgspec.structs.replace(host, **{part: new})


def without(host: records.Host, **values: Any) -> records.Host:
    return msgspec.structs.replace(host, **values)


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


def test_every_recorded_host_has_its_expectation() -> None:
    assert {path.stem for path in HOSTS.glob("*.json")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_recorded_hosts_give_the_expected_findings_and_no_others(name: str) -> None:
    report = doctor.examine(recorded(name))
    found = {(one.id, one.severity.value) for one in report.findings if one.severity != "good"}
    assert found == EXPECTED[name]
    problems = sum(severity == "problem" for _, severity in EXPECTED[name])
    assert report.exit_code == (1 if problems else 0)


@pytest.mark.parametrize("name", EXPECTED)
def test_every_finding_says_what_why_and_how(name: str) -> None:
    for finding in doctor.examine(recorded(name)).findings:
        assert finding.found
        if finding.severity is not Severity.GOOD:
            assert finding.expected
            assert finding.why
            assert finding.mend


def test_line_rate_and_share_of_each_gpu() -> None:
    finding = only(place.line_rate(recorded("p6-b300")))
    assert finding.found == "p6-b300.48xlarge: 16 x 400 Gb/s = 800 GB/s, 100 GB/s per GPU"


def test_an_unknown_instance_type_is_only_a_note() -> None:
    host = changed(recorded("p5en"), "machine", instance_type="x9.metal")
    assert only(place.line_rate(host)).severity is Severity.NOTE
    assert only(devices.present(host)).severity is Severity.GOOD


def test_missing_efa_devices_are_counted() -> None:
    host = recorded("p5en")
    some = without(host, rdma_devices=host.rdma_devices[:4])
    finding = only(devices.present(some))
    assert (finding.severity, finding.found) == (Severity.WARNING, "4 EFA devices")


def test_no_efa_on_an_efa_instance_is_a_problem() -> None:
    finding = only(devices.present(without(recorded("p5en"), rdma_devices=())))
    assert finding.severity is Severity.PROBLEM
    assert finding.mend.startswith("modprobe efa")


def test_a_port_that_is_down_is_named() -> None:
    host = recorded("p5en")
    down = msgspec.structs.replace(host.rdma_devices[3], port_state="DOWN")
    broken = without(host, rdma_devices=(*host.rdma_devices[:3], down, *host.rdma_devices[4:]))
    finding = only(devices.link(broken))
    assert finding.severity is Severity.PROBLEM
    assert down.name in finding.found


def test_dead_connectx_are_left_out() -> None:
    finding = only(devices.foreign(recorded("p6-b200")))
    assert finding.found == "left out: mlx5_0 (ConnectX, no link), mlx5_1 (ConnectX, no link)"
    assert "NCCL_NET=IB" in finding.why


def test_foreign_devices_that_hide_efa_are_a_problem() -> None:
    host = recorded("p6-b200")
    error = records.FabricAnswer(asked_with="fi_info -p efa", error="-61 (No data available)")
    finding = only(devices.foreign(without(host, fabric=error)))
    assert finding.severity is Severity.PROBLEM
    assert "/dev/infiniband/uverbs8" in finding.mend
    assert devices.fabric(without(host, fabric=error)) == []


def test_device_nodes_without_permission_are_a_problem() -> None:
    host = recorded("p5en")
    closed = msgspec.structs.replace(host.device_nodes[0], writable=False)
    finding = only(devices.nodes(without(host, device_nodes=(closed, *host.device_nodes[1:]))))
    assert (finding.id, finding.severity) == ("nodes.permission", Severity.PROBLEM)
    assert closed.path in finding.mend


@pytest.mark.parametrize(
    ("container", "mend"),
    [("", "modprobe"), ("docker", "--device=/dev/infiniband"), ("kubernetes", "vpc.amazonaws")],
)
def test_missing_device_nodes_are_mended_by_place(container: str, mend: str) -> None:
    host = changed(without(recorded("p5en"), device_nodes=()), "machine", container=container)
    assert mend in only(devices.nodes(host)).mend


def test_a_device_that_libfabric_does_not_offer_is_named() -> None:
    host = recorded("p5en")
    hidden = host.efa_devices[0].name
    domains = tuple(one for one in host.fabric.domains if not one.domain.startswith(hidden))
    finding = only(devices.fabric(changed(host, "fabric", domains=domains)))
    assert finding.severity is Severity.PROBLEM
    assert hidden in finding.found


def test_libfabric_that_nobody_could_ask_is_a_note() -> None:
    host = without(recorded("p5en"), fabric=records.FabricAnswer())
    assert only(devices.fabric(host)).severity is Severity.NOTE


@pytest.mark.parametrize(
    ("libfabric", "driver", "severity"),
    [
        ("", "3.3.0g", Severity.PROBLEM),
        ("1.17.1", "", Severity.PROBLEM),
        ("1.18.0", "", Severity.GOOD),
        ("2.1.0amzn5.0", "3.3.0g", Severity.WARNING),
        ("2.6.0amzn1.0", "3.3.0g", Severity.GOOD),
        ("2.7.0amzn2.0", "3.3.0g", Severity.GOOD),
        ("1.22.0", "2.13.0", Severity.GOOD),
    ],
)
def test_libfabric_against_the_driver(libfabric: str, driver: str, severity: Severity) -> None:
    host = changed(recorded("p5en"), "versions", libfabric=libfabric, efa_driver=driver)
    assert only(versions.libfabric(host)).severity is severity


@pytest.mark.parametrize(
    ("nccl", "plugin", "severity"),
    [
        ("2.16.5", "1.16.3", Severity.PROBLEM),
        ("2.27.7", "1.16.3", Severity.GOOD),
        ("2.31.2", "1.16.3", Severity.WARNING),
        ("2.31.2", "1.21.1", Severity.GOOD),
        ("2.27.7", "", Severity.GOOD),
    ],
)
def test_nccl_against_its_plugin(nccl: str, plugin: str, severity: Severity) -> None:
    host = changed(recorded("p5en"), "versions", nccl=nccl, ofi_nccl=plugin)
    assert only(versions.plugin(host)).severity is severity


@pytest.mark.parametrize(
    ("cuda", "driver", "severity"),
    [
        ("13.0.2", "570.172.08", Severity.PROBLEM),
        ("13.0.2", "580.95.05", Severity.GOOD),
        ("12.9.1", "570.172.08", Severity.GOOD),
    ],
)
def test_cuda_against_the_driver(cuda: str, driver: str, severity: Severity) -> None:
    host = changed(recorded("p5en"), "versions", cuda=cuda, nvidia_driver=driver)
    assert only(versions.cuda(host)).severity is severity


def test_the_table_of_releases_is_in_order_and_dated() -> None:
    assert [one.date for one in versions.RELEASES] == sorted(one.date for one in versions.RELEASES)
    drivers = [versions.number(one.driver) for one in versions.RELEASES]
    assert drivers == sorted(drivers)


def test_two_copies_of_libfabric_in_a_process() -> None:
    process = records.MappedProcess(
        pid=7, command="vllm", paths=("/opt/amazon/efa/lib/libfabric.so.1", "/x.libs/libfabric.so")
    )
    finding = only(versions.copies(changed(recorded("p5en"), "libraries", processes=(process,))))
    assert (finding.id, finding.severity) == ("libraries.two-copies", Severity.PROBLEM)
    assert finding.mend == "export LD_PRELOAD=/opt/amazon/efa/lib/libfabric.so.1"
    single = msgspec.structs.replace(process, paths=process.paths[:1])
    one_copy = changed(recorded("p5en"), "libraries", processes=(single,))
    assert only(versions.copies(one_copy)).severity is Severity.GOOD


def test_a_package_that_bundles_libfabric_is_warned_of() -> None:
    bundled = ("/venv/nixl_cu12.libs/libfabric-0a1b2c.so.1",)
    finding = only(versions.copies(changed(recorded("p5en"), "libraries", bundled=bundled)))
    assert (finding.id, finding.severity) == ("libraries.bundled", Severity.WARNING)


@pytest.mark.parametrize(
    ("limit_bytes", "severity"),
    [(None, Severity.GOOD), (64 << 10, Severity.PROBLEM), (1 << 40, Severity.WARNING)],
)
def test_memlock(limit_bytes: int | None, severity: Severity) -> None:
    host = changed(recorded("p5en"), "memory", memlock_soft_bytes=limit_bytes)
    assert only(memory.memlock(host)).severity is severity


def test_memlock_is_mended_within_the_hard_limit() -> None:
    host = changed(recorded("p5en"), "memory", memlock_soft_bytes=64 << 10)
    assert only(memory.memlock(host)).mend == "ulimit -l unlimited"
    hard = changed(host, "memory", memlock_hard_bytes=64 << 10)
    assert "limits.d" in only(memory.memlock(hard)).mend
    docker = changed(hard, "machine", container="docker")
    assert "--ulimit memlock=-1" in only(memory.memlock(docker)).mend


def test_huge_pages() -> None:
    host = changed(recorded("p5en"), "memory", huge_pages_free=0)
    assert only(memory.huge_pages(host)).severity is Severity.NOTE
    asked = without(host, environment={"FI_EFA_USE_HUGE_PAGE": "1"})
    assert only(memory.huge_pages(asked)).severity is Severity.WARNING


@pytest.mark.parametrize(
    ("container", "mend"), [("", "remount"), ("docker", "--shm-size"), ("kubernetes", "emptyDir")]
)
def test_small_shared_memory(container: str, mend: str) -> None:
    host = changed(recorded("p5en"), "memory", shm_total_bytes=64 << 20)
    host = changed(host, "machine", container=container)
    finding = only(memory.shared_memory(host))
    assert finding.severity is Severity.WARNING
    assert mend in finding.mend


@pytest.mark.parametrize(
    ("is_open", "kernel", "modules", "severity"),
    [
        (True, "6.8.0", (), Severity.GOOD),
        (True, "5.10.0", (), Severity.PROBLEM),
        (False, "6.8.0", (), Severity.PROBLEM),
        (False, "6.8.0", ("nvidia_peermem",), Severity.GOOD),
        (False, "5.10.0", ("efa_nv_peermem",), Severity.GOOD),
        (None, "6.8.0", (), Severity.NOTE),
    ],
)
def test_the_way_into_gpu_memory(
    is_open: bool | None, kernel: str, modules: tuple[str, ...], severity: Severity
) -> None:
    host = changed(recorded("p5en"), "machine", kernel=kernel, kernel_modules=modules)
    host = changed(host, "versions", nvidia_open=is_open)
    assert only(gpu.direct(host)).severity is severity


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("value", "severity"),
    [
        ("expandable_segments:True", Severity.PROBLEM),
        ("max_split_size_mb:512, expandable_segments:true", Severity.PROBLEM),
        ("backend:cudaMallocAsync", Severity.PROBLEM),
        ("expandable_segments:False", Severity.GOOD),
        ("max_split_size_mb:512", Severity.GOOD),
    ],
)
def test_allocators_in_both_spellings(variable: str, value: str, severity: Severity) -> None:
    host = without(recorded("p5en"), environment={variable: value})
    finding = only(gpu.allocators(host))
    assert finding.severity is severity
    if severity is Severity.PROBLEM:
        assert finding.mend == f"unset {variable}"


@pytest.mark.parametrize(
    "environment",
    [
        {"LD_PRELOAD": "/venv/torch_memory_saver_hook_mode_preload.abi3.so"},
        {"SGLANG_MOONCAKE_CUSTOM_MEM_POOL": "NVLINK"},
    ],
)
def test_other_remapping_allocators(environment: dict[str, str]) -> None:
    finding = only(gpu.allocators(without(recorded("p5en"), environment=environment)))
    assert (finding.id, finding.severity) == ("gpu.allocator", Severity.WARNING)


@pytest.mark.parametrize(
    ("usable", "quota", "environment", "severity"),
    [
        ("0-191", None, {}, Severity.GOOD),
        ("0-191", 8.0, {}, Severity.PROBLEM),
        ("0-191", 64.0, {}, Severity.WARNING),
        ("0-127", None, {}, Severity.NOTE),
        ("0", None, {"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, Severity.PROBLEM),
        ("0-23", None, {"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, Severity.GOOD),
        ("0-23", None, {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, Severity.GOOD),
        ("0-23", None, {"SLURM_STEP_TASKS_PER_NODE": "1"}, Severity.WARNING),
        ("0-23", None, {"LOCAL_WORLD_SIZE": "8"}, Severity.WARNING),
        ("0-23", None, {"CUDA_VISIBLE_DEVICES": "3"}, Severity.GOOD),
        ("0-23", None, {"CUDA_VISIBLE_DEVICES": "2,3"}, Severity.NOTE),
    ],
)
def test_cores_per_rank(
    usable: str, quota: float | None, environment: dict[str, str], severity: Severity
) -> None:
    host = changed(recorded("p5en"), "cpu", usable=usable, quota_cores=quota)
    finding = only(place.cores(without(host, environment=environment)))
    assert finding.severity is severity
    if severity is not Severity.GOOD:
        assert "24" in finding.expected


def test_cores_on_the_wrong_numa_node() -> None:
    host = changed(recorded("p5en"), "cpu", usable="0-23")
    finding = only(place.numa(host))
    assert finding.severity is Severity.WARNING
    assert finding.found == "no core on the NUMA node of GPU 4, 5, 6, 7"
    assert finding.mend == "numactl --cpunodebind=1 …"
    near = without(host, environment={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert only(place.numa(near)).severity is Severity.GOOD


def test_gpus_are_mapped_to_the_devices_of_their_switch() -> None:
    host = recorded("p5")
    for card in host.gpus:
        level, near = place.nearest(card, host.efa_devices)
        assert level == "switch"
        assert len(near) == 4
        assert {one.numa_node for one in near} == {card.numa_node}


def test_gpus_without_a_device_nearby() -> None:
    host = recorded("p5en")
    hidden = tuple(msgspec.structs.replace(one, pci_path=()) for one in host.rdma_devices)
    level, near = place.nearest(host.gpus[0], hidden)
    assert (level, len(near)) == ("node", 8)
    unknown = tuple(msgspec.structs.replace(one, numa_node=-1) for one in hidden)
    finding = only(place.gpu_nic_map(without(host, rdma_devices=unknown)))
    assert finding.severity is Severity.WARNING


@pytest.mark.parametrize(
    ("scope", "severity"),
    [(None, Severity.GOOD), (0, Severity.GOOD), (1, Severity.GOOD), (2, Severity.NOTE)],
)
def test_copying_between_processes(scope: int | None, severity: Severity) -> None:
    host = changed(recorded("p5en"), "machine", ptrace_scope=scope)
    assert only(place.near_peers(host)).severity is severity


def test_copying_between_containers() -> None:
    host = changed(recorded("p5en"), "machine", ptrace_scope=1, container="docker")
    found = only(place.near_peers(host)).found
    assert "pid namespace" in found
    assert "near_consent" in found
    outside = changed(recorded("p5en"), "machine", ptrace_scope=0, container="")
    assert "pid namespace" not in only(place.near_peers(outside)).found


def test_devices_that_cannot_write_are_warned_of() -> None:
    host = changed(recorded("p5en"), "machine", instance_type="p4d.24xlarge")
    finding = only(place.line_rate(host))
    assert (finding.id, finding.severity) == ("place.instance", Severity.WARNING)


def test_further_checks_are_run_with_the_rest() -> None:
    def live(host: records.Host) -> list[Finding]:
        return [Finding(id="live.loopback", severity=Severity.PROBLEM, found=host.machine.kernel)]

    report = doctor.examine(recorded("p5en"), further=[live])
    assert report.exit_code == 1
    assert report.findings[-1].id == "live.loopback"
    assert len(checks.ALL) > 15


def test_help() -> None:
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    for option in ("--container", "--require", "--json", "--host-record", "--save-host"):
        assert option in result.output


@pytest.mark.parametrize("name", EXPECTED)
def test_the_command_on_recorded_hosts(name: str, tmp_path: Path) -> None:
    out = tmp_path / "doctor.json"
    record = HOSTS / f"{name}.json"
    result = runner.invoke(app, ["--host-record", str(record), "--json", str(out)])
    report = json.loads(out.read_text())
    assert result.exit_code == report["exit_code"]
    assert sum(report["counts"].values()) == len(report["findings"])
    for identity, _ in EXPECTED[name]:
        assert identity in result.output


def test_require_efa_fails_without_efa() -> None:
    record = str(HOSTS / "plain-vm.json")
    result = runner.invoke(app, ["--host-record", record, "--require", "efa"])
    assert result.exit_code == 1
    assert "devices.required" in result.output
    good = runner.invoke(app, ["--host-record", str(HOSTS / "p5.json"), "--require", "efa"])
    assert good.exit_code == 0


def test_container_changes_the_advice(tmp_path: Path) -> None:
    host = without(recorded("p5en"), device_nodes=())
    record = tmp_path / "host.json"
    record.write_bytes(records.encode(host))
    plain = runner.invoke(app, ["--host-record", str(record)])
    inside = runner.invoke(app, ["--host-record", str(record), "--container"])
    assert "modprobe ib_uverbs" in plain.output
    assert "docker run --device=/dev/infiniband" in inside.output


def test_what_cannot_run_ends_with_2(tmp_path: Path) -> None:
    assert runner.invoke(app, ["--host-record", str(tmp_path / "none.json")]).exit_code == 2
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    result = runner.invoke(app, ["--host-record", str(broken)])
    assert result.exit_code == 2
    assert "not a host record" in result.output
    assert runner.invoke(app, ["--require", "infiniband"]).exit_code == 2
    record = str(HOSTS / "p5.json")
    nowhere = str(tmp_path / "no" / "folder.json")
    assert runner.invoke(app, ["--host-record", record, "--json", nowhere]).exit_code == 2
    assert runner.invoke(app, ["--host-record", record, "--save-host", nowhere]).exit_code == 2


def test_this_host_can_be_checked_and_saved(tmp_path: Path) -> None:
    saved = tmp_path / "host.json"
    result = runner.invoke(app, ["--save-host", str(saved), "--no-transfer"])
    assert result.exit_code in (0, 1)
    again = runner.invoke(app, ["--host-record", str(saved)])
    assert again.exit_code == result.exit_code
    assert again.output == result.output
