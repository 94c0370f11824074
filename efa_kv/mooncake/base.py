"""What an open engine has under Mooncake's names, apart from the transfers themselves:
opening and closing, memory, and the steps that every transfer goes through."""

from __future__ import annotations

import itertools
import logging
import secrets
import time
import weakref
from collections.abc import Callable
from typing import Any, Final

import msgspec

from efa_kv.config_mooncake import PEER_TO_PEER, MooncakeSettings, mooncake_settings
from efa_kv.errors import ConfigError, EfaKvError, PeerUnreachable
from efa_kv.mooncake.memory import MemoryBook
from efa_kv.mooncake.names import FAILED, OK, TransferNotify
from efa_kv.mooncake.transfer import Quarantine, Transfer, pieces, refresh
from efa_kv.runtime import engine as runtime
from efa_kv.runtime.notes import NoteBook
from efa_kv.runtime.ports import MOONCAKE, free_port, who_listens
from efa_kv.runtime.rendezvous import resolve_own
from efa_kv.types import RailCounters

_log = logging.getLogger(__name__)

_PORT_TRIES: Final = 8
# Who it was that did not greet back is asked this often per session, and not longer.
_IDENTIFY_EVERY_S: Final = 10.0
_IDENTIFY_S: Final = 1.0
_IDENTIFIED_MAX: Final = 1024

#: Called after every transfer: session, operation (`WRITE` or `READ`), bytes asked for,
#: seconds, and what went wrong.
Observer = Callable[[str, int, int, float, EfaKvError | None], None]

_already_ignored: set[str] = set()


class _Open:
    """What there is between a successful ``initialize`` and ``close``."""

    def __init__(self, engine: runtime.TransferEngine) -> None:
        self.engine = engine
        self.memory = MemoryBook(engine)
        self.notes = NoteBook(engine)
        self.quarantine = Quarantine()
        # Ids begin anywhere, so that a stale one of another engine is not taken for ours.
        self.ids = itertools.count(secrets.randbelow(1 << 48) + 1)
        self.batches: dict[int, Transfer] = {}
        self.identified: dict[str, tuple[float, str, str]] = {}
        engine.add_handler(self.notes)


