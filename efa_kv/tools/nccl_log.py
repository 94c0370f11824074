"""`efa-kv nccl-log`: which network NCCL really took, read from its NCCL_DEBUG=INFO log.

NCCL never fails for want of a fast network: it takes sockets and runs slowly. The lines it prints
at start tell. Wordings of NCCL 2.18 to 2.31 and of aws-ofi-nccl 1.7 to 1.22 are understood.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from efa_kv.tools import output

_LINE = re.compile(
    r"(?P<process>\S+:\d+):\d+ \[(?P<gpu>\d+)\] NCCL (?P<level>INFO|WARN) (?P<text>.*)"
)
_NETWORK = re.compile(r"Using network (.+)")
_PROVIDER = re.compile(
    r"Selected [Pp]rovider is ([^,\s]+)(?:, fabric is (\S+))? \(found (\d+) nics?\)"
)
_CHANNEL = re.compile(r"via NET/([^/]+)/\d+(?:\([^)]*\))?(/GDRDMA)?")
_NCCL_VERSION = re.compile(r"NCCL version (\S+)")
_PLUGIN_VERSION = re.compile(r"(?:Initializing|Using) aws-ofi-nccl (\S+)")

# What a line means when NCCL did not take EFA: a piece of the line, the cause, what to do.
_CAUSES = (
    (
        r"NCCL_NET set by environment to (?!.*Libfabric)",
        "NCCL_NET names another network",
        "unset NCCL_NET",
    ),
    (
        r"NCCL_NET_PLUGIN set by environment",
        "NCCL_NET_PLUGIN names another plugin",
        "unset NCCL_NET_PLUGIN",
    ),
    (
        r"(No plugin found|Could not find:? libnccl-net|cannot open shared object file.*libnccl-net"
        r"|libnccl-net\S*: cannot open shared object)",
        "the EFA plugin (libnccl-net.so of aws-ofi-nccl) was not found",
        "export LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib:$LD_LIBRARY_PATH",
    ),
    (
        r"(undefined symbol|undefined reference|version `\S+' not found)",
        "the plugin does not fit the libfabric or verbs library of this image",
        "efa-kv doctor --container",
    ),
    (
        r"provider efa output empty list",
        "libfabric lists no EFA device: a second copy of it in the process holds them",
        "export LD_PRELOAD=/opt/amazon/efa/lib/libfabric.so.1",
    ),
    (
        r"(No eligible providers were found|No data available|\(-61\)|error -61|RC: -61)",
        "libfabric lists no EFA device",
        "efa-kv doctor --container",
    ),
    (
        r"(Permission denied.*(fabric|uverbs)|(fabric|uverbs).*Permission denied)",
        "the device files may not be opened",
        "efa-kv doctor --container",
    ),
    (
        r"Function not implemented",
        "libfabric is older than the driver of the host",
        "efa-kv doctor --container",
    ),
    (
        r"Cannot allocate memory",
        "memory could not be registered: the limit on locked memory",
        "ulimit -l unlimited",
    ),
    (
        r"(Failed to initialize any NET plugin|network \S+ not found)",
        "NCCL was told to use a network that it does not have",
        "unset NCCL_NET NCCL_NET_PLUGIN",
    ),
)


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """What one process of the job reported. `channels` counts its connections by network.

    `direct_channels` are those whose GPU memory the device reaches itself (GDRDMA).
    """

    name: str
    network: str = ""
    provider: str = ""
    fabric: str = ""
    nics: int = 0
    channels: dict[str, int] = {}
    direct_channels: int = 0


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """A reason for not using EFA that a line of the log gives."""

    cause: str
    mend: str
    line: str
    count: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of the command: `verdict` in one sentence, and what it rests on."""

    verdict: str
    uses_efa: bool
    problems: tuple[str, ...]
    causes: tuple[Cause, ...]
    processes: tuple[Process, ...]
    nccl: tuple[str, ...]
    plugin: tuple[str, ...]
    exit_code: int


class _Tally:
    """Collects one process's lines; order in the log does not matter."""

    def __init__(self) -> None:
        self.network = ""
        self.provider = ""
        self.fabric = ""
        self.nics = 0
        self.channels: Counter[str] = Counter()
        self.direct_channels = 0

    def add(self, text: str) -> None:
        if found := _NETWORK.search(text):
            self.network = found.group(1).strip()
        if found := _PROVIDER.search(text):
            self.provider, self.fabric = found.group(1), found.group(2) or ""
            self.nics = int(found.group(3))
        if found := _CHANNEL.search(text):
            self.channels[found.group(1)] += 1
            self.direct_channels += found.group(2) is not None

    def process(self, name: str) -> Process:
        return Process(
            name=name,
            network=self.network,
            provider=self.provider,
            fabric=self.fabric,
            nics=self.nics,
            channels=dict(self.channels),
            direct_channels=self.direct_channels,
        )


