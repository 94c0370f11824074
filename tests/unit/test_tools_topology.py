"""`efa-kv topology`: shared network nodes, the tree, and the pairing with the fewest hops."""

import itertools
import json
import random
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from efa_kv.tools import topology
from efa_kv.tools.topology import Instance

app = typer.Typer()
app.command("topology")(topology.command)
runner = CliRunner()


def entry(identity: str, *nodes: str) -> dict[str, object]:
    return {
        "InstanceId": identity,
        "InstanceType": "p5en.48xlarge",
        "NetworkNodes": list(nodes),
        "AvailabilityZone": "us-west-2a",
        "ZoneId": "usw2-az2",
        "CapacityBlockId": None if identity == "i-5" else "cb-1",
    }


TWO_SPINES = {
    "Instances": [
        entry("i-1", "nn-top", "nn-a", "nn-a1"),
        entry("i-2", "nn-top", "nn-a", "nn-a2"),
        entry("i-3", "nn-top", "nn-b", "nn-b1"),
        entry("i-4", "nn-top", "nn-a", "nn-a1"),
        entry("i-5", "nn-top", "nn-b", "nn-b1"),
    ]
}


def parsed() -> dict[str, Instance]:
    return {one.instance_id: one for one in topology.parse(json.dumps(TWO_SPINES))}


def test_hops_count_the_nodes_between() -> None:
    by_id = parsed()
    assert topology.hops(by_id["i-1"], by_id["i-4"]) == 1
    assert topology.hops(by_id["i-1"], by_id["i-2"]) == 3
    assert topology.hops(by_id["i-1"], by_id["i-3"]) == 5


def test_shared_nodes_are_listed_from_the_bottom() -> None:
    shared = topology.shared_nodes(tuple(parsed().values()))
    assert [(one.level, one.node, one.instances) for one in shared] == [
        (1, "nn-a1", ("i-1", "i-4")),
        (1, "nn-b1", ("i-3", "i-5")),
        (2, "nn-a", ("i-1", "i-2", "i-4")),
        (2, "nn-b", ("i-3", "i-5")),
        (3, "nn-top", ("i-1", "i-2", "i-3", "i-4", "i-5")),
    ]


def test_roles_are_suggested_next_to_each_other() -> None:
    prefill, decode = topology.suggest_roles(tuple(parsed().values()))
    pairs = topology.pair(prefill, decode)
    assert {one.instance_id for one in [*prefill, *decode]} == set(parsed())
    assert sorted(one.hops for one in pairs)[:2] == [1, 1]


def made_up(generator: random.Random, count: int) -> list[Instance]:
    made = []
    for index in range(count):
        spine = generator.randrange(2)
        leaf = generator.randrange(3)
        nodes = (f"top{generator.randrange(2)}", f"s{spine}", f"s{spine}l{leaf}")
        made.append(Instance(f"i-{index}", nodes))
    return made


@pytest.mark.parametrize("seed", range(60))
def test_the_pairing_has_the_fewest_hops_there_are(seed: int) -> None:
    generator = random.Random(seed)
    prefill_count = generator.randrange(1, 5)
    made = made_up(generator, prefill_count + generator.randrange(prefill_count, 6))
    prefill, decode = made[:prefill_count], made[prefill_count:]
    matched = topology._match(prefill, decode)
    cost = sum(topology.hops(left, right) for left, right in matched)
    best = min(
        sum(topology.hops(left, right) for left, right in zip(prefill, chosen, strict=True))
        for chosen in itertools.permutations(decode, prefill_count)
    )
    assert len({right.instance_id for _, right in matched}) == prefill_count
    assert cost == best


