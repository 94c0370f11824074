"""``TransferEngine`` as Mooncake's users know it: method names, arguments and numbers are
Mooncake's, what happens underneath is `efa_kv.runtime.engine`.

What a caller can rely on:

- Any thread may call anything; waiting releases the interpreter lock.
- 0 from a transfer means that every byte has landed in the peer's memory.
- A failure is returned when no byte of the transfer can move any more; where that
  cannot be had, the log says so and the session is refused until it can.
- Back-pressure is waited out, changed memory keys are asked for; neither is a failure.
- Failures are numbers, as Mooncake's are, and the reason is one line in the log.  Only
  what this engine doesn't have at all raises `NotImplementedError`.
"""

from __future__ import annotations

import json
import logging
from typing import Any, Final

from efa_kv.config import EngineConfig
from efa_kv.errors import EfaKvError, FabricError
from efa_kv.fabric import choose_protocol, list_nics
from efa_kv.mooncake import cuda, names
from efa_kv.mooncake.base import EngineBase, numbers
from efa_kv.mooncake.names import DONE, FAILED, NO_ENDPOINT, OK, PENDING, TransferNotify
from efa_kv.mooncake.transfer import Transfer
from efa_kv.types import READ, WRITE, Nic

_log = logging.getLogger(__name__)

_NO_OBJECT: Final = (
    "efa-kv has no C++ engine of Mooncake's to hand out. Elastic expert parallelism and a "
    "Mooncake store that shares the engine need Mooncake itself: set EFA_KV_SGLANG=0."
)


