"""All settings, in one frozen struct; the only module that reads the environment.

A setting comes from (first wins) the mapping a server passes (vLLM's
``kv_connector_extra_config``), the environment variable ``EFA_KV_<NAME>``, or its
default.  Unknown names are refused with the nearest known one.  The table in the
README is printed by ``efa-kv config`` from the metadata here.
"""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from efa_kv.errors import ConfigError
from efa_kv.types import ip_of

ENVIRONMENT_PREFIX: Final = "EFA_KV_"
#: Prefixes of variables that other parts read: the simulated NIC and the test suites.
FOREIGN_PREFIXES: Final = ("EFA_KV_SIM_", "EFA_KV_TEST_", "EFA_KV_SGLANG")
#: Other names of settings, as given by servers written for another engine.
ALIASES: Final = {"mooncake_protocol": "protocol"}
#: Variables that are read when nothing else gives the setting.
FALLBACK_VARIABLES: Final = {
    "bootstrap_port": "VLLM_MOONCAKE_BOOTSTRAP_PORT",
    "host": "VLLM_HOST_IP",
}
PROTOCOLS: Final = (
    "auto",
    "efa",
    "efa-direct",
    "tcp",
    "shm",
    "net",
    "sockets",
    "tcp;ofi_rxm",
    "udp;ofi_rxd",
    "verbs;ofi_rxm",
)
_STRIPE_BYTES_MIN: Final = 4096
_WILDCARDS: Final = ("*", "0.0.0.0", "::", "")  # noqa: S104 - the list of what is refused

Seconds = Annotated[float, Meta(gt=0, le=86400)]
Count = Annotated[int, Meta(ge=0, le=1 << 24)]
Positive = Annotated[int, Meta(ge=1, le=1 << 19)]
Port = Annotated[int, Meta(ge=0, le=65535)]