@pytest.mark.parametrize(("prefill", "decode"), [(2, 5), (5, 2), (3, 3), (1, 4)])
def test_everyone_gets_a_partner_and_they_are_shared_evenly(prefill: int, decode: int) -> None:
    made = made_up(random.Random(prefill * 10 + decode), prefill + decode)
    pairs = topology.pair(made[:prefill], made[prefill:])
    assert {one.prefill for one in pairs} == {one.instance_id for one in made[:prefill]}
    assert {one.decode for one in pairs} == {one.instance_id for one in made[prefill:]}
    few = "prefill" if prefill <= decode else "decode"
    counts = [
        sum(getattr(one, few) == name for one in pairs)
        for name in {getattr(one, few) for one in pairs}
    ]
    assert max(counts) - min(counts) <= 1


def test_no_pairs_without_both_sides() -> None:
    assert topology.pair([], list(parsed().values())) == ()


@pytest.fixture
def answer(tmp_path: Path) -> Path:
    path = tmp_path / "topology.json"
    path.write_text(json.dumps(TWO_SPINES))
    return path


def test_the_command_shows_tree_nodes_and_pairs(answer: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = [str(answer), "--prefill", "i-1", "--prefill", "i-3", "--json", str(out)]
    result = runner.invoke(app, [*arguments, "--decode", "i-5", "--decode", "i-4"])
    assert result.exit_code == 0
    assert "prefill i-1 -> decode i-4: 1 hops" in result.output
    assert "prefill i-3 -> decode i-5: 1 hops" in result.output
    assert "level 1 from the bottom, nn-a1: i-1, i-4" in result.output
    assert "nn-top" in result.output
    report = json.loads(out.read_text())
    assert report["total_hops"] == 2
    assert report["spread"] is False


def test_one_side_named_leaves_the_rest_to_the_other(answer: Path) -> None:
    result = runner.invoke(app, [str(answer), "--prefill", "i-1"])
    assert result.output.count("prefill i-1 -> ") == 4


def test_several_pages_and_a_split_network(answer: Path, tmp_path: Path) -> None:
    second = tmp_path / "second.json"
    second.write_text(json.dumps({"Instances": [entry("i-8", "nn-far", "nn-f", "nn-f1")]}))
    result = runner.invoke(app, [str(answer), str(second)])
    assert result.exit_code == 1
    assert "do not all share the top node" in result.output


def test_capacity_blocks_are_measured_within_and_between(answer: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = runner.invoke(app, [str(answer), "--json", str(out)])
    # The farthest pair stands for all: 1, 2 and 4 are near each other, 3 and 5 are below nn-b1.
    assert "measure within cb-1: i-1 and i-3, 5 hops" in result.output
    assert "measure between no block and cb-1: i-5 and i-1, 5 hops" in result.output
    assert len(json.loads(out.read_text())["measurements"]) == 2


def test_one_capacity_block_needs_no_comparison() -> None:
    block = [one for one in parsed().values() if one.capacity_block_id]
    assert topology.measurements(block) == ()
    assert topology.notes_on(block) == ()


def test_a_placement_group_in_a_capacity_block_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "topology.json"
    grouped = {**entry("i-1", "nn-top", "nn-a", "nn-a1"), "GroupName": "mine"}
    path.write_text(json.dumps({"Instances": [grouped]}))
    result = runner.invoke(app, [str(path)])
    assert result.exit_code == 0
    assert "i-1: in a capacity block and a placement group" in result.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not the JSON"),
        ('{"Instances": [{"InstanceId": "i-1", "NetworkNodes": []}]}', "lists no network nodes"),
        ('{"Instances": []}', "no instance"),
    ],
)
def test_unusable_input_ends_with_2(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "topology.json"
    path.write_text(text)
    result = runner.invoke(app, [str(path)])
    assert result.exit_code == 2
    assert message in result.output


def test_names_that_are_not_there_end_with_2(answer: Path) -> None:
    assert runner.invoke(app, [str(answer), "--prefill", "i-77"]).exit_code == 2
    both = [str(answer), "--prefill", "i-1", "--decode", "i-1"]
    assert "both roles" in runner.invoke(app, both).output
    assert "describe-instance-topology" in runner.invoke(app, ["--help"]).output
