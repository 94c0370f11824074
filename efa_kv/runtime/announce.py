"""What is said when an engine starts: one line for it, one for each rail, and warnings."""

from __future__ import annotations

import logging
from typing import Protocol

from efa_kv import fabric
from efa_kv.config import EngineConfig
from efa_kv.types import Address, Nic, ip_of, nic_address

_log = logging.getLogger(__name__)


class Announced(Protocol):
    """What is told of an engine."""

    config: EngineConfig

    @property
    def session(self) -> str: ...
    @property
    def protocol(self) -> str: ...
    @property
    def rails(self) -> tuple[Nic, ...]: ...


def log_start(engine: Announced, *, authenticated: bool) -> None:
    """Logs what was chosen and opened, and what to know of it. [blocks]"""
    _log.info(
        "engine %s: protocol %s (asked for %s), libfabric %s",
        engine.session,
        engine.protocol,
        engine.config.protocol,
        fabric.library_version(engine.config),
    )
    for nic in engine.rails:
        _log.info(
            "rail %s: provider %s, fabric %s, queue depth %d of %d, completion queue %d, "
            "%g Gbit/s, NUMA node %d%s",
            nic_address(engine.session, nic.name),
            nic.provider,
            nic.fabric,
            nic.queue_depth,
            nic.provider_queue_depth,
            nic.completion_queue_size,
            nic.speed_bits_per_second / 1e9,
            nic.numa_node,
            ", reaches GPU memory" if nic.reaches_gpus else "",
        )
    warning = "" if authenticated else secret_warning(engine.session)
    if warning:
        _log.warning("engine %s %s", engine.session, warning)


def warn_servers(engine: Announced) -> None:
    """Logs what matters to an engine whose peers are on other hosts."""
    warning = place_warning(engine.session, engine.protocol)
    if warning:
        _log.warning("engine %s %s", engine.session, warning)


def secret_warning(session: str) -> str:
    """Of an engine without a secret: what to know of the address it listens on, or nothing."""
    if _is_loopback(session):
        return ""
    return (
        "listens beyond this machine without a secret: whoever reaches the port can write "
        "registered memory. Set EFA_KV_SECRET on all servers."
    )


def place_warning(session: str, protocol: str) -> str:
    """Of a server's engine: whether other hosts can reach it, or nothing."""
    if not protocol.startswith("efa") or not _is_loopback(session):
        return ""
    return (
        "has an EFA network but listens on this machine only, so that no other host can greet "
        "it. Set host (EFA_KV_HOST, or VLLM_HOST_IP) to the address that peers reach this host at."
    )


def _is_loopback(session: str) -> bool:
    address = ip_of(Address.parse(session).host)
    return address is not None and address.is_loopback
