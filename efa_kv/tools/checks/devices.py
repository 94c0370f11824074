"""EFA devices: present, up, reachable through /dev, and seen by libfabric as by the kernel."""

import re

from efa_kv.tools import instances
from efa_kv.tools.checks.finding import Finding, Severity, good, listed
from efa_kv.tools.host import MELLANOX_VENDOR, DeviceNode, Host, RdmaDevice

_INSTALL_PAGE = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start.html"


def present(host: Host) -> list[Finding]:
    """The number of EFA devices against what the instance type has."""
    instance = instances.find(host.machine.instance_type)
    count = len(host.efa_devices)
    if instance is None:
        return [good("devices.efa", f"{count} EFA devices")] if count else [_none_expected()]
    if count == instance.nics:
        return [good("devices.efa", f"{count} EFA devices, all that {instance.name} has")]
    if count == 0:
        return [_none_on(instance)]
    return [
        Finding(
            id="devices.efa",
            severity=Severity.WARNING,
            found=f"{count} EFA devices",
            expected=f"{instance.nics} on {instance.name}",
            why=(
                f"every missing device takes {instance.nic_gbps} Gb/s from the line rate, and the "
                "GPUs next to it reach their peers through a farther device"
            ),
            mend=(
                "launch the instance with an EFA or EFA-only interface on every network card; "
                "in a pod, request all of vpc.amazonaws.com/efa"
            ),
        )
    ]


def _none_expected() -> Finding:
    return Finding(
        id="devices.efa",
        severity=Severity.NOTE,
        found="no EFA device",
        expected="at least one, to use EFA",
        why="with protocol auto the engine will use tcp here; that is right for trying things out",
        mend="use an instance type with EFA, or set protocol to tcp to say that this is intended",
    )


def _none_on(instance: instances.Instance) -> Finding:
    return Finding(
        id="devices.efa",
        severity=Severity.PROBLEM,
        found="no EFA device",
        expected=f"{instance.nics} on {instance.name}",
        why="without one all traffic goes over TCP, at a small share of the line rate",
        mend=(
            "modprobe efa; when that finds nothing, attach EFA interfaces to the instance and "
            f"install the driver: {_INSTALL_PAGE}"
        ),
    )


def required(host: Host) -> list[Finding]:
    """The extra demand of `--require efa`: no EFA device is a problem wherever this runs."""
    if host.efa_devices:
        return []
    return [
        Finding(
            id="devices.required",
            severity=Severity.PROBLEM,
            found="no EFA device",
            expected="EFA, as --require efa asks",
            why="an engine told to require efa refuses to start on this host",
            mend="modprobe efa && ls /sys/class/infiniband",
        )
    ]


def link(host: Host) -> list[Finding]:
    """Ports of EFA devices that are not active."""
    down = [f"{one.name} ({one.port_state})" for one in host.efa_devices if _is_down(one)]
    if not host.efa_devices:
        return []
    if not down:
        return [good("devices.link", "every EFA port is active")]
    return [
        Finding(
            id="devices.link",
            severity=Severity.PROBLEM,
            found=f"not active: {listed(down)}",
            expected="ACTIVE on every EFA port",
            why="transfers over this device fail or stall until the rail is taken out",
            mend="dmesg | grep -i efa; if the port stays down, stop and start the instance",
        )
    ]


def _is_down(device: RdmaDevice) -> bool:
    return device.port_state not in ("", "ACTIVE")


def foreign(host: Host) -> list[Finding]:
    """Verbs devices that are not EFA: left out, harmful only where the provider trips on them."""
    if not host.foreign_devices:
        return []
    described = [_described(device) for device in host.foreign_devices]
    if not host.efa_devices:
        return [good("devices.foreign", f"verbs devices without EFA: {listed(described)}")]
    if _provider_lists_nothing(host) and _foreign_nodes(host):
        return [
            Finding(
                id="devices.foreign",
                severity=Severity.PROBLEM,
                found=f"libfabric lists nothing while it can see {listed(described)}",
                expected="only EFA devices in /dev/infiniband",
                why=(
                    "the EFA provider gives up its whole list when it meets a verbs device that "
                    "it cannot open, and NCCL then falls back to TCP"
                ),
                mend=f"do not pass {listed(_foreign_nodes(host))} into the container",
            )
        ]
    return [
        Finding(
            id="devices.foreign",
            severity=Severity.NOTE,
            found=f"left out: {listed(described)}",
            expected="nothing to do",
            why="these are not EFA; do not choose them in NCCL_IB_HCA and do not set NCCL_NET=IB",
            mend="none needed",
        )
    ]