class TransferEngine(EngineBase):
    """See the module's head.  A ``transport_hint`` chooses between transports of
    Mooncake's and is ignored."""

    TransferOpcode = names.TransferOpcode

    # ---- transfers that wait -------------------------------------------------------------

    def transfer_sync_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Writes to the peer; 0 when it has landed. [blocks]"""
        return self._move(target_hostname, WRITE, [buffer], [peer_buffer_address], [length])

    def transfer_sync_read(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Reads from the peer; 0 when it is here. [blocks]"""
        return self._move(target_hostname, READ, [buffer], [peer_buffer_address], [length])

    def batch_transfer_sync_write(
        self,
        target_hostname: str,
        buffers: Any,
        peer_buffer_addresses: Any,
        lengths: Any,
        transport_hint: str = "",
    ) -> int:
        """Writes all pieces; 0 when all have landed.  Lists, arrays or tensors. [blocks]"""
        return self._move(target_hostname, WRITE, buffers, peer_buffer_addresses, lengths)

    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: Any,
        peer_buffer_addresses: Any,
        lengths: Any,
        transport_hint: str = "",
    ) -> int:
        """Reads all pieces; 0 when all are here.  Lists, arrays or tensors. [blocks]"""
        return self._move(target_hostname, READ, buffers, peer_buffer_addresses, lengths)

    def transfer_sync(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        opcode: names.TransferOpcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """One piece in either direction; the note is delivered behind it. [blocks]"""
        return self.batch_transfer_sync(
            target_hostname, [buffer], [peer_buffer_address], [length], opcode, notify
        )

    def batch_transfer_sync(
        self,
        target_hostname: str,
        buffers: Any,
        peer_buffer_addresses: Any,
        lengths: Any,
        opcode: names.TransferOpcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """All pieces in either direction; 0 when they and the note have arrived. [blocks]"""
        operation = _operation(opcode)
        code = self._move(target_hostname, operation, buffers, peer_buffer_addresses, lengths)
        if code != OK or notify is None:
            return code
        return self._notify(target_hostname, notify)

    # ---- transfers with an id ------------------------------------------------------------

    def transfer_submit_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Begins to write; an id for `transfer_check_status`, 0 on failure. [may block]"""
        return self._submit(target_hostname, WRITE, [buffer], [peer_buffer_address], [length])

    def batch_transfer_async_write(
        self,
        target_hostname: str,
        buffers: Any,
        peer_buffer_addresses: Any,
        lengths: Any,
        transport_hint: str = "",
    ) -> int:
        """Begins to write all pieces; an id, 0 on failure. [may block]"""
        return self._submit(target_hostname, WRITE, buffers, peer_buffer_addresses, lengths)

    def batch_transfer_async_read(
        self,
        target_hostname: str,
        buffers: Any,
        peer_buffer_addresses: Any,
        lengths: Any,
        transport_hint: str = "",
    ) -> int:
        """Begins to read all pieces; an id, 0 on failure. [may block]"""
        return self._submit(target_hostname, READ, buffers, peer_buffer_addresses, lengths)

    def batch_transfer_async(
        self,
        target_hostname: str,
        buffers: Any,
        peer_buffer_addresses: Any,
        lengths: Any,
        opcode: names.TransferOpcode,
        transport_hint: str = "",
    ) -> int:
        """Begins all pieces in either direction; an id, 0 on failure. [may block]"""
        operation = _operation(opcode)
        return self._submit(target_hostname, operation, buffers, peer_buffer_addresses, lengths)

    def transfer_check_status(self, batch_id: int) -> int:
        """1 landed, 0 not yet, -1 failed or unknown; an id that got 1 or -1 is gone."""
        batches = self._batches()
        transfer = _taken_out(batches, batch_id)
        if transfer is None:
            return FAILED
        try:
            if not transfer.poll():
                batches[batch_id] = transfer
                return PENDING
        except EfaKvError as problem:
            self._report(transfer, problem)
            return FAILED
        self._report(transfer, None)
        return DONE

    def get_batch_transfer_status(self, batch_ids: Any) -> int:
        """Waits for all; 0 when all have landed.  The ids are gone afterwards, and also
        after a failure none of their transfers is in flight. [blocks]"""
        code = OK
        batches = self._batches()
        for batch_id in numbers(batch_ids):
            transfer = _taken_out(batches, batch_id)
            if transfer is None or self._wait(transfer) != OK:
                code = FAILED
        return code

    # ---- transfers in the order of a CUDA stream -----------------------------------------

    def transfer_write_on_cuda(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        stream_ptr: int,
    ) -> int:
        """`transfer_sync_write` behind what the stream has been given.  Waits on the
        caller's thread, so what is given to the stream later comes later. [blocks]"""
        cuda.synchronize(stream_ptr)
        return self.transfer_sync_write(target_hostname, buffer, peer_buffer_address, length)

    def transfer_read_on_cuda(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        stream_ptr: int,
    ) -> int:
        """`transfer_sync_read` behind what the stream has been given. [blocks]"""
        cuda.synchronize(stream_ptr)
        return self.transfer_sync_read(target_hostname, buffer, peer_buffer_address, length)

    def batch_transfer_write_on_cuda(
        self,
        target_hostname: str,
        buffers: Any,
        peer_buffer_addresses: Any,
        lengths: Any,
        stream_ptr: int,
    ) -> int:
        """`batch_transfer_sync_write` behind what the stream has been given. [blocks]"""
        cuda.synchronize(stream_ptr)
        return self._move(target_hostname, WRITE, buffers, peer_buffer_addresses, lengths)

    def batch_transfer_read_on_cuda(
        self,
        target_hostname: str,
        buffers: Any,
        peer_buffer_addresses: Any,
        lengths: Any,
        stream_ptr: int,
    ) -> int:
        """`batch_transfer_sync_read` behind what the stream has been given. [blocks]"""
        cuda.synchronize(stream_ptr)
        return self._move(target_hostname, READ, buffers, peer_buffer_addresses, lengths)

    # ---- peers ------------------------------------------------------------------------

    def send_probe(self, peer_server_name: str) -> int:
        """0 when the peer answers now and nothing of an earlier failure is in flight to
        it. [blocks]"""
        try:
            state = self._need()
            state.quarantine.check(peer_server_name)
            self._refreshed(peer_server_name)
        except (EfaKvError, RuntimeError) as problem:
            _log.warning(
                "probe of %s: %s", peer_server_name, self._explained(peer_server_name, problem)
            )
            return FAILED
        return OK

    def warmup_efa_segment(self, segment_name: str) -> int:
        """Resolves every pair of devices before the first transfer; 0, or -201. [blocks]"""
        try:
            self._need().engine.warmup(segment_name)
        except (EfaKvError, RuntimeError) as problem:
            _log.error("warm-up of %s: %s", segment_name, self._explained(segment_name, problem))
            return NO_ENDPOINT if isinstance(problem, FabricError) else FAILED
        return OK

    def get_first_buffer_address(self, segment_name: str) -> int:
        """The address of the memory that the peer registered first, 0 for none. [blocks]"""
        try:
            peer = self._refreshed(segment_name)
        except (EfaKvError, RuntimeError) as problem:
            _log.error("memory of %s: %s", segment_name, self._explained(segment_name, problem))
            return 0
        regions = peer.regions
        return regions[min(regions)].address if regions else 0

    def get_notifies(self) -> list[TransferNotify]:
        """Notes that peers sent behind their transfers, each once."""
        state = self._state
        notes = [] if state is None else state.notes.take()
        return [TransferNotify(note.name, note.text) for note in notes]

    def get_local_topology(self, device_name: str | None = None) -> str:
        """JSON: which network devices are near each NUMA node, and which are not. [blocks]"""
        wanted = [name.strip() for name in (device_name or "").split(",") if name.strip()]
        nics = [
            nic
            for nic in self._nics()
            if not wanted
            or any(nic.name == name or nic.name.startswith(f"{name}-") for name in wanted)
        ]
        nodes = sorted({max(nic.numa_node, 0) for nic in nics}) or [0]
        return json.dumps(
            {
                f"cpu:{node}": [
                    [nic.name for nic in nics if max(nic.numa_node, 0) == node],
                    [nic.name for nic in nics if max(nic.numa_node, 0) != node],
                ]
                for node in nodes
            }
        )

    # ---- what this engine doesn't have -----------------------------------------------------

    def get_engine(self) -> Any:
        """Raises: there is no C++ object of Mooncake's here."""
        raise NotImplementedError(_NO_OBJECT)

    def get_engine_ptr(self) -> int:
        """Raises: there is no C++ object of Mooncake's here."""
        raise NotImplementedError(_NO_OBJECT)

    def _batches(self) -> dict[int, Transfer]:
        state = self._state
        return {} if state is None else state.batches

    def _nics(self) -> tuple[Nic, ...]:
        if self._state is not None:
            return self._state.engine.rails
        config = EngineConfig()
        return tuple(list_nics(config, choose_protocol(config)))


def _operation(opcode: names.TransferOpcode) -> int:
    return READ if names.TransferOpcode(int(opcode)) is names.TransferOpcode.Read else WRITE


def _taken_out(batches: dict[int, Transfer], batch_id: int) -> Transfer | None:
    """Taken out while it is looked at, so that two threads never do it at once; None, and
    a line in the log, for an id that is not there."""
    transfer = batches.pop(batch_id, None)
    if transfer is None:
        _log.error("batch id %r is not (or no longer) known here", batch_id)
    return transfer
