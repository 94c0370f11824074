"""Environment variables left from InfiniBand, or harmful to a transfer over EFA.

Each rule is one row: the names it looks at, when it applies, and what it says. The rows come from
the guide to EFA networks, the notes on Mooncake's EFA transport and the plugin's own page on its
environment; `docs/coverage.md` names the passage of each.
"""

from collections.abc import Callable

import msgspec

from efa_kv.tools.checks.finding import Finding, Severity, good
from efa_kv.tools.host import Host

# The deepest transmit queue a provider was seen to choose by itself, per device.
DEEPEST_QUEUE = 4096


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """A variable (or a prefix ending in "*"), the values it is about, and the advice."""

    name: str
    applies: Callable[[str], bool]
    severity: Severity
    expected: str
    why: str
    mend: str = ""
    gpu_only: bool = False


def _any(_value: str) -> bool:
    return True


def _is(*values: str) -> Callable[[str], bool]:
    return lambda value: value.strip().lower() in values


def _is_not(*values: str) -> Callable[[str], bool]:
    return lambda value: value.strip().lower() not in values


_OFF = ("0", "off", "no", "n", "false")
_ON = ("1", "on", "yes", "y", "true")

_NCCL_RULES = (
    Rule(
        name="NCCL_NET",
        applies=_is("ib"),
        severity=Severity.PROBLEM,
        expected="unset; if it must be set, Libfabric",
        why="NCCL refuses to start: EFA is not an InfiniBand device",
    ),
    Rule(
        name="NCCL_NET",
        applies=_is_not("ib", "libfabric", "aws libfabric", "ofi"),
        severity=Severity.PROBLEM,
        expected="unset; if it must be set, Libfabric",
        why="NCCL uses this network instead of EFA, or stops when it has none of that name",
    ),
    Rule(
        name="NCCL_NET_PLUGIN",
        applies=_any,
        severity=Severity.WARNING,
        expected="unset, so that NCCL finds the EFA plugin of the image",
        why="another plugin, or none, makes NCCL fall back to sockets",
    ),
    Rule(
        name="NCCL_IB_*",
        applies=_any,
        severity=Severity.WARNING,
        expected="unset on EFA",
        why="left from InfiniBand; it steers NCCL towards devices that are not EFA",
    ),
    Rule(
        name="NCCL_NET_GDR_LEVEL",
        applies=_is("0", "loc"),
        severity=Severity.PROBLEM,
        expected="unset",
        why="this turns GPUDirect RDMA off, so that every byte is copied through host memory",
        gpu_only=True,
    ),
    Rule(
        name="NCCL_NET_GDR_LEVEL",
        applies=_is_not("0", "loc"),
        severity=Severity.WARNING,
        expected="unset",
        why="the plugin knows the distances on these instances; a level by hand can exclude GPUs",
        gpu_only=True,
    ),
)

_FABRIC_RULES = (
    Rule(
        name="FI_PROVIDER",
        applies=lambda value: "efa" not in value.replace(";", ",").split(","),
        severity=Severity.PROBLEM,
        expected="unset or efa",
        why="libfabric offers no EFA device under this filter, to us and to NCCL alike",
    ),
    Rule(
        name="FI_PROVIDER_PATH",
        applies=_any,
        severity=Severity.WARNING,
        expected="unset in production",
        why="a provider loaded from there can take the place of the real efa",
    ),
    Rule(
        name="FI_EFA_USE_DEVICE_RDMA",
        applies=_is(*_OFF),
        severity=Severity.PROBLEM,
        expected="unset (1 is the default from libfabric 1.18)",
        why="remote writes are then emulated by messages and copied by the remote processor",
    ),
    Rule(
        name="FI_EFA_ENABLE_SHM_TRANSFER",
        applies=_is(*_ON),
        severity=Severity.WARNING,
        expected="unset, or 0 where processes of one host exchange GPU memory",
        why=(
            "libfabric's path between processes of one host copies into GPU memory as if it were "
            "host memory and crashes (ofiwg/libfabric 12328)"
        ),
        mend="export FI_EFA_ENABLE_SHM_TRANSFER=0",
        gpu_only=True,
    ),
    Rule(
        name="FI_HMEM",
        applies=_is("system"),
        severity=Severity.PROBLEM,
        expected="unset",
        why="libfabric then takes GPU memory for host memory, in NCCL's plugin as well",
        gpu_only=True,
    ),
    Rule(
        name="FI_EFA_TX_SIZE",
        applies=lambda value: not value.strip().isdigit() or int(value) < DEEPEST_QUEUE // 16,
        severity=Severity.WARNING,
        expected="unset, or a number above what the device chooses",
        why="it sets how many operations a device may have in flight; a small one stalls the rail",
    ),
    Rule(
        name="RDMAV_*",
        applies=_any,
        severity=Severity.WARNING,
        expected="unset on EFA",
        why="fork protection of the verbs library breaks registration or a child on huge pages",
    ),
    Rule(
        name="FI_EFA_FORK_SAFE",
        applies=_is(*_ON),
        severity=Severity.WARNING,
        expected="unset",
        why="not needed since Linux 5.15, and a process that has registered memory must not fork",
    ),
)

