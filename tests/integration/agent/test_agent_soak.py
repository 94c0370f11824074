"""Many handoffs through a tiny pool, where every block is hashed."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from kv_caches import contents

Child = Callable[..., Any]
Consumer = Callable[..., Any]

HANDOFFS = 2000
BLOCKS = 24
AT_ONCE = 5


@pytest.mark.timeout(180)
@pytest.mark.slow
def test_2000_handoffs_through_a_tiny_pool(child: Child, consumer: Consumer) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    dice = random.Random(seed)
    producer, decode = child(blocks=64), consumer(blocks=BLOCKS)
    producer.ask("fill", seed=11)
    source = contents(64, 11)
    digests = [hashlib.sha256(source[:, block].tobytes()).digest() for block in range(64)]
    free = set(range(1, BLOCKS))
    running: dict[str, tuple[list[int], list[int], bool]] = {}
    started = ended = aborted = 0
    deadline = time.monotonic() + 150
    while ended < HANDOFFS:
        assert time.monotonic() < deadline, (seed, running)
        while started < HANDOFFS and len(running) < AT_ONCE and len(free) >= 4:
            count = dice.randint(1, 4)
            ours = dice.sample(sorted(free), count)
            theirs = dice.sample(range(1, 64), count)
            free.difference_update(ours)
            name = f"r{started}"
            early = dice.random() < 0.3
            if early:
                decode.pull(name, producer.session, ours, early=True)
            producer.hold(name, theirs)
            if not early:
                decode.pull(name, producer.session, ours)
            doomed = dice.random() < 0.1
            if doomed:
                decode.agent.abort(name)
            running[name] = (theirs, ours, doomed)
            started += 1
        report = decode.poll()
        for name in [*report.received, *report.failed]:
            theirs, ours, doomed = running.pop(name)
            assert doomed or name in report.received, (seed, name, report.failed)
            aborted += doomed
            if name in report.received:
                for their, our in zip(theirs, ours, strict=True):
                    data = decode.cache.data[:, our].tobytes()
                    assert hashlib.sha256(data).digest() == digests[their], (seed, name)
            decode.cache.data[:, ours] = 0xEE
            free.update(ours)
            ended += 1
    assert len(free) == BLOCKS - 1
    assert (decode.cache.data == 0xEE).all(), seed
    print(f"{aborted} aborted, slowest poll {decode.slowest_poll_s * 1e3:.2f} ms")
