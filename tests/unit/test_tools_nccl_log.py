"""`efa-kv nccl-log`: what NCCL's log says about the network it took."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from efa_kv.tools import nccl_log

app = typer.Typer()
app.command("nccl-log")(nccl_log.command)
runner = CliRunner()


def line(text: str, pid: int = 100, gpu: int = 0, level: str = "INFO") -> str:
    return f"ip-10-1-2-3:{pid}:{pid + 7} [{gpu}] NCCL {level} {text}"


def good_process(pid: int, gpu: int, nics: int = 16) -> list[str]:
    return [
        line("NET/OFI Initializing aws-ofi-nccl 1.21.1", pid, gpu),
        line(
            f"NET/OFI Selected provider is efa, fabric is efa-direct (found {nics} nics)", pid, gpu
        ),
        line("Using network Libfabric", pid, gpu),
        line("Channel 00/0 : 8[0] -> 0[0] [receive] via NET/Libfabric/0/GDRDMA", pid, gpu),
        line("Channel 01/0 : 0[0] -> 8[0] [send] via NET/Libfabric/1(0)/GDRDMA", pid, gpu),
        line("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", pid, gpu),
    ]


GOOD = "\n".join(
    ["NCCL version 2.31.2+cuda13.0"] + [x for i in range(8) for x in good_process(100 + i, i)]
)

SOCKETS = "\n".join(
    [
        line("NET/Plugin: No plugin found (libnccl-net.so)"),
        line("NET/IB : No device found."),
        line("Using network Socket"),
        line("Channel 00/0 : 8[0] -> 0[0] [receive] via NET/Socket/0"),
    ]
)


def test_efa_in_every_process() -> None:
    report = nccl_log.read(GOOD)
    assert report.verdict == "NCCL uses EFA in all 8 processes"
    assert report.exit_code == 0
    assert {(one.network, one.provider, one.nics) for one in report.processes} == {
        ("Libfabric", "efa", 16)
    }
    assert all(one.fabric == "efa-direct" for one in report.processes)
    assert all(one.direct_channels == 2 for one in report.processes)
    assert report.nccl == ("2.31.2+cuda13.0",)
    assert report.plugin == ("1.21.1",)


def test_the_older_wording_is_understood() -> None:
    text = "\n".join(
        [
            line("NET/OFI Using aws-ofi-nccl 1.7.3-aws"),
            line("NET/OFI Selected Provider is efa (found 4 nics)"),
            line("Using network AWS Libfabric"),
            line("Channel 00 : 0[101c0] -> 8[101c0] [send] via NET/AWS Libfabric/1/GDRDMA"),
        ]
    )
    report = nccl_log.read(text)
    assert (report.uses_efa, report.exit_code) == (True, 0)
    assert report.processes[0].nics == 4


def test_sockets_and_why() -> None:
    report = nccl_log.read(SOCKETS)
    assert report.verdict == "NCCL does NOT use EFA in 1 of 1 processes"
    assert report.problems == ("ip-10-1-2-3:100: network Socket",)
    assert "plugin" in report.causes[0].cause
    assert "/opt/amazon/ofi-nccl" in report.causes[0].mend


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("NCCL_NET set by environment to IB.", "another network"),
        ("NCCL_NET_PLUGIN set by environment to none", "another plugin"),
        ("NET/Plugin: Could not find: libnccl-net.so.", "was not found"),
        ("libnccl-net.so: undefined symbol: fi_version", "does not fit"),
        ("libefa: undefined reference to `efadv_query_qp_wqs@EFA_1.4'", "does not fit"),
        ("NET/OFI fi_getinfo: provider efa output empty list", "second copy"),
        ("NET/OFI Couldn't find any optimal provider (-61) No data available", "no EFA device"),
        ("NET/OFI fi_fabric failed: Permission denied", "may not be opened"),
        ("NET/OFI fi_ep_bind (av) failed: Function not implemented", "older than the driver"),
        ("NET/OFI Unable to register memory: Cannot allocate memory", "locked memory"),
        ("Failed to initialize any NET plugin", "does not have"),
    ],
)
def test_causes_are_named(text: str, cause: str) -> None:
    report = nccl_log.read("\n".join([line(text, level="WARN"), line("Using network Socket")]))
    assert report.exit_code == 1
    assert [one for one in report.causes if cause in one.cause], report.causes


def test_naming_libfabric_is_no_cause() -> None:
    text = line("NCCL_NET set by environment to AWS Libfabric.") + "\n" + SOCKETS
    assert not [one for one in nccl_log.read(text).causes if "another network" in one.cause]


def test_a_start_that_failed_says_why() -> None:
    report = nccl_log.read(line("Failed to initialize any NET plugin", level="WARN"))
    assert report.verdict == "NCCL did not get as far as choosing a network"
    assert report.exit_code == 1
    assert report.causes[0].count == 1


def test_one_process_on_sockets_among_many() -> None:
    report = nccl_log.read(GOOD + "\n" + line("Using network Socket", pid=900))
    assert report.verdict == "NCCL does NOT use EFA in 1 of 9 processes"
    assert report.problems == ("ip-10-1-2-3:900: network Socket",)


def test_libfabric_over_another_provider_is_not_efa() -> None:
    text = "\n".join(
        [
            line("NET/OFI Selected provider is tcp, fabric is 10.0.0.0/16 (found 1 nics)"),
            line("Using network Libfabric"),
        ]
    )
    report = nccl_log.read(text)
    assert not report.uses_efa
    assert report.exit_code == 1


def test_channels_without_gdrdma_are_a_problem() -> None:
    text = GOOD + "\n" + line("Channel 02/0 : 0[0] -> 8[0] [send] via NET/Libfabric/2", pid=100)
    report = nccl_log.read(text)
    assert report.uses_efa
    assert report.exit_code == 1
    assert "1 of 3 network channels without GDRDMA" in report.problems[0]


def test_different_numbers_of_nics_are_a_problem() -> None:
    report = nccl_log.read("\n".join(good_process(1, 0, nics=16) + good_process(2, 1, nics=8)))
    assert report.problems == ("processes found different numbers of NICs: 8, 16",)


def test_a_log_that_does_not_say() -> None:
    report = nccl_log.read("loss 3.1\n")
    assert report.verdict == "the log does not say which network NCCL chose"
    assert report.exit_code == 1


def test_the_command(tmp_path: Path) -> None:
    good, bad, out = tmp_path / "good.log", tmp_path / "bad.log", tmp_path / "out.json"
    good.write_text(GOOD)
    bad.write_text(SOCKETS)
    result = runner.invoke(app, [str(good), "--json", str(out)])
    assert result.exit_code == 0
    assert "8 processes: network Libfabric, provider efa, fabric efa-direct, 16 NICs" in (
        result.output
    )
    assert json.loads(out.read_text())["uses_efa"] is True
    both = runner.invoke(app, [str(good), str(bad), "--json", str(out)])
    assert both.exit_code == 1
    assert "mend: export LD_LIBRARY_PATH" in both.output
    assert json.loads(out.read_text())["exit_code"] == 1
    assert runner.invoke(app, [str(tmp_path / "none.log")]).exit_code == 2
    assert "--json" in runner.invoke(app, ["--help"]).output
