"""The only module that loads the native core.

Importing it loads ``efa_kv._native`` and checks that its structs are what this package
was written for.  `check` turns the core's error numbers into exceptions.
"""

from __future__ import annotations

from typing import Any, Final

from efa_kv.errors import EfaKvError, FabricUnavailable, from_code
from efa_kv.types import ROW_DTYPE

try:
    from efa_kv._native import ffi, lib
except ImportError as problem:
    raise FabricUnavailable(
        f"The native core of efa-kv cannot be loaded: {problem}.",
        advice="Install the wheel for this platform, or build it with: pip install .",
    ) from problem

ABI_VERSION: Final = 1

__all__ = ["ABI_VERSION", "check", "ffi", "lib", "new_error", "new_struct", "text_of"]


def _check_build() -> None:
    found = lib.ekv_abi_version()
    if found != ABI_VERSION:
        raise FabricUnavailable(
            f"Found version {found} of the native core; expected {ABI_VERSION}.",
            advice="Reinstall efa-kv: its Python and native parts are of different releases.",
        )
    names = ROW_DTYPE.names or ()
    layout = [(name, ROW_DTYPE.fields[name][1]) for name in names] if ROW_DTYPE.fields else []
    native = [(name, ffi.offsetof("ekv_row", name)) for name in names]
    if layout != native or ROW_DTYPE.itemsize != ffi.sizeof("ekv_row"):
        raise FabricUnavailable("The row layout of the native core is not the one expected here.")


_check_build()


def new_struct(kind: str) -> Any:
    """A zeroed struct of this kind with its ``struct_size`` filled in."""
    value = ffi.new(f"{kind} *")
    value.struct_size = ffi.sizeof(kind)
    return value


def new_error() -> Any:
    """An ``ekv_error`` for a call to fill."""
    return new_struct("ekv_error")


def text_of(characters: Any) -> str:
    """A C string (pointer or array) as text; bytes that are not UTF-8 are replaced."""
    return bytes(ffi.string(characters)).decode("utf-8", "replace")


def check(code: int, error: Any = None, *, peer: str = "") -> int:
    """``code`` when it is not negative; else raises the exception that it stands for."""
    if code >= 0:
        return code
    raise failure(code, error, peer=peer)


def failure(code: int, error: Any = None, *, peer: str = "") -> EfaKvError:
    """The exception for a native code and, if there is one, its filled ``ekv_error``."""
    text = where = ""
    provider_code = 0
    if error is not None and error.code == code:
        text, where, provider_code = text_of(error.text), text_of(error.where), error.provider_code
    if not text:
        text = text_of(lib.ekv_code_text(code))
    return from_code(code, text.rstrip("."), where=where, provider_code=provider_code, peer=peer)
