"""Software versions, alone and against one another."""

import datetime
import re

import msgspec

from efa_kv.tools.checks.finding import Finding, Severity, good
from efa_kv.tools.host import Host

Number = tuple[int, ...]

OLDEST_LIBFABRIC: Number = (1, 18)
OLDEST_NCCL: Number = (2, 17, 1)
CUDA13_DRIVER: Number = (580,)


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """What one EFA installer ships together; `ofi_nccl` is empty where it ships no plugin."""

    installer: str
    date: datetime.date
    driver: str
    libfabric: str
    ofi_nccl: str = ""


# From AWS's "Elastic Fabric Adapter release notes" (EC2 user guide) and, for the driver of 1.41.0,
# the change log of AWS ParallelCluster. Read in October 2026. A new installer adds a row.
RELEASES = (
    Release(
        installer="1.41.0",
        date=datetime.date(2025, 5, 16),
        driver="2.15.0",
        libfabric="2.1.0",
        ofi_nccl="1.14.2",
    ),
    Release(
        installer="1.42.0",
        date=datetime.date(2025, 6, 6),
        driver="2.15.3",
        libfabric="2.1.0",
        ofi_nccl="1.15.0",
    ),
    Release(
        installer="1.43.2",
        date=datetime.date(2025, 8, 15),
        driver="2.17.2",
        libfabric="2.1.0",
        ofi_nccl="1.16.3",
    ),
    Release(
        installer="1.50.0",
        date=datetime.date(2026, 8, 21),
        driver="3.3.0",
        libfabric="2.6.0",
        ofi_nccl="1.21.1",
    ),
    Release(
        installer="1.51.0",
        date=datetime.date(2026, 10, 22),
        driver="3.3.1",
        libfabric="2.7.0",
        ofi_nccl="1.22.0",
    ),
)

# The NCCL versions each plugin release says it was tested with (release pages of aws-ofi-nccl,
# read in October 2026); for 1.16.3 the pair that AWS's own nccl-tests image of August 2025 holds.
TESTED_NCCL: dict[str, tuple[str, ...]] = {
    "1.16.3": ("2.27.7",),
    "1.19.2": ("2.27.3", "2.28.7", "2.29.7"),
    "1.20.0": ("2.28.9", "2.29.7", "2.30.4"),
    "1.21.1": ("2.31.2",),
}


def number(text: str) -> Number:
    """The leading numbers of a version: "2.1.0amzn3.0" and "3.3.0g" give (2, 1, 0), (3, 3, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def release_of_driver(driver: str) -> Release | None:
    """The newest known release whose driver is not newer than this one."""
    fitting = [one for one in RELEASES if number(one.driver) <= number(driver)]
    return fitting[-1] if driver and fitting else None


def libfabric(host: Host) -> list[Finding]:
    """libfabric new enough for device writes, and not older than the driver's own release."""
    if not host.efa_devices:
        return []
    version = host.versions.libfabric
    if not version:
        return [_no_libfabric()]
    if number(version) < OLDEST_LIBFABRIC:
        return [_too_old(host)]
    release = release_of_driver(host.versions.efa_driver)
    if release and number(version)[:2] < number(release.libfabric)[:2]:
        return [_older_than_driver(host, release)]
    return [good("versions.libfabric", f"libfabric {version}")]


def _no_libfabric() -> Finding:
    return Finding(
        id="versions.libfabric",
        severity=Severity.PROBLEM,
        found="no libfabric of the EFA installer, and no fi_info",
        expected="/opt/amazon/efa/lib/libfabric.so.1",
        why="without it no program can use the EFA devices of this host",
        mend="sudo ./efa_installer.sh -y  (in a container: -y --skip-kmod --skip-limit-conf)",
    )


def _mount_mend(host: Host) -> str:
    if not host.machine.container:
        return "sudo ./efa_installer.sh -y"
    return (
        "in the image: efa_installer.sh -y --skip-kmod --skip-limit-conf --no-verify; or mount "
        "the host's: -v /opt/amazon/efa:/opt/amazon/efa with its libefa.so.1 and libibverbs.so.1"
    )


def _too_old(host: Host) -> Finding:
    return Finding(
        id="versions.libfabric",
        severity=Severity.PROBLEM,
        found=f"libfabric {host.versions.libfabric} with driver {host.versions.efa_driver or '?'}",
        expected="1.18 or later",
        why=(
            "before 1.18 remote writes are emulated with messages that the remote processor "
            "copies, and with a newer driver fi_ep_bind answers 'Function not implemented'"
        ),
        mend=_mount_mend(host),
    )


