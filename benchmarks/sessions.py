"""One engine with up to a thousand peers: memory per peer, and the speed of a transfer beside them.

A thousand engines do not fit one machine, so all peers but one are played by a single process that
answers greetings and heartbeats on a thousand ports, each as an engine of its own with the network
devices of the one real target.  Prints JSON.  Started by `compare.py --bar sessions`."""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import zmq

from efa_kv import EngineConfig, TransferEngine
from efa_kv.runtime.greeting import this_process
from efa_kv.tools.bench_load import Load, Pattern
from efa_kv.tools.bench_memory import HostBuffer
from efa_kv.tools.bench_run import Initiator
from efa_kv.tools.loopback import Target, TargetSettings, cpu_seconds
from efa_kv.types import NicRecord
from efa_kv.wire.messages import Card, Hello, Ping, Pong, Welcome, decode, encode

STEPS = (1, 250, 500, 1000)
IDLE_S = 2.0
HOST = "127.0.0.1"
BUFFER_BYTES = 256 << 20
LOAD = Load(block_size_bytes=4096, batch_size=4096, in_flight=2, pattern=Pattern.SCATTERED)


class Crowd:
    """The played peers: a socket each."""

    def __init__(self, count: int, nics: tuple[NicRecord, ...]) -> None:
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 2 * count + 64)
        self._poller = zmq.Poller()
        self._cards: dict[zmq.Socket[bytes], Card] = {}
        for number in range(count):
            socket = self._context.socket(zmq.ROUTER)
            port = socket.bind_to_random_port(f"tcp://{HOST}")
            self._poller.register(socket, zmq.POLLIN)
            self._cards[socket] = Card(
                session=f"{HOST}:{port}",
                incarnation=number + 1,
                process=this_process(),
                nics=nics,
            )

    @property
    def sessions(self) -> list[str]:
        return [card.session for card in self._cards.values()]

    def serve(self) -> None:
        """Answers until standard input ends."""
        self._poller.register(sys.stdin, zmq.POLLIN)
        while True:
            for socket, _ in self._poller.poll():
                if socket not in self._cards:
                    return
                sender, frame = socket.recv_multipart()
                card = self._cards[socket]
                message = decode(frame)
                if isinstance(message, Hello):
                    answer = Welcome(to=message.card.incarnation, card=card)
                elif isinstance(message, Ping):
                    answer = Pong(incarnation=card.incarnation)
                else:
                    continue
                socket.send_multipart((sender, encode(answer)))


def play() -> None:
    """The crowd's process: the devices to show on the first line of standard input."""
    lines = json.loads(sys.stdin.readline())
    nics = tuple(NicRecord(*fields[:3], bytes.fromhex(fields[3])) for fields in lines)
    crowd = Crowd(max(STEPS), nics)
    print(json.dumps(crowd.sessions), flush=True)
    crowd.serve()


def resident_bytes() -> int:
    """Memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def measure(
    engine: TransferEngine, initiator: Initiator, sessions: list[str], seconds: float
) -> list[dict]:
    """The figures at every number of peers; the real target is the first peer."""
    batches = initiator.batches(LOAD)
    # A first run, so that what a measurement itself holds is not counted as a peer's.
    initiator.measure(LOAD, batches, seconds, check=False)
    start_bytes, steps = resident_bytes(), []
    known = 1
    for peers in STEPS:
        for session in sessions[known - 1 : peers - 1]:
            engine.connect(session, timeout_s=30.0)
        known = peers
        cpu = cpu_seconds()
        time.sleep(IDLE_S)
        idle_share = (cpu_seconds() - cpu) / IDLE_S
        outcome = initiator.measure(LOAD, batches, seconds, check=False)
        now_bytes = resident_bytes()
        steps.append(
            {
                "peers": peers,
                "memory_bytes": now_bytes,
                "bytes_per_peer": max(0, now_bytes - start_bytes) / max(1, peers - 1),
                "descriptors_per_second": outcome.descriptors_per_second,
                "idle_share": idle_share,
            }
        )
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--play", action="store_true", help="be the crowd")
    options = parser.parse_args()
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if options.play:
        play()
        return
    settings = {"protocol": "efa", "near": False}
    memory = TargetSettings(engine=settings, buffer_size_bytes=BUFFER_BYTES, touch=False)
    with Target(memory) as target, TransferEngine(EngineConfig.load(settings)) as engine:
        buffer = HostBuffer(BUFFER_BYTES)
        engine.register(buffer.whole)
        peer = engine.connect(target.session)
        engine.warmup(peer)
        records = [nic.record() for nic in engine.rails]
        shown = [[one.name, one.fabric, one.provider, one.address.hex()] for one in records]
        crowd = subprocess.Popen(
            [sys.executable, __file__, "--play"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert crowd.stdin is not None
        assert crowd.stdout is not None
        crowd.stdin.write(json.dumps(shown) + "\n")
        crowd.stdin.flush()
        sessions = json.loads(crowd.stdout.readline())
        steps = measure(
            engine, Initiator(engine, peer, [buffer], "write"), sessions, options.seconds
        )
        crowd.stdin.close()
        crowd.wait(10)
    print(json.dumps({"steps": steps}))


if __name__ == "__main__":
    main()
