"""The scheduler half inside vLLM's real scheduler, stepped by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from efa_kv.connectors.vllm.commands import (
    Abort,
    Expect,
    Fail,
    Hold,
    Pull,
    Queue,
    Release,
    Withdraw,
)
from efa_kv.connectors.vllm.prompt import prompt_digest

BLOCK = 16
EOS_TOKEN = 9


def nixl(**changes: Any) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "engine-p",
        "remote_request_id": "request-p",
        "remote_host": "10.0.0.1",
        "remote_port": 15001,
        "remote_block_ids": [[1, 2, 3]],
        "transfer_id": "transfer-p",
        "generation": 3,
        **changes,
    }


def mooncake(transfer_id: str = "xfer-1", **changes: Any) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "remote_bootstrap_addr": "http://10.0.0.1:8998",
        **changes,
    }


PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def kinds(commands: list[Any]) -> list[type]:
    return [type(command) for command in commands]


# ---- producer -------------------------------------------------------------------------


def test_prefill_holds_its_blocks_until_they_are_sent(engine: Any) -> None:
    p = engine("kv_producer")
    request = p.add(40, dict(PREFILL), max_tokens=1)
    commands, outputs = p.step()
    assert kinds(commands) == [Expect]
    params = outputs[0].kv_transfer_params
    assert outputs[0].finish_reason is FinishReason.LENGTH
    (hold,) = p.schedule()
    assert isinstance(hold, Hold)
    assert (hold.transfer_id, hold.generation) == (commands[0].transfer_id, commands[0].generation)
    assert hold.token_count == 40
    assert [len(table) for table in hold.blocks] == [3]
    assert hold.blocks[0].dtype == np.uint32
    assert hold.prompt_digest == prompt_digest(request)
    assert params["remote_block_ids"] == [hold.blocks[0].tolist()]
    assert (params["remote_host"], params["remote_port"]) == ("127.0.0.1", 15001)
    assert params["remote_num_tokens"] == 40
    json.dumps(params)
    p.finish()
    assert p.free_blocks == 999 - 3
    p.schedule()
    p.finish(finished_sending={request.request_id})
    p.schedule()
    p.assert_idle()


def test_prefill_with_a_transfer_id_of_the_router(engine: Any) -> None:
    p = engine("kv_producer")
    p.add(40, {**PREFILL, "transfer_id": "xfer-1"}, max_tokens=1)
    commands, outputs = p.step()
    assert commands[0].transfer_id == "xfer-1"
    assert outputs[0].kv_transfer_params is None
    assert p.schedule()[0].transfer_id == "xfer-1"


def test_a_request_is_expected_before_its_first_token(engine: Any) -> None:
    p = engine("kv_producer")
    p.add(200, dict(PREFILL), max_tokens=1)  # four chunks of 64 tokens
    assert [kinds(p.step()[0]) for _ in range(5)] == [[Expect], [], [], [], [Hold]]


@pytest.mark.parametrize("max_tokens", [1, 8])
def test_first_token_is_a_stop_token(engine: Any, max_tokens: int) -> None:
    p = engine("kv_producer")
    p.add(40, dict(PREFILL), max_tokens=max_tokens)
    _, outputs = p.step(token=EOS_TOKEN)
    assert outputs[0].finish_reason is FinishReason.STOP
    assert outputs[0].kv_transfer_params["remote_num_tokens"] == 40
    assert kinds(p.schedule()) == [Hold]


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_prefill_aborted(engine: Any, steps: int) -> None:
    p = engine("kv_producer")
    request = p.add(150, dict(PREFILL), max_tokens=1)
    for _ in range(steps):
        p.step()
    p.abort(request)
    assert kinds(p.schedule())[-1] is Withdraw
    p.finish()
    p.assert_idle()


def test_a_client_that_leaves_after_prefill_changes_nothing(engine: Any) -> None:
    p = engine("kv_producer")
    request = p.add(40, dict(PREFILL), max_tokens=1)
    p.step()
    p.abort(request)
    assert kinds(p.step()[0]) == [Hold]
    assert p.free_blocks == 999 - 3


def test_parallel_samples_share_an_id_and_a_generation(engine: Any) -> None:
    p = engine("kv_producer")
    for index in range(3):
        p.add(40, dict(PREFILL), name=f"{index}_parent", max_tokens=1)
    commands, outputs = p.step()
    expected = {(command.transfer_id, command.generation) for command in commands}
    assert len(expected) == 1
    answers = {(o.kv_transfer_params["transfer_id"], o.kv_transfer_params["generation"])
               for o in outputs}  # fmt: skip
    assert answers == expected
    p.schedule()
    p.finish(finished_sending={"0_parent"})
    # One sibling is gone; the id still belongs to the other two.
    assert len(p.half._live_out) == 1
    p.schedule()
    p.finish(finished_sending={"1_parent", "2_parent"})
    p.schedule()
    p.assert_idle()


def test_requests_that_only_look_like_samples_get_ids_of_their_own(engine: Any) -> None:
    p = engine("kv_producer")
    p.add(40, dict(PREFILL), name="0_parent", max_tokens=1)
    p.add(41, dict(PREFILL), name="1_parent", max_tokens=1)
    p.add(40, dict(PREFILL), name="parent", max_tokens=1)
    assert len({command.transfer_id for command in p.schedule()}) == 3


def test_a_transfer_id_in_use_is_refused_for_the_second_request(engine: Any) -> None:
    p = engine("kv_producer")
    first = p.add(40, {**PREFILL, "transfer_id": "xfer-1"}, max_tokens=1)
    second = p.add(41, {**PREFILL, "transfer_id": "xfer-1"}, max_tokens=1)
    commands, outputs = p.step()
    assert kinds(commands) == [Expect, Fail]
    assert "xfer-1" in commands[1].reason
    failed = {second.request_id}
    p.schedule()
    outputs = p.finish(finished_recving=failed, failed_recving=failed)
    assert [(o.request_id, o.finish_reason) for o in outputs] == [
        (second.request_id, FinishReason.ERROR)
    ]
    p.schedule()
    p.finish(finished_sending={first.request_id})
    p.schedule()
    p.assert_idle()
    p.add(40, {**PREFILL, "transfer_id": "xfer-1"}, max_tokens=1)  # free again
    assert kinds(p.step()[0]) == [Expect]


# ---- consumer -------------------------------------------------------------------------


def test_pull_and_decode(engine: Any) -> None:
    d = engine("kv_consumer")
    request = d.add(40, nixl())
    queue, pull = d.schedule()
    assert isinstance(queue, Queue)
    assert isinstance(pull, Pull)
    assert pull.source == queue.source
    assert (pull.source.address, pull.source.generation) == ("10.0.0.1:15001", 3)
    assert (pull.first_token, pull.token_count) == (0, 40)
    assert [len(table) for table in pull.blocks] == [3]
    d.finish()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert d.schedule() == []
    d.finish(finished_recving={request.request_id})
    assert d.schedule() == []
    # Only the last token of the prompt is computed here.
    assert d.output.num_scheduled_tokens == {request.request_id: 1}
    d.finish()
    d.step(token=EOS_TOKEN)
    d.schedule()
    d.assert_idle()


@pytest.mark.parametrize("prompt", range(1, 5 * BLOCK + 2))
@pytest.mark.parametrize("cached", [0, 1, 2, 5])
def test_only_what_is_not_cached_is_pulled(engine: Any, prompt: int, cached: int) -> None:
    d = engine("kv_consumer")
    tokens = list(range(10, 10 + prompt))
    if cached:
        d.add(list(range(10, 10 + cached * BLOCK)), max_tokens=1)
        while d.scheduler.requests:
            d.step()
    request = d.add(tokens, mooncake())
    commands = d.schedule()
    hit = min(cached * BLOCK, (prompt - 1) // BLOCK * BLOCK)
    if prompt - hit > 1:
        (pull,) = [command for command in commands if isinstance(command, Pull)]
        assert (pull.first_token, pull.token_count) == (hit, prompt - hit)
        assert len(pull.blocks[0]) == -(-prompt // BLOCK)
        assert not d.output.num_scheduled_tokens
    else:
        # All that can be loaded is here: the producer may have its blocks back at once.
        assert kinds(commands) == [Queue, Release]
        assert d.output.num_scheduled_tokens == {request.request_id: 1}
        assert d.half.take_stats() is None


def test_aborted_before_it_is_scheduled(engine: Any) -> None:
    d = engine("kv_consumer")
    request = d.add(40, nixl())
    d.abort(request)
    assert d.connector.has_pending_push_work()
    assert d.scheduler.has_requests()
    assert kinds(d.schedule()) == [Queue, Release]
    d.finish()
    d.assert_idle()
    assert not d.connector.has_pending_push_work()


def test_rejected_by_the_api_server(engine: Any) -> None:
    """vLLM adds a dummy request with the parameters and aborts it on the spot."""
    d = engine("kv_consumer")
    d.abort(d.add([0], nixl(remote_num_tokens=500), max_tokens=1))
    queue, release = d.schedule()
    assert isinstance(release, Release)
    assert release.source == queue.source


def test_aborted_while_loading_keeps_its_blocks_until_they_are_safe(engine: Any) -> None:
    d = engine("kv_consumer")
    request = d.add(40, nixl())
    d.step()
    d.abort(request)
    assert kinds(d.schedule()) == [Abort]
    d.finish()
    assert d.free_blocks == 999 - 3
    d.schedule()
    d.finish(finished_recving={request.request_id})
    d.schedule()
    d.assert_idle()


def test_aborted_in_the_step_that_reports_it(engine: Any) -> None:
    d = engine("kv_consumer")
    request = d.add(40, nixl())
    d.step()
    d.schedule()
    d.abort(request)
    d.finish(finished_recving={request.request_id})
    assert d.free_blocks == 999
    assert kinds(d.schedule()) == [Abort]  # the worker half knows that it is over
    d.finish()
    d.assert_idle()


def test_aborted_after_it_was_loaded(engine: Any) -> None:
    d = engine("kv_consumer")
    request = d.add(40, nixl())
    d.step()
    d.schedule()
    d.finish(finished_recving={request.request_id})
    d.abort(request)
    assert d.schedule() == []
    d.finish()
    d.assert_idle()


def test_failed_load_is_answered_with_an_error(engine: Any) -> None:
    d = engine("kv_consumer")
    request = d.add(40, nixl())
    d.step()
    d.schedule()
    failed = {request.request_id}
    (output,) = d.finish(finished_recving=failed, failed_recving=failed)
    assert output.finish_reason is FinishReason.ERROR
    assert kinds(d.schedule()) == [Abort]
    d.finish()
    d.assert_idle()


def test_a_doomed_load_is_answered_before_its_blocks_are_safe(engine: Any) -> None:
    d = engine("kv_consumer")
    request = d.add(40, nixl())
    (pull,) = [command for command in d.schedule() if isinstance(command, Pull)]
    d.finish()
    d.schedule()
    (output,) = d.finish(invalid_block_ids={int(block) for block in pull.blocks[0]})
    assert output.finish_reason is FinishReason.ERROR
    assert d.free_blocks == 999 - 3
    d.schedule()
    failed = {request.request_id}
    assert d.finish(finished_recving=failed, failed_recving=failed) == []
    d.schedule()
    d.assert_idle()


def test_failed_load_is_recomputed_once(engine: Any) -> None:
    d = engine("kv_consumer", policy="recompute")
    request = d.add(40, nixl())
    d.step()
    d.schedule()
    failed = {request.request_id}
    assert d.finish(finished_recving=failed, failed_recving=failed) == []
    assert d.schedule() == []
    assert d.output.num_scheduled_tokens == {request.request_id: 40}
    assert (d.counts["recomputed"], d.counts["zero_byte_pulls"]) == (1, 1)
    d.finish()
    d.step(token=EOS_TOKEN)
    d.schedule()
    d.assert_idle()


def test_a_preempted_request_is_not_loaded_again(engine: Any) -> None:
    d = engine("kv_consumer", num_blocks=10)
    request = d.add(40, nixl(), max_tokens=500)
    d.step()
    d.schedule()
    d.finish(finished_recving={request.request_id})
    d.step()
    d.scheduler.running.remove(request)
    d.scheduler._preempt_request(request, 0.0)
    commands = d.schedule()
    assert commands == []
    assert d.output.num_scheduled_tokens[request.request_id] >= 1


def test_log_probabilities_of_the_prompt_are_computed_here(engine: Any) -> None:
    d = engine("kv_consumer")
    request = d.add(40, nixl(), prompt_logprobs=1)
    assert kinds(d.schedule()) == [Queue, Release]
    assert d.output.num_scheduled_tokens == {request.request_id: 40}
    assert d.half.take_stats().data["zero_byte_pulls"] == 1


def test_a_load_that_does_not_fit_waits_with_its_lease(engine: Any) -> None:
    d = engine("kv_consumer", num_blocks=6)
    first = d.add(60, nixl())
    d.step()
    d.add(list(range(100, 160)), nixl(transfer_id="other"))
    assert kinds(d.schedule()) == [Queue]
    d.finish(finished_recving={first.request_id})
    d.step()
    d.step(token=EOS_TOKEN)
    assert kinds(d.schedule()) == [Pull]


# ---- parameters that make no sense ----------------------------------------------------

NONSENSE = [
    {"do_remote_prefill": True},
    {"do_remote_prefill": True, "do_remote_decode": True},
    {"foo": "bar"},
    nixl(remote_port="15001"),
    nixl(remote_num_tokens=39),
    mooncake(remote_bootstrap_addr=7),
    [1, 2],
    "text",
]


@pytest.mark.parametrize("params", NONSENSE, ids=repr)
def test_nonsense_fails_at_once(engine: Any, params: Any) -> None:
    d = engine("kv_consumer")
    request = d.add(40, params)
    other = d.add(50)
    (fail,) = d.schedule()  # and no word to a producer: nobody would renew or end its lease
    assert isinstance(fail, Fail)
    assert fail.request_id == request.request_id
    failed = {request.request_id}
    outputs = d.finish(finished_recving=failed, failed_recving=failed)
    assert {o.request_id: o.finish_reason for o in outputs} == {
        request.request_id: FinishReason.ERROR,
        other.request_id: None,
    }
    assert d.counts["failures"] == {"invalid_params": 1}
    d.step(token=EOS_TOKEN)
    d.schedule()
    d.assert_idle()


@pytest.mark.parametrize("params", NONSENSE, ids=repr)
def test_nonsense_is_recomputed_where_that_is_the_policy(engine: Any, params: Any) -> None:
    d = engine("kv_consumer", policy="recompute")
    request = d.add(40, params)
    assert Fail not in kinds(d.schedule())
    assert d.output.num_scheduled_tokens == {request.request_id: 40}
    stats = d.half.take_stats()
    assert stats.data["recomputed"] == 1
    d.finish(token=EOS_TOKEN)
    d.schedule()
    d.assert_idle()


def test_nonsense_aborted_before_it_is_reported(engine: Any) -> None:
    d = engine("kv_consumer")
    request = d.add(40, {"do_remote_prefill": True})
    d.schedule()
    d.abort(request)
    failed = {request.request_id}
    assert d.finish(finished_recving=failed, failed_recving=failed) == []
    assert d.schedule() == []
    d.finish()
    d.assert_idle()


def test_the_same_transfer_for_two_requests(engine: Any) -> None:
    d = engine("kv_consumer")
    first, second = d.add(40, nixl()), d.add(40, nixl())
    commands = d.schedule()
    assert kinds(commands) == [Queue, Pull, Fail]
    assert commands[1].request_id == first.request_id
    assert commands[2].request_id == second.request_id


def test_samples_may_share_a_transfer(engine: Any) -> None:
    d = engine("kv_consumer")
    d.add(40, nixl(), name="0_parent")
    d.add(40, nixl(), name="1_parent")
    assert kinds(d.schedule()) == [Queue, Queue, Pull, Pull]


def test_a_producer_does_not_pull(engine: Any) -> None:
    p = engine("kv_producer")
    p.add(40, nixl())
    assert kinds(p.schedule()) == [Fail]


# ---- the half itself ------------------------------------------------------------------


def test_every_hook_runs_without_a_worker(engine: Any) -> None:
    d = engine("kv_both")
    connector = d.connector
    request = d.request(40)
    assert connector.request_finished(request, []) == (False, None)
    assert connector.request_finished_all_groups(request, ([],)) == (False, None)
    assert connector.get_loaded_kv_cache_group_ids(request) == (0,)
    assert list(connector.take_events()) == []
    assert connector.get_kv_connector_stats() is None
    assert connector.reset_cache()
    assert connector.get_finished_count() is None
    connector.shutdown()


@pytest.mark.parametrize("rank", [(0, 1), (1, 0)])
def test_handshakes_of_more_workers_are_refused(engine: Any, rank: tuple[int, int]) -> None:
    d = engine()
    with pytest.raises(ValueError, match="expected the handshake of a single"):
        d.connector.set_xfer_handshake_metadata_pp_aware({rank: d.half._handshake})


@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_more_workers_are_refused_at_the_start(vllm_config: Any, size: str) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from efa_kv.connectors.vllm import EfaConnector
    from efa_kv.errors import ConfigError

    config = vllm_config()
    setattr(config.parallel_config, size, 2)
    with pytest.raises(ConfigError, match=size.replace("_", "-")):
        EfaConnector(config, KVConnectorRole.SCHEDULER, None)


def test_both_constructor_signatures(vllm_config: Any) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from efa_kv.connectors.vllm import EfaConnector

    assert EfaConnector(vllm_config(), KVConnectorRole.SCHEDULER).role == KVConnectorRole.SCHEDULER


def test_plugin_may_be_loaded_twice() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from efa_kv.connectors.vllm import EfaConnector, register

    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name("EfaConnector") is EfaConnector


def test_the_api_server_needs_no_native_code() -> None:
    script = """
import sys
import efa_kv.connectors.vllm as plugin
assert "torch" not in sys.modules
plugin.register()
from efa_kv.connectors.vllm import EfaConnector
assert EfaConnector.build_kv_connector_stats().is_empty()
native = ("efa_kv._", "efa_kv.runtime", "efa_kv.fabric", "efa_kv.memory")
assert not [name for name in sys.modules if name.startswith(native)]
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=200)
