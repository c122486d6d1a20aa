"""The metrics of streamed answers follow their definitions, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from loadgen.metrics.registry import (
    GOOD_SHARE,
    GOODPUT,
    METRICS,
    OUTPUT_TOKENS,
    TTFT,
    Metric,
    leading_metric,
    measured_answers,
    metrics_of,
)
from loadgen.metrics.summaries import figure_of, summarise_blocks, summarise_workload
from loadgen.metrics.tokens import with_tokens
from loadgen.records.run import TokenLimits, Workload
from loadgen.records.samples import Samples
from tests.streamed_blocks import Chunks, streamed_arrays, streamed_block


def load(users: int = 1, tokens: int = 4, limits: TokenLimits | None = None, rate: float | None = None) -> Workload:
    return Workload(
        scenario="open" if rate else "concurrent" if users > 1 else "single", batch_size=1, concurrency=users,
        requests=1, seconds=1.0, max_seconds=2.0, rounds=4, prompt_tokens=32, output_tokens=tokens, limits=limits,
        arrivals="poisson" if rate else "closed", rate_per_s=rate,
    )  # fmt: skip


def measured(name: str, answers: Sequence[Chunks], workload: Workload | None = None, **more: object) -> float | None:
    """A metric's figure of a block of these answers; the first answer of a user is not at full load."""
    workload = workload or load()
    assert workload.output_tokens is not None
    block = streamed_block(workload, streamed_arrays(answers, workload.output_tokens, **more))  # type: ignore[arg-type]
    (summary,) = summarise_blocks([block])
    figure = figure_of(summary, METRICS[name])
    whole = summarise_workload(workload.name, "a", [block], [summary])
    if METRICS[name].quantile is None:
        assert figure_of(whole, METRICS[name]) == pytest.approx(figure)
    return figure


def found(metric: Metric, samples: Samples, workload: Workload) -> tuple[float | None, str | None]:
    return metric.measure(samples, measured_answers(samples, is_open=workload.is_open), workload)


def reason(name: str, answers: Sequence[Chunks], workload: Workload | None = None) -> str | None:
    workload = workload or load()
    return found(METRICS[name], with_tokens(*streamed_arrays(answers, workload.output_tokens or 0)), workload)[1]


STEADY: Chunks = [(20.0, 1), (30.0, 1), (40.0, 1), (50.0, 1)]


def test_each_time_follows_its_formula() -> None:
    answers = [STEADY] * 3
    assert measured("ttft", answers) == pytest.approx(20.0)
    assert measured("tpot", answers) == pytest.approx(10.0)
    assert measured("output_tokens_per_s", answers) == pytest.approx(4 / 0.050)
    assert measured("input_tokens_per_s", answers) == pytest.approx(32 / 0.050)
    assert measured("tokens_per_chunk", answers) == 1.0
    assert measured("latency_mean", answers) == pytest.approx(50.0)


def test_tokens_of_the_first_chunk_take_no_time_after_it() -> None:
    """Eight tokens at once and one per 10 ms after them: TPOT is the server's pace, not (latency − TTFT)/(n − 1)."""
    prefilled: Chunks = [(20.0, 8), (30.0, 1), (40.0, 1)]
    assert measured("tpot", [prefilled] * 2, load(tokens=10)) == pytest.approx(10.0)


def test_chunks_of_four_tokens_keep_the_pace_and_change_the_gaps() -> None:
    by_four: Chunks = [(40.0 * chunk, 4) for chunk in range(1, 17)]
    alone: Chunks = [(40.0 + 10.0 * token, 1) for token in range(61)]
    for answers, tokens, chunk, gap in ((by_four, 64, 4.0, 40.0), (alone, 61, 1.0, 10.0)):
        workload = load(tokens=tokens)
        assert measured("tpot", [answers] * 40, workload) == pytest.approx(10.0)
        assert measured("tokens_per_chunk", [answers] * 40, workload) == chunk
        assert measured("gap_p99", [answers] * 40, workload) == pytest.approx(gap)
    assert measured("gap_p50", [by_four] * 40, load(tokens=64)) == 0.0, "three of four tokens come with another"


