"""Other people's tools in `efa-kv validate`: what is run, and what their output says."""

from __future__ import annotations

from pathlib import Path

import pytest

from efa_kv.tools.validation import outcome, outside
from efa_kv.tools.validation.outside import (
    Collective,
    Exchange,
    OutputError,
    PingpongClient,
    PingpongServer,
    ToolError,
)
from efa_kv.tools.validation.place import AtAddress, Place
from efa_kv.tools.validation.samples import HostFacts
from efa_kv.types import Address

OUTPUTS = Path(__file__).parents[1] / "outputs"
# Recorded from libfabric 1.17.
PINGPONG = (OUTPUTS / "fi_pingpong.txt").read_text()
# In the form that nccl-tests print since 2.13, beside the log of NCCL.
ALL_REDUCE = (OUTPUTS / "all_reduce_perf.txt").read_text()
# In the older form, through mpirun --tag-output: no operation, an error instead of a count.
ALL_TO_ALL = (OUTPUTS / "alltoall_perf-old.txt").read_text()


def test_pingpong_is_read_with_its_units() -> None:
    rows = outside.read_pingpong(PINGPONG)
    assert [row.size_bytes for row in rows] == [64, 1536, 1 << 20]
    assert (rows[2].megabytes_per_s, rows[2].transfer_us) == (4485.41, 233.77)


def test_nccl_tests_are_read_with_the_network_they_took() -> None:
    found = outside.read_nccl_tests(ALL_REDUCE)
    assert [row.size_bytes for row in found.rows] == [8388608, 16777216]
    assert found.rows[0].time_us == 157.3
    assert (found.fastest.algorithm_gb_per_s, found.fastest.bus_gb_per_s) == (72.60, 136.12)
    assert found.log.uses_efa
    assert outside.nccl_problems("all_reduce_perf", found) == []


def test_older_nccl_tests_through_mpirun_are_read() -> None:
    (row,) = outside.read_nccl_tests(ALL_TO_ALL).rows
    assert (row.time_us, row.algorithm_gb_per_s, row.wrong) == (520935.0, 0.52, None)


def test_wrong_elements_and_another_network_are_problems() -> None:
    text = ALL_REDUCE.replace("136.12      0", "136.12      7").replace("Libfabric", "Socket")
    problems = outside.nccl_problems("all_reduce_perf", outside.read_nccl_tests(text))
    assert problems[0] == "all_reduce_perf: 7 wrong elements at 16777216 bytes"
    assert any("NOT use EFA" in problem for problem in problems)


@pytest.mark.parametrize("read", [outside.read_pingpong, outside.read_nccl_tests])
@pytest.mark.parametrize("text", ["", "fi_getinfo: -61\nno device\n", PINGPONG[:78]])
def test_output_without_a_result_is_said_with_its_end(read: object, text: str) -> None:
    with pytest.raises(OutputError, match="gave no result"):
        read(text)  # type: ignore[operator]


def host(rank: int, gpus: int = 8, protocol: str = "efa") -> HostFacts:
    return HostFacts(
        rank=rank,
        label=f"h{rank}",
        session=f"10.0.0.{rank}:1",
        nics=("a",),
        nic_rates=(1.0,),
        protocol=protocol,
        provider=protocol,
        gpus=gpus,
    )


def started_by(launcher: str, mpi: bool) -> Place:
    where = AtAddress("a", 1)
    return Place(rank=0, hosts=3, launcher=launcher, rendezvous=where, mpi=mpi)


HOSTS = [host(0), host(1), host(2)]


def test_all_is_run_where_all_is_there() -> None:
    plan = outside.plan(outside.PROGRAMS, HOSTS, started_by("srun", mpi=True))
    assert [(one.client, one.server) for one in plan.exchanges] == [(0, 1), (1, 2), (2, 0)]
    assert plan.exchanges[0].tools == {1: PingpongServer("efa"), 0: PingpongClient("efa", 1)}
    assert plan.collectives == (Collective("all_reduce_perf", 8), Collective("alltoall_perf", 8))
    assert plan.skipped == ()


ADDRESSES = {0: Address("10.0.0.1", 9), 1: Address("fd00::1", 9), 2: Address("--help", 9)}


def test_command_lines_are_made_here() -> None:
    serving = outside.arguments(PingpongServer("tcp"), ADDRESSES)
    assert serving[:3] == ("fi_pingpong", "-p", "tcp")
    assert outside.arguments(PingpongClient("tcp", 0), ADDRESSES) == (*serving, "10.0.0.1")
    assert outside.arguments(PingpongClient("tcp", 1), ADDRESSES) == (*serving, "-6", "fd00::1")
    collective = outside.arguments(Collective("alltoall_perf", 4), ADDRESSES)
    assert collective[:3] == ("env", "NCCL_DEBUG=INFO", "alltoall_perf")
    assert collective[-2:] == ("-g", "4")


@pytest.mark.parametrize("server", [2, 3])
def test_only_an_ip_address_that_we_have_met_is_called(server: int) -> None:
    with pytest.raises(ToolError, match="IP address"):
        outside.arguments(PingpongClient("tcp", server), ADDRESSES)


@pytest.mark.parametrize(
    ("there", "hosts", "place", "text"),
    [
        ((), HOSTS, started_by("srun", True), "fi_pingpong: not on PATH"),
        (outside.NCCL_TESTS, HOSTS, started_by("torchrun", False), "started by torchrun"),
        (outside.NCCL_TESTS, [host(0), host(1, 4)], started_by("srun", True), "8, 4 GPUs"),
        (outside.NCCL_TESTS, [host(0, 0), host(1, 0)], started_by("srun", True), "0, 0 GPUs"),
    ],
)
def test_what_is_not_run_has_a_reason(
    there: tuple[str, ...], hosts: list[HostFacts], place: Place, text: str
) -> None:
    plan = outside.plan(there, hosts, place)
    assert not plan.collectives
    assert any(text in reason for reason in plan.skipped)


def test_findings_gather_series_lines_and_problems() -> None:
    exchange = Exchange(server=1, client=0, provider="tcp")
    found = outcome.Outside().with_exchange(exchange, PINGPONG)
    found = found.with_collective(Collective("all_reduce_perf", 8), ALL_REDUCE)
    found = found.with_collective(Collective("alltoall_perf", 8), "Segmentation fault")
    assert found.series["fi_pingpong 0>1"].samples == (240.02,)
    assert found.series["all_reduce_perf"].samples == (72.60e9,)
    assert [told.program for told in found.told] == ["fi_pingpong", "all_reduce_perf"]
    assert found.problems == ("nccl-tests gave no result: Segmentation fault",)
