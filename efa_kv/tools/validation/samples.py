"""What hosts tell about themselves and about each step: the data that everything is judged by."""

from __future__ import annotations

import msgspec

from efa_kv.tools.validation.schedule import Kind


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One host as it introduces itself.

    ``nic_rates`` are line rates in bytes per second, 0 where a device does not say; ``boot`` is
    equal for processes of one machine; ``container`` is empty on a host itself.
    """

    rank: int
    label: str
    session: str
    nics: tuple[str, ...]
    nic_rates: tuple[float, ...]
    protocol: str
    provider: str
    boot: str = ""
    container: str = ""
    libfabric: str = ""
    gpus: int = 0

    @property
    def line_rate_bytes_per_s(self) -> float:
        """All devices together, one direction; 0 where one does not say."""
        return sum(self.nic_rates) if all(self.nic_rates) else 0.0


class RailSample(msgspec.Struct, frozen=True, array_like=True):
    """What one device of a sender did in a step: bytes that landed, operations that failed, and
    operations that had not ended when a deadline passed."""

    bytes: int
    failed: int
    stuck: int = 0


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What one sender did in one step.

    ``rails`` is in the order of its devices. ``latencies_us`` are the median and the 99th
    percentile. ``error`` names the first transfer that failed, after which nothing was measured;
    ``mismatch`` the first wrong byte.
    """

    kind: Kind
    repeat: int
    source: int
    targets: tuple[int, ...]
    wall_s: float = 0.0
    rails: tuple[RailSample, ...] = ()
    latencies_us: tuple[float, float] | None = None
    error: str = ""
    mismatch: str = ""

    @property
    def bytes(self) -> int:
        return sum(rail.bytes for rail in self.rails)

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.wall_s if self.wall_s else 0.0