def test_the_gaps_of_an_answer_are_one_fewer_than_its_tokens() -> None:
    samples, events, answers = streamed_arrays([[(5.0, 3), (9.0, 2), (10.0, 1)], STEADY], 6)
    wide = with_tokens(samples, events, answers)
    assert wide["gaps_ms"][0].tolist() == [0.0, 0.0, 4.0, 0.0, 1.0]
    assert wide["gaps_ms"][1].tolist() == [10.0, 10.0, 10.0]
    assert wide["worst_gap_ms"].tolist() == [4.0, 10.0]


def test_the_worst_gap_shows_a_stall_that_the_mean_hides() -> None:
    stalled: Chunks = [(20.0 + 10.0 * token + (300.0 if token > 30 else 0.0), 1) for token in range(64)]
    smooth: Chunks = [(20.0 + 10.0 * token, 1) for token in range(64)]
    answers = [stalled if number % 5 == 4 else smooth for number in range(80)]
    worst, pace = measured("worst_gap_p90", answers, load(tokens=64)), measured("tpot", answers, load(tokens=64))
    assert worst == pytest.approx(310.0)
    assert pace == pytest.approx(11.0, abs=0.1)


AT_ONCE: Chunks = [(50.0, 4)]


@pytest.mark.parametrize("name", ["ttft", "ttft_p50", "tpot", "worst_gap_p90", "gap_p50"])
def test_answers_in_one_piece_say_nothing_of_their_tokens(name: str) -> None:
    assert measured(name, [AT_ONCE] * 80) is None
    assert measured(name, [AT_ONCE, STEADY] * 80) is None, "the others are another kind of answer"
    assert reason(name, [AT_ONCE, STEADY] * 80) is not None
    few = [AT_ONCE, *[STEADY] * 79]
    assert measured(name, few) == measured(name, [STEADY] * 79), "a read or two that joins all is left out"
    assert reason(name, few) is None
    assert measured("output_tokens_per_s", [AT_ONCE] * 3) == pytest.approx(80.0)
    assert measured("answer_time", [AT_ONCE] * 3) == pytest.approx(50.0)


@pytest.mark.parametrize("name", ["ttft", "tpot", "worst_gap_p90", "gap_p50"])
def test_tokens_that_somebody_holds_back_have_no_times(name: str) -> None:
    """A proxy joins the first events of most answers; a late client those of a few, which count with their read."""
    samples, events, answers = streamed_arrays([STEADY] * 80, 4)
    firsts = np.flatnonzero(np.diff(events["sample"].astype(np.int64), prepend=-1))
    for joined, is_known in ((firsts[:30], True), (firsts[:60], False)):
        events["events"] = 1
        events["events"][joined] = 3
        wide = with_tokens(samples, events, answers)
        assert (found(METRICS[name], wide, load())[0] is not None) == is_known
        assert (found(METRICS[name], wide, load())[1] is None) == is_known


def test_answers_of_one_token_have_a_first_token_and_no_pace() -> None:
    assert measured("ttft", [[(50.0, 1)]] * 3, load(tokens=1)) == pytest.approx(50.0)
    assert measured("tpot", [[(50.0, 1)]] * 3, load(tokens=1)) is None
    assert reason("tpot", [[(50.0, 1)]] * 3, load(tokens=1)) != reason("tpot", [AT_ONCE] * 3)


def test_tokens_that_were_not_streamed_leave_the_pace_unknown() -> None:
    samples, events, answers = streamed_arrays([STEADY] * 8, 4)
    answers["hidden_tokens"][:4] = 2
    wide = with_tokens(samples, events, answers)
    assert found(METRICS["tpot"], wide, load())[0] is None
    assert found(METRICS["tpot"], wide, load())[1] is not None
    assert found(TTFT, wide, load())[0] == pytest.approx(20.0), "of the visible answer"


def test_what_the_first_read_brought_took_no_time_after_it() -> None:
    """Eight tokens are held back and come at once; the pace of the others is the same."""
    held = [(90.0, 8), *((90.0 + 10.0 * token, 1) for token in range(1, 57))]
    assert measured("tpot", [held] * 3, load(tokens=64)) == pytest.approx(10.0)
    assert measured("ttft", [held] * 3, load(tokens=64)) == pytest.approx(90.0)


def test_failed_answers_take_time_and_have_no_tokens() -> None:
    answers: list[Chunks] = [STEADY, STEADY, [], STEADY]
    assert measured("output_tokens_per_s", answers) == pytest.approx(8 / 0.101)
    assert measured("ttft", answers) == pytest.approx(20.0)


