"""`efa-kv topology`: how near instances are to each other in the network, and whom to pair.

The input is the JSON of `aws ec2 describe-instance-topology`. Each instance lists its network
nodes from the top of the network down; the last is the one it hangs on. Two instances that share
their last node are nearest; sharing only an upper node means more hops between them.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.tree import Tree

from efa_kv.tools import output


class TopologyError(ValueError):
    """Input that is not the answer of describe-instance-topology."""


class Instance(msgspec.Struct, frozen=True, rename="pascal"):
    """One entry of the answer; `network_nodes` from the top down."""

    instance_id: str
    network_nodes: tuple[str, ...]
    instance_type: str | None = None
    group_name: str | None = None
    capacity_block_id: str | None = None
    availability_zone: str | None = None
    zone_id: str | None = None


class Answer(msgspec.Struct, frozen=True, rename="pascal"):
    """The whole answer; `next_token` is set when there is a further page."""

    instances: tuple[Instance, ...]
    next_token: str | None = None


class Shared(msgspec.Struct, frozen=True):
    """A network node and the instances below it; level 1 is the node nearest to them."""

    level: int
    node: str
    instances: tuple[str, ...]


class Pair(msgspec.Struct, frozen=True):
    """A prefill and a decode instance; `hops` counts network nodes on the way between them."""

    prefill: str
    decode: str
    hops: int


class Measurement(msgspec.Struct, frozen=True):
    """Two instances between which to measure: of one capacity block, or of two (None is none)."""

    blocks: tuple[str | None, str | None]
    instances: tuple[str, str]
    hops: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of the command. `spread` tells that some pair must cross the top of the network.

    `measurements` is empty unless there are several capacity blocks; `notes` are for people.
    """

    instances: tuple[Instance, ...]
    shared: tuple[Shared, ...]
    pairs: tuple[Pair, ...]
    total_hops: int
    spread: bool
    measurements: tuple[Measurement, ...]
    notes: tuple[str, ...]


def parse(text: str) -> tuple[Instance, ...]:
    """The instances of one page of the answer."""
    try:
        answer = msgspec.json.decode(text, type=Answer)
    except msgspec.DecodeError as error:
        raise TopologyError(f"not the JSON of describe-instance-topology: {error}") from error
    for instance in answer.instances:
        if not instance.network_nodes:
            raise TopologyError(f"{instance.instance_id} lists no network nodes")
    return answer.instances


def shared_depth(one: Instance, other: Instance) -> int:
    """How many network nodes two instances share, from the top down."""
    depth = 0
    for left, right in zip(one.network_nodes, other.network_nodes, strict=False):
        if left != right:
            break
        depth += 1
    return depth


def hops(one: Instance, other: Instance) -> int:
    """Network nodes on the way from one instance to another: 1 below the same last node.

    Where not even the top node is shared the way is counted as if one more level joined them.
    """
    depth = shared_depth(one, other)
    up = len(one.network_nodes) - depth
    down = len(other.network_nodes) - depth
    return up + down + 1


def shared_nodes(instances: Sequence[Instance]) -> tuple[Shared, ...]:
    """Nodes with two or more instances below them, nearest level first."""
    below: dict[tuple[int, str], list[str]] = {}
    for instance in instances:
        for level, node in enumerate(reversed(instance.network_nodes), start=1):
            below.setdefault((level, node), []).append(instance.instance_id)
    found = [Shared(level, node, tuple(ids)) for (level, node), ids in below.items()]
    return tuple(sorted((one for one in found if len(one.instances) > 1), key=_shared_order))


def _shared_order(shared: Shared) -> tuple[int, str]:
    return shared.level, shared.node


def pair(prefill: Sequence[Instance], decode: Sequence[Instance]) -> tuple[Pair, ...]:
    """Give every instance of both sides a partner, with the fewest hops in all.

    In a tree, matching within the lowest nodes first and passing on only what is left over is the
    best matching there is. Where one side has more instances its rest is matched again against
    the whole other side, so that partners are shared out evenly.
    """
    if not prefill or not decode:
        return ()
    few, many = (prefill, decode) if len(prefill) <= len(decode) else (decode, prefill)
    pairs: list[tuple[Instance, Instance]] = []
    rest = list(many)
    while rest:
        matched = _match(few, rest)
        pairs.extend(matched)
        taken = {partner.instance_id for _, partner in matched}
        rest = [one for one in rest if one.instance_id not in taken]
    ordered = pairs if few is prefill else [(right, left) for left, right in pairs]
    return tuple(
        Pair(left.instance_id, right.instance_id, hops(left, right)) for left, right in ordered
    )


def _match(few: Sequence[Instance], many: Sequence[Instance]) -> list[tuple[Instance, Instance]]:
    """Match each of `few` with one of `many`, as far as they last, nearest first."""
    deepest = max(len(one.network_nodes) for one in [*few, *many])
    free = list(many)
    pairs = []
    for depth in range(deepest, -1, -1):
        waiting: dict[tuple[str, ...], list[Instance]] = {}
        for one in free:
            waiting.setdefault(one.network_nodes[:depth], []).append(one)
        left_over = []
        for one in few:
            candidates = waiting.get(one.network_nodes[:depth], [])
            if not candidates:
                left_over.append(one)
                continue
            partner = candidates.pop(0)
            free.remove(partner)
            pairs.append((one, partner))
        few = left_over
    return pairs


def suggest_roles(instances: Sequence[Instance]) -> tuple[list[Instance], list[Instance]]:
    """Split instances into prefill and decode so that each prefill has a near decode.

    Neighbours in the tree's order alternate between the roles; an odd one out decodes.
    """
    ordered = sorted(instances, key=lambda one: (one.network_nodes, one.instance_id))
    return ordered[1::2], ordered[0::2]


