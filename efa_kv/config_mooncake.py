"""Settings of servers that were written for Mooncake, turned into ours.

`mooncake_settings` serves ``TransferEngine.initialize``: its arguments and the ``MC_*``
variables become an `EngineConfig`.  First wins: the argument, ``EFA_KV_<NAME>``, the
``MC_*`` variable, the default.  The protocol alone is the other way round: the servers
pass one name everywhere, so ``EFA_KV_PROTOCOL`` is the way to choose another.

`plugin_settings` tells SGLang's plugin whether it is wanted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from efa_kv.config import ENVIRONMENT_PREFIX, PROTOCOLS, EngineConfig
from efa_kv.errors import ConfigError
from efa_kv.types import Address, ip_of

#: Says whether SGLang's Mooncake code gets this engine: 0 never, 1 always; unset, it
#: does when `PROTOCOL_VARIABLE` is one that nobody else serves.
SWITCH_VARIABLE: Final = "EFA_KV_SGLANG"
PROTOCOL_VARIABLE: Final = "MOONCAKE_PROTOCOL"
#: Protocols that mean this engine without being asked.  Others (tcp) are Mooncake's too.
OWN_PROTOCOLS: Final = ("efa", "efa-direct")
#: What the servers give in place of a metadata server's address; we know no other.
PEER_TO_PEER: Final = "P2PHANDSHAKE"

_ON: Final = ("1", "true", "yes", "on")
_OFF: Final = ("0", "false", "no", "off", "")
_PORTS: Final = (15000, 17000)
_TRANSFER_TIMEOUT_MIN_S: Final = 5.0
_LOG_LEVELS: Final = MappingProxyType(
    {"TRACE": "DEBUG", "INFO": "INFO", "WARNING": "WARNING", "ERROR": "ERROR"}
)
#: Setting by variable; values are checked like all others.
_NUMBERS: Final = MappingProxyType(
    {
        "MC_MAX_WR": "max_in_flight",
        "MC_EFA_CQ_THREADS": "progress_threads",
        "MC_TRANSFER_TIMEOUT": "transfer_timeout_s",
        "MC_HANDSHAKE_CONNECT_TIMEOUT": "handshake_timeout_s",
    }
)
#: Variables that tuned what this engine does not have, and why.
WITHOUT_EFFECT: Final = MappingProxyType(
    {
        "MC_NUM_CQ_PER_CTX": "every device has one completion queue",
        "MC_MAX_CQE_PER_CTX": "completion queues are sized by the provider's own limit",
        "MC_MAX_EP_PER_CTX": "peers cost no endpoint; see EFA_KV_MAX_PEERS",
        "MC_MAX_MR_SIZE": "registrations are cut to what the device takes",
        "MC_EFA_NIC_SELECTION": "devices are chosen by their distance from the memory",
        "MC_EFA_STRIPING_THRESHOLD": "large pieces are always striped; see EFA_KV_STRIPE_BYTES",
        "MC_SLICE_SIZE": "large pieces are always striped; see EFA_KV_STRIPE_BYTES",
        "MC_SLICE_TIMEOUT": "a transfer has one deadline; see EFA_KV_TRANSFER_TIMEOUT_S",
        "MC_RETRY_CNT": "unfinished operations are sent again until the deadline",
        "MC_ENABLE_PARALLEL_REG_MR": "devices register in parallel",
        "MC_MAX_CONCURRENT_REG_MR": "devices register in parallel",
        "MC_DISABLE_METACACHE": "peers tell each other about every change of their memory",
        "MC_TE_METADATA_REFRESH_INTERVAL_SECONDS": "peers tell each other about every change",
        "MC_HANDSHAKE_LISTEN_BACKLOG": "greetings do not queue behind each other",
        "MC_HANDSHAKE_MAX_LENGTH": "see EFA_KV_MAX_MESSAGE_BYTES",
        "MC_PATH_ROUNDROBIN": "the device with the least outstanding bytes is taken",
        "MC_LEGACY_RPC_PORT_BINDING": "the port is bound on one interface",
        "MC_USE_IPV6": "the address given decides",
        "MC_USE_TENT": "this is another engine",
        "MC_USE_TEV1": "this is another engine",
        "MC_TE_METRIC": "counters are always there; see the documentation of metrics",
        "MC_LOG_DIR": "logs go where the server's logs go",
        "MC_CUSTOM_TOPO_JSON": "devices are chosen by their distance from the memory",
    }
)


class MooncakeSettings(msgspec.Struct, frozen=True):
    """What ``initialize`` asked for.

    ``ports`` is the range to take a free control port from, None when one was given.
    ``ignored`` are variables without effect and why; ``log_level`` may be empty.
    """

    config: EngineConfig
    ports: tuple[int, int] | None
    ignored: Mapping[str, str]
    log_level: str


class PluginSettings(msgspec.Struct, frozen=True):
    """Whether SGLang's Mooncake code is to get this engine, and why (not).

    ``offered`` is false where not even the backend name ``efakv`` is wanted.
    """

    wanted: bool
    offered: bool
    protocol: str
    reason: str


def mooncake_settings(
    name: str,
    metadata_server: str,
    protocol: str,
    devices: str,
    environ: Mapping[str, str] | None = None,
) -> MooncakeSettings:
    """The settings for ``initialize(name, metadata_server, protocol, devices)``.

    Raises `ConfigError`, with what to give instead.
    """
    environ = os.environ if environ is None else environ
    if metadata_server != PEER_TO_PEER:
        raise ConfigError(
            f"found the metadata server {metadata_server!r}; expected {PEER_TO_PEER!r}, because "
            "engines of efa-kv find each other without a server."
        )
    host, port = split_name(name)
    extra: dict[str, Any] = {
        "host": host,
        "protocol": _protocol(protocol, environ),
        **_from_variables(environ),
    }
    wanted_devices = devices or _device_filter(environ)
    if wanted_devices:
        extra["devices"] = device_patterns(wanted_devices)
    ports = None
    if port:
        extra["port"] = port
    elif ENVIRONMENT_PREFIX + "PORT" not in environ:
        ports = _port_range(environ)
    return MooncakeSettings(
        EngineConfig.load(extra, _ours(environ)),
        ports,
        {name: why for name, why in WITHOUT_EFFECT.items() if environ.get(name)},
        _log_level(environ),
    )


def plugin_settings(environ: Mapping[str, str] | None = None) -> PluginSettings:
    """Reads `SWITCH_VARIABLE` and `PROTOCOL_VARIABLE`; raises `ConfigError`."""
    environ = os.environ if environ is None else environ
    protocol = environ.get(PROTOCOL_VARIABLE, "rdma")
    switch = environ.get(SWITCH_VARIABLE)
    if switch is None:
        wanted = protocol in OWN_PROTOCOLS
        return PluginSettings(wanted, True, protocol, f"{PROTOCOL_VARIABLE} is {protocol!r}")
    if switch.lower() not in (*_ON, *_OFF):
        raise ConfigError(f"found {SWITCH_VARIABLE} = {switch!r}; expected 0 or 1.")
    wanted = switch.lower() in _ON
    if wanted and protocol not in PROTOCOLS:
        raise ConfigError(
            f"found {SWITCH_VARIABLE} = {switch!r} and {PROTOCOL_VARIABLE} = {protocol!r}; "
            f"expected one of {', '.join(PROTOCOLS)} for the second."
        )
    return PluginSettings(wanted, wanted, protocol, f"{SWITCH_VARIABLE} is {switch!r}")


def choose_own_backend() -> str:
    """Says, to this process and those that it starts, that the engine is to be ours;
    returns the protocol."""
    os.environ[SWITCH_VARIABLE] = "1"
    if os.environ.get(PROTOCOL_VARIABLE) not in PROTOCOLS:
        os.environ[PROTOCOL_VARIABLE] = OWN_PROTOCOLS[0]
    return os.environ[PROTOCOL_VARIABLE]


def metrics_folder(environ: Mapping[str, str] | None = None) -> str:
    """Where processes of one server share their metrics; empty when they don't."""
    environ = os.environ if environ is None else environ
    return environ.get("PROMETHEUS_MULTIPROC_DIR", "")


