"""The plugin that gives SGLang's Mooncake backend this engine.

SGLang calls `register` early in every process it starts (entry point group
``sglang.srt.plugins``).  Then ``from mooncake.engine import TransferEngine``, which is how
SGLang reaches the engine for prefill/decode disaggregation, yields ours; the backend's
name stays ``mooncake``, and with it every feature that SGLang ties to that name.

When it does so:

- ``MOONCAKE_PROTOCOL=efa``;
- ``EFA_KV_SGLANG=1`` with any protocol of ours (tcp and shm, which plain Mooncake has too);
- ``--disaggregation-transfer-backend efakv``, which stands for both of the above.

``EFA_KV_SGLANG=0`` leaves everything to Mooncake.  SGLang only logs what goes wrong in a
plugin and goes on without it; a server that was to use this engine must not, so here it
ends the process.
"""

from __future__ import annotations

import logging
import sys

__all__ = ["register"]

_log = logging.getLogger(__name__)


def register() -> None:
    """The entry point; safe to call twice."""
    from efa_kv.config_mooncake import plugin_settings

    try:
        settings = plugin_settings()
        if not settings.offered:
            _log.info("efa-kv leaves SGLang to Mooncake: %s", settings.reason)
            return
        from efa_kv.connectors.sglang import backend, hooks

        backend.offer()
        if settings.wanted:
            hooks.install()
    except Exception as problem:
        # SystemExit, because SGLang catches and logs everything below it.
        _log.critical("efa-kv could not take Mooncake's place in SGLang", exc_info=True)
        print(f"efa-kv could not take Mooncake's place in SGLang: {problem}", file=sys.stderr)
        sys.exit(1)
    if settings.wanted:
        _log.info("efa-kv takes the place of mooncake.engine: %s", settings.reason)
