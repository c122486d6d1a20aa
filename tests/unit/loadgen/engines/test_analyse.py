"""Estimates, winners and exclusions of an engine matrix with known latencies."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from loadgen.engines.analyse import analyse, cells_of, winners
from loadgen.records.matrix import Configuration, Matrix, Visit
from loadgen.records.run import RunState
from tests.unit.loadgen.engines.simulated_matrix import (
    ENVIRONMENT,
    FINISHED,
    ONNX,
    TORCH,
    configuration,
    matrix,
    per_item,
    plan,
    visits,
)

JAX = configuration("jax", "jit")
FAST = per_item({"onnxruntime": 1.5, "jax": 2.0})
SIMULATED = 300


def cell(analysed: Matrix, place: int, batch: int = 1) -> Any:
    return next(cell for cell in analysed.cells if (cell.configuration, cell.batch) == (place, batch))


def test_intervals_of_latency_and_speedup_cover_what_was_planted() -> None:
    """The spread of the mean of 300 intervals of 95 % is 1.3 percent points."""
    asked = plan(TORCH, ONNX, batches=(4,))
    latencies, speedups = [], []
    for seed in range(SIMULATED):
        analysed = matrix(asked, FAST, seed=seed)
        latencies.append(cell(analysed, 0, 4).latency_ns)
        speedups.append(cell(analysed, 1, 4).speedup)
    covered = [estimate.low <= 40e6 <= estimate.high for estimate in latencies]
    assert 0.91 <= np.mean(covered) <= 0.99
    assert 0.91 <= np.mean([estimate.low <= 1.5 <= estimate.high for estimate in speedups]) <= 0.99
    # Paired by round, the drift that the rounds share does not widen the interval.
    widths = [
        np.mean([math.log(estimate.high / estimate.low) for estimate in estimates])
        for estimates in (latencies, speedups)
    ]
    assert widths[1] < 0.75 * widths[0]


@pytest.mark.parametrize("count", [2, 3])
def test_identical_configurations_get_no_certain_winner(count: int) -> None:
    """Of two the chance is 5 %, which 300 matrices show within 1.3 percent points; without Holm's adjustment it would
    be 14 %."""
    asked = plan(*(TORCH, ONNX, JAX)[:count], batches=(1, 4, 16))
    certain = [
        any(winner.certain for winner in winners(asked, tuple(cells_of(asked, measured).values())))
        for measured in (visits(asked, per_item({}), seed=seed) for seed in range(SIMULATED))
    ]
    assert np.mean(certain) <= 0.08


def test_the_fastest_wins_with_its_ratio_to_the_next() -> None:
    analysed = matrix(plan(TORCH, ONNX, JAX), FAST)
    for winner in analysed.winners:
        assert (winner.configuration, winner.runner_up, winner.certain) == (2, 1, True)
        assert winner.ratio is not None
        assert winner.ratio.low is not None
        assert winner.ratio.low < 2.0 / 1.5 < (winner.ratio.high or 0.0)
    assert [(winner.batch, winner.length) for winner in analysed.winners] == [(1, None), (8, None)]


def test_a_winner_that_is_not_certain_says_over_which() -> None:
    """The slowest one, whose time in one round of three is almost the winner's."""

    def vary(configuration: Configuration, number: int, fields: dict[str, Any]) -> dict[str, Any]:
        if configuration.engine != "torch" or number != 1:
            return fields
        return fields | {"calls_ns": [round(0.55 * ns) for ns in fields["calls_ns"]]}

    asked = plan(TORCH, ONNX, JAX, batches=(8,), rounds=3)
    (winner,) = matrix(asked, FAST, change=vary).winners
    assert (winner.configuration, winner.runner_up, winner.certain, winner.unbeaten) == (2, 1, False, 0)
    (winner,) = matrix(asked, FAST).winners
    assert (winner.certain, winner.unbeaten) == (True, None)