def split_name(name: str) -> tuple[str, int]:
    """Host and port of "host", "host:port", "[v6]:port" or a bare IPv6 address; port 0
    when there is none.  Raises `ConfigError`."""
    if ip_of(name) is not None or ":" not in name:
        return name, 0
    if name.startswith("[") and name.endswith("]"):
        return name[1:-1], 0
    address = Address.parse(name)
    return address.host, address.port


def device_patterns(names: str) -> list[str]:
    """Patterns for a comma-separated list of devices.

    The servers name devices as the verbs library does (rdmap79s0); libfabric's names are
    longer (rdmap79s0-rdm).  Both are matched.
    """
    patterns: list[str] = []
    for part in names.split(","):
        name = part.strip()
        if name:
            patterns += [name] if any(c in name for c in "*?[") else [name, f"{name}-*"]
    return patterns


def _ours(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name != SWITCH_VARIABLE}


def _protocol(argument: str, environ: Mapping[str, str]) -> str:
    chosen = environ.get(ENVIRONMENT_PREFIX + "PROTOCOL", argument)
    if _flag("MC_FORCE_TCP", environ) and ENVIRONMENT_PREFIX + "PROTOCOL" not in environ:
        chosen = "tcp"
    if chosen not in PROTOCOLS:
        raise ConfigError(
            f"found the protocol {chosen!r}; efa-kv has {', '.join(PROTOCOLS)}. Set "
            f"{PROTOCOL_VARIABLE}=efa, or {SWITCH_VARIABLE}=0 to leave {chosen!r} to Mooncake."
        )
    return chosen


