"""vLLM servers and a router on loopback, started with what a prefill/decode pair needs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from demo_common.model import OFFLINE, REPOSITORY, Model
from demo_common.processes import LOOPBACK, ReservedPorts, ServerError
from demo_common.servers import HttpServer, Progress, RoutedServers

from vllm_demo.model import VLLM_BIN

ROUTER_BIN = REPOSITORY / ".venv-router" / "bin" / "vllm-router"
SERVED_NAME = "tiny"
DIALECTS = ("nixl", "mooncake")

# Every byte must cross the provider here, also between two processes of one host.
FABRIC = {"protocol": "tcp", "near": False, "host": LOOPBACK}


def kv_transfer_config(role: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "EfaConnector",
        "kv_connector_module_path": "efa_kv.connectors.vllm",
        "kv_role": role,
        "kv_connector_extra_config": {**FABRIC, **extra},
    }


def pinned_processors() -> tuple[int, int]:
    """One processor for prefill and one for decode; the same one where there is no other.

    Each server gets exactly one thread: the order of additions, and with it the last
    bit of a result, depends on the number of threads.
    """
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[0], allowed[1 % len(allowed)]


def server_environment(processor: int) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("VLLM_", "PYTHON")) and name != "VIRTUAL_ENV"
    }
    return {
        **kept,
        **OFFLINE,
        "PATH": f"{VLLM_BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": LOOPBACK,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(processor),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    }


class VllmServer(HttpServer):
    """One ``vllm serve`` with one thread on one processor."""

    def __init__(
        self,
        name: str,
        model: Model,
        port: int,
        processor: int,
        logs: Path,
        transfer: Mapping[str, Any] | None = None,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        command = [
            str(VLLM_BIN / "vllm"),
            "serve",
            str(model.path),
            *("--served-model-name", SERVED_NAME),
            *("--host", LOOPBACK),
            *("--port", str(port)),
            *("--dtype", model.dtype),
            *("--block-size", str(model.block_tokens)),
            *("--max-model-len", "2048"),
            *("--max-num-seqs", "8"),
            *("--max-num-batched-tokens", "2048"),
            *("--seed", "0"),
            "--enforce-eager",
        ]
        if transfer is not None:
            command += ["--kv-transfer-config", json.dumps(transfer)]
        super().__init__(
            name,
            [*command, *options],
            {**server_environment(processor), **(environment or {})},
            logs / f"{name}.log",
            port,
        )


class Router(HttpServer):
    """The stock vllm-router in front of one prefill and one decode server."""

    def __init__(
        self,
        dialect: str,
        prefill: VllmServer,
        decode: VllmServer,
        ports: ReservedPorts,
        logs: Path,
        bootstrap_port: int | None = None,
    ) -> None:
        port = ports.take()
        command = [
            str(ROUTER_BIN),
            "--vllm-pd-disaggregation",
            *("--kv-connector", dialect),
            *("--prefill", prefill.url),
            *([str(bootstrap_port)] if bootstrap_port is not None else []),
            *("--decode", decode.url),
            *("--host", LOOPBACK),
            *("--port", str(port)),
            *("--policy", "round_robin"),
            *("--prometheus-port", str(ports.take())),
            *("--worker-startup-check-interval", "1"),
            "--disable-retries",  # a request that fails once must be seen to fail
        ]
        super().__init__("router", command, dict(os.environ), logs / "router.log", port)


class Pair(RoutedServers):
    """A prefill server, a decode server and a router."""

    def __init__(
        self,
        model: Model,
        dialect: str,
        logs: Path,
        extra: Mapping[str, Any] | None = None,
        options: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> None:
        if dialect not in DIALECTS:
            raise ServerError(
                f"found: dialect {dialect!r}; expected: one of {', '.join(DIALECTS)}; "
                "what to do: name one of them"
            )
        ports = ReservedPorts()
        prefill_processor, decode_processor = pinned_processors()
        self.bootstrap_port = ports.take()
        self.prefill = VllmServer(
            "prefill",
            model,
            ports.take(),
            prefill_processor,
            logs,
            kv_transfer_config(
                "kv_producer", {"bootstrap_port": self.bootstrap_port, **(extra or {})}
            ),
            options,
        )
        self.decode = VllmServer(
            "decode",
            model,
            ports.take(),
            decode_processor,
            logs,
            kv_transfer_config("kv_consumer", extra or {}),
            options,
        )
        router = Router(
            dialect,
            self.prefill,
            self.decode,
            ports,
            logs,
            self.bootstrap_port if dialect == "mooncake" else None,
        )
        super().__init__((self.prefill, self.decode), router, ports, progress)