def measurements(instances: Sequence[Instance]) -> tuple[Measurement, ...]:
    """What to measure where there are several capacity blocks: the farthest pair within each
    block, and between each two of them.

    Blocks that were reserved apart may lie in different parts of the network, and stay there.
    """
    blocks: dict[str | None, list[Instance]] = {}
    for instance in sorted(instances, key=lambda one: one.instance_id):
        blocks.setdefault(instance.capacity_block_id, []).append(instance)
    if len(blocks) < 2:
        return ()
    found = []
    for one, other in itertools.combinations_with_replacement(sorted(blocks, key=str), 2):
        couples = (
            itertools.combinations(blocks[one], 2)
            if one == other
            else itertools.product(blocks[one], blocks[other])
        )
        farthest = max(couples, key=lambda couple: hops(*couple), default=None)
        if farthest:
            ids = (farthest[0].instance_id, farthest[1].instance_id)
            found.append(Measurement((one, other), ids, hops(*farthest)))
    return tuple(found)


def notes_on(instances: Sequence[Instance]) -> tuple[str, ...]:
    """What the placement of these instances calls for, besides a measurement."""
    grouped = [one.instance_id for one in instances if one.group_name and one.capacity_block_id]
    if not grouped:
        return ()
    return (
        f"{', '.join(grouped)}: in a capacity block and a placement group; AWS places the "
        "instances of a block and supports no group there: leave it out of the launch template",
    )


def report_for(instances: Sequence[Instance], pairs: tuple[Pair, ...]) -> Report:
    """Everything the command prints."""
    tops = {instance.network_nodes[0] for instance in instances}
    return Report(
        instances=tuple(instances),
        shared=shared_nodes(instances),
        pairs=pairs,
        total_hops=sum(one.hops for one in pairs),
        spread=len(tops) > 1,
        measurements=measurements(instances),
        notes=notes_on(instances),
    )


def show(report: Report, console: Console) -> None:
    """Print the tree, the shared nodes and the pairs."""
    root = Tree("network")
    branches: dict[tuple[str, ...], Tree] = {(): root}
    for instance in sorted(report.instances, key=lambda one: (one.network_nodes, one.instance_id)):
        for depth in range(1, len(instance.network_nodes) + 1):
            path = instance.network_nodes[:depth]
            if path not in branches:
                branches[path] = branches[path[:-1]].add(path[-1])
        block = f", block {instance.capacity_block_id}" if instance.capacity_block_id else ""
        leaf = f"{instance.instance_id} ({instance.instance_type or 'type not given'}{block})"
        branches[instance.network_nodes].add(leaf)
    console.print(root)
    for one in report.shared:
        console.print(f"level {one.level} from the bottom, {one.node}: {', '.join(one.instances)}")
    for matched in report.pairs:
        console.print(f"prefill {matched.prefill} -> decode {matched.decode}: {matched.hops} hops")
    if report.pairs:
        console.print(f"{report.total_hops} hops in all")
    if report.spread:
        console.print(
            "these instances do not all share the top node: measure within and between the parts"
        )
    for one_pair in report.measurements:
        first, second = (block or "no block" for block in one_pair.blocks)
        where = f"within {first}" if first == second else f"between {first} and {second}"
        console.print(f"measure {where}: {' and '.join(one_pair.instances)}, {one_pair.hops} hops")
    for note in report.notes:
        console.print(f"note: {note}")


def _chosen(by_id: dict[str, Instance], wanted: Sequence[str]) -> list[Instance]:
    unknown = [name for name in wanted if name not in by_id]
    if unknown:
        output.could_not_run(f"not in the topology: {', '.join(unknown)}")
    return [by_id[name] for name in wanted]


def _roles(
    instances: Sequence[Instance], prefill: Sequence[str], decode: Sequence[str]
) -> tuple[list[Instance], list[Instance]]:
    """The two sides: as named, or the rest where only one side is named, or as suggested."""
    by_id = {instance.instance_id: instance for instance in instances}
    if not prefill and not decode:
        return suggest_roles(instances)
    both = set(prefill) & set(decode)
    if both:
        output.could_not_run(f"named for both roles: {', '.join(sorted(both))}")
    first = _chosen(by_id, prefill) if prefill else _others(instances, decode)
    second = _chosen(by_id, decode) if decode else _others(instances, prefill)
    return first, second


def _others(instances: Sequence[Instance], named: Sequence[str]) -> list[Instance]:
    return [one for one in instances if one.instance_id not in named]


def command(
    files: Annotated[
        list[Path],
        typer.Argument(help="Output of aws ec2 describe-instance-topology, one file per page."),
    ],
    prefill: Annotated[
        list[str] | None, typer.Option(help="An instance that prefills; repeat for more.")
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(help="An instance that decodes; repeat for more.")
    ] = None,
    json_file: output.JsonOption = None,
) -> None:
    """Show which instances share which network node, and pair prefill with decode nearby.

    Ends with 0 when all instances share the top node, 1 when they are spread over several, 2 when
    the input cannot be used.
    """
    instances: dict[str, Instance] = {}
    for path in files:
        try:
            instances.update({one.instance_id: one for one in parse(output.read_text(path))})
        except TopologyError as error:
            output.could_not_run(f"{path}: {error}")
    if not instances:
        output.could_not_run("no instance in the input")
    every = tuple(instances.values())
    report = report_for(every, pair(*_roles(every, prefill or [], decode or [])))
    show(report, output.console())
    output.write_json(json_file, report)
    raise typer.Exit(output.EXIT_PROBLEM if report.spread else output.EXIT_GOOD)
