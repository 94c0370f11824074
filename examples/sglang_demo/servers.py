"""SGLang servers and its router on loopback, started with what a CPU pair needs."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from demo_common.model import OFFLINE, REPOSITORY, Model
from demo_common.processes import LOOPBACK, ReservedPorts
from demo_common.servers import HEALTH_TIMEOUT_S, HttpServer, Progress, RoutedServers

from sglang_demo.model import SGLANG_PYTHON, STUBS

ROUTER_PYTHON = REPOSITORY / ".venv-sglang-router" / "bin" / "python"

#: Left out of what the servers inherit: settings that would change what is shown.
FOREIGN_PREFIXES = ("SGLANG_", "MOONCAKE_", "MC_", "EFA_KV_", "PYTHON")

# As on a host with EFA, but for the second line: the provider that this machine has.
FABRIC = {"MOONCAKE_PROTOCOL": "efa", "EFA_KV_PROTOCOL": "tcp", "EFA_KV_NEAR": "false"}

# What SGLang does with a GPU by default and cannot without one.
WITHOUT_GPU = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER": "1",
    "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0",
}


def server_environment() -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(FOREIGN_PREFIXES) and name != "VIRTUAL_ENV"
    }
    return {
        **kept,
        **OFFLINE,
        **WITHOUT_GPU,
        "SGLANG_HOST_IP": LOOPBACK,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(STUBS),
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": "0",
    }


class SglangServer(HttpServer):
    """One ``sglang.launch_server``; with a role it is one half of a pair."""

    def __init__(
        self,
        name: str,
        model: Model,
        port: int,
        logs: Path,
        role: str = "",
        bootstrap_port: int = 0,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        command = [
            *(str(SGLANG_PYTHON), "-m", "sglang.launch_server"),
            *("--model-path", str(model.path)),
            *("--host", LOOPBACK),
            *("--port", str(port)),
            *("--device", "cpu"),
            *("--attention-backend", "torch_native"),
            *("--dtype", model.dtype),
            *("--page-size", str(model.block_tokens)),
            *("--mem-fraction-static", "0.1"),
            *("--max-total-tokens", "8192"),
            *("--max-running-requests", "8"),
            *("--grammar-backend", "none"),
            *("--random-seed", "0"),
            "--disable-cuda-graph",
            "--skip-server-warmup",
            "--sleep-on-idle",
            "--enable-metrics",
        ]
        if role:
            command += [
                *("--disaggregation-mode", role),
                *("--disaggregation-transfer-backend", "mooncake"),
                *("--disaggregation-bootstrap-port", str(bootstrap_port)),
            ]
        if role == "decode":
            # The default keeps retracted requests in pinned memory, which needs CUDA.
            command += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
        super().__init__(
            name,
            [*command, *options],
            {**server_environment(), **(FABRIC if role else {}), **(environment or {})},
            logs / f"{name}.log",
            port,
        )


# The router looks for SGLang only to trace requests, and can do without; here the import
# would take many seconds.
_ROUTER = (
    "import sys; sys.modules['sglang'] = None; from sglang_router.launch_router import main; main()"
)


class Router(HttpServer):
    """The stock router in front of one prefill and one decode server."""

    def __init__(
        self,
        prefill: SglangServer,
        decode: SglangServer,
        bootstrap_port: int,
        ports: ReservedPorts,
        logs: Path,
    ) -> None:
        port = ports.take()
        command = [
            *(str(ROUTER_PYTHON), "-c", _ROUTER),
            "--pd-disaggregation",
            *("--prefill", prefill.url, str(bootstrap_port)),
            *("--decode", decode.url),
            *("--host", LOOPBACK),
            *("--port", str(port)),
            *("--policy", "round_robin"),
            *("--prometheus-port", str(ports.take())),
            *("--worker-startup-check-interval", "1"),
            "--disable-retries",  # a request that fails once must be seen to fail
        ]
        super().__init__("router", command, dict(os.environ), logs / "router.log", port)

    def ready(self) -> bool:
        """Whether it has found both servers; it answers before that too."""
        try:
            with urllib.request.urlopen(f"{self.url}/workers", timeout=HEALTH_TIMEOUT_S) as answer:
                workers = json.load(answer)["workers"]
        except (OSError, ValueError, KeyError):
            return False
        return len(workers) == 2 and all(worker.get("is_healthy") for worker in workers)


class Pair(RoutedServers):
    """A prefill server, a decode server, a router, and a server alone to compare with."""

    def __init__(
        self,
        model: Model,
        logs: Path,
        *,
        compared: bool = True,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        progress: Progress | None = None,
    ) -> None:
        ports = ReservedPorts()
        bootstrap_port = ports.take()
        self.prefill, self.decode = (
            SglangServer(
                role,
                model,
                ports.take(),
                logs,
                role,
                bootstrap_port if role == "prefill" else ports.take(),
                options,
                environment,
            )
            for role in ("prefill", "decode")
        )
        self.alone = SglangServer("alone", model, ports.take(), logs)
        router = Router(self.prefill, self.decode, bootstrap_port, ports, logs)
        models = [self.prefill, self.decode, *([self.alone] if compared else [])]
        super().__init__(models, router, ports, progress)
