"""What servers written for Mooncake say, turned into our settings."""

from __future__ import annotations

from typing import Any

import pytest

from efa_kv.config_mooncake import (
    PEER_TO_PEER,
    WITHOUT_EFFECT,
    device_patterns,
    mooncake_settings,
    plugin_settings,
    split_name,
)
from efa_kv.errors import ConfigError


def load(environ: dict[str, str] | None = None, **changed: str) -> Any:
    arguments = {
        "name": "127.0.0.1",
        "metadata_server": PEER_TO_PEER,
        "protocol": "efa",
        "devices": "",
        **changed,
    }
    return mooncake_settings(**arguments, environ=environ or {})


def test_arguments_become_settings() -> None:
    settings = load(name="10.0.0.1", devices="rdmap79s0, rdmap80s0")
    assert settings.config.host == "10.0.0.1"
    assert settings.config.protocol == "efa"
    assert settings.config.devices == (
        "rdmap79s0",
        "rdmap79s0-*",
        "rdmap80s0",
        "rdmap80s0-*",
    )
    assert settings.ports == (15000, 17000)
    assert settings.ignored == {}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("host", ("host", 0)),
        ("10.0.0.1:123", ("10.0.0.1", 123)),
        ("fd00::1", ("fd00::1", 0)),
        ("[fd00::1]", ("fd00::1", 0)),
        ("[fd00::1]:5", ("fd00::1", 5)),
    ],
)
def test_names_with_and_without_a_port(name: str, expected: tuple[str, int]) -> None:
    assert split_name(name) == expected


def test_a_port_in_the_name_or_in_the_environment_leaves_no_choice() -> None:
    assert load(name="10.0.0.1:5000").ports is None
    assert load(name="10.0.0.1:5000").config.port == 5000
    settings = load({"EFA_KV_PORT": "6000"})
    assert (settings.ports, settings.config.port) == (None, 6000)
    assert load({"MC_MIN_RPC_PORT": "100", "MC_MAX_PRC_PORT": "200"}).ports == (100, 200)


def test_variables_carry_over() -> None:
    config = load(
        {
            "MC_MAX_WR": "64",
            "MC_EFA_CQ_THREADS": "4",
            "MC_TRANSFER_TIMEOUT": "60",
            "MC_HANDSHAKE_CONNECT_TIMEOUT": "7",
            "MC_MS_AUTO_DISC": "1",
            "MC_MS_FILTERS": "rdmap1s0",
        }
    ).config
    assert config.max_in_flight == 64
    assert config.progress_threads == 4
    assert config.transfer_timeout_s == 60
    assert config.handshake_timeout_s == 7
    assert config.devices == ("rdmap1s0", "rdmap1s0-*")
    assert load({"MC_TRANSFER_TIMEOUT": "1"}).config.transfer_timeout_s == 5
    assert load({"MC_MS_FILTERS": "rdmap1s0"}).config.devices == ()


def test_our_own_variables_are_stronger_and_arguments_stronger_still() -> None:
    environ = {
        "MC_MAX_WR": "64",
        "EFA_KV_MAX_IN_FLIGHT": "32",
        "MC_TE_FILTERS": "a",
        "EFA_KV_DEVICES": "b",
        "EFA_KV_HOST": "10.9.9.9",
    }
    config = load(environ).config
    assert config.max_in_flight == 32
    assert config.devices == ("b",)
    assert config.host == "127.0.0.1"
    assert load(environ, devices="c*").config.devices == ("c*",)


def test_the_protocol_can_be_named_from_outside() -> None:
    assert load({"EFA_KV_PROTOCOL": "tcp"}).config.protocol == "tcp"
    assert load({"MC_FORCE_TCP": "1"}).config.protocol == "tcp"
    assert load({"MC_FORCE_TCP": "1", "EFA_KV_PROTOCOL": "efa"}).config.protocol == "efa"


def test_what_has_no_effect_is_told() -> None:
    settings = load({"MC_SLICE_SIZE": "65536", "MC_LOG_LEVEL": "warning"})
    assert set(settings.ignored) == {"MC_SLICE_SIZE"}
    assert settings.log_level == "WARNING"
    assert all(WITHOUT_EFFECT.values())


@pytest.mark.parametrize(
    ("environ", "changed"),
    [
        ({}, {"metadata_server": "etcd://1.2.3.4"}),
        ({}, {"protocol": "rdma"}),
        ({}, {"name": "0.0.0.0"}),
        ({}, {"name": "a:b:c"}),
        ({"MC_MAX_WR": "many"}, {}),
        ({"MC_MAX_WR": "-1"}, {}),
        ({"MC_TRANSFER_TIMEOUT": "0"}, {}),
        ({"MC_MIN_RPC_PORT": "200", "MC_MAX_RPC_PORT": "100"}, {}),
        ({"MC_MIN_RPC_PORT": "0"}, {}),
        ({"MC_LOG_LEVEL": "LOUD"}, {}),
        ({"EFA_KV_PROTOCL": "tcp"}, {}),
    ],
)
def test_the_impossible_is_refused(environ: dict[str, str], changed: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        load(environ, **changed)


def test_patterns_stay_patterns() -> None:
    assert device_patterns("rdmap*, ,x") == ["rdmap*", "x", "x-*"]


@pytest.mark.parametrize(
    ("environ", "wanted", "offered"),
    [
        ({}, False, True),
        ({"MOONCAKE_PROTOCOL": "efa"}, True, True),
        ({"MOONCAKE_PROTOCOL": "tcp"}, False, True),
        ({"MOONCAKE_PROTOCOL": "rdma"}, False, True),
        ({"MOONCAKE_PROTOCOL": "tcp", "EFA_KV_SGLANG": "1"}, True, True),
        ({"MOONCAKE_PROTOCOL": "efa", "EFA_KV_SGLANG": "0"}, False, False),
    ],
)
def test_when_sglang_gets_the_engine(environ: dict[str, str], wanted: bool, offered: bool) -> None:
    settings = plugin_settings(environ)
    assert (settings.wanted, settings.offered) == (wanted, offered)


@pytest.mark.parametrize(
    "environ", [{"EFA_KV_SGLANG": "maybe"}, {"EFA_KV_SGLANG": "1", "MOONCAKE_PROTOCOL": "rdma"}]
)
def test_a_switch_that_cannot_be_followed_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        plugin_settings(environ)
    # The switch itself is no setting of the engine.
    assert load({"EFA_KV_SGLANG": "1"}).config.protocol == "efa"
