"""What an engine warns of when it starts, by the address it listens on."""

import pytest

from efa_kv.runtime.announce import place_warning, secret_warning


@pytest.mark.parametrize(
    ("session", "warns"),
    [
        ("127.0.0.1:5000", False),
        ("[::1]:5000", False),
        ("10.0.0.5:5000", True),
        ("prefill-0:5000", True),
    ],
)
def test_whoever_reaches_the_port_is_trusted_without_a_secret(session: str, warns: bool) -> None:
    assert ("EFA_KV_SECRET" in secret_warning(session)) is warns


@pytest.mark.parametrize(
    ("session", "protocol", "warns"),
    [
        ("127.0.0.1:5000", "efa", True),
        ("[::1]:5000", "efa-direct", True),
        ("127.0.0.1:5000", "tcp", False),
        ("10.0.0.5:5000", "efa", False),
        ("prefill-0:5000", "efa", False),
    ],
)
def test_a_server_that_other_hosts_cannot_reach_says_what_to_set(
    session: str, protocol: str, warns: bool
) -> None:
    warning = place_warning(session, protocol)
    assert bool(warning) is warns
    assert warns is ("VLLM_HOST_IP" in warning)