_MOONCAKE_RULES = (
    Rule(
        name="MC_MAX_WR",
        applies=_any,
        severity=Severity.WARNING,
        expected="unset: the provider's own queue depth is used",
        why=(
            "a smaller value ends in 'timed out waiting for CQ drain' with an empty queue, a "
            "larger one in endless FI_EAGAIN; here a larger one is clamped"
        ),
        mend="unset MC_MAX_WR; for a deeper queue set FI_EFA_TX_SIZE",
    ),
    Rule(
        name="MC_EFA_CQ_THREADS",
        applies=_is_not("1"),
        severity=Severity.WARNING,
        expected="unset or 1",
        why="every further poller burns a core of the inference loop and wins nothing measurable",
    ),
    Rule(
        name="MC_FORCE_TCP",
        applies=_is_not(*_OFF, ""),
        severity=Severity.PROBLEM,
        expected="unset",
        why="all transfers go over TCP",
    ),
    Rule(
        name="MC_MS_AUTO_DISC",
        applies=_is(*_OFF),
        severity=Severity.NOTE,
        expected="unset, or device names given beside it",
        why="without discovery only the devices that are named are used",
    ),
    Rule(
        name="MC_IB_*",
        applies=_any,
        severity=Severity.WARNING,
        expected="unset on EFA",
        why="left from InfiniBand; EFA has no such setting",
    ),
    Rule(
        name="MC_GID_INDEX",
        applies=_any,
        severity=Severity.WARNING,
        expected="unset on EFA",
        why="left from InfiniBand; EFA addresses are not chosen by index",
    ),
    Rule(
        name="MC_SLICE_SIZE",
        applies=_any,
        severity=Severity.NOTE,
        expected="unset; the size of a stripe is stripe_bytes here",
        why="transfers over EFA are not cut by this setting",
    ),
    Rule(
        name="MOONCAKE_PROTOCOL",
        applies=_is("rdma"),
        severity=Severity.PROBLEM,
        expected="efa",
        why="the rdma transport needs reliable connections, which EFA does not have (EOPNOTSUPP)",
        mend="export MOONCAKE_PROTOCOL=efa",
    ),
    Rule(
        name="MOONCAKE_PROTOCOL",
        applies=_is("tcp"),
        severity=Severity.WARNING,
        expected="efa",
        why="the KV cache goes over TCP although this host has EFA",
        mend="export MOONCAKE_PROTOCOL=efa",
    ),
)

_UCX_RULES = tuple(
    Rule(
        name=name,
        applies=_any,
        severity=Severity.WARNING,
        expected="unset on EFA",
        why="UCX over EFA has been seen to run on TCP or on emulation without saying so",
        mend=f"unset {name}; use NIXL's libfabric backend, or this engine",
    )
    for name in ("UCX_TLS", "UCX_NET_DEVICES", "UCX_IB_*")
)

RULES = _NCCL_RULES + _FABRIC_RULES + _MOONCAKE_RULES + _UCX_RULES


def environment(host: Host) -> list[Finding]:
    """Every variable of the host that a rule speaks about; nothing without EFA devices."""
    if not host.efa_devices:
        return []
    findings = [
        _finding(rule, name, value)
        for name, value in sorted(host.environment.items())
        for rule in RULES
        if _concerns(rule, name) and rule.applies(value) and (host.gpus or not rule.gpu_only)
    ]
    return findings or [good("settings", "no harmful setting in the environment")]


def _concerns(rule: Rule, name: str) -> bool:
    if rule.name.endswith("*"):
        return name.startswith(rule.name[:-1])
    return name == rule.name


def _finding(rule: Rule, name: str, value: str) -> Finding:
    return Finding(
        id=f"settings.{name}",
        severity=rule.severity,
        found=f"{name}={value}",
        expected=rule.expected,
        why=rule.why,
        mend=rule.mend or f"unset {name}",
    )
