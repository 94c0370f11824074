"""kv_transfer_params of every shape."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from efa_kv.connectors.vllm.params import (
    Invalid,
    Local,
    MooncakeRequest,
    NixlRequest,
    RemoteDecode,
    parse,
    response,
)
from efa_kv.types import Address

NIXL = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "engine",
    "remote_request_id": "request",
    "remote_host": "10.0.0.1",
    "remote_port": 15001,
    "remote_block_ids": [[1, 2, 3]],
    "tp_size": 1,
}
MOONCAKE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "transfer_id": "xfer-1",
    "remote_bootstrap_addr": "http://10.0.0.1:8998",
    "remote_engine_id": "engine",
}
STRANGE = [
    *(1, -1, 1.5, 1 << 80, float("nan"), True, "", "x" * 5000, "a\nb", b"bytes"),
    *([], {}, [None], object()),
]


def without(params: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in params.items() if key != name}


@pytest.mark.parametrize(
    "params",
    [None, {}, {"do_remote_prefill": False, "do_remote_decode": False}, {"do_remote_decode": None}],
)
def test_nothing_remote(params: Any) -> None:
    assert parse(params) == Local()


def test_prefill_of_either_router() -> None:
    nixl = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert parse(nixl) == RemoteDecode(None)
    mooncake = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "xfer-1"}
    assert parse(mooncake) == RemoteDecode("xfer-1")


def test_decode_of_either_router() -> None:
    assert parse(NIXL) == NixlRequest("", "request", "engine", "10.0.0.1:15001")
    assert parse(MOONCAKE) == MooncakeRequest("xfer-1", "http://10.0.0.1:8998", "engine")
    assert parse(without(MOONCAKE, "remote_engine_id")) == MooncakeRequest(
        "xfer-1", "http://10.0.0.1:8998", ""
    )


def test_ipv6_and_flat_block_ids() -> None:
    parsed = parse({**NIXL, "remote_host": "fe80::1", "remote_block_ids": [1, 2]})
    assert isinstance(parsed, NixlRequest)
    assert parsed.address == "[fe80::1]:15001"
    parsed = parse({**MOONCAKE, "remote_bootstrap_addr": "http://[::1]:8998/"})
    assert isinstance(parsed, MooncakeRequest)
    assert parsed.address == "http://[::1]:8998"


def test_a_response_is_understood_by_the_other_side() -> None:
    answer = response(
        transfer_id="t",
        generation=7,
        engine_id="engine",
        request_id="request",
        address=Address("::1", 15001),
        block_ids=([1, 2],),
        token_count=20,
    )
    assert parse(answer) == NixlRequest("t", "request", "engine", "[::1]:15001", 7, 20)


@pytest.mark.parametrize("params", [1, "text", [1], True, b"x", object(), ("do_remote_prefill",)])
def test_not_an_object(params: Any) -> None:
    assert isinstance(parse(params), Invalid)


@pytest.mark.parametrize(
    "params",
    [
        {"foo": 1},
        {"transfer_id": "t", "remote_bootstrap_addr": "http://h:1"},
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "do_remote_decode": True},
        {**NIXL, "remote_bootstrap_addr": "http://10.0.0.1:8998"},
        {**NIXL, "tp_size": 2},
        {**NIXL, "remote_port": 0},
        {**NIXL, "remote_port": 65536},
        {**NIXL, "remote_port": "15001"},
        {**NIXL, "remote_host": "a b"},
        {**NIXL, "remote_host": "h:1@x"},
        {**NIXL, "remote_block_ids": [[-1]]},
        {**NIXL, "remote_block_ids": [[1 << 32]]},
        {**NIXL, "remote_block_ids": [["1"]]},
        {**NIXL, "remote_block_ids": "123"},
        {**NIXL, "generation": -1},
        {**MOONCAKE, "remote_bootstrap_addr": "10.0.0.1:8998"},
        {**MOONCAKE, "remote_bootstrap_addr": "http://10.0.0.1"},
        {**MOONCAKE, "remote_bootstrap_addr": "http://10.0.0.1:99999"},
        {**MOONCAKE, "remote_bootstrap_addr": "http://u@10.0.0.1:8998"},
        {**MOONCAKE, "remote_bootstrap_addr": "http://10.0.0.1:8998/x"},
        {**MOONCAKE, "remote_bootstrap_addr": "file:///etc/passwd"},
        {**MOONCAKE, "remote_bootstrap_addr": "http://[::1:8998"},
        {"do_remote_decode": "yes"},
        {"do_remote_decode": 1},
        {"do_remote_decode": True, "transfer_id": ""},
        {"do_remote_decode": True, "transfer_id": 7},
    ],
    ids=repr,
)
def test_refused(params: Any) -> None:
    parsed = parse(params)
    assert isinstance(parsed, Invalid)
    assert parsed.reason


@pytest.mark.parametrize(
    ("params", "name"),
    [(NIXL, name) for name in ("remote_engine_id", "remote_request_id", "remote_port")]
    + [(NIXL, "remote_host"), (MOONCAKE, "transfer_id"), (MOONCAKE, "remote_bootstrap_addr")],
)
def test_a_missing_key_is_refused(params: dict[str, Any], name: str) -> None:
    assert isinstance(parse(without(params, name)), Invalid)
    assert isinstance(parse({**params, name: None}), Invalid)


def test_no_value_anywhere_makes_it_raise() -> None:
    for params, value in itertools.product((NIXL, MOONCAKE, {"do_remote_decode": True}), STRANGE):
        for name in (*params, "transfer_id", "generation", "remote_num_tokens", "pp_size"):
            parsed = parse({**params, name: value})
            if isinstance(parsed, Invalid):
                assert len(parsed.reason) < 400


def test_keys_that_are_no_text() -> None:
    assert isinstance(parse({1: 2, None: 3}), Invalid)
