"""Writes the table of settings into the README, from the settings themselves.

Run in the development environment; ``--check`` only says whether it is up to date.
"""

from __future__ import annotations

import sys
from pathlib import Path

from efa_kv.config import settings_table

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN = "<!-- settings, written by `make format` -->\n"
END = "<!-- end of settings -->\n"


def with_settings(text: str) -> str:
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(
            f"found: {README.name} without its two marks for settings; "
            f"expected: {BEGIN.strip()} and {END.strip()}; what to do: put them back"
        )
    return f"{before}{BEGIN}{settings_table()}\n{END}{after}"


def main() -> int:
    text = README.read_text()
    wanted = with_settings(text)
    if text == wanted:
        return 0
    if "--check" in sys.argv[1:]:
        print(
            f"found: {README.name} with another table of settings than efa_kv/config.py gives; "
            "expected: the same; what to do: run 'make format'",
            file=sys.stderr,
        )
        return 1
    README.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