def test_groups_are_not_mixed() -> None:
    two = configuration("onnxruntime", "session", threads=2)
    analysed = matrix(plan(TORCH, two, batches=(1,)), FAST)
    assert [
        (winner.threads, winner.configuration, winner.runner_up, winner.certain) for winner in analysed.winners
    ] == [
        (1, 0, None, False),
        (2, 1, None, False),
    ]
    assert cell(analysed, 1).speedup is None  # the baseline was not measured with two threads


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fault": "logits: relative error 0.5, above 0.001"}, "wrong answers: logits"),
        ({"cosine_min": 0.98}, "the lowest cosine to FP32 is 0.98, below the limit of 0.99"),
        ({"top1": 0.9}, "the lowest top-1 agreement with FP32 is 0.9, below the limit of 0.98"),
    ],
    ids=["wrong", "cosine", "top1"],
)
def test_what_is_wrong_in_one_round_never_wins(change: dict[str, Any], reason: str) -> None:
    def spoil(configuration: Configuration, number: int, fields: dict[str, Any]) -> dict[str, Any]:
        return fields | change if configuration.engine == "jax" and number == 3 else fields

    analysed = matrix(plan(TORCH, ONNX, JAX), FAST, change=spoil)
    assert {winner.configuration for winner in analysed.winners} == {1}
    assert {winner.runner_up for winner in analysed.winners} == {0}
    assert cell(analysed, 2).excluded.startswith(reason)
    assert (cell(analysed, 2).speedup is None) == ("fault" in change)
    assert not [result for result in analysed.break_even if result.configuration == 2]


def test_nothing_is_compared_with_a_baseline_whose_answers_are_wrong() -> None:
    def spoil(configuration: Configuration, number: int, fields: dict[str, Any]) -> dict[str, Any]:
        return fields | {"fault": "NaN"} if configuration.engine == "torch" else fields

    analysed = matrix(plan(TORCH, ONNX), FAST, change=spoil)
    assert all(cell.speedup is None for cell in analysed.cells)
    assert analysed.break_even == ()
    assert {winner.configuration for winner in analysed.winners} == {1}


def test_one_round_has_no_interval_and_no_certain_winner() -> None:
    analysed = matrix(plan(TORCH, ONNX, rounds=1), FAST)
    assert cell(analysed, 1).speedup.value == pytest.approx(1.5, rel=0.2)
    assert cell(analysed, 1).speedup.interval is None
    assert cell(analysed, 1).latency_ns.interval is None
    assert [winner.certain for winner in analysed.winners] == [False, False]


def test_an_interrupted_run_is_compared_over_the_rounds_that_two_cells_share() -> None:
    """The machine got twice as slow after the round that only the baseline finished."""
    asked = plan(TORCH, ONNX, rounds=3, batches=(1,))
    slow = [
        msgspec.structs.replace(
            visit,
            cells=tuple(
                msgspec.structs.replace(c, calls_ns=tuple(ns * (1 if visit.round == 0 else 2) for ns in c.calls_ns))
                for c in visit.cells
            ),
        )
        for visit in visits(asked, per_item({"onnxruntime": 1.2}))
        if (visit.round, visit.configuration) != (0, 1)
    ]
    analysed = analyse(asked, ENVIRONMENT, slow, RunState(state="interrupted", phase="measuring"))
    assert [each_cell.rounds for each_cell in analysed.cells] == [3, 2]
    assert cell(analysed, 1).speedup.value == pytest.approx(1.2, rel=0.1)
    assert [winner.configuration for winner in analysed.winners] == [1]


@pytest.mark.parametrize("state", [None, FINISHED])
def test_nothing_measured_is_an_empty_matrix(state: RunState | None) -> None:
    analysed = analyse(plan(TORCH, ONNX), ENVIRONMENT, [], state)
    assert (analysed.cells, analysed.winners, analysed.break_even) == ((), (), ())
    assert [configuration.load_seconds for configuration in analysed.configurations] == [None, None]


def test_a_failed_visit_is_kept_as_an_error() -> None:
    asked = plan(TORCH, ONNX, rounds=2)
    failed = Visit(round=1, configuration=1, started_at="2026-11-24T03:00:00Z", error="out of memory")
    kept = [visit for visit in visits(asked, FAST) if (visit.round, visit.configuration) != (1, 1)]
    analysed = analyse(asked, ENVIRONMENT, [*kept, failed], FINISHED)
    assert analysed.configurations[1].errors == ("round 1: out of memory",)
    assert cell(analysed, 1).rounds == 1


