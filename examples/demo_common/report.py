"""What the demo found, for the reader at the terminal and for a program."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from demo_common.traffic import Answer, Counters, Prompt

RECOMPUTED_TOKENS = 1  # a server always computes the last prompt token, for its logits

CAPTION = """
taken: tokens from the prefill server; cached: tokens the decode server had
TTFT, alone: milliseconds to the first token, of the pair and of a server alone
"""


@dataclass(frozen=True)
class Outcome:
    """One prompt, answered by the pair and by a server alone."""

    name: str
    prompt_tokens: int
    identical: bool
    arrived: bool
    external_tokens: int
    local_tokens: int
    bytes: int
    transfer_seconds: float
    first_token_seconds: float
    first_token_seconds_alone: float
    problem: str | None

    @property
    def good(self) -> bool:
        return self.identical and self.arrived


def judge(
    prompt: Prompt, alone: Answer, paired: Answer, seen: Counters, kv_bytes_per_token: int
) -> Outcome:
    missing = what_is_missing(paired.prompt_tokens, seen, kv_bytes_per_token)
    identical = paired.text == alone.text
    difference = None if identical else f"answered {paired.text!r}, alone {alone.text!r}"
    return Outcome(
        name=prompt.name,
        prompt_tokens=paired.prompt_tokens,
        identical=identical,
        arrived=missing is None,
        external_tokens=seen.external_tokens,
        local_tokens=seen.local_tokens,
        bytes=seen.bytes,
        transfer_seconds=seen.transfer_s,
        first_token_seconds=paired.first_token_s,
        first_token_seconds_alone=alone.first_token_s,
        problem="; ".join(filter(None, (difference, missing))) or None,
    )


def what_is_missing(prompt_tokens: int, seen: Counters, kv_bytes_per_token: int) -> str | None:
    """What speaks against the KV of this prompt having come whole over the fabric."""
    if seen.failures:
        return f"{seen.failures} transfers failed"
    if seen.external_tokens == 0:
        return "no token came from the other side"
    taken = seen.external_tokens + seen.local_tokens
    if taken < prompt_tokens - RECOMPUTED_TOKENS:
        return f"only {taken} of {prompt_tokens} tokens were taken, the rest computed again"
    # The scheduler's token count is a promise; the bytes that the engine received,
    # under the name of the provider that brought them, are the proof.
    needed = (seen.external_tokens - RECOMPUTED_TOKENS) * kv_bytes_per_token
    if seen.bytes == 0 or seen.bytes < needed:
        return f"{seen.bytes} bytes came over the fabric where {needed} were needed"
    return None


@dataclass(frozen=True)
class Report:
    outcomes: list[Outcome]
    provider: str
    router: str

    @property
    def good(self) -> bool:
        return bool(self.outcomes) and all(outcome.good for outcome in self.outcomes)

    def as_json(self) -> dict[str, Any]:
        return {
            "identical": bool(self.outcomes) and all(o.identical for o in self.outcomes),
            "requests": len(self.outcomes),
            "external_tokens": sum(o.external_tokens for o in self.outcomes),
            "bytes": sum(o.bytes for o in self.outcomes),
            "provider": self.provider,
            "router": self.router,
            "requests_detail": [asdict(o) for o in self.outcomes],
        }

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.as_json(), indent=2) + "\n")

    def show(self, console: Console) -> None:
        console.print(self._table())
        console.print(CAPTION, style="dim")
        for outcome in self.outcomes:
            if outcome.problem is not None:
                console.print(f"[red]{outcome.name}:[/red] ", end="")
                console.print(outcome.problem, markup=False)
        total = self.as_json()
        seconds = sum(o.transfer_seconds for o in self.outcomes)
        identical = sum(o.identical for o in self.outcomes)
        arrived = sum(o.arrived for o in self.outcomes)
        console.print(
            f"[bold]{identical} of {total['requests']}[/bold] answers equal those of a server "
            f"alone; [bold]{arrived} of {total['requests']}[/bold] prompts had their KV brought "
            f"over the fabric."
        )
        console.print(
            f"{total['external_tokens']} tokens, {_size(total['bytes'])} at "
            f"{_rate(total['bytes'], seconds)}; provider {self.provider or 'none'}; "
            f"{self.router}."
        )

    def _table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        table.add_column("prompt", no_wrap=True)
        for title in ("tokens", "taken", "cached", "bytes", "GB/s", "TTFT", "alone"):
            table.add_column(title, justify="right", no_wrap=True)
        table.add_column("equal", justify="center", no_wrap=True)
        for outcome in self.outcomes:
            table.add_row(
                outcome.name,
                str(outcome.prompt_tokens),
                str(outcome.external_tokens),
                str(outcome.local_tokens),
                _size(outcome.bytes),
                _rate(outcome.bytes, outcome.transfer_seconds, unit=""),
                f"{outcome.first_token_seconds * 1e3:.0f}",
                f"{outcome.first_token_seconds_alone * 1e3:.0f}",
                "[green]yes[/green]" if outcome.identical else "[red]NO[/red]",
            )
        return table


def _size(count: int) -> str:
    if count < 1024 * 1024:
        return f"{count / 1024:.0f} KiB"
    return f"{count / (1024 * 1024):.1f} MiB"


def _rate(count: int, seconds: float, unit: str = " GB/s") -> str:
    return f"{count / seconds / 1e9:.2f}{unit}" if seconds > 0 else f"-{unit}"
