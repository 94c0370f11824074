"""The wheel, made from the source archive as pip makes it: what is in it, and that it works."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = """
import sys
from scikit_build_core import build
print(build.build_sdist(sys.argv[1]) if sys.argv[2] == "sdist" else build.build_wheel(sys.argv[1]))
"""
#: Without `site`: its path files would bring the editable install of this environment.
INSTALLED = [sys.executable, "-S", "-c"]
PATHS = "import sys; sys.path[:0] = {paths!r}; "

pytestmark = pytest.mark.slow


def _build(what: str, source: Path, folder: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder), what],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the unpacked source archive, so that a file left out of it is missed."""
    folder = tmp_path_factory.mktemp("packaging")
    archive = _build("sdist", ROOT, folder)
    subprocess.run(["tar", "-xzf", archive, "-C", folder], check=True)
    return _build("wheel", folder / archive.name.removesuffix(".tar.gz"), folder)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def _run(installed: Path, code: str, folder: Path) -> str:
    paths = [str(installed), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    command = [*INSTALLED, PATHS.format(paths=paths) + code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_one_wheel_serves_every_python(wheel: Path) -> None:
    assert re.fullmatch(r"efa_kv-[\d.]+-cp310-abi3-linux_\w+\.whl", wheel.name)
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"efa_kv/py.typed", "efa_kv/connectors/vllm/connector.py"} <= names
    assert {"efa_kv/connectors/sglang/__init__.py", "efa_kv/mooncake/__init__.py"} <= names
    assert [name for name in names if "simnic" in name and name.endswith(".so")]
    assert [name for name in names if not name.startswith(("efa_kv/", "efa_kv-"))] == []


def test_the_wheel_brings_no_library_of_others(installed: Path) -> None:
    libraries = list(installed.rglob("*.so*"))
    assert len(libraries) >= 2
    for library in libraries:
        answer = subprocess.run(
            ["readelf", "-d", library], capture_output=True, text=True, check=True
        )
        needed = set(re.findall(r"\(NEEDED\).*\[(.*?)\]", answer.stdout))
        # A second libfabric in a process takes the devices away from NCCL's plugin.
        assert all(re.match(r"(libc|libm|libdl|libpthread|ld-linux)\b", one) for one in needed)


def test_servers_find_the_plugins(installed: Path) -> None:
    (record,) = installed.glob("efa_kv-*.dist-info/entry_points.txt")
    text = record.read_text()
    assert "[vllm.general_plugins]\nefa_kv = efa_kv.connectors.vllm:register" in text
    assert "[sglang.srt.plugins]\nefa_kv = efa_kv.connectors.sglang:register" in text


def test_what_is_installed_moves_bytes(installed: Path, tmp_path: Path) -> None:
    code = (
        "import numpy, efa_kv; from efa_kv import EngineConfig, TransferEngine\n"
        "config = EngineConfig(protocol='tcp', near=False)\n"
        "with TransferEngine(config) as one, TransferEngine(config) as other:\n"
        "    local = one.register(numpy.full(4096, 7, numpy.uint8))\n"
        "    target = numpy.zeros(4096, numpy.uint8)\n"
        "    remote = other.register(target)\n"
        "    job = one.write(other.session, [local.address], [remote.address], [4096])\n"
        "    assert job.wait(10).error is None\n"
        "    print('[\"%s\", %d]' % (efa_kv.__file__, (target == 7).sum()))\n"
    )
    place, landed = json.loads(_run(installed, code, tmp_path))
    assert Path(place).is_relative_to(installed)
    assert landed == 4096
