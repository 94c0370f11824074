"""The house rules, read from the sources themselves.

Every rule is a function from a file's name and text to a list of complaints. The first
half applies the rules to the repository; the second half shows, on small bad examples,
that each of them can fail.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCE_FOLDERS = ("efa_kv", "connectors", "examples", "tests", "scripts", "native", "benchmarks")
NOT_OURS = re.compile(
    r"^(\.git|\.venv|build|dist|native/third_party)|/\.|__pycache__|_cache/|\.btr$"
)

LONGEST_FILE_LINES = 600
LONGEST_FUNCTION_LINES = 70

# What may be imported by what: a unit reaches units of lower levels and itself.
LEVELS = {
    "errors": 0,
    "types": 0,
    "_native": 1,
    "_cffi": 2,
    "config": 3,
    "config_mooncake": 4,
    "plan": 3,
    "wire": 3,
    "observe": 3,
    "fabric": 3,
    "_structs": 3,
    "memory": 4,
    "metrics": 4,
    "runtime": 5,
    "mooncake": 6,
    "connectors": 6,
    "tools": 6,
    "cli": 7,
    "__main__": 8,
}
# The exceptions, within one level: who may import whom.
SIDEWAYS = {
    ("errors", "types"),
    ("types", "errors"),
    ("fabric", "config"),
    ("connectors", "mooncake"),
    ("_structs", "config"),
    ("fabric", "_structs"),
}
PACKAGE = "efa_kv"

# Modules that only some places may import; a place is a prefix of a path.
CONFINED = {
    "threading": ("efa_kv/runtime/",),
    "_thread": ("efa_kv/runtime/",),
    "concurrent": ("efa_kv/runtime/",),
    "multiprocessing": ("efa_kv/runtime/",),
    "zmq": ("efa_kv/runtime/",),
    "efa_kv._native": ("efa_kv/_cffi.py",),
    "torch": ("connectors/", "efa_kv/tools/"),
    "vllm": ("connectors/vllm/",),
    "sglang": ("connectors/sglang/",),
    "pickle": (),
    "marshal": (),
}

# Parts of words are joined at run time, so that this file does not break its own rules.
UNFINISHED = re.compile(
    r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")) + r")\b"
)
MACHINE_PATHS = re.compile(r"(^|[^.\w])/" + "(wo" + "rk|ro" + "ot)/")
REGISTRIES = re.compile("pytho" + r"nhosted|pyp" + r"i\.org|debia" + r"n\.org|npmj" + r"s\.org")
TRACKER = re.compile(r"\bissue" + r"s? #?\d+\b", re.IGNORECASE)

REQUIRED_FILES = (
    ".ci/run",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "pyproject.toml",
)

Rule = Callable[[str, str], list[str]]


def imported_modules(tree: ast.AST, path: str) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported, wherever in the file it is."""
    package = module_name(path).split(".")
    if not path.endswith("__init__.py"):
        package = package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{source}.{alias.name}"


def module_name(path: str) -> str:
    parts = list(PurePosixPath(path).with_suffix("").parts)
    if parts[0] == "connectors":
        parts.insert(0, PACKAGE)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_product(path: str) -> bool:
    return path.endswith(".py") and path.startswith(("efa_kv/", "connectors/"))


def unit_of(module: str) -> str | None:
    """The named part of the package that a module belongs to: 'wire' of efa_kv.wire.x."""
    parts = module.split(".")
    return parts[1] if parts[0] == PACKAGE and len(parts) > 1 else None


def check_levels(path: str, text: str) -> list[str]:
    importer = unit_of(module_name(path)) if is_product(path) else None
    if importer is None:  # efa_kv/__init__.py offers names of every level, lazily
        return []
    if importer not in LEVELS:
        return [f"{path}: {importer!r} has no level; add it to LEVELS in tests/test_house.py"]
    complaints = []
    for line, module in imported_modules(ast.parse(text), path):
        imported = unit_of(module)
        if imported is None or imported == importer:
            continue
        if imported not in LEVELS:
            if LEVELS[importer] < LEVELS["mooncake"]:
                complaints.append(f"{path}:{line}: takes {module} through the top of the package")
        elif LEVELS[imported] >= LEVELS[importer] and (importer, imported) not in SIDEWAYS:
            complaints.append(f"{path}:{line}: {importer} may not import {imported} ({module})")
    return complaints


def check_confined_imports(path: str, text: str) -> list[str]:
    if not is_product(path):
        return []
    complaints = []
    for line, module in imported_modules(ast.parse(text), path):
        for confined, places in CONFINED.items():
            if not (module == confined or module.startswith(f"{confined}.")):
                continue
            if not path.startswith(places):
                where = ", ".join(places) or "nowhere"
                complaints.append(f"{path}:{line}: {confined} may be imported in: {where}")
    return complaints


