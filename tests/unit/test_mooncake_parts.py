"""The parts of the engine under Mooncake's names that need no network."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import types
from typing import Any

import numpy as np
import pytest

from efa_kv import mooncake
from efa_kv.errors import AddressError, FabricUnavailable, TransferTimeout
from efa_kv.mooncake import TransferEngine, cuda
from efa_kv.mooncake.install import MODULE, install
from efa_kv.mooncake.memory import _buffer
from efa_kv.mooncake.transfer import Quarantine, pieces

#: Every method of Mooncake's published class with its parameters behind ``self``.
PUBLISHED = {
    "allocate_managed_buffer": 1,
    "batch_register_memory": 3,
    "batch_transfer_async": 6,
    "batch_transfer_async_read": 5,
    "batch_transfer_async_write": 5,
    "batch_transfer_sync": 7,
    "batch_transfer_sync_read": 5,
    "batch_transfer_sync_write": 5,
    "batch_unregister_memory": 1,
    "free_managed_buffer": 2,
    "get_batch_transfer_status": 1,
    "get_engine": 0,
    "get_engine_ptr": 0,
    "get_first_buffer_address": 1,
    "get_local_topology": 1,
    "get_notifies": 0,
    "get_rpc_port": 0,
    "initialize": 4,
    "initialize_ext": 5,
    "read_bytes_from_buffer": 2,
    "register_memory": 3,
    "send_probe": 1,
    "transfer_check_status": 1,
    "transfer_submit_write": 5,
    "transfer_sync": 7,
    "transfer_sync_read": 5,
    "transfer_sync_write": 5,
    "unregister_memory": 1,
    "warmup_efa_segment": 1,
    "write_bytes_to_buffer": 3,
}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_every_published_method_is_there_with_its_parameters(name: str) -> None:
    parameters = inspect.signature(getattr(TransferEngine, name)).parameters
    assert len(parameters) - 1 == PUBLISHED[name]


def test_what_is_left_out_says_why() -> None:
    for name in ("get_engine", "get_engine_ptr"):
        with pytest.raises(NotImplementedError, match="Mooncake itself"):
            getattr(TransferEngine(), name)()
    for name in ("SharedSegment", "create_rpc_client", "create_rpc_server"):
        with pytest.raises(AttributeError, match=f"efa-kv has no {name}: .*; "):
            getattr(mooncake, name)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = mooncake.nonsense


def test_importing_it_loads_no_core() -> None:
    heavy = "('zmq', 'numpy', 'efa_kv._cffi')"
    code = f"import sys, efa_kv.mooncake; print([m for m in {heavy} if m in sys.modules])"
    printed = subprocess.run(
        [sys.executable, "-c", code], check=True, text=True, stdout=subprocess.PIPE
    )
    assert printed.stdout.strip() == "[]"


def test_columns_come_out_equal_and_without_empty_pieces() -> None:
    for make in (list, tuple, np.array, lambda v: np.array(v, np.int32)):
        local, remote, lengths = pieces(make([1, 2, 3]), make([4, 5, 6]), make([7, 0, 9]))
        assert local.tolist() == [1, 3]
        assert remote.tolist() == [4, 6]
        assert lengths.tolist() == [7, 9]
        assert local.dtype == remote.dtype == lengths.dtype == np.uint64
    assert [len(column) for column in pieces([], [], [])] == [0, 0, 0]


def test_an_array_of_the_right_kind_is_not_copied() -> None:
    column = np.arange(1, 1001, dtype=np.uint64)
    assert all(np.shares_memory(column, one) for one in pieces(column, column, column))


class Tensor:
    """As much of a tensor as is asked for."""

    def __init__(self, values: list[int]) -> None:
        self._values = values
        self.asked: list[str] = []

    def untyped_storage(self) -> None:
        raise AssertionError("not needed")

    def detach(self) -> Tensor:
        self.asked.append("detach")
        return self

    def cpu(self) -> Tensor:
        self.asked.append("cpu")
        return self

    def numpy(self) -> np.ndarray:
        return np.array(self._values, np.int64)


def test_tensors_are_brought_to_the_host_whole() -> None:
    tensor = Tensor([1, 2])
    assert pieces(tensor, [1, 2], [1, 1])[0].tolist() == [1, 2]
    assert tensor.asked == ["detach", "cpu"]


@pytest.mark.parametrize(
    ("local", "remote", "lengths"),
    [
        ([1], [1, 2], [1]),
        ([-1], [1], [1]),
        ([1.5], [1], [1]),
        ([1 << 64], [1], [1]),
        ([[1]], [[1]], [[1]]),
        (["a"], [1], [1]),
        ([None], [1], [1]),
    ],
)
def test_columns_that_are_none_are_refused(local: Any, remote: Any, lengths: Any) -> None:
    with pytest.raises(AddressError):
        pieces(local, remote, lengths)


def test_without_a_driver_everything_is_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_driver", lambda: None)
    assert cuda.device_of(1 << 40) is None
    assert _buffer(4096, 10, "cpu:0") == (4096, 10)
    for name in ("transfer_write", "transfer_read", "batch_transfer_write", "batch_transfer_read"):
        with pytest.raises(FabricUnavailable, match="CUDA driver"):
            getattr(TransferEngine(), f"{name}_on_cuda")("127.0.0.1:1", 1, 1, 1, 0)


class Driver:
    """A CUDA driver that knows one range of device 3, and one of managed memory."""

    def __init__(self) -> None:
        self.synchronized: list[int] = []
        self.code = 0

    def cuPointerGetAttribute(self, out: Any, attribute: int, pointer: Any) -> int:  # noqa: N802
        if pointer.value < 1 << 40:
            return 1
        managed = pointer.value >= 1 << 41
        out._obj.value = {2: 2, 8: int(managed), 9: 3}[attribute]
        return 0

    def cuStreamSynchronize(self, stream: Any) -> int:  # noqa: N802
        self.synchronized.append(stream.value or 0)
        return self.code


def test_device_memory_is_registered_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    from efa_kv.memory import span_of
    from efa_kv.types import MEMORY_CUDA, MEMORY_HOST

    driver = Driver()
    monkeypatch.setattr(cuda, "_driver", lambda: driver)
    span = span_of(_buffer(1 << 40, 512, "*"))
    assert (span.kind, span.device, span.address, span.length_bytes) == (
        MEMORY_CUDA,
        3,
        1 << 40,
        512,
    )
    assert span_of(_buffer(4096, 512, "*")).kind == MEMORY_HOST
    assert span_of(_buffer(1 << 41, 512, "*")).kind == MEMORY_HOST
    assert span_of(_buffer(4096, 512, "cuda:1")).device == 1
    cuda.synchronize(77)
    assert driver.synchronized == [77]
    driver.code = 700
    with pytest.raises(FabricUnavailable, match="700"):
        cuda.synchronize(77)


def test_a_session_in_quarantine_is_refused_until_all_has_settled() -> None:
    quarantine = Quarantine()
    held: list[Any] = []
    for _ in range(2):
        state = {"settled": False}
        held.append(state)
        quarantine.put(
            types.SimpleNamespace(session="a:1", settled=lambda state=state: state["settled"])  # type: ignore[arg-type]
        )
    quarantine.check("b:1")
    with pytest.raises(TransferTimeout, match="2 failed"):
        quarantine.check("a:1")
    held[0]["settled"] = True
    with pytest.raises(TransferTimeout, match="1 failed"):
        quarantine.check("a:1")
    held[1]["settled"] = True
    quarantine.check("a:1")
    quarantine.check("a:1")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.delitem(sys.modules, "mooncake", raising=False)


def test_it_answers_for_mooncake_where_that_is_not_installed(modules: None) -> None:
    assert install() is mooncake
    assert importlib.import_module(MODULE) is mooncake
    from mooncake.engine import TransferEngine as Imported

    assert Imported is TransferEngine
    assert importlib.util.find_spec(MODULE) is not None
    del sys.modules[MODULE]


def test_it_answers_for_mooncake_where_that_is_installed(
    modules: None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "engine.py").write_text("TransferEngine = 'theirs'\n")
    (package / "store.py").write_text("Store = 'theirs'\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.import_module(MODULE).TransferEngine == "theirs"
    install()
    install()
    assert caplog.text.count("is replaced") == 1
    from mooncake.engine import TransferEngine as Imported

    assert Imported is TransferEngine
    assert importlib.import_module("mooncake.store").Store == "theirs"
    for name in ("mooncake.store", MODULE, "mooncake"):
        sys.modules.pop(name, None)
