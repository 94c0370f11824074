"""The pure parts of the bench: where blocks lie, what is expected, how the flags are read."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from efa_kv.tools import bench, bench_flags, bench_memory, gflags, probe
from efa_kv.tools.bench_load import (
    MAX_BATCHES,
    Load,
    Pattern,
    pattern_bytes,
    percentile_us,
    size_bytes,
)
from efa_kv.tools.bench_run import Batch, expected

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(pattern: Pattern, **changes: int) -> Load:
    sizes = {"block_size_bytes": 96, "batch_size": 16, "in_flight": 3, **changes}
    return Load(pattern=pattern, **sizes)


def application(command: object) -> typer.Typer:
    app = typer.Typer()
    app.command("one")(command)
    app.command("other")(lambda: None)
    return app


@pytest.mark.parametrize("pattern", list(Pattern))
def test_no_two_blocks_share_a_byte(pattern: Pattern) -> None:
    one = load(pattern)
    for side in (0, 1):
        places = np.concatenate([one.offsets(batch)[side] for batch in range(8)])
        assert len(set(places.tolist())) == 8 * one.batch_size
        assert np.diff(np.sort(places)).min() >= one.block_size_bytes
        assert places.max() + one.block_size_bytes <= 8 * one.batch_span_bytes


@pytest.mark.parametrize("place", [0, 7, bench_memory.PIECE_BYTES + 3])
def test_the_first_byte_that_came_back_wrong_is_named(place: int) -> None:
    length = bench_memory.PIECE_BYTES + 8
    sent, back = bench_memory.HostBuffer(length), bench_memory.HostBuffer(length)
    for buffer in (sent, back):
        bench_memory.fill(buffer, 5)
    assert bench_memory.difference(sent, back, length) == ""
    back.put(place, sent.get(place, 1) ^ 1)
    words = bench_memory.difference(sent, back, length)
    assert words == f"byte {place} of {length} came back wrong"
    assert bench_memory.difference(sent, back, place) == ""


def test_scattered_blocks_have_no_neighbour_and_contiguous_ones_are_a_run() -> None:
    scattered, _ = load(Pattern.SCATTERED).offsets(2)
    assert np.diff(np.sort(scattered)).min() >= 2 * 96
    here, there = load(Pattern.CONTIGUOUS).offsets(2)
    assert np.diff(here).tolist() == [96] * 15
    assert here.tolist() == there.tolist()


def test_the_sides_are_shuffled_apart_and_the_same_again() -> None:
    one = load(Pattern.SCATTERED)
    here, there = one.offsets(0)
    assert here.tolist() != there.tolist()
    assert [side.tolist() for side in one.offsets(0)] == [here.tolist(), there.tolist()]


def test_batches_fill_the_buffer_and_no_more() -> None:
    one = load(Pattern.CONTIGUOUS)
    assert one.batch_count(10 * one.batch_span_bytes + 5) == 10
    assert one.batch_count(10_000 * one.batch_span_bytes) == MAX_BATCHES
    assert one.least_buffer_bytes == 3 * one.batch_span_bytes


def test_the_text_does_not_depend_on_how_it_is_cut() -> None:
    whole = pattern_bytes(5, 0, 1000)
    assert np.array_equal(pattern_bytes(5, 13, 500), whole[13:513])
    assert not np.array_equal(pattern_bytes(6, 0, 1000), whole)


def test_no_block_of_the_text_equals_another() -> None:
    blocks = pattern_bytes(1, 0, 1 << 20).reshape(-1, 64)
    assert len(np.unique(blocks, axis=0)) == len(blocks)


@pytest.mark.parametrize("pattern", list(Pattern))
@pytest.mark.parametrize("ground", [9, None])
def test_what_is_expected_is_what_a_plain_copy_gives(pattern: Pattern, ground: int | None) -> None:
    one = load(pattern)
    here, there = one.offsets(2)
    batch = Batch(0, 2, here, there, np.full(16, 96, np.uint64))
    end = 3 * one.batch_span_bytes
    source = pattern_bytes(4, 0, end)
    result = np.zeros(end, np.uint8) if ground is None else pattern_bytes(ground, 0, end).copy()
    # A write goes from the local to the remote places, a read the other way.
    moves = zip(here, there, strict=True) if ground is not None else zip(there, here, strict=True)
    for origin, place in moves:
        result[int(place) : int(place) + 96] = source[int(origin) : int(origin) + 96]
    assert np.array_equal(expected(one, batch, 4, ground), result[2 * one.batch_span_bytes :])


def test_percentiles_are_values_that_were_measured() -> None:
    durations = [index / 1e6 for index in range(1, 101)]
    assert percentile_us(durations, 0.5) == pytest.approx(50)
    assert percentile_us(durations, 0.99) == pytest.approx(99)
    assert percentile_us([3e-6], 0.99) == pytest.approx(3)
    assert percentile_us([], 0.5) == 0


@pytest.mark.parametrize(
    ("text", "size"), [("65536", 65536), ("64K", 65536), ("1MiB", 1 << 20), ("2gb", 2 << 30)]
)
def test_sizes(text: str, size: int) -> None:
    assert size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "K", "12x", "1.5M"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        size_bytes(text)


def test_switches_take_the_words_of_gflags() -> None:
    assert [gflags.switch(word) for word in ("true", "1", "Yes")] == [True] * 3
    assert [gflags.switch(word) for word in ("false", "0", "off")] == [False] * 3
    with pytest.raises(typer.BadParameter):
        gflags.switch("maybe")


def test_buffers_begin_on_a_page_and_take_pieces() -> None:
    buffer = bench_memory.HostBuffer(10_000)
    assert buffer.address % 4096 == 0
    bench_memory.fill(buffer, 3)
    assert np.array_equal(buffer.get(0, 10_000), pattern_bytes(3, 0, 10_000))
    bench_memory.fill(buffer, None)
    assert not buffer.get(0, 10_000).any()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "segment-id"),
        (["--loopback", "--segment_id=a:1"], "not both"),
        (["--loopback", "--metadata_server=etcd:2379"], "P2PHANDSHAKE"),
        (["--loopback", "--block_size=none"], "--block-size"),
        (["--loopback", "--duration=0"], "--duration"),
        (["--loopback", "--report_unit=furlongs"], "report-unit"),
        (["--loopback", "--protocol=nonsense"], "protocol"),
        (["--loopback", "--mode=target"], "starts both sides"),
    ],
)
def test_the_bench_says_why_it_cannot_run(arguments: list[str], words: str) -> None:
    arguments = ["one", "--use_vram=false", *arguments]
    result = CliRunner().invoke(application(bench.command), arguments)
    assert result.exit_code == 2, result.output
    assert words in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "segment-id"),
        (["--loopback", "--xfer_size=2G"], "xfer-size"),
        (["--loopback", "--metadata_server=etcd:2379"], "P2PHANDSHAKE"),
    ],
)
def test_the_probe_says_why_it_cannot_run(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(application(probe.command), ["one", *arguments])
    assert result.exit_code == 2, result.output
    assert words in result.output


def test_every_flag_has_both_spellings() -> None:
    for command in (bench.command, probe.command):
        options = typer.main.get_command(application(command)).commands["one"].params
        names = {name for option in options for name in option.opts}
        for name in names:
            if name.count("-") > 2 and name not in bench_flags.OWN_FLAGS:
                assert "--" + name[2:].replace("-", "_") in names


def test_the_flags_of_transfer_engine_bench_are_all_there() -> None:
    options = typer.main.get_command(application(bench.command)).commands["one"].params
    names = {name for option in options for name in option.opts}
    wanted = (
        "mode protocol metadata_server segment_id operation block_size batch_size threads "
        "buffer_size duration report_unit use_vram gpu_id init_mem auto_discovery"
    )
    assert {f"--{word}" for word in wanted.split()} <= names


class TestComparison:
    """The scripts in benchmarks/, which are no package."""

    @pytest.fixture(autouse=True)
    def _scripts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        known = set(sys.modules)
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        yield
        for name in set(sys.modules) - known:
            if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]

    @pytest.mark.parametrize("pattern", list(Pattern))
    def test_peers_move_the_same_blocks(self, pattern: Pattern) -> None:
        import workload

        ours = load(pattern, in_flight=2)
        theirs = workload.Load("write", 96, 16, 2, pattern.value, 1 << 16, 1.0)
        assert theirs.batch_span_bytes == ours.batch_span_bytes
        assert theirs.batch_count == ours.batch_count(1 << 16)
        for batch in range(3):
            for mine, other in zip(ours.offsets(batch), theirs.offsets(batch), strict=True):
                assert mine.tolist() == other.tolist()

    def test_ratios_are_taken_within_a_round_and_against_the_best(self) -> None:
        import summary

        def sample(rate: float) -> dict:
            return {"bytes_per_second": rate}

        rounds = [
            {"us": sample(6), "a": sample(2), "b": sample(3)},
            {"us": sample(8), "a": sample(4)},
            {"us": sample(8)},
        ]
        assert summary.ratios(rounds, "us", ("a", "b"), "bytes_per_second") == [2.0, 2.0]
        assert summary.best_rival(rounds, ("a", "b"), "bytes_per_second") in ("a", "b")

    def test_the_document_is_made_from_samples(self, tmp_path: Path) -> None:
        import report
        from plan import BARS

        bar = next(bar for bar in BARS if bar.name == "tcp-peers")
        sample = {
            "bytes_per_second": 3e9,
            "descriptors_per_second": 1e5,
            "descriptors": 1000,
            "bytes": 1 << 20,
            "cpu_seconds": 0.5,
            "target_cpu_seconds": 0.25,
            "memory_bytes": 1 << 20,
        }
        rival = {**sample, "bytes_per_second": 1e9}
        cells = [[{bar.ours: sample, bar.rivals[0]: rival}] for _ in bar.cells]
        data = {
            "bars": {bar.name: {"missing": {bar.rivals[1]: "not installed"}, "cells": cells}},
            "special": {"idle": {"missing": "no reason"}},
            "machine": {"cores": "2"},
            "when": "today",
            "rounds": 1,
            "seconds": 1.0,
        }
        report.write(data, tmp_path / "benchmarks.md")
        text = (tmp_path / "benchmarks.md").read_text()
        assert "3.00 (3.00 to 3.00)" in text
        assert "not installed" in text
        assert text.count("reached") == len(bar.cells)
        assert "<svg" in (tmp_path / "benchmarks.svg").read_text()
        assert all(line.startswith("reached") for line in report.verdicts(data))

    def test_every_bar_names_contenders_that_exist(self) -> None:
        from contenders import CONTENDERS
        from plan import BARS

        for bar in BARS:
            assert set(bar.contenders) <= set(CONTENDERS)
            assert bar.cells
