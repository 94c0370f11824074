"""One vLLM engine in this process, told what to do in JSON lines over a socket.

Runs in vLLM's environment, as a script: ``engine_process.py FD MODEL TRANSFER_JSON
OPTIONS_JSON``, where FD is the number of an inherited stream socket.  Nothing is
generated in the background: between two commands the engine is stepped as long as it
has anything to do, and it stops when it is paused.
"""

from __future__ import annotations

import hashlib
import json
import re
import select
import socket
import sys
import time
import traceback
from typing import Any

IDLE_S = 0.05
WAITING_S = 0.001


class EngineProcess:
    def __init__(self, channel: socket.socket, model: str, transfer: Any, options: Any) -> None:
        from vllm import LLM

        self._channel = channel
        self._received = b""
        self._paused = False
        self._steps_left: int | None = None
        self._total: dict[str, Any] = {}
        llm = LLM(
            model=model,
            enforce_eager=True,
            max_model_len=2048,
            max_num_seqs=8,
            seed=0,
            disable_log_stats=True,
            kv_transfer_config=transfer,
            **options,
        )
        self._engine = llm.llm_engine
        self._core = self._engine.engine_core.engine_core
        self._scheduler = self._core.scheduler
        self._caches = self._core.model_executor.driver_worker.worker.model_runner.kv_caches
        self._digests: dict[str, list[str]] = {}

    def say(self, **event: Any) -> None:
        self._channel.sendall(json.dumps(event, default=str).encode() + b"\n")

    def run(self) -> None:
        self.say(event="ready")
        while True:
            busy = self._scheduler.has_requests() and not self._paused
            for line in self._lines(0 if busy else IDLE_S):
                command = json.loads(line)
                if command["op"] == "quit":
                    return
                self._obey(command)
            if busy and not self._paused:
                self._step()

    def _lines(self, timeout_s: float) -> list[bytes]:
        if not select.select([self._channel], [], [], timeout_s)[0]:
            return []
        data = self._channel.recv(1 << 20)
        if not data:
            raise SystemExit(0)  # the test is gone
        *lines, self._received = (self._received + data).split(b"\n")
        return lines

    def _step(self) -> None:
        outputs = self._engine.step()
        for output in outputs:
            if output.finished:
                self._tell_finished(output)
        if self._steps_left is not None:
            self._steps_left -= 1
            self._paused = self._steps_left <= 0
        if not self._scheduler.running:
            time.sleep(WAITING_S)

    def _tell_finished(self, output: Any) -> None:
        self.say(
            event="finished",
            id=output.request_id,
            tokens=[list(sample.token_ids) for sample in output.outputs],
            reasons=[sample.finish_reason for sample in output.outputs],
            params=output.kv_transfer_params,
            cached=output.num_cached_tokens,
        )

    def _obey(self, command: dict[str, Any]) -> None:
        try:
            getattr(self, f"_{command.pop('op')}")(**command)
        except Exception as problem:  # a refused request must not end the engine
            traceback.print_exc()
            self.say(event="error", id=command.get("id"), text=str(problem))

    def _add(self, id: str, prompt: list[int], params: Any, sampling: dict[str, Any]) -> None:  # noqa: A002
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        options: dict[str, Any] = {
            "temperature": 0.0,
            "max_tokens": 8,
            "ignore_eos": True,
            **sampling,
        }
        options["output_kind"] = RequestOutputKind.FINAL_ONLY  # all samples in one output
        extra = {} if params is None else {"extra_args": {"kv_transfer_params": params}}
        self._engine.add_request(
            id, {"prompt_token_ids": prompt}, SamplingParams(**options, **extra)
        )

    def _abort(self, id: str) -> None:  # noqa: A002
        self._engine.abort_request([id])

    def _pause(self) -> None:
        self._paused = True

    def _resume(self, steps: int | None = None) -> None:
        self._paused, self._steps_left = False, steps

    def _reset_cache(self) -> None:
        self.say(event="reset_cache", done=self._engine.reset_prefix_cache())

    def _look(self) -> None:
        """What the scheduler and the connector hold at this moment."""
        pool = self._scheduler.kv_cache_manager.block_pool
        half = self._scheduler.connector._scheduler if self._scheduler.connector else None
        self.say(
            event="look",
            requests=len(self._scheduler.requests),
            statuses={name: str(r.status) for name, r in self._scheduler.requests.items()},
            used_blocks=pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            session=half._handshake.session if half else None,
            incoming=len(half._incoming) if half else 0,
            outgoing=len(half._outgoing) if half else 0,
        )

    def _counts(self) -> None:
        """The connector's counts since the engine began."""
        self.say(event="counts", **self._total)

    def count_stats(self) -> None:
        """Keeps what the connector counts: without a log nobody else would."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = get_kv_transfer_group()
        for connector in (self._scheduler.connector, worker):
            self._count_calls(connector)

    def watch_blocks(self) -> None:
        """Notes what is in a request's blocks when it is held, and when it was received."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        half = get_kv_transfer_group()._worker
        run, results, pulls = half.run, half.results, {}

        def running(commands: Any) -> None:
            for command in commands:
                if type(command).__name__ == "Hold":
                    self._note(command.request_id, command.blocks[0], 0, command.token_count)
                if type(command).__name__ == "Pull":
                    pulls[command.request_id] = command
            run(commands)

        def reporting() -> Any:
            reported = results()
            for name in reported.finished_recving - reported.failed_recving:
                pull = pulls.pop(name)
                end = pull.first_token + pull.token_count
                self._note(name, pull.blocks[0], pull.first_token, end)
            return reported

        half.run, half.results = running, reporting

    def _note(self, name: str, table: Any, first: int, end: int) -> None:
        """One digest per block, over the tokens that it holds of ``[first, end)``."""
        import torch

        size = self._caches[0].shape[2]
        digests = []
        for start in range(first, end, size):
            block, filled = int(table[start // size]), min(size, end - start)
            digest = hashlib.sha256()
            for cache in self._caches:
                content = cache[block, :, :filled].contiguous().view(torch.uint8)
                digest.update(content.numpy().tobytes())
            digests.append(digest.hexdigest()[:16])
        # vLLM adds a random end to the ids that it is given, and a number to samples.
        self._digests[re.sub(r"^\d+_|-[0-9a-f]{8}$", "", name)] = digests

    def _kv(self, id: str) -> None:  # noqa: A002
        self.say(event="kv", digests=self._digests.get(id))

    def _count_calls(self, connector: Any) -> None:
        take = connector.get_kv_connector_stats

        def taking() -> Any:
            stats = take()
            if stats is not None:
                self._add_up(stats.to_dict())
            return stats

        connector.get_kv_connector_stats = taking

    def _add_up(self, data: dict[str, Any]) -> None:
        for name, value in data.items():
            if isinstance(value, dict):
                causes = self._total.setdefault(name, {})
                for cause, count in value.items():
                    causes[cause] = causes.get(cause, 0) + count
            elif isinstance(value, str):
                self._total[name] = value
            else:
                zero: Any = [] if isinstance(value, list) else 0
                self._total[name] = self._total.get(name, zero) + value


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    transfer, options = json.loads(sys.argv[3]), json.loads(sys.argv[4])
    process = EngineProcess(channel, sys.argv[2], transfer, options)
    if transfer is not None:
        process.count_stats()
        process.watch_blocks()
    process.run()


if __name__ == "__main__":
    main()
