"""The verdict on an engine's state."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from engine_states import peer, rail, state
from hypothesis import given
from hypothesis import strategies as some

from efa_kv.observe.state import (
    FAILURE_COUNTS_S,
    STUCK_AFTER_S,
    Bears,
    Health,
    LastTransfers,
    judge,
)


def wrong(health: Health) -> set[str]:
    return {check.name for check in health.checks if not check.ok}


def test_an_engine_without_work_is_in_order() -> None:
    for one in (state(), state(started=False, control_answered=None)):
        health = judge(one)
        assert (health.live, health.ready, wrong(health)) == (True, True, set())


@pytest.mark.parametrize(
    ("changes", "live", "ready", "names"),
    [
        ({"control_answered": False}, False, False, {"control thread"}),
        ({"rails": (rail(turned_age_s=STUCK_AFTER_S + 1),)}, False, False, {"progress threads"}),
        ({"rails": (rail(down=True), rail("b", down=True))}, True, False, {"fabric", "rails"}),
        ({"rails": (rail(down=True), rail("b"))}, True, True, {"rails"}),
        ({"regions": 0}, True, False, {"registration"}),
        ({"peers": (peer("suspect"),)}, True, False, {"peers"}),
        ({"peers": (peer("suspect"), peer("ready"))}, True, True, set()),
        ({"peers": (peer("greeting"), peer("closed"))}, True, True, set()),
        (
            {"peers": (peer("rejected", "other model"), peer("ready"))},
            True,
            True,
            {"refused peers"},
        ),
        ({"peers": (peer("rejected", "x"),)}, True, False, {"peers", "refused peers"}),
        (
            {"transfers": LastTransfers(landed_age_s=9.0, failed_age_s=3.0)},
            True,
            False,
            {"last transfer"},
        ),
        ({"transfers": LastTransfers(landed_age_s=3.0, failed_age_s=9.0)}, True, True, set()),
        ({"transfers": LastTransfers(failed_age_s=3.0)}, True, False, {"last transfer"}),
        ({"transfers": LastTransfers(failed_age_s=FAILURE_COUNTS_S + 1)}, True, True, set()),
    ],
)
def test_what_is_wrong_is_named(
    changes: dict[str, Any], live: bool, ready: bool, names: set[str]
) -> None:
    health = judge(state(**changes))
    assert (health.live, health.ready, wrong(health)) == (live, ready, names)
    for check in health.checks:
        assert check.found
        assert bool(check.advice) is bool(check.expected) is not check.ok


def test_a_refused_peer_is_told_with_its_reason() -> None:
    health = judge(state(peers=(peer("rejected", "model.weights differ"), peer("ready"))))
    assert any("model.weights differ" in check.found for check in health.checks)


@given(
    some.tuples(
        some.lists(some.builds(rail, down=some.booleans(), turned_age_s=some.floats(0, 100))),
        some.lists(some.builds(peer, some.sampled_from(["idle", "ready", "suspect", "rejected"]))),
        some.sampled_from([None, True, False]),
        some.integers(0, 3),
    )
)
def test_ready_means_live_and_nothing_else_does(parts: Any) -> None:
    rails, peers, answered, regions = parts
    health = judge(
        state(rails=tuple(rails), peers=tuple(peers), control_answered=answered, regions=regions)
    )
    failing = {check.bears for check in health.checks if not check.ok}
    assert health.live is (Bears.ON_LIFE not in failing)
    assert health.ready is (failing <= {Bears.ON_NOTHING})
    assert msgspec.json.decode(msgspec.json.encode(health), type=Health) == health
