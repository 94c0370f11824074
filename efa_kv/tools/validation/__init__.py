"""The parts of `efa-kv validate`.

Pure: `place` (which process is this), `schedule` (who sends to whom when), `samples` and `orders`
(what hosts say), `series` (medians, noise and baselines), `verdict` (what is wrong, and with which
device), `outside` (other people's tools: what to run, and how to read them).
Acting: `meeting` (finding each other), `member` (one host's engine and its work), `flow` (moving
bytes for a while), `leader` (rank 0), `fleet` (many hosts on one machine), `run` (all of it in
order).
"""