def _about(text: str, unit: str = "") -> Meta:
    return Meta(description=text, extra={"unit": unit})


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine; see `load`.  Raises `ConfigError` for impossible values."""

    protocol: Annotated[
        str,
        _about(
            "efa, tcp, shm, or auto (efa if there is a device, else tcp); "
            "a full libfabric provider name works too"
        ),
    ] = "auto"
    require: Annotated[str, _about("refuse to start on any other protocol than this one")] = ""
    host: Annotated[
        str, _about("address that peers reach this engine at, and the only one it listens on")
    ] = "127.0.0.1"
    port: Annotated[Port, _about("control port; 0 takes a free one")] = 0
    devices: Annotated[
        tuple[str, ...], _about("names or globs of network devices; empty takes all that match")
    ] = ()
    near: Annotated[
        bool,
        _about(
            "copy memory to peers in this process, and on this host where the kernel permits it, "
            "instead of using the provider"
        ),
    ] = True
    near_consent: Annotated[
        bool,
        _about(
            "let processes of this user read and write this one's memory where Yama "
            "(ptrace_scope 1) forbids it, so that peers on this host need no provider"
        ),
    ] = False
    push: Annotated[
        Literal["request"],
        _about("how much prefill finishes before the producer writes it: the whole request"),
    ] = "request"
    lease_s: Annotated[
        Seconds, _about("how long a producer holds blocks without a sign of the consumer", "s")
    ] = 30.0
    transfer_timeout_s: Annotated[
        Seconds, _about("deadline of a transfer, counted from its last sign of life", "s")
    ] = 30.0
    handshake_timeout_s: Annotated[Seconds, _about("deadline of a greeting", "s")] = 5.0
    heartbeat_interval_s: Annotated[
        Seconds, _about("between heartbeats of a used session", "s")
    ] = 1.0
    suspect_after_s: Annotated[Seconds, _about("silence after which a peer is suspect", "s")] = 3.0
    idle_after_s: Annotated[
        Seconds, _about("a session without other traffic stops its heartbeats after this", "s")
    ] = 10.0
    forget_after_s: Annotated[Seconds, _about("a suspect peer is forgotten after this", "s")] = (
        120.0
    )
    unsolicited_s: Annotated[
        Seconds, _about("how long a request for an unknown transfer is kept", "s")
    ] = 60.0
    quarantine_share: Annotated[
        float,
        Meta(ge=0, le=1),
        _about("share of the consumer's blocks that silent peers may hold before keys are changed"),
    ] = 0.1
    max_handoffs: Annotated[Positive, _about("handoffs known at once")] = 4096
    max_peers: Annotated[Positive, _about("peers known at once")] = 1024
    max_regions: Annotated[Positive, _about("registered regions")] = 4096
    max_jobs: Annotated[Positive, _about("jobs not yet released")] = 4096
    max_message_bytes: Annotated[
        int, Meta(ge=65536, le=1 << 26), _about("largest control message", "bytes")
    ] = 1 << 20
    send_queue_messages: Annotated[
        Positive, _about("control messages queued per peer; more are dropped")
    ] = 1024
    command_queue_calls: Annotated[
        Positive, _about("calls queued for the control thread; more are refused")
    ] = 8192
    progress_threads: Annotated[
        Count, _about("progress threads of the core; 0 chooses from the number of devices")
    ] = 0
    max_in_flight: Annotated[
        Count, _about("operations in flight per device; 0 is the provider's own limit")
    ] = 0
    register_everywhere: Annotated[
        bool, _about("register GPU memory with every device, not only with those nearest to it")
    ] = False
    device_bytes_max: Annotated[
        int,
        Meta(ge=0, le=1 << 62),
        _about("most memory registered with one device; 0 asks the device", "bytes"),
    ] = 0
    device_entries_max: Annotated[
        int,
        Meta(ge=0, le=1 << 62),
        _about("most page-table entries used on one device; 0 asks the device"),
    ] = 0
    sysfs_root: Annotated[str, _about("where to look up the places of devices; empty is /sys")] = ""
    stripe_bytes: Annotated[
        int, Meta(ge=0, le=1 << 40), _about("largest single operation; 0 is 1 MiB", "bytes")
    ] = 1 << 20
    spin_us: Annotated[
        Count, _about("spinning after the last activity; 0 is the core's default", "us")
    ] = 0
    trace_capacity: Annotated[Count, _about("trace records kept; 0 is the core's default")] = 0
    libfabric: Annotated[
        str, _about("path of libfabric, tried after a copy that is already loaded")
    ] = ""
    cuda_library: Annotated[
        str, _about("path of NVIDIA's driver, for GPU memory; empty is libcuda.so.1")
    ] = ""
    secret: Annotated[
        str, _about("shared secret; encrypts and authenticates the control plane")
    ] = ""
    secret_file: Annotated[str, _about("file that holds the shared secret")] = ""
    scratch_bytes: Annotated[
        int,
        Meta(ge=0, le=1 << 32),
        _about(
            "most memory lent to somebody who tries the way here (efa-kv doctor --peer); "
            "0 lends none",
            "bytes",
        ),
    ] = 64 << 20
    require_auth: Annotated[bool, _about("refuse to start without a secret")] = False
    bootstrap_port: Annotated[
        Port, _about("port of the HTTP registry that routers query; 0 starts none")
    ] = 0

    http_port: Annotated[
        Port,
        _about(
            "port of the endpoint for health, metrics, state and trace; workers of one host "
            "take the next free ones; 0 starts none"
        ),
    ] = 0

    def __post_init__(self) -> None:
        for name in ("protocol", "require"):
            value = getattr(self, name)
            if value not in PROTOCOLS and not (name == "require" and value == ""):
                raise ConfigError(
                    f"found {name} = {value!r}; expected one of {', '.join(PROTOCOLS)}."
                    + _nearest(value, PROTOCOLS)
                )
        if self.require == "auto":
            raise ConfigError("found require = 'auto'; expected the name of one protocol.")
        if self.require and self.protocol not in ("auto", self.require):
            raise ConfigError(
                f"found protocol = {self.protocol!r} together with require = {self.require!r}; "
                "expected the same, or protocol = 'auto'."
            )
        self._check_addresses()

    def _check_addresses(self) -> None:
        if self.host in _WILDCARDS:
            raise ConfigError(
                f"found host = {self.host!r}; expected the address of one interface, "
                "because peers are told this address. Name the address they can reach."
            )
        if "[" in self.host or (":" in self.host and ip_of(self.host) is None):
            raise ConfigError(
                f"found host = {self.host!r}; expected a name or an IP address "
                "without brackets or port."
            )
        if self.secret and self.secret_file:
            raise ConfigError("found both secret and secret_file; expected one of them.")
        if 0 < self.stripe_bytes < _STRIPE_BYTES_MIN:
            raise ConfigError(
                f"found stripe_bytes = {self.stripe_bytes}; expected 0 or at least "
                f"{_STRIPE_BYTES_MIN}."
            )
        if self.suspect_after_s <= self.heartbeat_interval_s:
            raise ConfigError(
                f"found suspect_after_s = {self.suspect_after_s:g} and heartbeat_interval_s = "
                f"{self.heartbeat_interval_s:g}; expected the first to be the larger one."
            )

    def __repr__(self) -> str:
        values = (
            f"{name}={'(hidden)' if name == 'secret' and self.secret else getattr(self, name)!r}"
            for name in self.__struct_fields__
        )
        return f"EngineConfig({', '.join(values)})"

    @classmethod
    def load(
        cls, extra: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
    ) -> EngineConfig:
        """Settings from ``extra``, the environment and the defaults, in this order.

        ``environ`` defaults to the process's environment.  Raises `ConfigError`.
        """
        environ = os.environ if environ is None else environ
        values = _from_environment(environ)
        given: dict[str, str] = {}
        for key, value in (extra or {}).items():
            name = ALIASES.get(key, key)
            if name not in cls.__struct_fields__:
                raise ConfigError(
                    f"found the unknown setting {key!r}."
                    + _nearest(key, (*cls.__struct_fields__, *ALIASES))
                )
            if name in given:
                raise ConfigError(f"found both {given[name]!r} and {key!r}, which are the same.")
            given[name] = key
            values[name] = value
        return _convert(values)

    def checked(self) -> EngineConfig:
        """The same settings with every type and range checked; raises `ConfigError`.

        A struct that was made directly, not by `load`, has not been checked yet.
        """
        return _convert({name: getattr(self, name) for name in self.__struct_fields__})

    def load_secret(self) -> bytes | None:
        """The shared secret, from the setting or the file; raises `ConfigError`."""
        if self.secret:
            return self.secret.encode()
        if self.secret_file:
            try:
                secret = Path(self.secret_file).read_bytes().strip()
            except OSError as problem:
                raise ConfigError(
                    f"found secret_file = {self.secret_file!r}, which cannot be read: {problem}."
                ) from problem
            if not secret:
                raise ConfigError(f"found secret_file = {self.secret_file!r}, which is empty.")
            return secret
        if self.require_auth:
            raise ConfigError(
                "found require_auth without a secret; expected EFA_KV_SECRET or secret_file."
            )
        return None


def _nearest(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    fields = EngineConfig.__struct_fields__
    known = {ENVIRONMENT_PREFIX + name.upper(): name for name in fields}
    values: dict[str, Any] = {}
    for variable, value in environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable.startswith(FOREIGN_PREFIXES):
            continue
        if variable not in known:
            raise ConfigError(
                f"found the unknown environment variable {variable}."
                + _nearest(variable.removeprefix(ENVIRONMENT_PREFIX), fields)
            )
        values[known[variable]] = value
    for name, variable in FALLBACK_VARIABLES.items():
        if environ.get(variable) and name not in values:
            values[name] = environ[variable]
    return values


def _convert(values: dict[str, Any]) -> EngineConfig:
    devices = values.get("devices")
    if isinstance(devices, str):
        values["devices"] = [part.strip() for part in devices.split(",") if part.strip()]
    try:
        return msgspec.convert(values, EngineConfig, strict=False)
    except msgspec.ValidationError as problem:
        if isinstance(problem.__cause__, ConfigError):
            raise problem.__cause__ from None
        text, _, place = str(problem).partition(" - at ")
        name = place.strip("`").removeprefix("$.").partition("[")[0]
        found = "" if name == "secret" else f" = {values.get(name)!r}"
        raise ConfigError(f"found {name}{found}: {text}.") from None


def process_environment() -> Mapping[str, str]:
    """The variables of this process, for checks of other libraries' settings."""
    return dict(os.environ)


