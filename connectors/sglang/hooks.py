"""Hooks on SGLang's own code around the engine, and the proof that they are in place.

- A failed registration of KV memory is only noted at debug level there, and every
  transfer fails later; here it stops the server, with the reason above it in the log.
- What needs Mooncake's C++ object is refused at start-up.
- Whoever opens an engine gets ours, or the server stops.

SGLang applies hooks after all plugins ran and only logs one that it could not apply, so
they are looked at again when the engine opens.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable
from typing import Any, Final

from efa_kv.mooncake.install import install as install_module
from efa_kv.mooncake.install import installed

_log = logging.getLogger(__name__)

ENGINE_MODULE: Final = "efa_kv.connectors.sglang.engine"
_WRAPPER: Final = "sglang.srt.distributed.device_communicators.mooncake_transfer_engine"
_WRAPPER_CLASS: Final = f"{_WRAPPER}.MooncakeTransferEngine"
_CHAIN_MAX: Final = 32


class HookError(RuntimeError):
    """A hook on SGLang is missing, or SGLang wants what this engine cannot serve."""


def around_init(original: Callable[..., None], wrapper: Any, *args: Any, **kwargs: Any) -> None:
    """After SGLang has opened its engine: it is ours."""
    original(wrapper, *args, **kwargs)
    from efa_kv.mooncake.engine import TransferEngine

    if not isinstance(wrapper.engine, TransferEngine):
        raise HookError(
            f"found: SGLang opened a {type(wrapper.engine).__module__} engine; expected: "
            "efa-kv's; what to do: remove what imports mooncake.engine before SGLang's plugins "
            "run, or set EFA_KV_SGLANG=0"
        )
    # Said here, because SGLang sets up its log only after the plugins ran.
    _log.info("SGLang's mooncake backend runs on efa-kv, session %s", wrapper.session_id)


def around_batch_register(
    original: Callable[..., int], wrapper: Any, ptrs: Any, lengths: Any, *args: Any, **kwargs: Any
) -> int:
    """SGLang ignores a failure here; the server stops instead."""
    code = original(wrapper, ptrs, lengths, *args, **kwargs)
    if code != 0:
        raise HookError(
            f"found: {len(ptrs)} KV buffers of {sum(lengths)} bytes that could not all be "
            f"registered (code {code}); expected: all; what to do: read the reason in efa-kv's "
            "lines above this one"
        )
    return code


def around_get_engine(original: Callable[..., Any], wrapper: Any) -> Any:
    """A Mooncake store that would share the engine gets the reason why it cannot."""
    try:
        return original(wrapper)
    except NotImplementedError as problem:
        raise HookError(
            f"found: a Mooncake store (HiCache) that would share the transfer engine; expected: "
            f"one with an engine of its own; what to do: give the store another device or "
            f"protocol than the server's. {problem}"
        ) from None


def before_shared_engine(*args: Any, **kwargs: Any) -> None:
    """Elastic expert parallelism works on Mooncake's C++ engine, which isn't here."""
    from sglang.srt.runtime_context import get_exec

    if get_exec().moe.elastic_ep_backend == "mooncake":
        raise HookError(
            "found: --elastic-ep-backend mooncake, which needs Mooncake's own engine; expected: "
            "no elastic expert parallelism; what to do: leave the option out, or set "
            "EFA_KV_SGLANG=0 to run Mooncake"
        )


#: Target, kind and hook.
HOOKS: Final[tuple[tuple[str, str, Callable[..., Any]], ...]] = (
    (f"{_WRAPPER_CLASS}.__init__", "AROUND", around_init),
    (f"{_WRAPPER_CLASS}.batch_register", "AROUND", around_batch_register),
    (f"{_WRAPPER_CLASS}.get_engine", "AROUND", around_get_engine),
    (f"{_WRAPPER}.maybe_init_shared_mooncake_transfer_engine", "BEFORE", before_shared_engine),
)


def install() -> None:
    """Puts the engine in Mooncake's place and asks for the hooks; raises when this version
    of SGLang has no such places."""
    install_module(ENGINE_MODULE)
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, kind, hook in HOOKS:
        function = resolve(target)
        if not _reaches(function, hook):
            HookRegistry.register(target, hook, HookType[kind])


def require_live() -> None:
    """Raises `HookError` unless every hook is reached by the function that it is on."""
    module = installed()
    if module is None or module.__name__ != ENGINE_MODULE:
        raise HookError(
            f"found: {module!r} in the place of mooncake.engine; expected: {ENGINE_MODULE}; what "
            "to do: remove the plugin that put it there, or set EFA_KV_SGLANG=0"
        )
    missing = [target for target, _, hook in HOOKS if not _reaches(resolve(target), hook)]
    if missing:
        raise HookError(
            f"found: SGLang without efa-kv's hooks on {', '.join(missing)}; expected: all of "
            "them; what to do: read above why SGLang could not apply them, or set EFA_KV_SGLANG=0"
        )


def resolve(target: str) -> Callable[..., Any]:
    path, _, name = target.rpartition(".")
    try:
        found: Callable[..., Any] = getattr(pkgutil.resolve_name(path), name)
    except (ImportError, AttributeError) as problem:
        raise HookError(
            f"found: no {target} in this SGLang ({problem}); expected: a version that efa-kv "
            "knows; what to do: install SGLang 0.5.23, or set EFA_KV_SGLANG=0"
        ) from problem
    return found


def _reaches(function: Any, hook: Callable[..., Any]) -> bool:
    """Whether ``hook`` is among the wrappers around a function of SGLang's."""
    for _ in range(_CHAIN_MAX):
        cells = getattr(function, "__closure__", None) or ()
        if any(cell.cell_contents is hook for cell in cells):
            return True
        function = getattr(function, "__wrapped__", None)
        if function is None:
            return False
    return False
