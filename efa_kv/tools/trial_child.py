"""The child of a trial: opens an engine, moves bytes and prints what came of it.

It writes only to scratch memory that the peer makes for it (`efa_kv.runtime.lender`); without a
peer it starts one beside itself.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from typing import Any, Final

import msgspec

from efa_kv.config import EngineConfig
from efa_kv.errors import EfaKvError, PeerRefused
from efa_kv.runtime.borrower import REASON_SCRATCH, Borrower
from efa_kv.runtime.engine import TransferEngine
from efa_kv.tools import bench_memory, loopback
from efa_kv.tools.trial import Outcome, Rail, Wish

_SEED: Final = 0x3C
#: Jobs in flight while the rate is measured.
_IN_FLIGHT: Final = 4
#: How long the peer keeps the memory for us, beyond the time that is measured.
_LOAN_SPARE_S: Final = 20.0
_ANSWER_TIMEOUT_S: Final = 10.0
_TARGET_BUFFER_BYTES: Final = 1 << 16


def attempt(wish: Wish) -> Outcome:
    """Opens an engine and tries; raises `EfaKvError`. Only for a process of its own."""
    settings = {**wish.engine, "port": 0, "near": False}
    with contextlib.ExitStack() as stack:
        session = wish.session
        if not session:
            target = loopback.TargetSettings(
                engine=settings, buffer_size_bytes=_TARGET_BUFFER_BYTES, touch=False
            )
            session = stack.enter_context(loopback.Target(target)).session
        return _move(wish, settings, session, stack)


def _move(
    wish: Wish, settings: dict[str, Any], session: str, stack: contextlib.ExitStack
) -> Outcome:
    engine = TransferEngine(EngineConfig.load(settings))
    stack.callback(engine.close)
    borrower = Borrower(engine)
    engine.start()
    length = wish.length_bytes
    source, echo = bench_memory.HostBuffer(length), bench_memory.HostBuffer(length)
    bench_memory.fill(source, _SEED)
    bench_memory.fill(echo, None)
    engine.register(source.whole)
    engine.register(echo.whole)
    peer = engine.connect(session)
    engine.warmup(peer)
    loan_s = min(60.0, wish.duration_s + _LOAN_SPARE_S)
    with borrower.borrow(peer, length, loan_s, _ANSWER_TIMEOUT_S) as region:
        _settle(engine.write(peer, [source.address], [region.address], [length]))
        _settle(engine.read(peer, [echo.address], [region.address], [length]))
        mismatch = bench_memory.difference(source, echo, length)
        before = engine.counters()
        start = time.perf_counter()
        moved = 0
        waiting: deque[Any] = deque()
        while time.perf_counter() - start < wish.duration_s:
            waiting.append(engine.write(peer, [source.address], [region.address], [length]))
            if len(waiting) == _IN_FLIGHT:
                moved += _settle(waiting.popleft())
        while waiting:
            moved += _settle(waiting.popleft())
        wall_s = time.perf_counter() - start
        after = engine.counters()
    card = peer.handle.card
    assert card is not None
    return Outcome(
        mismatch=mismatch,
        protocol=engine.protocol,
        provider=engine.rails[0].provider,
        bytes_per_second=moved / wall_s,
        length_bytes=length,
        same_machine=card.process.boot == engine.identity.process.boot,
        rails=tuple(
            Rail(
                name=nic.name,
                line_rate_bytes_per_s=nic.speed_bits_per_second / 8,
                bytes=new.bytes_written - old.bytes_written,
            )
            for nic, old, new in zip(engine.rails, before, after, strict=True)
        ),
        peer_line_rate_bytes_per_s=sum(nic.speed_bits_per_second for nic in card.nics) / 8,
    )


def _settle(job: Any) -> int:
    """Bytes of a job once it is done; raises what went wrong with it."""
    result = job.wait()
    if result.error is not None:
        raise result.error
    return int(result.bytes)


def main() -> None:
    """The child: a wish as its one argument, an outcome as its last line."""
    wish = msgspec.json.decode(sys.argv[1], type=Wish)
    try:
        outcome = attempt(wish)
    except EfaKvError as problem:
        nothing_lent = isinstance(problem, PeerRefused) and problem.reason == REASON_SCRATCH
        outcome = Outcome(error=str(problem), nothing_lent=nothing_lent)
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(outcome) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