def _older_than_driver(host: Host, release: Release) -> Finding:
    return Finding(
        id="versions.libfabric",
        severity=Severity.WARNING,
        found=f"libfabric {host.versions.libfabric} with driver {host.versions.efa_driver}",
        expected=f"{release.libfabric} or later, shipped with driver {release.driver}",
        why="libfabric older than the host's driver misses features and has failed to bind",
        mend=_mount_mend(host),
    )


def plugin(host: Host) -> list[Finding]:
    """NCCL, its libfabric plugin and the installer as a combination known to work."""
    if not host.efa_devices or not host.versions.nccl:
        return []
    nccl = number(host.versions.nccl)
    if nccl < OLDEST_NCCL:
        return [
            _combination(
                host,
                Severity.PROBLEM,
                expected="NCCL 2.17.1 or later",
                why="aws-ofi-nccl does not load into an older NCCL, which then uses sockets",
            )
        ]
    tested = TESTED_NCCL.get(host.versions.ofi_nccl, ())
    if tested and nccl[:2] > number(tested[-1])[:2]:
        return [
            _combination(
                host,
                Severity.WARNING,
                expected=f"NCCL {tested[-1]} or earlier, which that plugin was tested with",
                why="an NCCL newer than its plugin may not load it and then uses sockets",
            )
        ]
    named = f"NCCL {host.versions.nccl}, aws-ofi-nccl {host.versions.ofi_nccl or 'not found'}"
    return [good("versions.nccl", named)]


def _combination(host: Host, severity: Severity, expected: str, why: str) -> Finding:
    return Finding(
        id="versions.nccl",
        severity=severity,
        found=f"NCCL {host.versions.nccl} with aws-ofi-nccl {host.versions.ofi_nccl or 'unknown'}",
        expected=expected,
        why=why,
        mend="NCCL_DEBUG=INFO … 2>&1 | tee nccl.log; efa-kv nccl-log nccl.log",
    )


def cuda(host: Host) -> list[Finding]:
    """The GPU driver against the CUDA runtime."""
    runtime, driver = number(host.versions.cuda), number(host.versions.nvidia_driver)
    if not runtime or not driver:
        return []
    if runtime >= (13,) and driver < CUDA13_DRIVER:
        return [
            Finding(
                id="versions.cuda",
                severity=Severity.PROBLEM,
                found=f"CUDA {host.versions.cuda} with driver {host.versions.nvidia_driver}",
                expected="driver 580 or later for CUDA 13",
                why="CUDA 13 does not start on an older driver, so GPU memory cannot be registered",
                mend="install a 580 driver, or the CUDA 12 build of the server",
            )
        ]
    named = f"CUDA {host.versions.cuda}, driver {host.versions.nvidia_driver}"
    return [good("versions.cuda", named)]


def copies(host: Host) -> list[Finding]:
    """More than one libfabric in a process, or about to be."""
    findings = [
        Finding(
            id="libraries.two-copies",
            severity=Severity.PROBLEM,
            found=f"{one.command} ({one.pid}) maps {' and '.join(one.paths)}",
            expected="one libfabric per process",
            why=(
                "the copy that starts first takes the EFA devices, the other sees an empty list "
                "('provider efa output empty list') and NCCL falls back to TCP without a word"
            ),
            mend=f"export LD_PRELOAD={_preload(host)}",
        )
        for one in host.libraries.processes
        if len(one.paths) > 1
    ]
    if host.libraries.bundled and host.efa_devices:
        findings.append(_bundled(host))
    if findings or not host.libraries.processes:
        return findings
    return [good("libraries.two-copies", "no process maps two copies of libfabric")]


def _preload(host: Host) -> str:
    return host.libraries.libfabric_path or "/opt/amazon/efa/lib/libfabric.so.1"


def _bundled(host: Host) -> Finding:
    return Finding(
        id="libraries.bundled",
        severity=Severity.WARNING,
        found=f"a Python package brings its own: {', '.join(host.libraries.bundled)}",
        expected="packages that use the system's libfabric",
        why="together with NCCL's plugin the process would hold two copies of libfabric",
        mend=f"export LD_PRELOAD={_preload(host)}",
    )