def runtime_folder() -> Path:
    """Where this user's processes leave word for each other; maybe not there yet."""
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    if given and Path(given).is_dir():
        return Path(given) / "efa-kv"
    return Path(tempfile.gettempdir()) / f"efa-kv-{os.getuid()}"


def keep_crash_handlers() -> None:
    """Keeps libraries behind libfabric from taking over crash signals; before it is loaded.

    Debian's libfabric links the PSM libraries, which install handlers of their own and
    write ``*.btr`` files into the working directory unless these variables are set.
    """
    for variable in ("IPATH_NO_BACKTRACE", "HFI_NO_BACKTRACE"):
        os.environ.setdefault(variable, "1")


class Setting(msgspec.Struct, frozen=True):
    """A row of the settings table."""

    name: str
    variable: str
    kind: str
    default: str
    unit: str
    text: str


def settings() -> list[Setting]:
    """All settings with their metadata, in the order of the struct."""
    hints = get_type_hints(EngineConfig, include_extras=True)
    defaults = EngineConfig()
    rows = []
    for name in EngineConfig.__struct_fields__:
        hint = hints[name]
        about = next(meta for meta in hint.__metadata__ if meta.description is not None)
        value = getattr(defaults, name)
        default = ",".join(value) if isinstance(value, tuple) else str(value)
        rows.append(
            Setting(
                name=name,
                variable=ENVIRONMENT_PREFIX + name.upper(),
                kind=_kind(get_args(hint)[0]),
                default=default.lower() if isinstance(value, bool) else default,
                unit=(about.extra or {}).get("unit", ""),
                text=about.description or "",
            )
        )
    return rows


def _kind(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(get_args(hint))
    if get_origin(hint) is tuple:
        return "list of names"
    return {"str": "text", "int": "number", "float": "number", "bool": "true or false"}[
        hint.__name__
    ]


def settings_table() -> str:
    """The settings as a Markdown table, for the README."""
    lines = ["| setting | environment | default | meaning |", "| --- | --- | --- | --- |"]
    for row in settings():
        default = f"`{row.default}`" if row.default else "empty"
        unit = f" ({row.unit})" if row.unit else ""
        lines.append(f"| `{row.name}` | `{row.variable}` | {default}{unit} | {row.text} |")
    return "\n".join(lines)