def read(text: str) -> Report:
    """Judge a log, or several joined together."""
    tallies: dict[str, _Tally] = {}
    causes: dict[str, Cause] = {}
    nccl: set[str] = set()
    plugin: set[str] = set()
    for line in text.splitlines():
        found = _LINE.search(line)
        words = found.group("text") if found else line
        _note_cause(causes, line, words)
        nccl.update(_NCCL_VERSION.findall(words))
        plugin.update(_PLUGIN_VERSION.findall(words))
        if found:
            tallies.setdefault(found.group("process"), _Tally()).add(words)
    processes = tuple(tally.process(name) for name, tally in sorted(tallies.items()))
    return _judge(processes, tuple(causes.values()), tuple(sorted(nccl)), tuple(sorted(plugin)))


def _note_cause(causes: dict[str, Cause], line: str, words: str) -> None:
    for pattern, cause, mend in _CAUSES:
        if not re.search(pattern, words):
            continue
        known = causes.get(cause)
        first = known.line if known else line.strip()
        count = known.count + 1 if known else 1
        causes[cause] = Cause(cause=cause, mend=mend, line=first, count=count)
        return


def _judge(
    processes: tuple[Process, ...],
    causes: tuple[Cause, ...],
    nccl: tuple[str, ...],
    plugin: tuple[str, ...],
) -> Report:
    speaking = [one for one in processes if one.network or one.provider]
    problems = _problems(speaking)
    uses_efa = bool(speaking) and not any(_off_efa(one) for one in speaking)
    if uses_efa:
        verdict = f"NCCL uses EFA in all {len(speaking)} processes"
    elif speaking:
        off = sum(_off_efa(one) for one in speaking)
        verdict = f"NCCL does NOT use EFA in {off} of {len(speaking)} processes"
    elif causes:
        verdict = "NCCL did not get as far as choosing a network"
    else:
        verdict = "the log does not say which network NCCL chose"
    failed = bool(problems) or not uses_efa
    return Report(
        verdict=verdict,
        uses_efa=uses_efa,
        problems=problems,
        causes=() if uses_efa else causes,
        processes=processes,
        nccl=nccl,
        plugin=plugin,
        exit_code=output.EXIT_PROBLEM if failed else output.EXIT_GOOD,
    )


def _off_efa(process: Process) -> bool:
    """Whether a process took another network, or libfabric with another provider."""
    if process.network and "libfabric" not in process.network.lower():
        return True
    return bool(process.provider) and process.provider != "efa"


def _problems(processes: list[Process]) -> tuple[str, ...]:
    problems = []
    for process in processes:
        if _off_efa(process):
            named = process.network or f"Libfabric with provider {process.provider}"
            problems.append(f"{process.name}: network {named}")
            continue
        total = sum(process.channels.values())
        if total and process.direct_channels < total:
            without = total - process.direct_channels
            problems.append(
                f"{process.name}: {without} of {total} network channels without GDRDMA; "
                "their data goes through host memory"
            )
    counts = {process.nics for process in processes if process.nics}
    if len(counts) > 1:
        listed = ", ".join(str(count) for count in sorted(counts))
        problems.append(f"processes found different numbers of NICs: {listed}")
    return tuple(problems)


def show(report: Report, console: Console) -> None:
    """Print the verdict, then what is wrong, then what was found."""
    console.print(Text(report.verdict, style="green" if report.uses_efa else "bold red"))
    for problem in report.problems:
        console.print(Text(f"  {problem}", style="yellow"))
    for cause in report.causes:
        console.print(f"  cause: {cause.cause} ({cause.count} lines)")
        console.print(f"   mend: {cause.mend}")
        console.print(Text(f"   line: {cause.line}", style="dim"))
    found = Counter(
        (one.network, one.provider, one.fabric, one.nics) for one in report.processes if one.network
    )
    for (network, provider, fabric, nics), count in sorted(found.items()):
        detail = f", provider {provider}, fabric {fabric or provider}, {nics} NICs"
        console.print(f"{count} processes: network {network}{detail if provider else ''}")
    versions = [
        *(f"NCCL {one}" for one in report.nccl),
        *(f"plugin {one}" for one in report.plugin),
    ]
    if versions:
        console.print(", ".join(versions))


def command(
    files: Annotated[list[Path], typer.Argument(help="Logs written with NCCL_DEBUG=INFO.")],
    json_file: output.JsonOption = None,
) -> None:
    """Tell which network NCCL chose, with how many NICs, and why when it was not EFA.

    Ends with 0 when every process uses EFA with GPUDirect RDMA, 1 when one does not or the log
    does not say, 2 when a file cannot be read.
    """
    report = read("\n".join(output.read_text(path) for path in files))
    show(report, output.console())
    output.write_json(json_file, report)
    raise typer.Exit(report.exit_code)
