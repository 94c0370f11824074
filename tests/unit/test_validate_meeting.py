"""How the hosts of `efa-kv validate` find rank 0, and how a fleet on one machine is watched."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from efa_kv.tools.validation import fleet, meeting
from efa_kv.tools.validation.member import run_program
from efa_kv.tools.validation.place import AtAddress, AtFile, AtStore, Place, PlaceError

STORE = AtStore("node-a", 29500, "efa-kv-validate/0")


def test_a_file_tells_where_rank_0_is(tmp_path: Path) -> None:
    where = AtFile(str(tmp_path / "session"))
    meeting.publish(where, "10.0.0.1:7")
    assert meeting.find(where, 1.0) == "10.0.0.1:7"
    assert [path.name for path in tmp_path.iterdir()] == ["session"]


def test_a_file_that_never_comes_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PlaceError, match="did not write"):
        meeting.find(AtFile(str(tmp_path / "session")), 0.1)
    with pytest.raises(PlaceError, match="No such file"):
        meeting.publish(AtFile(str(tmp_path / "nowhere" / "session")), "a:1")


def test_the_store_of_torchrun_tells_where_rank_0_is(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[str, str] = {}

    class TCPStore:
        def __init__(self, host: str, port: int, **settings: Any) -> None:
            assert (host, port, settings["is_master"]) == ("node-a", 29500, False)

        def set(self, key: str, value: str) -> None:
            kept[key] = value

        def get(self, key: str) -> bytes:
            if key not in kept:
                raise RuntimeError("wait timeout")
            return kept[key].encode()

    distributed = types.ModuleType("torch.distributed")
    distributed.TCPStore = TCPStore  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    with pytest.raises(PlaceError, match="wait timeout"):
        meeting.find(STORE, 1.0)
    meeting.publish(STORE, "10.0.0.1:7")
    assert kept == {"efa-kv-validate/0": "10.0.0.1:7"}
    assert meeting.find(STORE, 1.0) == "10.0.0.1:7"


def test_torchrun_without_torch_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    with pytest.raises(PlaceError, match="node-a:29500"):
        meeting.find(STORE, 1.0)


def place(rank: int, where: Any) -> Place:
    return Place(rank=rank, hosts=2, launcher="flags", rendezvous=where)


def test_only_rank_0_listens_at_the_address_that_all_know() -> None:
    where = AtAddress("127.0.0.1", 4567)
    assert meeting.engine_address(place(0, where), "") == ("127.0.0.1", 4567)
    assert meeting.engine_address(place(1, where), "") == ("127.0.0.1", 0)
    assert meeting.engine_address(place(1, where), "10.0.0.9") == ("10.0.0.9", 0)
    assert meeting.engine_address(place(0, AtFile("/x")), "") == ("127.0.0.1", 0)


def test_an_address_that_leads_nowhere_asks_for_a_flag() -> None:
    with pytest.raises(PlaceError, match="--host"):
        meeting.engine_address(place(1, AtAddress("no-such-host.invalid", 1)), "")


# ---- programs -------------------------------------------------------------------------


def test_a_program_may_try_again(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    script = f"test -e {mark} && echo done && exit 0; touch {mark}; exit 4"
    arguments = ("sh", "-c", script)
    assert run_program(arguments, 30, tries=1) == (4, "")
    mark.unlink()
    assert run_program(arguments, 30, tries=3) == (0, "done\n")


def test_a_program_that_hangs_or_is_missing_is_an_answer(tmp_path: Path) -> None:
    status, text = run_program(("sleep", "1000"), 0.1, tries=1)
    assert (status, "did not end" in text) == (-1, True)
    status, text = run_program((str(tmp_path / "no"),), 1, tries=1)
    assert (status, "No such file" in text) == (-1, True)


# ---- fleets ---------------------------------------------------------------------------


def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> tuple[int, str]:
    """A fleet of two whose processes run a shell script with the rank as $rank."""
    program = tmp_path / "python"
    # The arguments are: -m efa_kv.cli validate --rank N …
    program.write_text(f"#!/bin/sh\nrank=$5\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(fleet.sys, "executable", str(program))
    monkeypatch.setattr(fleet, "_GRACE_S", 0.3)
    return fleet.run(2, ["--quick"], [], {"PATH": "/usr/bin:/bin"})


def test_the_end_of_rank_0_is_the_end_of_the_fleet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert start(monkeypatch, tmp_path, "test $rank = 0 && exit 1; exit 0") == (1, "")


def test_every_host_of_a_fleet_has_a_name_that_faults_can_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    named = f"echo $EFA_KV_SIM_HOST > {tmp_path}/$rank"
    start(monkeypatch, tmp_path, named)
    assert [(tmp_path / rank).read_text().strip() for rank in "01"] == ["host-0", "host-1"]


def test_a_host_that_fails_ends_a_rank_0_that_would_wait_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fleet, "_END_TIMEOUT_S", 0.2)
    script = "test $rank = 0 && exec sleep 1000; echo no device >&2; exit 2"
    assert start(monkeypatch, tmp_path, script) == (2, "host-1: no device")