def test_goodput_counts_only_whole_answers_within_every_limit() -> None:
    """Of four answers one is late, one short and one has failed; the rate is that at which requests fall due."""
    late: Chunks = [(900.0, 1), (910.0, 1), (920.0, 1), (930.0, 1)]
    answers: list[Chunks] = [STEADY, late, [(20.0, 1), (30.0, 1)], []]
    workload = load(limits=TokenLimits(ttft_ms=200.0, tpot_ms=50.0), rate=10.0, users=64)
    due_ms = [0.0, 100.0, 200.0, 300.0]
    assert measured("goodput", answers, workload, due_ms=due_ms) == pytest.approx(2.5)
    assert measured("good_share", answers, workload, due_ms=due_ms) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("limits", "share"),
    [
        (TokenLimits(ttft_ms=19.0), None),
        (TokenLimits(ttft_ms=20.0), 1.0),
        (TokenLimits(tpot_ms=9.9), None),
        (TokenLimits(gap_ms=9.9), None),
        (TokenLimits(gap_ms=10.0, tpot_ms=10.0), 1.0),
    ],
)
def test_every_limit_bounds_goodput(limits: TokenLimits, share: float | None) -> None:
    workload = load(limits=limits, rate=10.0, users=64)
    found = measured("good_share", [STEADY] * 3, workload, due_ms=[0.0, 100.0, 200.0])
    assert (found or None) == share


def test_requests_that_could_not_be_sent_are_not_good() -> None:
    workload = load(limits=TokenLimits(ttft_ms=100.0), rate=10.0, users=64)
    wide = with_tokens(*streamed_arrays([STEADY] * 3, 4, due_ms=[0.0, 100.0, 200.0]), due=6)
    assert found(GOODPUT, wide, workload)[0] == pytest.approx(5.0)
    assert found(GOOD_SHARE, wide, workload)[0] == pytest.approx(0.5)


def test_a_closed_loop_has_goodput_too() -> None:
    workload = load(limits=TokenLimits(ttft_ms=100.0))
    assert measured("goodput", [STEADY] * 3, workload) == pytest.approx(1 / 0.050)


def test_the_metric_that_leads_fits_the_load() -> None:
    limits = TokenLimits(ttft_ms=200.0)
    assert leading_metric(load()) is METRICS["answer_time"]
    assert leading_metric(load(users=16)) is OUTPUT_TOKENS
    assert leading_metric(load(rate=20.0, users=64, limits=limits)) is GOODPUT
    assert leading_metric(load(rate=20.0, users=64)) is METRICS["ttft_p90"]
    assert leading_metric(load(rate=0.5, users=64)) is TTFT
    for workload in (load(), load(users=16), load(rate=20.0, users=64, limits=limits), load(rate=20.0, users=64)):
        compared = metrics_of(workload)
        assert leading_metric(workload) in compared
        assert not {"throughput", "latency_p50", "latency_p99"} & {metric.name for metric in compared}


def test_other_models_have_none_of_these_metrics() -> None:
    images = Workload(
        scenario="concurrent", batch_size=1, concurrency=4, requests=1, seconds=1.0, max_seconds=2.0, rounds=4
    )
    assert [metric.name for metric in metrics_of(images)] == ["throughput", "latency_p50", "latency_p90", "latency_p99"]
    measured_names = {metric.name for metric in METRICS.values() if metric.measures(images)}
    assert not {name for name in measured_names if "token" in name or "ttft" in name or "gap" in name}


def test_damaged_chunks_are_refused() -> None:
    samples, events, answers = streamed_arrays([STEADY] * 2, 4)
    foreign = events.copy()
    foreign["sample"] = 7
    with pytest.raises(ValueError, match="request 7 of 2"):
        with_tokens(samples, foreign, answers)
    huge = events.copy()
    huge["tokens"] = 2**31
    with pytest.raises(ValueError, match="hold"):
        with_tokens(samples, huge, answers)
    with pytest.raises(ValueError, match="stand together"):
        with_tokens(samples, events[np.argsort(events["at_ns"] % 20_000_000, kind="stable")], answers)


def test_a_block_without_chunks_has_no_figures() -> None:
    samples, events, answers = streamed_arrays([[], []], 4)
    wide = with_tokens(samples, events[:0], answers)
    assert found(TTFT, wide, load())[0] is None
    assert found(OUTPUT_TOKENS, wide, load())[0] is None
