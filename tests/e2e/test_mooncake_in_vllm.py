"""vLLM's own Mooncake connector on this engine, behind the stock router."""

from __future__ import annotations

import subprocess
from pathlib import Path

from demo_common.model import REPOSITORY
from demo_common.processes import ReservedPorts
from demo_common.servers import RoutedServers
from demo_common.traffic import make_prompts
from vllm_demo.model import VLLM_BIN, make_model
from vllm_demo.servers import Router, VllmServer, pinned_processors
from vllm_demo.traffic import complete, read_counters

STUBS = REPOSITORY / "tests" / "vllm_stubs"
PROMPTS = 6
FABRIC = {"EFA_KV_PROTOCOL": "tcp", "EFA_KV_NEAR": "false", "PYTHONPATH": str(STUBS)}


def transfer_config(role: str) -> dict[str, object]:
    return {
        "kv_connector": "MooncakeConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"mooncake_protocol": "efa"},
    }


def test_vllms_mooncake_connector_moves_kv_with_this_engine(tmp_path: Path) -> None:
    # There is no Mooncake here that could move it instead.
    probe = [str(VLLM_BIN / "python"), "-c", "import mooncake"]
    assert subprocess.run(probe, check=False, stderr=subprocess.DEVNULL).returncode != 0
    model = make_model()
    prompts = make_prompts(model)[-PROMPTS:]
    first, second = pinned_processors()
    with ReservedPorts() as ports:
        bootstrap_port = ports.take()
        environment = {**FABRIC, "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap_port)}
        prefill, decode = (
            VllmServer(
                name,
                model,
                ports.take(),
                processor,
                tmp_path,
                transfer_config(role),
                environment=environment,
            )
            for name, role, processor in (
                ("prefill", "kv_producer", first),
                ("decode", "kv_consumer", second),
            )
        )
        router = Router("mooncake", prefill, decode, ports, tmp_path, bootstrap_port)
        with RoutedServers((prefill, decode), router, ports):
            alone = [complete(prefill, prompt, cache_salt="alone").text for prompt in prompts]
            paired = [complete(router, prompt).text for prompt in prompts]
            assert paired == alone
            counted = read_counters(decode)
            assert counted.external_tokens > sum(len(prompt.text) for prompt in prompts) // 2
