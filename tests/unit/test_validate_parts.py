"""The pure parts of `efa-kv validate`: places, rounds, series and baselines."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from efa_kv.tools.validation import orders, outside, place, schedule, series
from efa_kv.tools.validation.place import AtAddress, AtFile, AtStore, Place, PlaceError
from efa_kv.tools.validation.schedule import Kind
from efa_kv.tools.validation.series import Series, Trend

# ---- places ---------------------------------------------------------------------------

TORCHRUN = {
    "RANK": "8",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "1",
}
SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "p5-[003-004]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "MASTER_ADDR": "10.0.0.1",
}


def test_torchrun_has_a_store_and_one_process_per_host_takes_part() -> None:
    found = place.by_launcher(TORCHRUN)
    assert found is not None
    assert found.rendezvous == AtStore("node-a", 29500, "efa-kv-validate/1")
    assert (found.hosts, found.takes_part, found.leads, found.mpi) == (2, True, False, False)
    other = place.by_launcher({**TORCHRUN, "RANK": "9", "LOCAL_RANK": "1"})
    assert other is not None
    assert not other.takes_part


def test_ranks_by_hand_meet_at_rank_0_itself() -> None:
    found = place.by_launcher(
        {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7"}
    )
    assert found == Place(rank=0, hosts=3, launcher="torchrun", rendezvous=AtAddress("10.0.0.1", 7))


def test_slurm_meets_at_the_first_host_of_the_step() -> None:
    found = place.by_launcher(SLURM)
    assert found is not None
    assert found.rendezvous == AtAddress("p5-003", place.DEFAULT_PORT)
    assert (found.rank, found.hosts, found.mpi) == (1, 2, True)
    eight = place.by_launcher({**SLURM, "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "3"})
    assert eight is not None
    assert (eight.hosts, eight.takes_part, eight.mpi) == (2, False, False)


def test_a_batch_script_alone_is_no_step_of_slurm() -> None:
    assert place.by_launcher({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}) is None


def test_mpirun_inside_a_job_of_slurm_is_mpirun() -> None:
    found = place.by_launcher({**SLURM, **OPEN_MPI})
    assert found is not None
    assert (found.launcher, found.rank, found.hosts, found.mpi) == ("mpirun", 3, 4, True)
    assert found.rendezvous == AtAddress("10.0.0.1", place.DEFAULT_PORT)


def test_mpirun_does_not_say_where_rank_0_is() -> None:
    silent = {name: value for name, value in OPEN_MPI.items() if name != "MASTER_ADDR"}
    with pytest.raises(PlaceError, match="MASTER_ADDR"):
        place.by_launcher(silent)
    found = place.by_launcher(silent, "file:/shared/x")
    assert found is not None
    assert found.rendezvous == AtFile("/shared/x")


def test_other_mpi_launchers_speak_pmi() -> None:
    found = place.by_launcher(
        {
            "PMI_RANK": "5",
            "PMI_SIZE": "8",
            "MPI_LOCALRANKID": "1",
            "MPI_LOCALNRANKS": "4",
            "MASTER_ADDR": "a",
        }
    )
    assert found is not None
    assert (found.rank, found.hosts, found.takes_part, found.mpi) == (5, 2, False, False)


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_PORT"),
        ({**TORCHRUN, "WORLD_SIZE": "15"}, "same number"),
        ({**SLURM, "SLURM_STEP_NODELIST": ""}, "list of nodes"),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "513"}, "at most 512"),
    ],
)
def test_what_is_missing_is_said(environment: dict[str, str], text: str) -> None:
    with pytest.raises(PlaceError, match=text):
        place.by_launcher(environment)


def test_no_launcher_is_no_place() -> None:
    assert place.by_launcher({"PATH": "/bin"}) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("node-a", AtAddress("node-a", place.DEFAULT_PORT)),
        ("node-a:77", AtAddress("node-a", 77)),
        ("[fd00::1]:77", AtAddress("fd00::1", 77)),
        ("[fd00::1]", AtAddress("fd00::1", place.DEFAULT_PORT)),
        ("file:/a/b", AtFile("/a/b")),
        ("file:///a/b", AtFile("/a/b")),
    ],
)
def test_a_rendezvous_is_read(text: str, found: object) -> None:
    assert place.parse_rendezvous(text) == found


@pytest.mark.parametrize("text", ["", "a:b", "a:0", "a:65536", "http://a", "fd00::1"])
def test_a_wrong_rendezvous_is_refused(text: str) -> None:
    with pytest.raises(PlaceError, match="expected host:port"):
        place.parse_rendezvous(text)


@pytest.mark.parametrize(("rank", "hosts"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_must_be_one_of_them(rank: int, hosts: int) -> None:
    with pytest.raises(PlaceError, match="rank"):
        place.by_flags(rank, hosts, "a:1")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("p5-[003-007,9],q1", "p5-003"),
        ("solo", "solo"),
        ("a,b", "a"),
        ("rack[1-2]-node[07-09]", "rack1-node07"),
    ],
)
def test_the_first_of_a_list_of_nodes(nodes: str, first: str) -> None:
    assert place.first_host(nodes) == first


# ---- rounds ---------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(2, 40))
def test_rounds_hold_every_pair_once_and_no_host_twice(hosts: int) -> None:
    found = schedule.rounds(hosts)
    pairs = [pair for one in found for pair in one]
    assert sorted(pairs) == [(a, b) for a in range(hosts) for b in range(hosts) if a != b]
    for one in found:
        ends = [end for pair in one for end in pair]
        assert len(ends) == len(set(ends))
    # As few rounds as there can be.
    assert len(found) == 2 * (hosts - 1 + hosts % 2)


@settings(deadline=None)
@given(st.integers(2, 12), st.integers(1, 3))
def test_steps_are_as_many_as_announced(hosts: int, repeats: int) -> None:
    found = list(schedule.steps(hosts, repeats))
    assert len(found) == schedule.step_count(hosts, repeats)
    everybody = [step for step in found if step.kind is Kind.ALL_TO_ALL]
    assert len(everybody) == repeats
    for source, targets in everybody[0].targets.items():
        assert sorted((source, *targets)) == list(range(hosts))
    ring = next(step for step in found if step.kind is Kind.RING)
    place_now, seen = 0, []
    for _ in range(hosts):
        seen.append(place_now)
        (place_now,) = ring.targets[place_now]
    assert (place_now, sorted(seen)) == (0, list(range(hosts)))


# ---- series ---------------------------------------------------------------------------

SAMPLES = st.lists(st.floats(1.0, 1e12), min_size=1, max_size=9).map(tuple)


def one_change(before: Series, now: Series) -> series.Change:
    (change,) = series.compare({"x": before}, {"x": now})
    return change


@settings(deadline=None)
@given(SAMPLES, st.booleans())
def test_a_run_equals_itself(samples: tuple[float, ...], less: bool) -> None:
    one = Series("bytes/s", samples, less)
    assert one_change(one, one).trend is Trend.SAME


@settings(deadline=None)
@given(SAMPLES, SAMPLES)
def test_what_is_worse_one_way_is_better_the_other_way(
    one: tuple[float, ...], other: tuple[float, ...]
) -> None:
    rates = one_change(Series("bytes/s", one), Series("bytes/s", other)).trend
    times = one_change(Series("us", one, True), Series("us", other, True)).trend
    opposite = {Trend.BETTER: Trend.WORSE, Trend.WORSE: Trend.BETTER, Trend.SAME: Trend.SAME}
    assert times is opposite[rates]


@settings(deadline=None)
@given(SAMPLES, SAMPLES)
def test_runs_whose_samples_mingle_around_the_medians_are_the_same(
    one: tuple[float, ...], other: tuple[float, ...]
) -> None:
    """A change is said only where the medians are further apart than both noises."""
    before, now = Series("u", one), Series("u", other)
    apart = abs(before.median - now.median)
    trend = one_change(before, now).trend
    if apart <= before.spread + now.spread:
        assert trend is Trend.SAME
    if apart > before.spread + now.spread + series.IGNORED_SHARE * before.median:
        assert trend is not Trend.SAME


@settings(deadline=None)
@given(SAMPLES, st.floats(0.0, 1.0))
def test_more_noise_never_makes_a_change(samples: tuple[float, ...], share: float) -> None:
    before = Series("u", samples)
    quiet = Series("u", (before.median * share,))
    low = quiet.median
    noisy = Series("u", (low * 0.5, low, low * 1.5))
    if one_change(before, quiet).trend is Trend.SAME:
        assert one_change(before, noisy).trend is Trend.SAME


@settings(deadline=None)
@given(st.floats(1.0, 1e9), st.floats(0.0, 0.9))
def test_a_quiet_loss_beyond_the_ignored_share_is_seen(value: float, share: float) -> None:
    before, now = Series("u", (value,) * 3), Series("u", (value * share,) * 3)
    assert one_change(before, now).trend is Trend.WORSE


def test_only_what_both_runs_have_is_compared() -> None:
    one = Series("u", (1.0,))
    assert [
        change.name for change in series.compare({"a": one, "b": one}, {"b": one, "c": one})
    ] == ["b"]


BASELINE = series.Baseline(
    format=series.FORMAT,
    protocol="efa",
    hosts=("a", "b"),
    containers=("", ""),
    block_size_bytes=1 << 20,
    series={"pair 0>1": Series("bytes/s", (1.0, 2.0))},
)


def test_a_baseline_survives_its_file() -> None:
    assert series.decode(series.encode(BASELINE)) == BASELINE


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda text: text[:40], "not a baseline"),
        (lambda text: text.replace(b"baseline 1", b"baseline 9"), "baseline 9"),
        (lambda text: text.replace(b"containers", b"containerz"), "containerz"),
        (lambda text: text.replace(b"1.0,\n", b"").replace(b"2.0", b""), "no samples"),
    ],
)
def test_a_wrong_baseline_is_refused(change: object, text: str) -> None:
    with pytest.raises(series.BaselineError, match=text):
        series.decode(change(series.encode(BASELINE)))  # type: ignore[operator]


# ---- orders ---------------------------------------------------------------------------


def test_orders_survive_their_notes() -> None:
    for order in (
        orders.Meet(number=1, position=2, sessions=("a:1", "b:2")),
        orders.Measure(number=2, kind=Kind.PAIR, repeat=1, targets=(3,), duration_s=0.5),
        orders.Run(number=3, tool=outside.PingpongClient("tcp", 4)),
        orders.Run(number=3, tool=outside.Collective("alltoall_perf", 8)),
        orders.End(number=4),
    ):
        assert orders.read_order(orders.text_of(order)) == order


def test_an_order_to_run_holds_no_command_line() -> None:
    """Orders come over the network: what can be run is in the code, not in the order."""
    tool = '{"type": "Run", "number": 1, "tool": {"type": "Collective", "program": %s, "gpus": 8}}'
    assert isinstance(orders.read_order(tool % '"alltoall_perf"'), orders.Run)
    with pytest.raises(orders.OrderError):
        orders.read_order(tool % '"rm -rf /"')


@pytest.mark.parametrize("text", ["", "[]", '{"type": "Nothing"}', '{"type": "End"}'])
def test_notes_of_others_are_refused(text: str) -> None:
    with pytest.raises(orders.OrderError):
        orders.read_order(text)
