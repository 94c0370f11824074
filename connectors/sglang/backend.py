"""``--disaggregation-transfer-backend efakv``: the backend ``mooncake`` on this engine.

Like SGLang's own ``mooncake_tcp`` it is another spelling: it becomes ``mooncake`` while
the arguments are checked, because SGLang ties features to that name, and says in the
environment, which its processes inherit, that the engine is to be ours.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from efa_kv.config_mooncake import choose_own_backend
from efa_kv.connectors.sglang import hooks

_log = logging.getLogger(__name__)

NAME: Final = "efakv"
_CHECK: Final = "sglang.srt.arg_groups.pd_disaggregation_hook.handle_pd_disaggregation"


def offer() -> None:
    """Adds the name to SGLang's list.  An SGLang that has no such list is left alone: only
    the name is missing then."""
    try:
        from sglang.srt.arg_groups import choices
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        hooks.resolve(_CHECK)
        known = choices.DISAGG_TRANSFER_BACKEND_CHOICES
        add = choices.add_disagg_transfer_backend_choices
    except (ImportError, AttributeError, hooks.HookError) as problem:
        _log.warning("this SGLang cannot be given the backend name %s: %s", NAME, problem)
        return
    if NAME not in known:
        HookRegistry.register(_CHECK, before_check, HookType.BEFORE)
        add([NAME])


def before_check(server_args: Any) -> None:
    """Turns the name into what it stands for."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    if resolving_view(server_args).disaggregation_transfer_backend != NAME:
        return
    protocol = choose_own_backend()
    hooks.install()
    # Registered after SGLang applied the others, so this time it has to be asked.
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()
    declare_resolution(
        server_args, "handle_pd_disaggregation", disaggregation_transfer_backend="mooncake"
    )
    _log.info("the backend %s is mooncake on efa-kv's engine, protocol %s", NAME, protocol)
