"""Settings: where they come from, what is refused, what the table says."""

from __future__ import annotations

from pathlib import Path

import pytest

from efa_kv.config import ENVIRONMENT_PREFIX, EngineConfig, settings, settings_table
from efa_kv.errors import ConfigError


def test_precedence_is_extra_then_environment_then_default() -> None:
    environ = {"EFA_KV_PORT": "7000", "EFA_KV_LEASE_S": "12.5", "HOME": "/root"}
    config = EngineConfig.load({"port": 8000}, environ)
    assert config.port == 8000
    assert config.lease_s == 12.5
    assert config.transfer_timeout_s == 30.0


def test_texts_of_the_environment_are_converted() -> None:
    config = EngineConfig.load(
        {},
        {
            "EFA_KV_NEAR": "false",
            "EFA_KV_DEVICES": "rdmap79*, rdmap80s0-rdm",
            "EFA_KV_QUARANTINE_SHARE": "0.25",
            "EFA_KV_REQUIRE_AUTH": "1",
        },
    )
    assert config.near is False
    assert config.devices == ("rdmap79*", "rdmap80s0-rdm")
    assert config.quarantine_share == 0.25
    assert config.require_auth is True


@pytest.mark.parametrize(
    ("name", "nearest"), [("protocoll", "protocol"), ("lease", "lease_s"), ("stripe", "stripe_")]
)
def test_unknown_names_are_refused_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*{nearest}"):
        EngineConfig.load({name: 1}, {})
    with pytest.raises(ConfigError, match=f"{name.upper()}.*{nearest}"):
        EngineConfig.load({}, {ENVIRONMENT_PREFIX + name.upper(): "1"})


def test_variables_of_other_parts_are_left_alone() -> None:
    EngineConfig.load({}, {"EFA_KV_SIM_NICS": "16", "EFA_KV_TEST_SEED": "3", "EFAKV": "x"})


def test_aliases_and_fallbacks() -> None:
    environ = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": "8998"}
    config = EngineConfig.load({"mooncake_protocol": "tcp"}, environ)
    assert config.protocol == "tcp"
    assert config.bootstrap_port == 8998
    assert EngineConfig.load({"bootstrap_port": 1}, environ).bootstrap_port == 1
    own = {**environ, "EFA_KV_BOOTSTRAP_PORT": "2"}
    assert EngineConfig.load({}, own).bootstrap_port == 2
    assert EngineConfig.load({}, {"VLLM_HOST_IP": "10.0.0.7"}).host == "10.0.0.7"
    assert EngineConfig.load({}, {"VLLM_HOST_IP": ""}).host == "127.0.0.1"
    with pytest.raises(ConfigError, match="both"):
        EngineConfig.load({"mooncake_protocol": "tcp", "protocol": "tcp"}, {})


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"protocol": "tpc"}, "tpc.*tcp"),
        ({"protocol": "tcp", "require": "efa"}, "require"),
        ({"require": "auto"}, "auto"),
        ({"host": "0.0.0.0"}, "0.0.0.0"),
        ({"host": "::"}, "one interface"),
        ({"host": ""}, "one interface"),
        ({"host": "1.2.3.4:80"}, "without brackets or port"),
        ({"host": "[::1]"}, "without brackets"),
        ({"port": 65536}, "port"),
        ({"port": "eighty"}, "port.*eighty"),
        ({"port": -1}, "port"),
        ({"lease_s": 0}, "lease_s"),
        ({"lease_s": float("nan")}, "lease_s"),
        ({"lease_s": float("inf")}, "lease_s"),
        ({"push": "token"}, "push"),
        ({"quarantine_share": 1.5}, "quarantine_share"),
        ({"near": "perhaps"}, "near"),
        ({"devices": 5}, "devices"),
        ({"devices": [1]}, "devices"),
        ({"suspect_after_s": 1, "heartbeat_interval_s": 2}, "heartbeat_interval_s"),
        ({"secret": "a", "secret_file": "b"}, "both"),
        ({"max_message_bytes": 10}, "max_message_bytes"),
        ({"stripe_bytes": 100}, "stripe_bytes"),
        ({"max_peers": 0}, "max_peers"),
    ],
)
def test_impossible_values_are_refused(values: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EngineConfig.load(values, {})


def test_secret(tmp_path: Path) -> None:
    assert EngineConfig().load_secret() is None
    config = EngineConfig.load({}, {"EFA_KV_SECRET": "tell nobody"})
    assert config.load_secret() == b"tell nobody"
    assert "tell nobody" not in repr(config)
    file = tmp_path / "secret"
    file.write_text("from a file\n")
    assert EngineConfig(secret_file=str(file)).load_secret() == b"from a file"
    file.write_text("\n")
    with pytest.raises(ConfigError, match="empty"):
        EngineConfig(secret_file=str(file)).load_secret()
    with pytest.raises(ConfigError, match="cannot be read"):
        EngineConfig(secret_file=str(tmp_path / "missing")).load_secret()
    with pytest.raises(ConfigError, match="EFA_KV_SECRET"):
        EngineConfig(require_auth=True).load_secret()


def test_a_wrong_secret_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load({"secret": ["hidden", "words"]}, {})
    assert "hidden" not in str(caught.value)


def test_every_setting_has_a_meaning_and_a_row() -> None:
    table = settings_table()
    for setting in settings():
        assert setting.text
        assert f"`{setting.name}`" in table
        assert f"`{setting.variable}`" in table
    assert {setting.name for setting in settings()} == set(EngineConfig.__struct_fields__)


def test_the_designs_names_and_defaults() -> None:
    config = EngineConfig()
    assert (config.protocol, config.lease_s, config.handshake_timeout_s) == ("auto", 30.0, 5.0)
    assert (config.quarantine_share, config.stripe_bytes, config.near) == (0.1, 1 << 20, True)
