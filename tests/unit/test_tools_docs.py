"""The tools' documents say what the code does: fields, findings, rules, versions, tests."""

import ast
import re
from pathlib import Path

import msgspec
import pytest

from efa_kv.tools import host as records
from efa_kv.tools.checks import settings, versions
from efa_kv.tools.validation import verdict

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

STRUCTS = [
    value
    for value in vars(records).values()
    if isinstance(value, type) and issubclass(value, msgspec.Struct) and value is not msgspec.Struct
]


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_every_field_of_the_record_is_documented(struct: type[msgspec.Struct]) -> None:
    text = (DOCS / "tools/host-record.md").read_text()
    missing = [
        name
        for name in struct.__struct_fields__
        if f"`{name}`" not in text and f"`host.{name}`" not in text
    ]
    assert missing == []


def test_every_finding_and_rule_is_documented() -> None:
    text = (DOCS / "tools/doctor.md").read_text()
    sources = [path.read_text() for path in (ROOT / "efa_kv/tools/checks").glob("*.py")]
    pattern = r'(?:id=|good\(\s*)"([a-z.-]+)"'
    ids = {one for source in sources for one in re.findall(pattern, source)}
    assert len(ids) > 20
    names = ids | {rule.name for rule in settings.RULES}
    assert sorted(name for name in names if f"`{name}`" not in text) == []


def test_every_fault_and_flag_of_validate_is_documented() -> None:
    text = (DOCS / "tools/validate.md").read_text()
    assert [fault for fault in verdict.Fault if f"`{fault.value}`" not in text] == []
    source = (ROOT / "efa_kv/tools/validation/flags.py").read_text()
    flags = re.findall(r'"(--[a-z-]+)', source)
    assert len(flags) > 10
    assert [flag for flag in flags if flag not in text] == []


def test_the_table_of_versions_is_the_one_in_the_code() -> None:
    text = (DOCS / "tools/doctor.md").read_text()
    for one in versions.RELEASES:
        nccl = versions.TESTED_NCCL.get(one.ofi_nccl, ("",))[-1]
        cells = (one.installer, one.date, one.driver, one.libfabric, one.ofi_nccl, nccl)
        row = "| " + " | ".join(str(cell) for cell in cells) + " |"
        assert row.replace("|  |", "| |") in text


def test_coverage_names_tests_that_exist() -> None:
    rows = [line for line in (DOCS / "coverage.md").read_text().splitlines() if "::" in line]
    assert len(rows) > 40
    files = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}
    for row in rows:
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", row.split("|")[3])
        assert named, row
        for file, function in named:
            assert function in functions(files[file]), (file, function)
