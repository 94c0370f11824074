"""What goes wrong, driven through SGLang's own classes: nobody hangs, nothing wrong arrives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.utils import DisaggregationMode

from efa_kv.connectors.sglang import hooks

SOURCE, TARGET = [1, 2, 3, 9], [5, 4, 30, 31]


def complete(rig: Any, aux: int = 0) -> None:
    handoff = rig.begin(TARGET, aux)
    handoff.wait_for_metadata()
    handoff.send(SOURCE)
    assert handoff.outcome() == ([KVPoll.Success], [KVPoll.Success])
    for mine, theirs in zip(rig.prefill[0].pool, rig.decode[0].pool, strict=True):
        assert torch.equal(mine[SOURCE], theirs[TARGET])


def test_an_abort_before_the_metadata_was_seen(rig: Any, shape_of: Any) -> None:
    rig.build(shape_of())
    handoff = rig.begin(TARGET, 0)
    handoff.receivers[0].abort()
    assert handoff.receivers[0].poll() == KVPoll.Failed
    with pytest.raises(Exception, match="Abort"):
        handoff.receivers[0].failure_exception()
    handoff.senders[0].abort()
    complete(rig, 1)


def test_an_abort_while_prefill_computes(rig: Any, shape_of: Any, wait_until: Any) -> None:
    rig.build(shape_of())
    handoff = rig.begin(TARGET, 0)
    handoff.wait_for_metadata()
    handoff.receivers[0].abort()
    wait_until(lambda: handoff.senders[0].poll() == KVPoll.Failed)
    handoff.send(SOURCE)
    assert handoff.outcome() == ([KVPoll.Failed], [KVPoll.Failed])
    assert not any(layer.any() for layer in rig.decode[0].pool)
    complete(rig, 1)


def test_an_abort_between_two_chunks(rig: Any, shape_of: Any) -> None:
    rig.build(shape_of())
    handoff = rig.begin(TARGET, 0)
    handoff.wait_for_metadata()
    sender = handoff.senders[0]
    sender.init(len(SOURCE), 0)
    sender.send(np.array(SOURCE[:2], np.int32))
    handoff.receivers[0].abort()
    assert handoff.receivers[0].poll() == KVPoll.Failed
    sender.abort()
    complete(rig, 1)


def test_an_abort_when_everything_has_been_sent(rig: Any, shape_of: Any) -> None:
    rig.build(shape_of())
    handoff = rig.begin(TARGET, 0)
    handoff.wait_for_metadata()
    handoff.send(SOURCE)
    handoff.receivers[0].abort()
    assert handoff.receivers[0].poll() == KVPoll.Failed
    complete(rig, 1)


def test_a_failed_engine_is_shunned_until_a_probe_reaches_it(
    rig: Any, shape_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.build(shape_of())
    manager, session = rig.prefill[0].manager, rig.decode[0].session
    handoff = rig.begin(TARGET, 0)
    handoff.wait_for_metadata()
    # Memory that goes away under a request: a true failure of the engine.
    engine = rig.decode[0].engine
    addresses = [layer.data_ptr() for layer in rig.decode[0].pool]
    assert engine.batch_unregister_memory(addresses) == 0
    handoff.send(SOURCE)
    assert handoff.outcome() == ([KVPoll.Failed], [KVPoll.Failed])
    assert manager.failed_sessions == {session}
    assert not any(layer.any() for layer in rig.decode[0].pool)
    lengths = [layer.nbytes for layer in rig.decode[0].pool]
    assert engine.batch_register_memory(addresses, lengths) == 0
    manager._run_one_probe_pass()
    assert manager.failed_sessions == set()
    complete(rig, 1)


def test_a_decode_side_that_restarts_on_the_same_port(
    rig: Any, shape_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.build(shape_of())
    complete(rig)
    gone = rig.decode[0]
    session = gone.session
    gone.engine.close()
    rig.decode = [rig.rank(shape_of(), DisaggregationMode.DECODE, 1, 0, session)]
    assert rig.decode[0].session == session
    complete(rig, 1)


def test_a_decode_side_that_is_gone_fails_the_request(
    rig: Any, shape_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EFA_KV_HANDSHAKE_TIMEOUT_S", "1")
    rig.build(shape_of())
    handoff = rig.begin(TARGET, 0)
    handoff.wait_for_metadata()
    rig.decode[0].engine.close()
    handoff.send(SOURCE)
    senders, _ = handoff.outcome()
    assert senders == [KVPoll.Failed]
    assert not any(layer.any() for layer in rig.decode[0].pool)


def test_a_prefill_side_that_is_gone_fails_the_request(
    rig: Any, shape_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL", "2")
    rig.build(shape_of())
    complete(rig)
    handoff = rig.begin(TARGET, 1)
    handoff.wait_for_metadata()
    rig.prefill[0].engine.close()
    rig.bootstrap.close()
    assert handoff.outcome_of_decode() == [KVPoll.Failed]


def test_memory_that_cannot_be_registered_stops_the_start(
    rig: Any, shape_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EFA_KV_MAX_REGIONS", "2")
    with pytest.raises(hooks.HookError, match="KV buffers"):
        rig.build(shape_of())


def test_a_hook_that_is_not_in_place_stops_the_start(
    rig: Any, shape_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
        MooncakeTransferEngine,
    )

    bare = MooncakeTransferEngine.batch_register.__wrapped__
    monkeypatch.setattr(MooncakeTransferEngine, "batch_register", bare)
    with pytest.raises(hooks.HookError, match="without efa-kv's hooks"):
        rig.build(shape_of())
