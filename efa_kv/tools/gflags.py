"""Options as gflags programs take them: words joined by dashes or underscores, and switches
that are given a value, as in ``--use_vram=false``."""

from __future__ import annotations

from typing import Any, Final

import typer

TRUE_WORDS: Final = ("true", "t", "yes", "y", "1", "on")
FALSE_WORDS: Final = ("false", "f", "no", "n", "0", "off")


def option(name: str, **more: Any) -> Any:
    """A Typer option under both spellings; ``name`` is the one with dashes."""
    words = name.replace("-", "_").removeprefix("__")
    names = (name,) if f"--{words}" == name else (name, f"--{words}")
    return typer.Option(*names, **more)


def switch(text: str) -> bool:
    """Reads the value of a switch; raises `typer.BadParameter`."""
    word = text.strip().lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise typer.BadParameter(f"found {text!r}; expected true or false")
