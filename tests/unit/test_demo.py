"""The demo's own parts: its verdict must be able to say no, and its processes must end."""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from demo_common.model import Model, kv_bytes_per_token
from demo_common.processes import (
    LOOPBACK,
    ManagedProcess,
    ReservedPorts,
    ServerError,
    first_failure,
    stop_together,
    wait_until,
)
from demo_common.report import Report, judge, what_is_missing
from demo_common.servers import HttpServer, require_alive, wait_until_ready
from demo_common.traffic import Answer, Counters, Prompt, make_prompts

BYTES_PER_TOKEN = 1024
GOOD = Counters(
    external_tokens=64,
    local_tokens=36,
    bytes=64 * BYTES_PER_TOKEN,
    requests=1,
    failures=0,
    transfer_s=0.001,
    providers=frozenset({"tcp"}),
)
ANSWER = Answer("abc", prompt_tokens=100, first_token_s=0.1, total_s=0.2)


def test_kv_that_came_whole_is_not_missed() -> None:
    assert what_is_missing(100, GOOD, BYTES_PER_TOKEN) is None
    # The last prompt token is always computed, so one less is whole too.
    assert what_is_missing(101, GOOD, BYTES_PER_TOKEN) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"external_tokens": 0}, "no token"),
        ({"external_tokens": 40}, "only 76 of 100"),
        ({"bytes": 0}, "0 bytes"),
        ({"bytes": 62 * BYTES_PER_TOKEN}, "were needed"),
        ({"failures": 1}, "failed"),
    ],
)
def test_kv_that_did_not_come_is_missed(change: dict[str, int], words: str) -> None:
    assert words in (what_is_missing(100, replace(GOOD, **change), BYTES_PER_TOKEN) or "")


def test_a_report_is_good_only_if_every_answer_is_equal_and_every_kv_came() -> None:
    prompt = Prompt("p", "text")
    good = judge(prompt, ANSWER, ANSWER, GOOD, BYTES_PER_TOKEN)
    different = judge(prompt, ANSWER, replace(ANSWER, text="abd"), GOOD, BYTES_PER_TOKEN)
    missing = judge(prompt, ANSWER, ANSWER, replace(GOOD, bytes=0), BYTES_PER_TOKEN)
    assert Report([good, good], "tcp", "r").good
    assert not Report([], "tcp", "r").good
    assert not Report([good, different], "tcp", "r").good
    assert not Report([good, missing], "tcp", "r").good
    assert Report([good, different], "tcp", "r").as_json()["identical"] is False
    assert Report([good, missing], "tcp", "r").as_json()["identical"] is True
    assert Report([good, good], "tcp", "r").as_json()["bytes"] == 2 * GOOD.bytes
    assert "abd" in (different.problem or "")


def test_a_token_takes_the_bytes_that_its_layers_take() -> None:
    grouped = {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 32}
    latent = {"num_hidden_layers": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert kv_bytes_per_token(grouped, "float32") == 4 * 2 * 2 * 32 * 4
    assert kv_bytes_per_token(latent, "bfloat16") == 4 * 576 * 2


@pytest.mark.parametrize("block", [16, 32])
def test_prompts_cover_the_edges_of_a_block(block: int) -> None:
    prompts = make_prompts(Model(Path(), "llama", "float32", block, BYTES_PER_TOKEN))
    lengths = [len(prompt.text) for prompt in prompts]
    assert len(prompts) >= 12
    assert {block - 1, block, block + 1, 2 * block} <= set(lengths)
    assert max(lengths) > 40 * block
    assert len({prompt.text for prompt in prompts}) == len(prompts) - 1  # one is sent twice
    assert len([p for p in prompts if p.text[: 10 * block] == prompts[8].text[: 10 * block]]) == 3


def process(tmp_path: Path, code: str, name: str = "child") -> ManagedProcess:
    return ManagedProcess(
        name, [sys.executable, "-c", code], dict(os.environ), tmp_path / f"{name}.log"
    )


SLEEP = "import time; time.sleep(60)"
STUBBORN = (
    "import signal, subprocess, sys, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(60)\n"
)


def is_running(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_stopping_ends_children_too_and_does_not_wait_for_the_stubborn(tmp_path: Path) -> None:
    with process(tmp_path, STUBBORN) as parent:
        assert wait_until(lambda: bool(parent.log_lines()), 10)
        child = int(parent.log_lines()[0])
        assert is_running(child)
        parent.stop(grace_s=0.5)
        assert not parent.alive
        assert not is_running(child)


def test_a_paused_process_can_be_stopped(tmp_path: Path) -> None:
    with process(tmp_path, SLEEP) as paused:
        paused.pause()
        started = time.monotonic()
        paused.stop()
        assert not paused.alive
        assert time.monotonic() - started < 5


def test_several_stop_together_whether_started_or_not(tmp_path: Path) -> None:
    running, idle = process(tmp_path, SLEEP, "running"), process(tmp_path, SLEEP, "idle")
    running.start()
    stop_together([running, idle])
    assert not running.alive


def test_a_started_process_is_not_started_twice(tmp_path: Path) -> None:
    with process(tmp_path, SLEEP) as running, pytest.raises(ServerError, match="already runs"):
        running.start()


def test_a_server_that_dies_is_named_with_its_last_words(tmp_path: Path) -> None:
    code = "print('no such model'); raise SystemExit(3)"
    server = HttpServer(
        "decode", [sys.executable, "-c", code], dict(os.environ), tmp_path / "log", 1
    )
    with server, pytest.raises(ServerError, match=r"(?s)decode server has ended.*no such model"):
        wait_until_ready([server], timeout_s=20)


def test_the_first_failure_is_found_among_the_last_words() -> None:
    log = [
        "(Worker pid=7) INFO 11-30 22:53:22 [a.py:1] starting",
        "(Worker pid=7) ERROR 11-30 22:53:22 [a.py:1] Traceback (most recent call last):",
        "(Worker pid=7) ERROR 11-30 22:53:22 [a.py:1]   File 'x'",
        "(Worker pid=7) ERROR 11-30 22:53:22 [a.py:1] ImportError: no part",
        "(APIServer pid=1) Traceback (most recent call last):",
        "(APIServer pid=1)   File 'y'",
        "(APIServer pid=1) RuntimeError: see above",
    ]
    assert first_failure(log) == "ImportError: no part"
    assert first_failure(log[4:]) == "RuntimeError: see above"
    assert first_failure(log[:1]) is None


def test_a_server_that_never_answers_runs_into_the_time_limit(tmp_path: Path) -> None:
    server = HttpServer(
        "prefill", [sys.executable, "-c", SLEEP], dict(os.environ), tmp_path / "log", 1
    )
    with server, pytest.raises(ServerError, match="prefill server not ready"):
        wait_until_ready([server], timeout_s=0.3)
    with pytest.raises(ServerError, match="has ended"):
        require_alive([server])


def test_reserved_ports_are_distinct_and_servers_can_listen_on_them() -> None:
    with ReservedPorts() as ports:
        taken = [ports.take() for _ in range(20)]
        assert len(set(taken)) == 20
        with socket.socket() as server, socket.socket() as client:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((LOOPBACK, taken[0]))
            server.listen()
            client.connect((LOOPBACK, taken[0]))
