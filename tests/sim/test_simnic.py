"""The simulated provider: its own C tests, and the launcher that puts a command on it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from efa_kv.errors import ConfigError
from efa_kv.tools.sim import PROVIDER_FILE, Simulation, environment, find_provider, run

SOURCE = Path(__file__).parents[2] / "native" / "simnic"
BUILD_TIMEOUT_S = 300


def _have_tools() -> bool:
    return shutil.which("cmake") is not None and any(
        (Path(place) / "rdma" / "fabric.h").is_file()
        for place in ("/usr/include", "/usr/local/include", "/opt/amazon/efa/include")
    )


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build of the provider and its tests, made once."""
    if not _have_tools():
        pytest.skip("cmake or libfabric's headers are missing")
    folder = tmp_path_factory.mktemp("simnic")
    for step in (
        ["cmake", "-S", str(SOURCE), "-B", str(folder)],
        ["cmake", "--build", str(folder), "--parallel", "2"],
    ):
        done = subprocess.run(
            step, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_c_tests_pass(build: Path) -> None:
    done = subprocess.run(
        ["ctest", "--test-dir", str(build), "--output-on-failure", "-j", "2"],
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "100% tests passed" in done.stdout


def _environment_of_child(build: Path, simulation: Simulation, target: Path) -> dict[str, str]:
    """What a command started by `run` finds in its environment."""
    script = (
        "import os, sys; open(sys.argv[1], 'w').write("
        "'\\0'.join(f'{k}={v}' for k, v in os.environ.items()))"
    )
    status = run([sys.executable, "-c", script, str(target)], simulation, os.environ, str(build))
    assert status == 0
    return dict(line.split("=", 1) for line in target.read_text().split("\0"))


@pytest.mark.timeout(400)
def test_command_sees_its_settings(build: Path, tmp_path: Path) -> None:
    simulation = Simulation(
        nics=16,
        instance="p5en.48xlarge",
        rate_gbps=12.5,
        op_rate=1e6,
        latency_us=15,
        no_copy=True,
        transmit_depth=64,
        faults=("nic=3,die_at_op=1000", "eagain=0.01"),
        seed=42,
    )
    found = _environment_of_child(build, simulation, tmp_path / "environment")
    ours = {name: value for name, value in found.items() if name.startswith("EFA_KV_SIM_")}
    assert ours == {
        "EFA_KV_SIM_NICS": "16",
        "EFA_KV_SIM_INSTANCE": "p5en.48xlarge",
        "EFA_KV_SIM_RATE_GBPS": "12.5",
        "EFA_KV_SIM_OP_RATE": "1000000.0",
        "EFA_KV_SIM_LATENCY_US": "15",
        "EFA_KV_SIM_NO_COPY": "1",
        "EFA_KV_SIM_FAULTS": "nic=3,die_at_op=1000;eagain=0.01",
        "EFA_KV_SIM_SEED": "42",
    }
    assert found["FI_EFA_TX_SIZE"] == "64"
    assert found["FI_PROVIDER_PATH"] == str(build)


@pytest.mark.timeout(400)
@pytest.mark.skipif(shutil.which("fi_info") is None, reason="fi_info is not installed")
def test_fi_info_lists_the_instance(build: Path) -> None:
    simulation = Simulation(instance="p5.48xlarge")
    done = subprocess.run(
        ["fi_info", "-p", "efa"],
        env=environment(os.environ, simulation, build / PROVIDER_FILE),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    domains = [line.split()[1] for line in done.stdout.splitlines() if "domain:" in line]
    assert len(domains) == 32
    assert domains[0] == "rdmap79s0-rdm"
    assert domains[-1] == "rdmap201s0-rdm"


@pytest.mark.timeout(400)
def test_exit_status_is_that_of_the_command(build: Path) -> None:
    def status_of(script: str) -> int:
        return run([sys.executable, "-c", script], Simulation(), os.environ, str(build))

    assert status_of("raise SystemExit(7)") == 7
    assert status_of("import os; os.kill(os.getpid(), 9)") == 128 + 9


def test_an_earlier_simulation_leaves_no_trace() -> None:
    base: Mapping[str, str] = {"EFA_KV_SIM_NICS": "3", "EFA_KV_SIM_FAULTS": "x", "PATH": "/bin"}
    found = environment(base, Simulation(seed=2), Path("/somewhere") / PROVIDER_FILE)
    assert found == {"PATH": "/bin", "FI_PROVIDER_PATH": "/somewhere", "EFA_KV_SIM_SEED": "2"}


def test_a_missing_provider_or_command_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=PROVIDER_FILE):
        find_provider(str(tmp_path))
    (tmp_path / PROVIDER_FILE).touch()
    assert find_provider(str(tmp_path)) == tmp_path / PROVIDER_FILE
    with pytest.raises(ConfigError, match="command"):
        run([], Simulation(), {}, str(tmp_path))
    with pytest.raises(ConfigError, match="cannot run"):
        run([str(tmp_path / "nothing")], Simulation(), {}, str(tmp_path))
