"""Every rule about the environment: the value that triggers it and one that does not."""

from pathlib import Path

import msgspec
import pytest

from efa_kv.tools import host as records
from efa_kv.tools.checks import settings
from efa_kv.tools.checks.finding import Severity

HOSTS = Path(__file__).parents[1] / "hosts"

# Variable, harmful value, severity, harmless value (None where only unset is harmless).
CASES = [
    ("NCCL_NET", "IB", "problem", "AWS Libfabric"),
    ("NCCL_NET", "Socket", "problem", "Libfabric"),
    ("NCCL_NET_PLUGIN", "none", "warning", None),
    ("NCCL_IB_HCA", "mlx5", "warning", None),
    ("NCCL_IB_DISABLE", "1", "warning", None),
    ("NCCL_NET_GDR_LEVEL", "LOC", "problem", None),
    ("NCCL_NET_GDR_LEVEL", "PIX", "warning", None),
    ("FI_PROVIDER", "tcp", "problem", "efa"),
    ("FI_PROVIDER_PATH", "/opt/providers", "warning", None),
    ("FI_EFA_USE_DEVICE_RDMA", "0", "problem", "1"),
    ("FI_EFA_ENABLE_SHM_TRANSFER", "1", "warning", "0"),
    ("FI_HMEM", "system", "problem", "cuda"),
    ("FI_EFA_TX_SIZE", "64", "warning", "16384"),
    ("FI_EFA_TX_SIZE", "many", "warning", "8192"),
    ("RDMAV_FORK_SAFE", "1", "warning", None),
    ("FI_EFA_FORK_SAFE", "1", "warning", "0"),
    ("MC_MAX_WR", "256", "warning", None),
    ("MC_MAX_WR", "16384", "warning", None),
    ("MC_EFA_CQ_THREADS", "0", "warning", "1"),
    ("MC_EFA_CQ_THREADS", "16", "warning", "1"),
    ("MC_FORCE_TCP", "1", "problem", "0"),
    ("MC_MS_AUTO_DISC", "0", "note", "1"),
    ("MC_IB_PORT", "1", "warning", None),
    ("MC_GID_INDEX", "3", "warning", None),
    ("MC_SLICE_SIZE", "65536", "note", None),
    ("MOONCAKE_PROTOCOL", "rdma", "problem", "efa"),
    ("MOONCAKE_PROTOCOL", "tcp", "warning", "efa"),
    ("UCX_NET_DEVICES", "mlx5_0:1", "warning", None),
    ("UCX_TLS", "rc,cuda_copy", "warning", None),
    ("UCX_IB_GID_INDEX", "3", "warning", None),
]


def host_with(environment: dict[str, str], name: str = "p5en") -> records.Host:
    host = records.decode((HOSTS / f"{name}.json").read_bytes())
    return msgspec.structs.replace(host, environment=environment)


@pytest.mark.parametrize(("name", "harmful", "severity", "harmless"), CASES)
def test_harmful_settings_are_found(
    name: str, harmful: str, severity: str, harmless: str | None
) -> None:
    (finding,) = settings.environment(host_with({name: harmful}))
    assert (finding.id, finding.severity.value) == (f"settings.{name}", severity)
    assert finding.found == f"{name}={harmful}"
    assert finding.expected
    assert finding.why
    assert finding.mend
    if harmless is not None:
        (clean,) = settings.environment(host_with({name: harmless}))
        assert clean.severity is Severity.GOOD


def test_every_rule_has_a_case() -> None:
    untested = [
        rule
        for rule in settings.RULES
        if not any(
            rule.applies(harmful)
            and (rule.name == name or (rule.name[-1] == "*" and name.startswith(rule.name[:-1])))
            for name, harmful, _, _ in CASES
        )
    ]
    assert untested == []


def test_all_leftovers_are_reported_together() -> None:
    environment = {"NCCL_NET": "IB", "NCCL_IB_HCA": "mlx5", "MC_MAX_WR": "256"}
    findings = settings.environment(host_with(environment))
    assert [one.id for one in findings] == [
        "settings.MC_MAX_WR",
        "settings.NCCL_IB_HCA",
        "settings.NCCL_NET",
    ]


def test_settings_do_not_matter_without_efa() -> None:
    assert settings.environment(host_with({"NCCL_NET": "IB"}, "plain-vm")) == []


def test_settings_about_gpu_memory_need_a_gpu() -> None:
    host = msgspec.structs.replace(host_with({"FI_HMEM": "system"}), gpus=())
    (finding,) = settings.environment(host)
    assert finding.severity is Severity.GOOD
