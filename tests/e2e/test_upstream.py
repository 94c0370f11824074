"""vLLM's own tests of a request's life with a remote prefill or decode, on EfaConnector.

They come from the source archive of the vLLM version in use and stay out of this
repository.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest
from demo_common.model import OFFLINE, REPOSITORY
from vllm_demo.model import VLLM_BIN, make_model

HERE = Path(__file__).resolve().parent / "upstream"
UPSTREAM = REPOSITORY / "build" / "upstream"
UNIT_TESTS = "tests/v1/kv_connector/unit"
UPSTREAM_TIMEOUT_S = 600
FETCH_TIMEOUT_S = 600

# What upstream's tests name as their model; only its shape is looked at.
MODEL_NAME = "facebook/opt-125m"
MODEL_CONFIG = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "word_embed_proj_dim": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "ffn_dim": 3072,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "torch_dtype": "float16",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}


def installed_vllm_version() -> str:
    shown = subprocess.run(
        [
            str(VLLM_BIN / "python"),
            "-c",
            "import importlib.metadata as m; print(m.version('vllm').split('+')[0])",
        ],
        check=True,
        text=True,
        stdout=subprocess.PIPE,
    )
    return shown.stdout.strip()


def fetch_archive(version: str, folder: Path) -> Path:
    """Fetches vLLM's source archive through pip, without building anything of it."""
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "-qq", "--dest", str(folder)),
            *("--no-deps", "--no-build-isolation", "--no-binary", "vllm", f"vllm=={version}"),
        ],
        check=True,
        timeout=FETCH_TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": str(HERE / "no_build"), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    (archive,) = folder.glob("vllm-*.tar.gz")
    return archive


def extract_tests(archive: Path, folder: Path) -> None:
    """Takes the tests and pytest's settings, but not the package: the installed one is tested."""
    with tarfile.open(archive) as packed:
        for member in packed:
            _, _, inner = member.name.partition("/")
            wanted = inner == "pyproject.toml" or inner.startswith("tests/")
            if wanted and (member.isfile() or member.isdir()):
                member.name = inner
                packed.extract(member, folder, filter="data")


def write_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(MODEL_CONFIG))
    for file in make_model().path.glob("tokenizer*"):
        shutil.copy(file, folder)


def prepare_upstream(version: str) -> Path:
    """The folder with upstream's tests; fetched once, then reused."""
    UPSTREAM.mkdir(parents=True, exist_ok=True)
    ready = UPSTREAM / f"vllm-{version}"
    with (UPSTREAM / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists():
            with tempfile.TemporaryDirectory(dir=UPSTREAM) as scratch:
                unpacked = Path(scratch) / "unpacked"
                extract_tests(fetch_archive(version, Path(scratch)), unpacked)
                write_model(unpacked / MODEL_NAME)
                unpacked.rename(ready)
    return ready


@pytest.fixture(scope="module")
def upstream() -> Path:
    return prepare_upstream(installed_vllm_version())


@pytest.mark.parametrize("file", ["test_remote_prefill_lifecycle", "test_remote_decode_lifecycle"])
def test_upstream_lifecycle(upstream: Path, file: str) -> None:
    finished = subprocess.run(
        [
            *(str(VLLM_BIN / "python"), "-m", "pytest", f"{UNIT_TESTS}/{file}.py"),
            *("-p", "efa_connector_plugin", "-p", "no:cacheprovider", "--no-header", "-q"),
            *("--rootdir", str(upstream), f"--confcutdir={UNIT_TESTS}"),
        ],
        cwd=upstream,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=UPSTREAM_TIMEOUT_S,
        env={
            **os.environ,
            **OFFLINE,
            "PYTHONPATH": os.pathsep.join((str(HERE), str(upstream))),
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
        },
    )
    assert finished.returncode == 0, finished.stdout[-8000:]
    passed = re.search(r"(\d+) passed", finished.stdout)
    assert passed is not None, finished.stdout[-2000:]
    assert int(passed.group(1)) > 0
