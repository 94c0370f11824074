"""What a request's ``kv_transfer_params`` ask for.

The dictionary comes from a client, through a router: it may have any shape.  `parse`
turns it into one of a few frozen types and never raises, so that the code behind it
only ever sees values that make sense.  Two dialects are understood:

- NIXL's: prefill is asked with ``do_remote_decode`` and nothing else; its answer holds
  the parameters for decode, which the router passes on as they are;
- Mooncake's: the router invents a ``transfer_id`` and gives it to both sides, and tells
  decode where prefill's registry is (``remote_bootstrap_addr``).

Block ids that travelled through a router are checked for their type and then ignored:
the producer finds the blocks in its own table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from efa_kv.errors import ConfigError
from efa_kv.types import Address

__all__ = [
    "Invalid",
    "Local",
    "MooncakeRequest",
    "NixlRequest",
    "Parsed",
    "RemoteDecode",
    "RemotePrefill",
    "parse",
    "response",
]

TEXT_LIMIT: Final = 512
BLOCK_IDS_LIMIT: Final = 1 << 22
_UINT32_END: Final = 1 << 32
_UINT64_END: Final = 1 << 64
_PARALLEL_SIZES: Final = ("tp_size", "pp_size", "dcp_size")


@dataclass(frozen=True, slots=True)
class Local:
    """Nothing to do with another server."""


@dataclass(frozen=True, slots=True)
class RemoteDecode:
    """Prefill for another server; without a transfer id this side makes one."""

    transfer_id: str | None = None


@dataclass(frozen=True, slots=True)
class NixlRequest:
    """Decode what another server prefilled, as that server's answer describes it.

    ``generation`` is 0 and ``remote_tokens`` None where the answer does not say.
    """

    transfer_id: str
    remote_request_id: str
    remote_engine_id: str
    address: str
    generation: int = 0
    remote_tokens: int | None = None

    early = False
    """Prefill is over before anybody knows these parameters."""

    @property
    def key(self) -> str:
        """Names the handoff; two live requests may not share it."""
        return self.transfer_id or f"{self.remote_engine_id}/{self.remote_request_id}"


@dataclass(frozen=True, slots=True)
class MooncakeRequest:
    """Decode what another server prefills, perhaps at this very moment.

    ``address`` is the registry that knows the server; the engine id is what the router
    once read there, which may be that of a process long gone.
    """

    transfer_id: str
    address: str
    remote_engine_id: str = ""

    remote_request_id = ""
    generation = 0
    remote_tokens = None
    early = True

    @property
    def key(self) -> str:
        """Names the handoff; two live requests may not share it."""
        return self.transfer_id


@dataclass(frozen=True, slots=True)
class Invalid:
    """Parameters that make no sense; ``reason`` is a sentence for the log."""

    reason: str


RemotePrefill = NixlRequest | MooncakeRequest
Parsed = Local | RemoteDecode | NixlRequest | MooncakeRequest | Invalid


class _UnusableError(Exception):
    """Raised inside this module only; its text becomes `Invalid.reason`."""


def parse(params: Any) -> Parsed:
    """The meaning of a request's ``kv_transfer_params``; never raises."""
    if params is None:
        return Local()
    if not isinstance(params, Mapping):
        return Invalid(
            f"found kv_transfer_params of type {type(params).__name__}; expected an object"
        )
    if not params:
        return Local()
    try:
        return _parse(params)
    except _UnusableError as problem:
        return Invalid(str(problem))


def _parse(params: Mapping[Any, Any]) -> Parsed:
    prefill = _flag(params, "do_remote_prefill")
    decode = _flag(params, "do_remote_decode")
    if prefill is None and decode is None:
        keys = ", ".join(sorted(str(key)[:TEXT_LIMIT] for key in list(params)[:8]))
        raise _UnusableError(
            f"found kv_transfer_params with the keys {keys}; "
            "expected do_remote_prefill or do_remote_decode: they are made for another connector"
        )
    if prefill and decode:
        raise _UnusableError(
            "found both do_remote_prefill and do_remote_decode; expected one of them"
        )
    if decode:
        return RemoteDecode(_text(params, "transfer_id", required=False))
    if prefill:
        return _remote_prefill(params)
    return Local()


def _remote_prefill(params: Mapping[Any, Any]) -> RemotePrefill:
    bootstrap = params.get("remote_bootstrap_addr") is not None
    direct = params.get("remote_host") is not None or params.get("remote_port") is not None
    if bootstrap and direct:
        raise _UnusableError(
            "found both remote_bootstrap_addr and remote_host; expected one of them"
        )
    if bootstrap:
        return MooncakeRequest(
            transfer_id=_required_text(params, "transfer_id"),
            address=_bootstrap_address(_required_text(params, "remote_bootstrap_addr")),
            remote_engine_id=_text(params, "remote_engine_id", required=False) or "",
        )
    if not direct:
        raise _UnusableError(
            "found do_remote_prefill without an address; expected remote_host and remote_port, "
            "or remote_bootstrap_addr"
        )
    return _nixl_request(params)


