"""The plugin itself, with SGLang's own registry and arguments."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import sglang.srt.distributed.device_communicators.mooncake_transfer_engine as wrapper
import sglang.srt.runtime_context as runtime_context
from sglang.srt.arg_groups import choices
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs, prepare_server_args

from efa_kv.connectors.sglang import backend, hooks, register
from efa_kv.mooncake.install import MODULE


def test_the_hooks_are_live_and_stay_so(server_args: ServerArgs) -> None:
    hooks.require_live()
    register()
    load_plugins()
    hooks.require_live()
    assert sys.modules[MODULE].__name__ == hooks.ENGINE_MODULE


def test_a_plugin_that_cannot_hook_ends_the_process(
    server_args: ServerArgs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = ("sglang.srt.moved_elsewhere.function", "AROUND", hooks.around_init)
    monkeypatch.setattr(hooks, "HOOKS", (*hooks.HOOKS, moved))
    with pytest.raises(SystemExit):
        register()
    assert "moved_elsewhere" in capsys.readouterr().err
    with pytest.raises(hooks.HookError, match="moved_elsewhere"):
        hooks.require_live()


def test_a_switch_that_makes_no_sense_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EFA_KV_SGLANG", "perhaps")
    with pytest.raises(SystemExit):
        register()


def test_switched_off_nothing_is_touched(
    server_args: ServerArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EFA_KV_SGLANG", "0")
    monkeypatch.delitem(sys.modules, MODULE)
    register()
    assert MODULE not in sys.modules


def test_another_engine_in_the_same_place_is_noticed(
    server_args: ServerArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    class TransferEngine:
        def initialize(self, *_: str) -> int:
            return 0

        def get_rpc_port(self) -> int:
            return 1

    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(TransferEngine=TransferEngine))
    with pytest.raises(hooks.HookError, match="SGLang opened"):
        wrapper.MooncakeTransferEngine("127.0.0.1", 0, None)


def test_elastic_experts_are_refused(
    server_args: ServerArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    moe = SimpleNamespace(elastic_ep_backend="mooncake")
    monkeypatch.setattr(runtime_context, "get_exec", lambda: SimpleNamespace(moe=moe))
    with pytest.raises(hooks.HookError, match="elastic-ep-backend"):
        wrapper.maybe_init_shared_mooncake_transfer_engine(gpu_id=0)


def test_a_store_that_would_share_the_engine_is_refused(server_args: ServerArgs) -> None:
    opened = wrapper.MooncakeTransferEngine("127.0.0.1", 0, None)
    try:
        with pytest.raises(hooks.HookError, match="HiCache"):
            opened.get_engine()
    finally:
        opened.engine.close()


def test_the_backends_own_name_stands_for_mooncake(
    server_args: ServerArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert backend.NAME in choices.DISAGG_TRANSFER_BACKEND_CHOICES
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "rdma")
    monkeypatch.setenv("EFA_KV_SGLANG", "1")
    arguments: Any = prepare_server_args(
        [
            *("--model-path", server_args.model_path),
            *("--device", "cpu"),
            *("--attention-backend", "torch_native"),
            *("--disaggregation-mode", "prefill"),
            *("--disaggregation-transfer-backend", "efakv"),
        ]
    )
    backend.before_check(arguments)
    from sglang.srt.arg_groups.overrides import resolving_view

    assert resolving_view(arguments).disaggregation_transfer_backend == "mooncake"
    assert os.environ["MOONCAKE_PROTOCOL"] == "efa"
