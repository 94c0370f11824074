"""What a report is made from: the JSON files of bench, validate and doctor, and traces.

Files come from other versions and other hands, so what is not needed is not looked at, what is
missing is left out, and what is of no known kind is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from efa_kv.observe.trace import TraceDocument

BYTES_MAX: Final = 64 << 20
INPUTS_MAX: Final = 32
#: Drawn at most; a busy engine's ring holds a few thousand.
SPANS_MAX: Final = 20_000


#: Rates, times and counts that a chart can show.
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class InputError(ValueError):
    """A file that no report can be made from; the text says why."""


class BenchRail(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    bytes: Count = 0
    operations: Count = 0
    speed_bits_per_second: Count = 0


class Bench(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement of `efa-kv bench`; ``sweep`` holds those of all block sizes."""

    bytes_per_second: Amount
    block_size_bytes: Count
    operation: str = ""
    p50_us: Amount = 0.0
    p99_us: Amount = 0.0
    verified: bool | None = None
    mismatch: str = ""
    protocol: str = ""
    provider: str = ""
    rails: tuple[BenchRail, ...] = ()
    sweep: tuple[Bench, ...] = ()

    @property
    def line_rate_bytes_per_s(self) -> float:
        """All devices together; 0 where one does not say."""
        speeds = [rail.speed_bits_per_second for rail in self.rails]
        return sum(speeds) / 8 if speeds and all(speeds) else 0.0


class ValidateHost(msgspec.Struct, frozen=True, kw_only=True):
    label: str
    nic_rates: tuple[Amount, ...] = ()


class ValidateSeries(msgspec.Struct, frozen=True):
    unit: str
    samples: tuple[Amount, ...]


class ValidateProblem(msgspec.Struct, frozen=True, kw_only=True):
    fault: str
    text: str


class Validate(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `efa-kv validate`."""

    series: dict[str, ValidateSeries]
    hosts: tuple[ValidateHost, ...]
    problems: tuple[ValidateProblem, ...] = ()
    notes: tuple[str, ...] = ()


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One finding of `efa-kv doctor`."""

    id: str
    severity: str
    found: str
    expected: str = ""
    why: str = ""
    mend: str = ""


class Doctor(msgspec.Struct, frozen=True, kw_only=True):
    """The report of `efa-kv doctor`."""

    findings: tuple[Finding, ...]
    instance_type: str = ""
    container: str = ""


class Inputs(msgspec.Struct, frozen=True, kw_only=True):
    """Everything given, by kind, each with the name it is shown under."""

    benches: tuple[tuple[str, Bench], ...] = ()
    validations: tuple[tuple[str, Validate], ...] = ()
    doctors: tuple[tuple[str, Doctor], ...] = ()
    traces: tuple[tuple[str, TraceDocument], ...] = ()


Kind = Bench | Validate | Doctor | TraceDocument
#: A kind, and a word that only its JSON has at the top.
_KINDS: Final[tuple[tuple[str, type], ...]] = (
    ("bytes_per_second", Bench),
    ("series", Validate),
    ("findings", Doctor),
    ("spans", TraceDocument),
)


def read(name: str, text: bytes) -> Kind:
    """A file's content by what it is; raises `InputError`."""
    if len(text) > BYTES_MAX:
        raise InputError(f"{name}: {len(text)} bytes; at most {BYTES_MAX} are read")
    try:
        top = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise InputError(f"{name}: not the JSON of an efa-kv command: {problem}") from None
    for word, kind in _KINDS:
        if word not in top:
            continue
        try:
            found: Kind = msgspec.json.decode(text, type=kind)
        except (msgspec.DecodeError, RecursionError) as problem:
            raise InputError(f"{name}: {problem}") from None
        return _trimmed(found)
    raise InputError(f"{name}: found none of {', '.join(word for word, _ in _KINDS)}")


def _trimmed(found: Kind) -> Kind:
    if isinstance(found, TraceDocument) and len(found.spans) > SPANS_MAX:
        newest = sorted(found.spans, key=lambda span: span.end_s)[-SPANS_MAX:]
        return msgspec.structs.replace(found, spans=tuple(newest))
    return found


def gather(named: Sequence[tuple[str, Kind]]) -> Inputs:
    """Sorts what was read by kind."""

    def of(kind: type) -> tuple[tuple[str, Kind], ...]:
        return tuple((name, one) for name, one in named if isinstance(one, kind))

    return msgspec.convert(
        {
            "benches": of(Bench),
            "validations": of(Validate),
            "doctors": of(Doctor),
            "traces": of(TraceDocument),
        },
        Inputs,
    )


def problems(inputs: Inputs) -> list[str]:
    """What the inputs say is wrong; the command then ends with 1."""
    found = []
    for name, bench in inputs.benches:
        if any(one.verified is False for one in (bench, *bench.sweep)):
            found.append(f"{name}: {bench.mismatch or 'wrong bytes'}")
    for name, validation in inputs.validations:
        found += [f"{name}: {one.fault}: {one.text}" for one in validation.problems]
    for name, doctor in inputs.doctors:
        wrong = [one for one in doctor.findings if one.severity == "problem"]
        found += [f"{name}: {one.id}: {one.found}" for one in wrong]
    for name, document in inputs.traces:
        failed = {span.request for span in document.spans if span.error}
        if failed:
            found.append(f"{name}: {len(failed)} transfers failed")
    return found
