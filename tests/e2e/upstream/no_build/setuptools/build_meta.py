"""A build backend that builds nothing, so that pip can fetch a source archive as it is.

``pip download`` asks the project's own backend for metadata before it saves a source
archive. vLLM's needs a compiler tool chain and gigabytes of build requirements for
that, while only the tests inside the archive are wanted. Placed ahead of the real
setuptools on PYTHONPATH, this one answers with a name and a version.
"""

import re
from pathlib import Path
from typing import Any


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return []


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    """Repeats the name and version that the archive's own PKG-INFO gives."""
    fields = dict(
        re.findall(r"^(Name|Version): (.+)$", Path("PKG-INFO").read_text(), flags=re.MULTILINE)
    )
    folder = Path(metadata_directory) / f"{fields['Name']}-{fields['Version']}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {fields['Name']}\nVersion: {fields['Version']}\n"
    )
    return folder.name


def build_wheel(*_: Any, **__: Any) -> str:
    raise RuntimeError(
        "found: a request to build; expected: only to fetch; "
        "what to do: leave this folder out of PYTHONPATH when you build"
    )
