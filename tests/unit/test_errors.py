"""The error tree, and the native codes in it."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from efa_kv import errors
from efa_kv.errors import Code, EfaKvError, FabricError, from_code

HEADER = Path(__file__).parents[2] / "native" / "include" / "efa_kv.h"


def _header_codes() -> dict[str, int]:
    found = re.findall(r"X\(EKV_(\w+), (-?\d+),", HEADER.read_text())
    return {name: int(number) for name, number in found}


def test_codes_are_those_of_the_header() -> None:
    assert {code.name: int(code) for code in Code} == _header_codes()


@pytest.mark.parametrize("code", [code for code in Code if code is not Code.OK])
def test_every_code_becomes_an_error_that_says_what_happened(code: Code) -> None:
    error = from_code(code, "something was found", where="fi_write", provider_code=12)
    assert isinstance(error, EfaKvError)
    assert code.name in str(error)
    assert "something was found" in str(error)
    assert "fi_write" in str(error)
    assert "12" in str(error)


@pytest.mark.parametrize(
    ("code", "kind", "retryable"),
    [
        (Code.EBUSY, errors.FabricBusy, True),
        (Code.ESTALE, errors.StaleHandle, False),
        (Code.ENODEVICE, errors.FabricUnavailable, False),
        (Code.EREGISTER, errors.RegistrationError, False),
        (Code.EACCESS, errors.AccessRefused, True),
        (Code.EREMOTEREGION, errors.AddressError, False),
        (Code.EPEER, errors.PeerUnreachable, True),
        (Code.EDEADLINE, errors.TransferTimeout, True),
        (Code.ECANCELED, errors.TransferAborted, False),
        (Code.EFORK, errors.ForkedError, False),
    ],
)
def test_kind_and_remedy(code: Code, kind: type[EfaKvError], retryable: bool) -> None:
    error = from_code(code, "text")
    assert type(error) is kind
    assert error.retryable is retryable


def test_unknown_code_keeps_its_number() -> None:
    error = from_code(-999, "text")
    assert isinstance(error, FabricError)
    assert error.code == -999
    assert "-999" in str(error)


def test_layout_mismatch_shows_both_values_and_survives_pickle() -> None:
    error = pickle.loads(pickle.dumps(errors.LayoutMismatch("dtype", "bf16", "fp8")))
    assert (error.field, error.local, error.remote) == ("dtype", "bf16", "fp8")
    assert "bf16" in str(error)
    assert "fp8" in str(error)
    assert error.advice in str(error)


def test_every_class_is_in_the_tree_drawn_at_the_top() -> None:
    drawn = errors.__doc__ or ""
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, EfaKvError):
            assert name in drawn
