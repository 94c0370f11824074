"""Rank 0: gathers the hosts, has them carry out each step together, and collects what they say.

Everything here runs on the command's one thread; rank 0 carries out its own part between telling
the others and collecting their answers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from efa_kv.errors import EfaKvError
from efa_kv.runtime.engine import Peer
from efa_kv.tools.validation import orders
from efa_kv.tools.validation.member import DELIVERY_TIMEOUT_S, Member
from efa_kv.tools.validation.orders import Answer, AnyOrder, End, Joined, Measure, Meet, Run
from efa_kv.tools.validation.outside import Tool, timeout_s
from efa_kv.tools.validation.samples import HostFacts, Sample
from efa_kv.tools.validation.schedule import Kind, Step

#: What a step may take beyond its own time: jobs that end by their deadline, a slow machine.
STEP_SPARE_S: Final = 60.0
_POLL_S: Final = 0.002


class RunError(Exception):
    """The run cannot go on; the text names the host."""


class Leader:
    """Rank 0's view of the run."""

    def __init__(self, member: Member, hosts: int) -> None:
        self._member = member
        self._expected = hosts
        self._numbers = itertools.count(1)
        self._peers: dict[int, Peer] = {}
        #: The hosts by position, this one first.
        self.hosts: list[HostFacts] = [member.facts]

    def gather(self, timeout_s: float, progress: Callable[[int], None]) -> None:
        """Waits for every host; ``progress`` hears how many are there. Raises `RunError`.
        [blocks]"""
        deadline = time.monotonic() + timeout_s
        found: dict[int, HostFacts] = {self._member.facts.rank: self._member.facts}
        progress(1)
        while len(found) < self._expected:
            for facts in self._joined():
                if facts.rank in found and facts != found[facts.rank]:
                    raise RunError(f"two hosts say that they are rank {facts.rank}")
                found[facts.rank] = facts
                progress(len(found))
            if time.monotonic() >= deadline:
                ranks = ", ".join(str(rank) for rank in sorted(found))
                raise RunError(
                    f"{len(found)} of {self._expected} hosts came within {timeout_s:g} s "
                    f"(ranks {ranks}); look at the output of the others"
                )
            time.sleep(_POLL_S)
        self.hosts = [found[rank] for rank in sorted(found)]
        kinds = {host.protocol for host in self.hosts}
        if len(kinds) > 1:
            told = ", ".join(f"{host.label}: {host.protocol}" for host in self.hosts)
            raise RunError(f"the hosts chose different protocols ({told}); give --protocol")

    def meet(self) -> None:
        """Has all hosts greet each other. Raises `RunError`. [blocks]"""
        engine = self._member.engine
        sessions = tuple(host.session for host in self.hosts)
        try:
            for position, session in enumerate(sessions[1:], start=1):
                self._peers[position] = engine.connect(session)
        except EfaKvError as problem:
            raise RunError(str(problem)) from problem
        self.carry_out(
            {
                position: Meet(number=next(self._numbers), position=position, sessions=sessions)
                for position in range(len(sessions))
            },
            duration_s=len(sessions) * 1.0,
        )

    def step(self, step: Step, duration_s: float) -> list[Sample]:
        """Carries out one step on all its senders. Raises `RunError`. [blocks]"""
        verify = step.kind is Kind.PAIR and step.repeat == 0
        wanted: dict[int, AnyOrder] = {
            source: Measure(
                number=next(self._numbers),
                kind=step.kind,
                repeat=step.repeat,
                targets=targets,
                duration_s=duration_s,
                verify=verify,
            )
            for source, targets in step.targets.items()
        }
        answers = self.carry_out(wanted, duration_s)
        return [answer.sample for answer in answers.values() if answer.sample is not None]

    def end(self) -> None:
        """Lets all hosts go; one that is gone already does not matter. [blocks]"""
        positions = self._peers
        try:
            self._tell({position: End(number=next(self._numbers)) for position in positions})
        except RunError:
            return

    def run(self, tools: Mapping[int, Tool]) -> dict[int, Answer]:
        """Runs a tool on each of these hosts, all at the same time; by host, its answer.
        Raises `RunError`. [blocks]"""
        wanted: dict[int, AnyOrder] = {
            position: Run(number=next(self._numbers), tool=tool) for position, tool in tools.items()
        }
        return self.carry_out(wanted, max(timeout_s(tool) for tool in tools.values()))

    def carry_out(self, wanted: Mapping[int, AnyOrder], duration_s: float) -> dict[int, Answer]:
        """Has each host in ``wanted`` carry out its order, all at the same time.

        Raises `RunError` when one of them does not answer or could not do it. [blocks]
        """
        self._tell({position: order for position, order in wanted.items() if position})
        answers: dict[int, Answer] = {}
        if 0 in wanted:
            answers[0] = self._member.carry_out(wanted[0])
        numbers = {order.number: position for position, order in wanted.items() if position}
        deadline = time.monotonic() + duration_s + STEP_SPARE_S
        while len(answers) < len(wanted):
            for answer in self._answers():
                if answer.number in numbers:
                    answers[numbers[answer.number]] = answer
            self._check_alive(wanted, answers, deadline)
            time.sleep(_POLL_S)
        for position, answer in sorted(answers.items()):
            if answer.error:
                raise RunError(f"{self.hosts[position].label}: {answer.error}")
        return answers

    # ---- inside -----------------------------------------------------------------------

    def _tell(self, wanted: Mapping[int, AnyOrder]) -> None:
        peers = [self._peers[position] for position in wanted]
        texts = [orders.text_of(order) for order in wanted.values()]
        try:
            self._member.notes.deliver_all(peers, orders.NOTE_NAME, texts, DELIVERY_TIMEOUT_S)
        except EfaKvError as problem:
            raise RunError(f"a host is gone: {problem}") from problem

    def _check_alive(
        self, wanted: Mapping[int, AnyOrder], answers: Mapping[int, Answer], deadline: float
    ) -> None:
        silent = [position for position in wanted if position not in answers]
        gone = [position for position in silent if not self._peers[position].ready]
        if gone or (silent and time.monotonic() >= deadline):
            labels = ", ".join(self.hosts[position].label for position in gone or silent)
            raise RunError(f"no answer from {labels}; look at its output")

    def _joined(self) -> Sequence[HostFacts]:
        return [note.facts for note in self._notes() if isinstance(note, Joined)]

    def _answers(self) -> Sequence[Answer]:
        return [note for note in self._notes() if isinstance(note, Answer)]

    def _notes(self) -> list[orders.AnyAnswer]:
        try:
            return [
                orders.read_answer(note.text)
                for note in self._member.notes.take()
                if note.name == orders.NOTE_NAME
            ]
        except orders.OrderError as problem:
            raise RunError(f"{problem}; all hosts need the same release") from problem