def check_environment(path: str, text: str) -> list[str]:
    if not is_product(path) or path.startswith("efa_kv/config"):
        return []
    names = ("environ", "environb", "getenv", "putenv")
    lines = [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if (
            isinstance(node, ast.Attribute)
            and node.attr in names
            and isinstance(node.value, ast.Name)
            and node.value.id == "os"
        )
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and any(alias.name in names for alias in node.names)
        )
    ]
    return [f"{path}:{line}: the environment is read only in efa_kv/config" for line in lines]


def check_file_length(path: str, text: str) -> list[str]:
    lines = text.count("\n")
    if not path.endswith((".py", ".c", ".h")) or lines <= LONGEST_FILE_LINES:
        return []
    return [f"{path}: {lines} lines, at most {LONGEST_FILE_LINES}"]


def python_functions(text: str) -> Iterator[tuple[str, int, int]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1


def _blank(match: re.Match[str]) -> str:
    """Nothing in place of a match, on as many lines."""
    return "\n" * match.group().count("\n") or " "


C_NOISE = re.compile(
    r"""/\*.*?\*/ | //[^\n]* | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' """, re.DOTALL | re.VERBOSE
)
C_DIRECTIVE = re.compile(r"^[ \t]*\#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)


def c_functions(text: str) -> Iterator[tuple[str, int, int]]:
    """Name, first line and length of each C function body, by counting braces."""
    text = re.sub(r'extern\s*"C"\s*\{', _blank, text)
    code = C_DIRECTIVE.sub(_blank, C_NOISE.sub(_blank, text))
    depth = start = 0
    name: str | None = None
    for position, character in enumerate(code):
        if character == "{":
            if depth == 0:
                head = code[:position].rstrip()
                # Only a parameter list comes right before a function's body.
                name = _function_name(head) if head.endswith(")") else None
                start = code.count("\n", 0, position) + 1
            depth += 1
        elif character == "}" and depth > 0:
            depth -= 1
            if depth == 0 and name is not None:
                yield name, start, code.count("\n", 0, position) + 1 - start + 1


def _function_name(head: str) -> str:
    depth = 0
    for position in range(len(head) - 1, -1, -1):
        depth += (head[position] == ")") - (head[position] == "(")
        if depth == 0:
            found = re.search(r"(\w+)\s*$", head[:position])
            return found.group(1) if found else "?"
    return "?"


def check_function_length(path: str, text: str) -> list[str]:
    if path.endswith(".py"):
        functions = python_functions(text)
    elif path.endswith((".c", ".h")):
        functions = c_functions(text)
    else:
        return []
    return [
        f"{path}:{line}: {name} has {lines} lines, at most {LONGEST_FUNCTION_LINES}"
        for name, line, lines in functions
        if lines > LONGEST_FUNCTION_LINES
    ]


def check_words(path: str, text: str) -> list[str]:
    complaints = []
    for number, line in enumerate(text.splitlines(), start=1):
        if path.endswith((".py", ".c", ".h", ".sh")) and UNFINISHED.search(line):
            complaints.append(f"{path}:{number}: marks something unfinished")
        if MACHINE_PATHS.search(line):
            complaints.append(f"{path}:{number}: names a path of one machine")
        if REGISTRIES.search(line):
            complaints.append(f"{path}:{number}: names the host of a package registry")
        if TRACKER.search(line):
            complaints.append(f"{path}:{number}: names a number of an issue tracker")
    return complaints


def repository_files() -> Iterator[tuple[str, str]]:
    """Every text file of ours, by its path from the top."""
    folders = [REPOSITORY / folder for folder in (*SOURCE_FOLDERS, ".ci", "docs")]
    files = [f for folder in folders if folder.is_dir() for f in sorted(folder.rglob("*"))]
    for file in [*files, *sorted(REPOSITORY.iterdir())]:
        path = file.relative_to(REPOSITORY).as_posix()
        if not file.is_file() or NOT_OURS.search(path):
            continue
        try:
            yield path, file.read_text()
        except UnicodeDecodeError:
            continue


RULES: tuple[Rule, ...] = (
    check_levels,
    check_confined_imports,
    check_environment,
    check_file_length,
    check_function_length,
    check_words,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_repository_keeps(rule: Rule) -> None:
    files = list(repository_files())
    assert any(is_product(path) for path, _ in files)
    assert [complaint for path, text in files for complaint in rule(path, text)] == []


def test_required_files_are_there_and_forbidden_ones_are_not() -> None:
    assert [name for name in REQUIRED_FILES if not (REPOSITORY / name).is_file()] == []
    assert not (REPOSITORY / "setup.py").exists()


def test_the_changelog_has_a_place_for_the_next_change() -> None:
    assert "## [Unreleased]" in (REPOSITORY / "CHANGELOG.md").read_text()


LONG_PYTHON = "def f():\n" + "    pass\n" * LONGEST_FUNCTION_LINES
LONG_C = "static int f(int (*g)(void))\n{\n" + "    g();\n" * LONGEST_FUNCTION_LINES + "}\n"


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (check_levels, "efa_kv/plan/layout.py", "from efa_kv.wire import messages\n"),
        (check_levels, "efa_kv/wire/session.py", "from efa_kv.runtime.agent import Agent\n"),
        (check_levels, "efa_kv/wire/session.py", "from ..runtime import agent\n"),
        (check_levels, "efa_kv/memory.py", "def f():\n    import efa_kv.runtime.agent\n"),
        (check_levels, "efa_kv/runtime/agent.py", "import efa_kv.tools.bench\n"),
        (check_levels, "efa_kv/runtime/agent.py", "from efa_kv import TransferEngine\n"),
        (check_levels, "efa_kv/types.py", "from efa_kv.config import EngineConfig\n"),
        (check_levels, "efa_kv/mooncake.py", "import efa_kv.connectors.vllm\n"),
        (check_levels, "efa_kv/new_room/a.py", "\n"),
        (check_confined_imports, "efa_kv/memory.py", "from efa_kv._native import lib\n"),
        (check_confined_imports, "efa_kv/memory.py", "import threading\n"),
        (check_confined_imports, "efa_kv/wire/a.py", "from concurrent.futures import Future\n"),
        (check_confined_imports, "connectors/vllm/worker.py", "import zmq.asyncio\n"),
        (check_confined_imports, "efa_kv/runtime/a.py", "import torch\n"),
        (check_confined_imports, "connectors/sglang/a.py", "from vllm.config import VllmConfig\n"),
        (check_confined_imports, "connectors/vllm/a.py", "import sglang\n"),
        (check_confined_imports, "efa_kv/runtime/a.py", "import pickle\n"),
        (check_environment, "connectors/vllm/a.py", "import os\nx = os.environ['A']\n"),
        (check_environment, "efa_kv/fabric.py", "import os\nx = os.getenv('A')\n"),
        (check_environment, "efa_kv/fabric.py", "from os import environ\n"),
        (check_file_length, "native/src/a.c", "\n" * (LONGEST_FILE_LINES + 1)),
        (check_function_length, "efa_kv/a.py", LONG_PYTHON),
        (check_function_length, "efa_kv/a.py", "class A:\n" + LONG_PYTHON.replace("def", "  def")),
        (check_function_length, "native/src/a.c", LONG_C),
        (check_function_length, "native/src/a.c", 'extern "C" {\n' + LONG_C + "}\n"),
        (check_words, "efa_kv/a.py", "# TO" + "DO later\n"),
        (check_words, "README.md", "see /wo" + "rk/main\n"),
        (check_words, "README.md", "from pyp" + "i.org\n"),
        (check_words, "CHANGELOG.md", "closes issue" + " 12\n"),
    ],
)
def test_a_rule_sees(rule: Rule, path: str, text: str) -> None:
    assert len(rule(path, text)) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("efa_kv/runtime/agent.py", "import threading\nimport zmq\nfrom efa_kv.wire import a\n"),
        ("efa_kv/fabric.py", "from efa_kv._cffi import lib\nfrom efa_kv.errors import E\n"),
        ("efa_kv/_cffi.py", "from efa_kv._native import ffi, lib\n"),
        ("efa_kv/config.py", "import os\nx = os.environ\n"),
        ("connectors/vllm/a.py", "import torch\nimport vllm\nfrom efa_kv import TransferEngine\n"),
        ("tests/unit/a.py", "import threading\nimport os\nx = os.environ\n"),
        ("efa_kv/plan/a.py", "from efa_kv.plan.b import c\nfrom . import d\n"),
        ("native/src/a.c", "struct s {\n" + "    int a;\n" * 100 + "};\n"),
        (
            "native/src/a.c",
            "#define F(x) \\\n    { \\\n    }\nint a[] = {\n" + "1,\n" * 99 + "};\n",
        ),
        ("native/src/a.c", "int f(void)\n{\n    /* { */ g(\"{\"); h('{'); // {\n}\n" + "\n" * 99),
        ("docs/a.md", "see https://example.com/work and ./root/\n"),
    ],
)
def test_no_rule_objects_to(path: str, text: str) -> None:
    assert [complaint for rule in RULES for complaint in rule(path, text)] == []


def test_c_functions_are_named_and_measured() -> None:
    text = (
        "static int\nadd(int a,\n    int (*b)(int))\n{\n    if (a) {\n    }\n}\nint one(void) {}\n"
    )
    assert list(c_functions(text)) == [("add", 4, 4), ("one", 8, 1)]