def _nixl_request(params: Mapping[Any, Any]) -> NixlRequest:
    for name in _PARALLEL_SIZES:
        size = _number(params, name, _UINT32_END)
        if size not in (None, 1):
            raise _UnusableError(
                f"found {name} = {size}; expected 1: other sizes are not supported"
            )
    _check_block_ids(params.get("remote_block_ids"))
    return NixlRequest(
        transfer_id=_text(params, "transfer_id", required=False) or "",
        remote_request_id=_required_text(params, "remote_request_id"),
        remote_engine_id=_required_text(params, "remote_engine_id"),
        address=_direct_address(params),
        generation=_number(params, "generation", _UINT64_END) or 0,
        remote_tokens=_number(params, "remote_num_tokens", _UINT32_END),
    )


def _flag(params: Mapping[Any, Any], name: str) -> bool | None:
    value = params.get(name)
    if name not in params:
        return None
    if value is None:
        return False
    if not isinstance(value, bool):
        raise _UnusableError(f"found {name} = {_shown(value)}; expected true or false")
    return value


def _text(params: Mapping[Any, Any], name: str, *, required: bool) -> str | None:
    value = params.get(name)
    if value is None and not required:
        return None
    if not isinstance(value, str) or not 1 <= len(value) <= TEXT_LIMIT or not value.isprintable():
        raise _UnusableError(
            f"found {name} = {_shown(value)}; expected a text of 1 to {TEXT_LIMIT} characters"
        )
    return value


def _required_text(params: Mapping[Any, Any], name: str) -> str:
    value = _text(params, name, required=True)
    assert value is not None
    return value


def _number(params: Mapping[Any, Any], name: str, end: int) -> int | None:
    value = params.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < end:
        raise _UnusableError(f"found {name} = {_shown(value)}; expected a whole number below {end}")
    return value


def _direct_address(params: Mapping[Any, Any]) -> str:
    host = _required_text(params, "remote_host")
    port = params.get("remote_port")
    if isinstance(port, bool) or not isinstance(port, int):
        raise _UnusableError(f"found remote_port = {_shown(port)}; expected a port number")
    text = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        return str(Address.parse(text))
    except ConfigError as problem:
        raise _UnusableError(str(problem)) from None


def _bootstrap_address(url: str) -> str:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as problem:
        raise _UnusableError(f"found remote_bootstrap_addr = {_shown(url)}: {problem}") from None
    extra = parts.path not in ("", "/") or parts.query or parts.fragment or parts.username
    if parts.scheme != "http" or not parts.hostname or not port or extra:
        raise _UnusableError(
            f"found remote_bootstrap_addr = {_shown(url)}; expected http://host:port"
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"http://{host}:{port}"


def _check_block_ids(value: Any) -> None:
    """Accepts nothing, a list of block ids, or one such list per group."""
    if value is None:
        return
    if not isinstance(value, list | tuple):
        raise _UnusableError(f"found remote_block_ids = {_shown(value)}; expected a list")
    groups = [group if isinstance(group, list | tuple) else (group,) for group in value]
    if sum(map(len, groups)) > BLOCK_IDS_LIMIT:
        raise _UnusableError(f"found more than {BLOCK_IDS_LIMIT} remote_block_ids")
    for group in groups:
        for block in group:
            if isinstance(block, bool) or not isinstance(block, int):
                raise _UnusableError(f"found the block id {_shown(block)}; expected a whole number")
            if not 0 <= block < _UINT32_END:
                raise _UnusableError(f"found the block id {block}; expected 0 to {_UINT32_END - 1}")


def _shown(value: Any) -> str:
    """A value from outside, short enough for a log line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def response(
    *,
    transfer_id: str,
    generation: int,
    engine_id: str,
    request_id: str,
    address: Address | None,
    block_ids: tuple[list[int], ...],
    token_count: int,
) -> dict[str, Any]:
    """What prefill answers in NIXL's dialect: the parameters of the decode request."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_host": address.host if address else None,
        "remote_port": address.port if address else None,
        "remote_block_ids": [list(group) for group in block_ids],
        "remote_num_tokens": token_count,
        "tp_size": 1,
        "pp_size": 1,
        "dcp_size": 1,
        "transfer_id": transfer_id,
        "generation": generation,
    }
