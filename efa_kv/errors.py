"""Every error that leaves a public call, in one tree.

    EfaKvError
      ConfigError
      LayoutMismatch                the two sides' caches do not fit; permanent for the pair
      ProtocolError
        LocalProtocolError          our own bug: an event in a state that cannot have it
        RemoteProtocolError         the peer sent something malformed or out of place
      FabricError                   from the native core, one subclass per kind of remedy
        FabricUnavailable           no libfabric or no network device
        FabricBusy                  a bounded table or ring is full; try again
        FabricBroken                the provider or every rail failed
        StaleHandle                 an id, region or engine that is gone
        RegistrationError           memory could not be registered
        AccessRefused               the peer's memory key is not valid (any more)
        AddressError                an address outside every registered region
      PeerError
        PeerUnreachable, PeerRestarted, PeerRefused
      TransferError
        TransferTimeout, TransferAborted, TransferRefused
      ForkedError

Texts are sentences: what was found, what was expected, what to do.  ``retryable``
says whether the same call can succeed later without anybody changing anything.
"""

# ruff: noqa: N818 - the names say what happened; "Error" on each would add nothing
from __future__ import annotations

import enum


class Code(enum.IntEnum):
    """The native core's error numbers (``EKV_CODE_LIST`` in native/include/efa_kv.h)."""

    OK = 0
    EINVAL = -1
    ENOMEM = -2
    ESTALE = -3
    EBUSY = -4
    EFORK = -5
    ECLOSED = -6
    ENOFABRIC = -7
    ENODEVICE = -8
    EVERSION = -9
    EREGISTER = -10
    EREGION = -11
    EREMOTEREGION = -12
    EACCESS = -13
    EPEER = -14
    ERAIL = -15
    EDEADLINE = -16
    ECANCELED = -17
    EPROVIDER = -18
    ENOTSUP = -19
    ESYSTEM = -20


class EfaKvError(Exception):
    """Base of all errors of this package.

    ``advice`` is a sentence that says what to do, or empty.
    """

    retryable: bool = False
    advice: str = ""

    def __init__(self, message: str = "", *, advice: str = "") -> None:
        super().__init__(message)
        if advice:
            self.advice = advice

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message} {self.advice}" if self.advice else message


class ConfigError(EfaKvError):
    """A setting has an unknown name or an impossible value."""


class LayoutMismatch(EfaKvError):
    """The two sides' KV caches or models differ in ``field``; permanent for the pair."""

    advice = "Start both servers with the same model, data type and cache settings."

    def __init__(self, field: str, local: str, remote: str) -> None:
        super().__init__(f"{field} differs: here it is {local}, at the peer {remote}.")
        self.field = field
        self.local = local
        self.remote = remote

    def __reduce__(self) -> tuple[type[LayoutMismatch], tuple[str, str, str]]:
        return type(self), (self.field, self.local, self.remote)


class ProtocolError(EfaKvError):
    """A rule of the control protocol was broken; see the two subclasses."""


class LocalProtocolError(ProtocolError):
    """This side tried something its own tables do not allow: a bug here."""


class RemoteProtocolError(ProtocolError):
    """The peer sent a message that is malformed, too large or out of place."""


class FabricError(EfaKvError):
    """The native core refused or failed a call.

    ``code`` is a `Code`, ``provider_code`` libfabric's or errno's own number (0 if
    none), ``where`` the call that failed.
    """

    def __init__(
        self,
        message: str,
        *,
        code: int = 0,
        provider_code: int = 0,
        where: str = "",
        advice: str = "",
    ) -> None:
        super().__init__(message, advice=advice)
        self.code = code
        self.provider_code = provider_code
        self.where = where


class FabricUnavailable(FabricError):
    """libfabric is missing or too old, or no network device matches."""


class FabricBusy(FabricError):
    """A bounded table, ring or queue is full; nothing was done."""

    retryable = True


class FabricBroken(FabricError):
    """The provider, the system or every rail failed."""


class StaleHandle(FabricError):
    """The id is unknown here, or what it named is closed."""


class RegistrationError(FabricError):
    """Memory could not be registered with a network device."""


class AccessRefused(FabricError):
    """The peer's memory key was refused: the region is gone or its key was changed."""

    retryable = True


class AddressError(FabricError):
    """An address range lies outside every region registered on its side."""


class PeerError(EfaKvError):
    """Something about one peer; ``peer`` is its session."""

    def __init__(self, message: str, *, peer: str = "", advice: str = "") -> None:
        super().__init__(message, advice=advice)
        self.peer = peer


class PeerUnreachable(PeerError):
    """The peer did not answer in time, or its network cannot be reached."""

    retryable = True
    advice = (
        "Check that the peer runs, that its address and port are reachable from here, that both "
        "sides have the same secret, and, on EFA, that the security group allows all traffic "
        "from itself in both directions."
    )


class PeerRestarted(PeerError):
    """The peer at this session is a new process; what the old one knew is gone."""

    retryable = True


class PeerRefused(PeerError):
    """The peer answered and said no; ``reason`` is its code for why."""

    def __init__(self, message: str, *, peer: str = "", reason: str = "", advice: str = "") -> None:
        super().__init__(message, peer=peer, advice=advice)
        self.reason = reason


class TransferError(EfaKvError):
    """A job or a handoff did not complete."""


class TransferTimeout(TransferError):
    """The deadline passed before every byte had landed."""

    retryable = True


class TransferAborted(TransferError):
    """The job or handoff was cancelled."""


class TransferRefused(TransferError):
    """A handoff was refused; ``reason`` is a short code, the same on both sides."""

    def __init__(self, message: str, *, reason: str = "", advice: str = "") -> None:
        super().__init__(message, advice=advice)
        self.reason = reason


class ForkedError(EfaKvError):
    """The engine was opened before a fork and is of no use in the child."""

    advice = "Open a new engine in the child process, or start it with spawn."


_BY_CODE: dict[int, type[FabricError]] = {
    Code.EINVAL: FabricError,
    Code.ENOMEM: FabricBroken,
    Code.ESTALE: StaleHandle,
    Code.EBUSY: FabricBusy,
    Code.ECLOSED: StaleHandle,
    Code.ENOFABRIC: FabricUnavailable,
    Code.ENODEVICE: FabricUnavailable,
    Code.EVERSION: FabricUnavailable,
    Code.EREGISTER: RegistrationError,
    Code.EREGION: AddressError,
    Code.EREMOTEREGION: AddressError,
    Code.EACCESS: AccessRefused,
    Code.ERAIL: FabricBroken,
    Code.EPROVIDER: FabricBroken,
    Code.ENOTSUP: FabricError,
    Code.ESYSTEM: FabricBroken,
}


def from_code(
    code: int, text: str, *, where: str = "", provider_code: int = 0, peer: str = ""
) -> EfaKvError:
    """The exception for a native error code; ``text`` is its sentence."""
    name = Code(code).name if code in Code._value2member_map_ else str(code)
    place = f" in {where}" if where else ""
    number = f", provider code {provider_code}" if provider_code else ""
    message = f"{text} ({name}{place}{number})."
    if code == Code.EFORK:
        return ForkedError(message)
    if code == Code.EPEER:
        return PeerUnreachable(message, peer=peer)
    if code == Code.EDEADLINE:
        return TransferTimeout(message)
    if code == Code.ECANCELED:
        return TransferAborted(message)
    kind = _BY_CODE.get(code, FabricError)
    return kind(message, code=code, provider_code=provider_code, where=where)
