"""What an engine warns of when it starts, by the address it listens on."""

import pytest

from efa_kv.runtime.announce import start_warnings


@pytest.mark.parametrize(
    ("session", "protocol", "authenticated", "words"),
    [
        ("127.0.0.1:5000", "tcp", False, []),
        ("[::1]:5000", "shm", False, []),
        ("127.0.0.1:5000", "efa", False, ["VLLM_HOST_IP"]),
        ("127.0.0.1:5000", "efa-direct", True, ["EFA_KV_HOST"]),
        ("10.0.0.5:5000", "efa", False, ["EFA_KV_SECRET"]),
        ("prefill-0:5000", "tcp", False, ["EFA_KV_SECRET"]),
        ("10.0.0.5:5000", "efa", True, []),
    ],
)
def test_warnings_name_the_setting_that_mends_them(
    session: str, protocol: str, authenticated: bool, words: list[str]
) -> None:
    found = start_warnings(session, protocol, authenticated=authenticated)
    assert len(found) == len(words)
    assert all(word in text for word, text in zip(words, found, strict=True))