def _described(device: RdmaDevice) -> str:
    kind = "ConnectX" if device.vendor == MELLANOX_VENDOR else device.driver or "unknown"
    return f"{device.name} ({kind}, {'no link' if _is_down(device) else 'link up'})"


def _foreign_nodes(host: Host) -> list[str]:
    """Device nodes of foreign devices that exist here."""
    there = {node.path for node in host.device_nodes}
    return [one.device_node for one in host.foreign_devices if one.device_node in there]


def _provider_lists_nothing(host: Host) -> bool:
    return bool(host.fabric.asked_with) and not host.fabric.domains


def nodes(host: Host) -> list[Finding]:
    """Device nodes of the EFA devices, and the permission to use them."""
    wanted = [one.device_node for one in host.efa_devices if one.device_node]
    there = {node.path: node for node in host.device_nodes}
    missing = [path for path in wanted if path not in there]
    closed = [path for path in wanted if path in there and not _usable(there[path])]
    if missing:
        return [_missing_nodes(host, missing)]
    if closed:
        return [
            Finding(
                id="nodes.permission",
                severity=Severity.PROBLEM,
                found=f"no permission to read and write {listed(closed)}",
                expected="read and write for the user of the server",
                why="opening the fabric fails with 'Permission denied'",
                mend=f"sudo chmod a+rw {' '.join(closed)}",
            )
        ]
    return [good("nodes.permission", f"{len(wanted)} device nodes open")] if wanted else []


def _usable(node: DeviceNode) -> bool:
    return node.readable and node.writable


def _missing_nodes(host: Host, missing: list[str]) -> Finding:
    if host.machine.container == "kubernetes":
        mend = "resources: {limits: {vpc.amazonaws.com/efa: 1}} with the EFA device plugin"
    elif host.machine.container:
        mend = "docker run --device=/dev/infiniband …"
    else:
        mend = "modprobe ib_uverbs && modprobe efa"
    return Finding(
        id="nodes.missing",
        severity=Severity.PROBLEM,
        found=f"missing: {listed(missing)}",
        expected="one device node for each EFA device",
        why="the kernel has the device but this process cannot open it; fi_getinfo answers -61",
        mend=mend,
    )


def fabric(host: Host) -> list[Finding]:
    """The devices libfabric offers against those the kernel has."""
    ours = {device.name for device in host.efa_devices}
    if not ours or _explained_elsewhere(host):
        return []
    if not host.fabric.asked_with:
        return [
            Finding(
                id="devices.fabric",
                severity=Severity.NOTE,
                found="libfabric was not asked: there is no fi_info here",
                expected="its list of EFA devices",
                why="the kernel can have a device that libfabric cannot use",
                mend="install the EFA software, or mount /opt/amazon/efa into the container",
            )
        ]
    offered = {re.sub(r"-(rdm|dgrm)$", "", one.domain) for one in host.fabric.domains}
    missing = sorted(ours - offered)
    if not missing:
        direct = any(one.fabric == "efa-direct" for one in host.fabric.domains)
        lighter = ", efa-direct among the fabrics" if direct else ""
        return [good("devices.fabric", f"libfabric offers all {len(ours)} devices{lighter}")]
    return [
        Finding(
            id="devices.fabric",
            severity=Severity.PROBLEM,
            found=f"libfabric does not offer {listed(missing)}; {_answer(host)}",
            expected="every EFA device of the kernel",
            why="a device that libfabric does not offer carries nothing",
            mend="FI_LOG_LEVEL=warn /opt/amazon/efa/bin/fi_info -p efa",
        )
    ]


def _answer(host: Host) -> str:
    return host.fabric.error or f"it lists {len(host.fabric.domains)} domains"


def _explained_elsewhere(host: Host) -> bool:
    """Whether an empty list follows from a finding that another check already makes."""
    there = {node.path for node in host.device_nodes}
    hidden = any(one.device_node not in there for one in host.efa_devices if one.device_node)
    return hidden or bool(_provider_lists_nothing(host) and _foreign_nodes(host))