class EngineBase:
    """See the module's head; `efa_kv.mooncake.engine` has the rules that hold for all."""

    #: Set it to hear of every transfer; it must not raise and not block.
    observer: Observer | None = None

    def __init__(self) -> None:
        self._state: _Open | None = None

    # ---- life -------------------------------------------------------------------------

    def initialize(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str
    ) -> int:
        """Opens the engine.  ``local_hostname`` is an address of this machine, with or
        without a port; 0, or -1 and the reason in the log. [blocks]"""
        try:
            settings = mooncake_settings(local_hostname, metadata_server, protocol, device_name)
            _tell_ignored(settings)
            return self._open(settings)
        except EfaKvError as problem:
            _log.error(
                "the transfer engine at %s (protocol %s) could not be opened: %s",
                local_hostname,
                protocol,
                problem,
            )
            return FAILED

    def initialize_ext(
        self,
        local_hostname: str,
        metadata_server: str,
        protocol: str,
        device_name: str,
        metadata_type: str,
    ) -> int:
        """Like `initialize`; there are no kinds of metadata server to choose from. [blocks]"""
        if metadata_type not in ("", PEER_TO_PEER, "p2p"):
            _log.error("found metadata type %r; expected %r", metadata_type, PEER_TO_PEER)
            return FAILED
        return self.initialize(local_hostname, metadata_server, protocol, device_name)

    def close(self) -> None:
        """Frees everything; safe to call twice.  Mooncake leaves this to the garbage
        collector, which works here too. [blocks]"""
        state, self._state = self._state, None
        if state is not None:
            state.engine.close()

    def get_rpc_port(self) -> int:
        """The port of this engine's session."""
        return int(self._need().engine.session.rpartition(":")[2])

    @property
    def session(self) -> str:
        """This engine's name on the network, "host:port"."""
        return self._need().engine.session

    @property
    def protocol(self) -> str:
        """The protocol in use."""
        return self._need().engine.protocol

    def counters(self) -> list[RailCounters]:
        """What each network device did."""
        return self._need().engine.counters()

    # ---- memory -----------------------------------------------------------------------

    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:
        """Makes memory reachable for peers; ``location`` may name its GPU ("cuda:0"). [blocks]"""
        state = self._state
        return (
            _not_open()
            if state is None
            else state.memory.register(int(buffer_addr), int(capacity), location)
        )

    def batch_register_memory(
        self, buffer_addresses: Any, capacities: Any, location: str = "*"
    ) -> int:
        """Registers all or none. [blocks]"""
        state = self._state
        return (
            _not_open()
            if state is None
            else state.memory.register_all(numbers(buffer_addresses), numbers(capacities), location)
        )

    def unregister_memory(self, buffer_addr: int) -> int:
        """Gives memory back; waits for transfers that use it. [blocks]"""
        state = self._state
        return _not_open() if state is None else state.memory.unregister(int(buffer_addr))

    def batch_unregister_memory(self, buffer_addresses: Any) -> int:
        """Tries all; the first failure's number. [blocks]"""
        state = self._state
        return (
            _not_open() if state is None else state.memory.unregister_all(numbers(buffer_addresses))
        )

    def allocate_managed_buffer(self, length: int) -> int:
        """The address of new registered host memory, 0 on failure. [blocks]"""
        state = self._state
        if state is None:
            _not_open()
            return 0
        return state.memory.allocate(int(length))

    def free_managed_buffer(self, buffer_addr: int, length: int = 0) -> int:
        """Gives back what `allocate_managed_buffer` gave. [blocks]"""
        state = self._state
        return _not_open() if state is None else state.memory.free(int(buffer_addr))

    def write_bytes_to_buffer(self, buffer_addr: int, data: str | bytes, length: int) -> int:
        """Copies the first ``length`` bytes into registered host memory."""
        raw = data.encode() if isinstance(data, str) else bytes(data)
        if not 0 <= length <= len(raw):
            _log.error("found length %d for %d bytes; expected at most that", length, len(raw))
            return FAILED
        state = self._state
        return _not_open() if state is None else state.memory.write(buffer_addr, raw[:length])

    def read_bytes_from_buffer(self, buffer_addr: int, length: int) -> bytes:
        """Copies out of registered host memory; raises `AddressError`."""
        return self._need().memory.read(int(buffer_addr), int(length))

    # ---- inside -----------------------------------------------------------------------

    def _open(self, settings: MooncakeSettings) -> int:
        if self._state is not None:
            raise ConfigError(f"this engine is open already, as {self.session}.")
        if settings.log_level:
            logging.getLogger("efa_kv").setLevel(settings.log_level)
        engine = _bound_engine(settings)
        state = _Open(engine)
        engine.start()
        self._state = state
        # Peers are told when the process ends in an ordinary way.
        weakref.finalize(self, engine.close)
        _log.info("transfer engine %s is open, protocol %s", engine.session, engine.protocol)
        return OK

    def _need(self) -> _Open:
        state = self._state
        if state is None:
            raise RuntimeError("this TransferEngine is not open; call initialize() first")
        return state

    def _started(
        self, session: str, operation: int, local: Any, remote: Any, lengths: Any
    ) -> tuple[_Open, Transfer] | None:
        """A transfer under way and what it runs on, which another thread may close by now;
        None, and the reason in the log, where it did not begin."""
        try:
            state = self._need()
            blocks = pieces(local, remote, lengths)
            transfer = Transfer(state.engine, state.quarantine, session, operation, blocks)
        except (EfaKvError, RuntimeError) as problem:
            _log.error("a transfer with %s was not begun: %s", session, problem)
            return None
        try:
            transfer.start()
        except EfaKvError as problem:
            self._report(transfer, problem)
            return None
        return state, transfer

    def _move(self, session: str, operation: int, local: Any, remote: Any, lengths: Any) -> int:
        started = self._started(session, operation, local, remote, lengths)
        return FAILED if started is None else self._wait(started[1])

    def _submit(self, session: str, operation: int, local: Any, remote: Any, lengths: Any) -> int:
        started = self._started(session, operation, local, remote, lengths)
        if started is None:
            return 0
        state, transfer = started
        batch_id = next(state.ids)
        state.batches[batch_id] = transfer
        return batch_id

    def _wait(self, transfer: Transfer) -> int:
        try:
            transfer.wait()
        except EfaKvError as problem:
            self._report(transfer, problem)
            return FAILED
        self._report(transfer, None)
        return OK

    def _notify(self, session: str, note: TransferNotify) -> int:
        try:
            state = self._need()
            peer = state.engine.connect(session)
            state.notes.deliver(peer, note.name, note.msg, state.engine.config.handshake_timeout_s)
        except (EfaKvError, RuntimeError, ValueError) as problem:
            _log.error("the note %r for %s was not delivered: %s", note.name, session, problem)
            return FAILED
        return OK

    def _refreshed(self, session: str) -> runtime.Peer:
        """The peer, after it has told its present memory."""
        engine = self._need().engine
        peer = engine.connect(session)
        if not refresh(engine, peer, engine.config.handshake_timeout_s):
            raise PeerUnreachable(f"{session} does not answer any more.", peer=session)
        return peer

    def _report(self, transfer: Transfer, problem: EfaKvError | None) -> None:
        seconds = transfer.seconds
        if problem is not None:
            _log.error(
                "a %s of %d bytes in %d pieces with %s failed after %.3f s: %s",
                transfer.verb,
                transfer.bytes,
                len(transfer.columns[0]),
                transfer.session,
                seconds,
                self._explained(transfer.session, problem),
            )
        if self.observer is not None:
            self.observer(transfer.session, transfer.operation, transfer.bytes, seconds, problem)

    def _explained(self, session: str, problem: Exception) -> str:
        """The problem in words, and who it is that answers where a peer should."""
        state = self._state
        if state is None or not isinstance(problem, PeerUnreachable):
            return str(problem)
        now = time.monotonic()
        known = state.identified.get(session)
        if known is None or now - known[0] > _IDENTIFY_EVERY_S:
            if len(state.identified) >= _IDENTIFIED_MAX:
                state.identified.clear()
            known = (now, *who_listens(session, _IDENTIFY_S))
            state.identified[session] = known
        _, who, words = known
        return words if who == MOONCAKE else f"{problem} ({words})"


def _not_open() -> int:
    _log.error("this TransferEngine is not open; call initialize() first")
    return FAILED


def numbers(values: Any) -> list[int]:
    """A short list of whole numbers out of a list, an array or a tensor."""
    return [int(value) for value in (values.tolist() if hasattr(values, "tolist") else values)]


def _tell_ignored(settings: MooncakeSettings) -> None:
    for name, why in settings.ignored.items():
        if name not in _already_ignored:
            _already_ignored.add(name)
            _log.warning("%s has no effect here: %s", name, why)


def _bound_engine(settings: MooncakeSettings) -> runtime.TransferEngine:
    """The engine on a free port of the range; another process may be faster at each."""
    if settings.ports is None:
        return runtime.TransferEngine(settings.config)
    host = resolve_own(settings.config.host)
    for attempt in range(_PORT_TRIES):
        port = free_port(host, *settings.ports)
        try:
            return runtime.TransferEngine(msgspec.structs.replace(settings.config, port=port))
        except ConfigError:
            if attempt == _PORT_TRIES - 1:
                raise
    raise AssertionError("unreachable")
