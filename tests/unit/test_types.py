"""Addresses and other small values."""

from __future__ import annotations

import pytest

from efa_kv.errors import ConfigError
from efa_kv.types import Address, Nic, nic_address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:15123", "127.0.0.1", 15123),
        ("[::1]:80", "::1", 80),
        ("[fe80::1%eth0]:65535", "fe80::1%eth0", 65535),
        ("prefill_0:1", "prefill_0", 1),
        ("Node-A.example:9000", "Node-A.example", 9000),
    ],
)
def test_parse_and_format_are_inverse(text: str, host: str, port: int) -> None:
    address = Address.parse(text)
    assert (address.host, address.port) == (host, port)
    assert str(address) == text
    assert address.session == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        ":80",
        "host:",
        "host:0",
        "host:65536",
        "host:-1",
        "host:+1",
        "host:8 0",
        "host:٣",
        "::1:80",
        "[::1]",
        "[::1]80",
        "[host]:80",
        "tcp://host:80",
        "a b:80",
        "a@b:80",
        "[[::1]]:80",
    ],
)
def test_malformed_addresses_are_refused_with_what_was_expected(text: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        Address.parse(text)


@pytest.mark.parametrize("value", [None, 5, b"host:80", ["host", 80]])
def test_other_types_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="expected"):
        Address.parse(value)  # type: ignore[arg-type]


def test_literals_are_known() -> None:
    assert Address.parse("10.0.0.1:1").is_literal
    assert Address.parse("[::1]:1").is_literal
    assert Address.parse("[::1]:1").is_ipv6
    assert not Address.parse("localhost:1").is_literal


def test_nic_address_and_record() -> None:
    nic = Nic(
        name="rdmap79s0-rdm",
        fabric="efa",
        provider="efa",
        pci="0000:4f:00.0",
        numa_node=1,
        flags=0,
        queue_depth=128,
        provider_queue_depth=256,
        completion_queue_size=512,
        speed_bits_per_second=100,
        address=b"raw",
    )
    assert nic_address("[::1]:80", nic.name) == "[::1]:80@rdmap79s0-rdm"
    record = nic.record()
    assert (record.name, record.address, record.numa_node) == ("rdmap79s0-rdm", b"raw", 1)
