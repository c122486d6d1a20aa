"""What a run shows while it goes on: the figures of the end, early; on a terminal and in a log."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from itertools import groupby

import msgspec
import numpy as np
import pytest
from rich.console import Console

from loadgen.base.quantities import number
from loadgen.measure.progress import LiveRatio, LiveRatios
from loadgen.metrics.summaries import BlockSummary, summarise_blocks
from loadgen.records.probes import ServerStart
from loadgen.records.samples import SAMPLE_DTYPE, Samples
from loadgen.records.store import StoredRun, read_run
from loadgen.report.progress import FIXED, WITHIN, RichProgress, ratio_table, round_line, track_of
from loadgen.verdict.result import analyse
from tests.golden.synthetic_run import Plan, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> StoredRun:
    return read_run(write_run(tmp_path_factory.mktemp("run"), Plan(pairs=3, requests=60)))


def summaries(run: StoredRun) -> tuple[BlockSummary, ...]:
    return summarise_blocks(run.blocks)


def test_after_the_last_pair_it_shows_what_the_result_says(run: StoredRun) -> None:
    live = LiveRatios(run.experiment)
    completed = [live.add(summary) for summary in summaries(run)]
    assert [len(ratios) for ratios in completed] == [0, 1] * (len(completed) // 2)
    final = {c.workload: c for c in analyse(run.directory).comparisons if c.leading}
    assert [ratio.workload for ratio in live.latest] == [workload.name for workload in run.experiment.workloads[1:]]
    for ratio in live.latest:
        assert (ratio.ratio, ratio.ci95) == (final[ratio.workload].ratio, final[ratio.workload].ci95)
        assert (ratio.pairs, ratio.planned) == (3, 3)


def test_one_pair_has_a_ratio_and_no_interval(run: StoredRun) -> None:
    live = LiveRatios(run.experiment)
    single = [summary for summary in summaries(run) if summary.workload == "single" and summary.round == 0]
    (first,) = [live.add(summary) for summary in single][-1]
    assert first.ratio is not None
    assert first.ci95 is None
    assert "one pair shows no spread" in str(first.reason)
    line = round_line(1, [first])
    assert line.startswith("round 1 of 3: single throughput B ")
    assert line.endswith("×")


def first_pair(run: StoredRun, workload: str) -> LiveRatio:
    live = LiveRatios(run.experiment)
    blocks = [block for block in run.blocks if (block.record.workload, block.record.round) == (workload, 0)]
    return [live.add(summary, block) for block, summary in zip(blocks, summarise_blocks(blocks), strict=True)][-1][0]


@pytest.mark.parametrize("workload", ["single", "concurrent(16)"])
def test_a_first_pair_has_a_range_within_its_blocks(run: StoredRun, workload: str) -> None:
    first = first_pair(run, workload)
    assert first.ratio is not None
    assert (first.pairs, first.ci95) == (1, None)
    assert first.within is not None
    low, high = first.within
    assert low < first.ratio < high
    line = round_line(1, [first], {"a": "FastAPI", "b": "Triton"})
    assert f"{workload} throughput Triton " in line
    assert line.endswith(f" {WITHIN})")
    assert WITHIN in "".join(str(cell) for column in ratio_table([first], 120).columns for cell in column.cells)
    assert "┄" in track_of(first, 21, math.log(2.0)).plain


def test_the_range_of_a_first_pair_holds_the_ratio_of_steady_servers(run: StoredRun) -> None:
    """Of two servers whose requests vary and whose blocks do not differ otherwise; B is 1.25 times as fast."""
    random, held = np.random.default_rng(0), 0
    pair = [block for block in run.blocks if (block.record.workload, block.record.round) == ("concurrent(16)", 0)]
    mean_ms = {"a": 10.0, "b": 8.0}
    for _ in range(200):
        live = LiveRatios(run.experiment)
        blocks = [replace(block, stored=closed_loop(random, mean_ms[block.record.label])) for block in pair]
        ratios = [live.add(summary, block) for block, summary in zip(blocks, summarise_blocks(blocks), strict=True)]
        assert ratios[-1][0].within is not None
        low, high = ratios[-1][0].within
        held += low <= 1.25 <= high
    assert held >= 180  # about 190 in the long run


def closed_loop(random: np.random.Generator, mean_ms: float, users: int = 16, requests: int = 12) -> Samples:
    """A block whose users send one request after the other."""
    ends = np.cumsum(random.gamma(4.0, mean_ms / 4.0, (users, requests)) * 1e6, axis=1).astype(np.int64)
    samples = np.zeros(users * requests, dtype=SAMPLE_DTYPE)
    samples["user"], samples["end_ns"] = np.repeat(np.arange(users), requests), ends.ravel()
    samples["intended_ns"] = samples["send_ns"] = np.column_stack((np.zeros(users, np.int64), ends[:, :-1])).ravel()
    samples["batch"], samples["error"] = 1, -1
    return samples


def test_a_block_that_cannot_be_read_or_is_of_no_workload_is_left_out(run: StoredRun) -> None:
    live = LiveRatios(run.experiment)
    stored = [block for block in run.blocks if block.record.workload == "single" and block.record.round == 0]
    known, other = summarise_blocks(stored)
    (unread,) = summarise_blocks([replace(stored[0], stored=None, problem="its samples are gone")])
    assert live.add(msgspec.structs.replace(known, workload="surface(1)")) == []
    assert live.add(msgspec.structs.replace(known, complete=False)) == []
    assert live.add(unread) == []
    assert live.add(other) == [], "alone, it is no pair"
    (standing,) = live.add(known)
    assert standing.pairs == 1


def test_the_track_puts_one_in_the_middle_and_keeps_to_its_width() -> None:
    def line(ratio: float | None, ci95: tuple[float, float] | None) -> str:
        live_ratio = LiveRatio(2, ratio, ci95, workload="single", baseline="a", arm="b", metric="throughput", planned=4)
        return track_of(live_ratio, 21, math.log(2.0)).plain

    assert line(None, None) == " " * 10 + "│" + " " * 10
    assert line(1.0, (0.9, 1.1)).strip().strip("─") == "●"
    assert line(1.0, (0.9, 1.1)).index("●") == 10
    assert line(2.0, (1.5, 1000.0))[-1] == "●"
    assert line(0.5, (0.001, 0.7))[0] == "●"
    assert "┼" in line(1.2, (0.8, 1.8))
    assert len(line(1e9, (1e-9, 1e9))) == 21


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_keeps_the_table_and_a_log_has_a_line_per_round(run: StoredRun, width: int) -> None:
    shown, logged = io.StringIO(), io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=width, color_system=None)
    for console in (terminal, Console(file=logged, width=width)):
        with RichProgress(console, LiveRatios(run.experiment)) as progress:
            progress.inputs_ready({"kind": "photographs", "item": "image", "count": 18})
            progress.phase("load")
            for block, summary in zip(run.blocks, summaries(run), strict=True):
                progress.now(f"block {block.record.index + 1}: {block.record.label} {block.record.workload}")
                progress.block_done(block, summary)
            progress.phase("stopping the servers")
    assert FIXED in shown.getvalue()
    assert "95 % interval" in shown.getvalue()
    table = io.StringIO()
    live = LiveRatios(run.experiment)
    for summary in summaries(run):
        live.add(summary)
    Console(file=table, width=width).print(ratio_table(live.latest, width))
    assert max(len(line.rstrip()) for line in table.getvalue().splitlines()) <= width
    assert "…" not in table.getvalue()
    lines = [line.split() for line in logged.getvalue().splitlines()]
    rounds = [line for line in lines if line[0] == "round"]
    runs = [key for key, _ in groupby(block.record.round for block in run.blocks)]
    assert [line[1:4] for line in rounds] == [[str(place + 1), "of", "3:"] for place in runs]
    for workload in run.experiment.workloads[1:]:
        assert sum(workload.name in line for line in rounds) == 3
    assert len(lines) == len(rounds) + 3, "besides the rounds, the inputs and two phases"


def test_a_log_has_the_first_ratio_at_once_and_the_rest_of_its_round_in_one_line(run: StoredRun) -> None:
    logged = io.StringIO()
    told = []
    first_round = [(b, s) for b, s in zip(run.blocks, summaries(run), strict=True) if b.record.round == 0]
    with RichProgress(Console(file=logged, width=120), LiveRatios(run.experiment)) as progress:
        for block, summary in first_round:
            progress.block_done(block, summary)
            told.append(logged.getvalue().count("round 1 of 3"))
    assert told[:2] == [0, 1]
    assert set(told[2:]) == {1}
    assert logged.getvalue().count("round 1 of 3") == 2


def test_a_log_names_a_block_with_errors(run: StoredRun) -> None:
    logged = io.StringIO()
    with RichProgress(Console(file=logged, width=120), LiveRatios(run.experiment)) as progress:
        block, summary = run.blocks[0], summaries(run)[0]
        progress.block_done(replace(block, record=msgspec.structs.replace(block.record, errors=2)), summary)
    assert "2 errors" in logged.getvalue()


def test_the_speed_of_a_block_is_that_of_the_result(run: StoredRun) -> None:
    """Its window includes the cool-down, whose requests are not among those counted, so counting them over it showed
    up to a quarter too little."""
    block = next(block for block in run.blocks if block.record.workload == "concurrent(16)")
    (summary,) = summarise_blocks([block])
    logged = io.StringIO()
    with RichProgress(Console(file=logged, width=120)) as progress:
        progress.block_done(block, summary)
        cool_down_ns = (block.record.window_end_ns - block.record.window_start_ns) // 3
        longer = msgspec.structs.replace(block.record, window_end_ns=block.record.window_end_ns + cool_down_ns)
        progress.block_done(replace(block, record=longer), summary)
    first, second = logged.getvalue().splitlines()
    assert first == second
    assert summary.throughput_per_s is not None
    p50_ms = summary.latency_ms("p50")
    assert p50_ms is not None
    assert f"{number(summary.throughput_per_s)} " in first
    assert f"p50 {number(p50_ms):>8} ms" in first


def test_ratios_that_fail_do_not_end_the_run(run: StoredRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: LiveRatios, summary: object, block: object) -> object:
        raise KeyError(summary)

    monkeypatch.setattr(LiveRatios, "add", fail)
    logged = io.StringIO()
    with RichProgress(Console(file=logged, width=120), LiveRatios(run.experiment)) as progress:
        for block, summary in zip(run.blocks, summaries(run), strict=True):
            progress.block_done(block, summary)
    assert logged.getvalue().count("no ratios during this run (KeyError") == 1


def test_what_is_said_breaks_between_words_on_a_terminal_and_not_at_all_in_a_log() -> None:
    words = " ".join(f"word{number}" for number in range(40))
    failed = ServerStart(label="a", repetition=0, live_ns=None, ready_ns=None, first_answer_ns=None, error=words)
    for terminal in (True, False):
        shown = io.StringIO()
        console = Console(file=shown, force_terminal=terminal, width=80, color_system=None)
        RichProgress(console).cold_start_done(failed)
        lines = shown.getvalue().splitlines()
        assert (len(lines) > 3) == terminal
        assert all(line.startswith("       ") for line in lines)
        assert " ".join(shown.getvalue().split()) == f"A did not start: {words}"
