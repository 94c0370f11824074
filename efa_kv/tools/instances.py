"""What each EFA instance type offers, as the instance pages of AWS and the field notes state it.

Sources: the EC2 user guide's pages on accelerated instances and on their network cards, and the
line rates and queue depths published with the benchmarks of other EFA transfer engines. Checked
October 2026; an instance missing here is not an error, only a host whose line rate is unknown.
"""

import msgspec

BITS_PER_BYTE = 8


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """One instance type: its GPUs, cores and EFA devices.

    `nic_gbps` is the line rate of one EFA device in 10^9 bits per second, each way.
    `transmit_depth` is the provider's queue per device where it has been read, else 0.
    `rdma_write` tells whether the device writes remote memory itself; without it libfabric
    emulates the write with messages and the remote processor copies.
    """

    name: str
    gpu: str
    gpus: int
    vcpus: int
    nics: int
    nic_gbps: int
    transmit_depth: int = 0
    rdma_write: bool = True

    @property
    def line_rate_bytes_per_s(self) -> float:
        """All EFA devices together, one direction."""
        return self.nics * self.nic_gbps * 1e9 / BITS_PER_BYTE

    @property
    def gpu_share_bytes_per_s(self) -> float:
        """The line rate divided over the GPUs: the ceiling of one rank's cross-node traffic."""
        return self.line_rate_bytes_per_s / self.gpus

    @property
    def nics_per_gpu(self) -> float:
        return self.nics / self.gpus

    @property
    def cores_per_gpu(self) -> int:
        """vCPUs a rank should have: the node's vCPUs divided by its GPUs."""
        return self.vcpus // self.gpus


_KNOWN = (
    Instance(
        name="p4d.24xlarge", gpu="A100", gpus=8, vcpus=96, nics=4, nic_gbps=100, rdma_write=False
    ),
    Instance(
        name="p4de.24xlarge", gpu="A100", gpus=8, vcpus=96, nics=4, nic_gbps=100, rdma_write=False
    ),
    Instance(name="p5.4xlarge", gpu="H100", gpus=1, vcpus=16, nics=1, nic_gbps=100),
    Instance(
        name="p5.48xlarge",
        gpu="H100",
        gpus=8,
        vcpus=192,
        nics=32,
        nic_gbps=100,
        transmit_depth=4096,
    ),
    Instance(name="p5e.48xlarge", gpu="H200", gpus=8, vcpus=192, nics=32, nic_gbps=100),
    Instance(name="p5en.48xlarge", gpu="H200", gpus=8, vcpus=192, nics=16, nic_gbps=200),
    Instance(name="p6-b200.48xlarge", gpu="B200", gpus=8, vcpus=192, nics=8, nic_gbps=400),
    Instance(
        name="p6-b300.48xlarge",
        gpu="B300",
        gpus=8,
        vcpus=192,
        nics=16,
        nic_gbps=400,
        transmit_depth=2048,
    ),
)

INSTANCES = {instance.name: instance for instance in _KNOWN}


def find(name: str) -> Instance | None:
    """The instance type of this name; a family name such as `p5en` means its largest size."""
    if name in INSTANCES:
        return INSTANCES[name]
    family = [known for known in _KNOWN if known.name.split(".")[0] == name]
    return max(family, key=lambda known: known.vcpus, default=None)