def _from_variables(environ: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for variable, setting in _NUMBERS.items():
        text = environ.get(variable, "")
        if not text or ENVIRONMENT_PREFIX + setting.upper() in environ:
            continue
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        # 0 stands for the default wherever a default can be asked for.
        if number < 0 or (setting.endswith("_s") and number == 0) or number > 86400:
            raise ConfigError(f"found {variable} = {text!r}; expected a number.")
        found[setting] = number if setting.endswith("_s") else int(number)
    if "transfer_timeout_s" in found:
        found["transfer_timeout_s"] = max(found["transfer_timeout_s"], _TRANSFER_TIMEOUT_MIN_S)
    return found


def _device_filter(environ: Mapping[str, str]) -> str:
    if ENVIRONMENT_PREFIX + "DEVICES" in environ:
        return ""
    filters = environ.get("MC_TE_FILTERS", "")
    if not filters and _flag("MC_MS_AUTO_DISC", environ):
        filters = environ.get("MC_MS_FILTERS", "")
    return filters


def _port_range(environ: Mapping[str, str]) -> tuple[int, int]:
    ends = []
    for name, old_name, default in (
        ("MC_MIN_RPC_PORT", "MC_MIN_PRC_PORT", _PORTS[0]),
        ("MC_MAX_RPC_PORT", "MC_MAX_PRC_PORT", _PORTS[1]),
    ):
        text = environ.get(name) or environ.get(old_name) or str(default)
        if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 65535):
            raise ConfigError(f"found {name} = {text!r}; expected a port from 1 to 65535.")
        ends.append(int(text))
    if ends[0] > ends[1]:
        raise ConfigError(
            f"found MC_MIN_RPC_PORT = {ends[0]} above MC_MAX_RPC_PORT = {ends[1]}; "
            "expected a range."
        )
    return ends[0], ends[1]


def _log_level(environ: Mapping[str, str]) -> str:
    text = environ.get("MC_LOG_LEVEL", "")
    if text and text.upper() not in _LOG_LEVELS:
        raise ConfigError(
            f"found MC_LOG_LEVEL = {text!r}; expected one of {', '.join(_LOG_LEVELS)}."
        )
    return _LOG_LEVELS[text.upper()] if text else ""


def _flag(variable: str, environ: Mapping[str, str]) -> bool:
    return environ.get(variable, "").lower() in _ON