def test_a_cell_without_a_timed_call_is_an_error_of_its_configuration() -> None:
    def untimed(configuration: Configuration, number: int, fields: dict[str, Any]) -> dict[str, Any]:
        return (
            fields | {"calls_ns": (), "fault": "too large"}
            if fields["batch"] == 8 and configuration.engine != "torch"
            else fields
        )

    analysed = matrix(plan(TORCH, ONNX), FAST, change=untimed)
    assert analysed.configurations[1].errors == ("batch 8: too large",)
    assert [(cell.configuration, cell.batch) for cell in analysed.cells] == [(0, 1), (0, 8), (1, 1)]


def test_memory_is_the_largest_and_energy_the_mean_and_rates_come_from_the_latency() -> None:
    def change(configuration: Configuration, number: int, fields: dict[str, Any]) -> dict[str, Any]:
        memory = {"allocated_bytes": 100 + number, "rss_bytes": 1000 - number, "flops_per_item": 10**9}
        energy = {"energy_joules": 2.0 ** (number + 1), "energy_items": 16, "sustained_ns": sustained_ns}
        return fields | memory | energy

    sustained_ns = 10**8
    largest = cell(matrix(plan(TORCH, rounds=3), FAST, change=change), 0, 8)
    assert largest.sustained_ns.value == pytest.approx(1e8)
    assert (largest.allocated_bytes, largest.rss_bytes, largest.reserved_bytes) == (102, 1000, None)
    assert largest.joules_per_item.value == pytest.approx(0.25)
    assert largest.items_per_second.value == pytest.approx(8e9 / largest.latency_ns.value)
    assert largest.items_per_second.low == pytest.approx(8e9 / largest.latency_ns.high)
    assert largest.tflops == pytest.approx(8 * 1e9 / largest.latency_ns.value / 1e3)
    assert largest.p99_ns is None  # nine calls have no 99th percentile
    sustained_ns = 3 * 10**8  # three times as long as the latency: the device waited
    largest = cell(matrix(plan(TORCH, rounds=3), FAST, change=change), 0, 8)
    assert (largest.joules_per_item, largest.sustained_ns.value) == (None, pytest.approx(3e8))


@pytest.mark.parametrize(("device", "fastest", "value"), [("cuda:0", 1, 5.0), ("cpu", 0, 10.0)])
def test_on_a_gpu_executions_count_and_on_a_cpu_calls(device: str, fastest: int, value: float) -> None:
    """torch has the faster calls, because its copies are, and ONNX Runtime the faster executions."""

    def change(configuration: Configuration, number: int, fields: dict[str, Any]) -> dict[str, Any]:
        factor = 0.5 if configuration.engine == "onnxruntime" else 0.9
        return fields | {"executions_ns": tuple(int(factor * 1e7 * (1 + number / 1e6)) for _ in range(300))}

    threads = 1 if device == "cpu" else None
    asked = plan(
        *(
            configuration(*of, device=device, threads=threads)
            for of in (("torch", "eager"), ("onnxruntime", "session"))
        ),
        rounds=3,
        batches=(1,),
    )
    analysed = matrix(asked, per_item({"onnxruntime": 0.8}), noise=1e-4, change=change)
    (winner,) = analysed.winners
    assert winner.configuration == fastest
    of_fastest = cell(analysed, fastest, 1)
    assert of_fastest.latency_ns.value / 1e6 == pytest.approx(value, rel=0.1)
    assert of_fastest.call_ns.value / 1e6 == pytest.approx(10.0 if fastest == 0 else 12.5, rel=0.1)
    assert (of_fastest.p99_ns is None) == (device == "cpu")  # 900 executions, nine calls


def test_a_kept_process_has_one_first_call() -> None:
    def change(configuration: Configuration, number: int, fields: dict[str, Any]) -> dict[str, Any]:
        return fields | {"first_call_ns": 10**9 if number == 0 else 10**6}

    fresh = matrix(plan(TORCH), FAST, change=change)
    kept = matrix(plan(TORCH, processes="kept"), FAST, change=change)
    assert (cell(fresh, 0).first_call_seconds, cell(kept, 0).first_call_seconds) == (0.001, 1.0)
