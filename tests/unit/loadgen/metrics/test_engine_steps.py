"""What the servers' own statistics say about the steps of their engines, beside what the client saw."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import msgspec
import pytest

from loadgen.findings.tokens import TokenTotals, explain_tokens, total
from loadgen.records.run import StageTotals, Workload
from loadgen.stats.percentiles import Pool
from tests.streamed_blocks import Chunks, streamed_arrays, streamed_block

ALONE = Workload(
    scenario="single", batch_size=1, concurrency=1, requests=1, seconds=1.0, max_seconds=2.0, rounds=4,
    prompt_tokens=32, output_tokens=4,
)  # fmt: skip
NAMES = {"a": "A", "b": "B"}
STEADY: Chunks = [(20.0, 1), (30.0, 1), (40.0, 1), (50.0, 1)]


def totals_of(stages: StageTotals | None) -> TokenTotals:
    """Three answers of 50 ms in a block."""
    block = streamed_block(ALONE, streamed_arrays([STEADY] * 3, 4))
    record = msgspec.structs.replace(block.record, stages=stages, window_start_ns=0, window_end_ns=150_000_000)
    totals = total([replace(block, record=record)])
    assert totals is not None
    return totals


def stages_of(executions: int, step_ns: int | None) -> StageTotals:
    return StageTotals(
        requests=3, items=3, executions=executions, queue_ns=0, compute_input_ns=0, compute_infer_ns=0,
        compute_output_ns=0, step_ns=step_ns,
    )  # fmt: skip


def test_the_steps_of_an_engine_are_counted_and_timed() -> None:
    totals = totals_of(stages_of(12, 120_000_000))
    assert (totals.steps, totals.step_ms) == (12, 10.0)
    assert totals.engine_share == pytest.approx(0.8)


def test_stalls_are_counted_also_where_only_a_part_of_the_gaps_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    stalled: Chunks = [(20.0, 1), (30.0, 1), (400.0, 1), (410.0, 1)]
    block = streamed_block(ALONE, streamed_arrays([STEADY, STEADY, STEADY, stalled] * 64, 4))
    monkeypatch.setattr("loadgen.findings.tokens.Pool", partial(Pool, 32))
    totals = total([block])
    assert totals is not None
    assert totals.stalled == pytest.approx(64, abs=8)


def test_an_open_loop_has_no_share_since_its_engine_also_waits_for_requests() -> None:
    block = streamed_block(ALONE, streamed_arrays([STEADY] * 3, 4))
    load = msgspec.structs.replace(ALONE, scenario="open", arrivals="poisson", rate_per_s=2.0)
    record = msgspec.structs.replace(block.record, stages=stages_of(12, 120_000_000))
    totals = total([replace(block, record=record, workload=load)])
    assert totals is not None
    assert (totals.step_ms, totals.engine_share) == (10.0, None)
    text = explain_tokens(totals, msgspec.structs.replace(totals, label="b"), {"a": 12.5, "b": 12.5}, NAMES, alike=True)
    assert text.count("a step of its engine 10.0 ms") == 2
    assert "÷" not in text


@pytest.mark.parametrize("stages", [None, stages_of(3, None), stages_of(0, 0)])
def test_a_server_without_steps_has_none(stages: StageTotals | None) -> None:
    totals = totals_of(stages)
    assert (totals.steps, totals.step_ms, totals.engine_share) == (None, None, None)


def test_the_time_of_a_token_is_divided_between_the_engine_and_the_rest() -> None:
    native = totals_of(stages_of(12, 120_000_000))
    triton = msgspec.structs.replace(totals_of(None), label="b")
    text = explain_tokens(native, triton, {"a": 12.5, "b": 15.0}, NAMES, alike=True)
    assert "A token of A takes 12.5 ms: a step of its engine 10.0 ms" in text
    assert "network and client 2.50 ms" in text
    assert "served ÷ engine is 0.80" in text
    assert "It runs the same engine as A, so the 2.50 ms more are of its serving layer" in text
    assert "same engine" not in explain_tokens(native, triton, {"a": 12.5, "b": 15.0}, NAMES, alike=False)
    assert "same engine" not in explain_tokens(native, triton, {"a": 12.5, "b": 11.0}, NAMES, alike=True)
    assert "whose step alone takes longer" in explain_tokens(native, triton, {"a": 12.5, "b": 9.0}, NAMES, alike=True)
    assert "whose step" not in explain_tokens(native, triton, {"a": 9.5, "b": 9.0}, NAMES, alike=True)
    assert explain_tokens(triton, triton, {"b": 15.0}, NAMES, alike=True) == ""


def test_a_token_may_take_less_than_a_mean_step_which_also_reads_prompts() -> None:
    native = totals_of(stages_of(12, 120_000_000))
    text = explain_tokens(native, native, {"a": 9.5}, NAMES, alike=True)
    assert "A token of A takes 9.50 ms: not more than a step of its engine, which takes 10.0 ms" in text
    assert "network and client" not in text


def test_steps_of_a_server_with_other_clients_are_not_shown() -> None:
    busy = msgspec.structs.replace(stages_of(12, 120_000_000), requests=9)
    assert totals_of(busy).steps is None
