"""What a check says: the fact, what it should be, why that matters and the way to mend it."""

from collections.abc import Callable
from enum import StrEnum

import msgspec

from efa_kv.tools.host import Host


class Severity(StrEnum):
    """How bad a finding is. Only `problem` makes `efa-kv doctor` fail."""

    GOOD = "good"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One result of one check. `expected`, `why` and `mend` are empty when all is well."""

    id: str
    severity: Severity
    found: str
    expected: str = ""
    why: str = ""
    mend: str = ""


Check = Callable[[Host], list[Finding]]


def good(check: str, found: str) -> Finding:
    """The finding of a check that passed."""
    return Finding(id=check, severity=Severity.GOOD, found=found)


def listed(names: list[str] | tuple[str, ...], limit: int = 6) -> str:
    """Names for a sentence, shortened when there are many."""
    if len(names) <= limit:
        return ", ".join(names)
    return ", ".join(names[:limit]) + f" and {len(names) - limit} more"
