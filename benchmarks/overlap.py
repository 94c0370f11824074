"""How much of a long transfer is left when chunks leave while later ones are still computed.

The core alone: computing is a wait, in place of a server's, twice as long for each chunk as its
transfer takes.  Prints JSON.  Started by `compare.py --bar overlap`."""

from __future__ import annotations

import json
import time

import numpy as np
from loopback import pools

from efa_kv.types import ROW_DTYPE

CHUNKS = 16
ROWS = 160
BLOCKS = 4096
BLOCK_BYTES = 4096
COMPUTE_TO_TRANSFER = 2.0
POOL_BYTES = ROWS * BLOCKS * BLOCK_BYTES


def main() -> None:
    with pools(POOL_BYTES) as made:
        rows = np.zeros(ROWS, ROW_DTYPE)
        starts = np.arange(ROWS, dtype=np.uint64) * np.uint64(BLOCKS * BLOCK_BYTES)
        rows["local_address"] = starts + np.uint64(made.local_address)
        rows["remote_address"] = starts + np.uint64(made.remote_address)
        for field in ("local_stride_bytes", "remote_stride_bytes", "length_bytes"):
            rows[field] = BLOCK_BYTES
        blocks = np.arange(BLOCKS, dtype=np.uint32)

        start = time.perf_counter()
        result = made.engine.write_paged(made.peer, rows, blocks, blocks).wait()
        if result.error is not None:
            raise result.error
        whole_s = time.perf_counter() - start

        jobs = []
        for chunk in np.array_split(blocks, CHUNKS):
            time.sleep(COMPUTE_TO_TRANSFER * whole_s / CHUNKS)
            jobs.append(made.engine.write_paged(made.peer, rows, chunk, chunk))
        computed = time.perf_counter()
        for job in jobs:
            error = job.wait().error
            if error is not None:
                raise error
        exposed_s = time.perf_counter() - computed
    print(json.dumps({"chunks": CHUNKS, "whole_ms": whole_s * 1e3, "exposed_ms": exposed_s * 1e3}))


if __name__ == "__main__":
    main()
