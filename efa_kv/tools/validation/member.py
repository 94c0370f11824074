"""One host of a run: its engine, its memory, and the orders of rank 0 that it carries out."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from efa_kv.config import EngineConfig
from efa_kv.errors import EfaKvError, PeerUnreachable, TransferTimeout
from efa_kv.fabric import library_version
from efa_kv.runtime.engine import Peer, TransferEngine
from efa_kv.runtime.notes import NoteBook
from efa_kv.tools.validation import flow, meeting, orders, outside
from efa_kv.tools.validation.orders import Answer, AnyOrder, End, Joined, Measure, Meet, Run
from efa_kv.tools.validation.place import Place, PlaceError
from efa_kv.tools.validation.samples import HostFacts, RailSample, Sample
from efa_kv.tools.validation.schedule import Kind
from efa_kv.types import Address

DELIVERY_TIMEOUT_S: Final = 15.0
#: A host that hears nothing for so long ends: rank 0 is gone.
SILENCE_LIMIT_S: Final = 900.0
_POLL_S: Final = 0.002
_TRY_AGAIN_S: Final = 0.3
#: Pairs of devices are tried for so long when hosts meet.
_WARMUP_TIMEOUT_S: Final = 20.0


class Equipment(msgspec.Struct, frozen=True, kw_only=True):
    """What a host brings: engine settings, sizes, and what it says about itself."""

    engine: dict[str, Any]
    block_size_bytes: int
    buffer_size_bytes: int
    label: str
    container: str = ""
    gpus: int = 0


class LostError(Exception):
    """Rank 0 is not there (any more), or spoke for another release."""


class Member:
    """This host; use it in a ``with`` statement. One thread only."""

    def __init__(self, place: Place, equipment: Equipment, host: str, port: int) -> None:
        """Opens the engine. Raises `EfaKvError`, and `flow.FlowError` for too small a buffer."""
        settings = {
            **equipment.engine,
            "host": host,
            "port": port,
            "near": False,
            "stripe_bytes": equipment.block_size_bytes,
        }
        config = EngineConfig.load(settings)
        self.engine = TransferEngine(config)
        try:
            self.notes = NoteBook(self.engine)
            self.engine.add_handler(self.notes)
            self.engine.start()
            self.buffers = flow.Buffers(
                self.engine,
                equipment.buffer_size_bytes,
                equipment.block_size_bytes,
                seed=place.rank + 1,
            )
            self.facts = _facts(self.engine, place, equipment, library_version(config))
        except BaseException:
            self.engine.close()
            raise
        self._peers: dict[int, Peer] = {}
        self._position = 0
        self._addresses: dict[int, Address] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.engine.close()

    # ---- orders -----------------------------------------------------------------------

    def carry_out(self, order: AnyOrder) -> Answer:
        """Does what is ordered; what goes wrong is part of the answer. [blocks]"""
        number = order.number
        try:
            match order:
                case Meet():
                    self._meet(order)
                case Measure():
                    return Answer(number=number, sample=self._measure(order))
                case Run():
                    words = outside.arguments(order.tool, self._addresses)
                    limit_s, tries = outside.timeout_s(order.tool), outside.tries(order.tool)
                    status, output = run_program(words, limit_s, tries)
                    return Answer(number=number, status=status, output=output)
                case End():
                    pass
        except (EfaKvError, flow.FlowError, outside.ToolError) as problem:
            return Answer(number=number, error=str(problem))
        return Answer(number=number)

    def _meet(self, order: Meet) -> None:
        self._position = order.position
        self._addresses = {
            position: Address.parse(session) for position, session in enumerate(order.sessions)
        }
        self._peers = {
            position: self.engine.connect(session, DELIVERY_TIMEOUT_S)
            for position, session in enumerate(order.sessions)
            if position != order.position
        }
        for peer in self._peers.values():
            # A dead device is no reason to stop: the steps will say which one it is.
            with contextlib.suppress(EfaKvError):
                self.engine.warmup(peer, _WARMUP_TIMEOUT_S)

    def _measure(self, order: Measure) -> Sample:
        unknown = [target for target in order.targets if target not in self._peers]
        if unknown or not order.targets:
            raise flow.FlowError(f"found targets {order.targets}; expected hosts that we have met")
        peers = [self._peers[target] for target in order.targets]
        wall_s, wrong = 0.0, ""
        rails: tuple[RailSample, ...] = ()
        latencies = None
        error = ""
        before = self.engine.counters()
        try:
            if order.verify:
                wrong = flow.mismatch(self.engine, self.buffers, peers[0])
            if order.kind is Kind.LATENCY:
                latencies = flow.latencies(self.engine, self.buffers, peers[0], order.duration_s)
            else:
                wall_s, rails = flow.stream(self.engine, self.buffers, peers, order.duration_s)
        except EfaKvError as problem:
            error = str(problem)
            overdue = isinstance(problem, TransferTimeout)
            rails = tuple(
                RailSample(
                    bytes=0,
                    failed=new.operations_failed - old.operations_failed,
                    stuck=max(0, new.in_flight - old.in_flight) if overdue else 0,
                )
                for old, new in zip(before, self.engine.counters(), strict=True)
            )
        return Sample(
            kind=order.kind,
            repeat=order.repeat,
            source=self._position,
            targets=order.targets,
            wall_s=wall_s,
            rails=rails,
            latencies_us=latencies,
            error=error,
            mismatch=wrong,
        )


def _facts(engine: TransferEngine, place: Place, equipment: Equipment, libfabric: str) -> HostFacts:
    return HostFacts(
        rank=place.rank,
        label=equipment.label,
        session=engine.session,
        nics=tuple(nic.name for nic in engine.rails),
        nic_rates=tuple(nic.speed_bits_per_second / 8 for nic in engine.rails),
        protocol=engine.protocol,
        provider=engine.rails[0].provider,
        boot=engine.identity.process.boot,
        container=equipment.container,
        libfabric=libfabric,
        gpus=equipment.gpus,
    )


def run_program(words: Sequence[str], timeout_s: float, tries: int) -> tuple[int, str]:
    """Exit status and output; -1 for a program that cannot be run or hangs. It is run again, up to
    ``tries`` times, while it fails and there is time. [blocks]"""
    status, output = -1, ""
    deadline = time.monotonic() + timeout_s
    for _ in range(tries):
        try:
            done = subprocess.run(
                list(words),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=max(_TRY_AGAIN_S, deadline - time.monotonic()),
                check=False,
            )
            status, output = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            return -1, f"it did not end within {timeout_s:g} s"
        except OSError as problem:
            return -1, f"{words[0]}: {problem.strerror or problem}"
        if status == 0 or time.monotonic() + _TRY_AGAIN_S >= deadline:
            break
        time.sleep(_TRY_AGAIN_S)
    return status, output


# ---- hosts other than rank 0 ----------------------------------------------------------


def serve(member: Member, place: Place, timeout_s: float) -> None:
    """Finds rank 0, and carries out its orders until it ends the run.

    Raises `PlaceError` or `LostError` with the reason, `EfaKvError`. [blocks]
    """
    deadline = time.monotonic() + timeout_s
    session = meeting.find(place.rendezvous, timeout_s)
    leader = _connect(member.engine, session, deadline)
    _tell(member, leader, Joined(facts=member.facts))
    heard_at = time.monotonic()
    while True:
        for note in member.notes.take():
            if note.sender != leader.incarnation or note.name != orders.NOTE_NAME:
                continue
            try:
                order = orders.read_order(note.text)
            except orders.OrderError as problem:
                raise LostError(f"{problem}; all hosts need the same release") from problem
            if isinstance(order, End):
                return  # not answered: rank 0 does not wait for it
            answer = member.carry_out(order)
            cut = answer.output[-orders.OUTPUT_CHARACTERS :]
            _tell(member, leader, msgspec.structs.replace(answer, output=cut))
            heard_at = time.monotonic()
        if not leader.ready or time.monotonic() - heard_at > SILENCE_LIMIT_S:
            raise LostError(f"rank 0 at {session} is gone")
        time.sleep(_POLL_S)


def _connect(engine: TransferEngine, session: str, deadline: float) -> Peer:
    """Rank 0 may start later than we do."""
    while True:
        try:
            return engine.connect(session)
        except PeerUnreachable as problem:
            if time.monotonic() >= deadline:
                raise PlaceError(f"rank 0 does not answer at {session}: {problem}") from problem


def _tell(member: Member, leader: Peer, answer: orders.AnyAnswer) -> None:
    member.notes.deliver(leader, orders.NOTE_NAME, orders.text_of(answer), DELIVERY_TIMEOUT_S)
