"""From the ratios of a probe's rounds to whether an arm is slow, and which loads a probe has."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.findings.handicap import MIN_ROUNDS, ArmTuning, HandicapRecord, HandicapsFound, estimate
from loadgen.measure.probes.handicap import ROUNDS, probe_loads
from loadgen.records.probes import ServerStart
from loadgen.records.run import Workload
from loadgen.verdict.result import analyse
from tests.golden.synthetic_run import Plan, write_run

MARGIN = 0.05
RUNS = 2000


def load(scenario: str = "concurrent", batch_size: int = 1, concurrency: int = 1, **more: object) -> Workload:
    fields: dict[str, object] = {"requests": 1, "seconds": 9.0, "max_seconds": 99.0, "rounds": 4, **more}
    return Workload(scenario=scenario, batch_size=batch_size, concurrency=concurrency, **fields)  # type: ignore[arg-type]


def decision(ratios: np.ndarray) -> bool | None:
    """What a probe concludes that ends once it decides, as the measurement does."""
    for count in range(MIN_ROUNDS, len(ratios) + 1):
        interval = estimate(list(ratios[:count]))
        assert interval is not None
        if (slower := interval.slower(MARGIN)) is not None:
            return slower
    return None


@pytest.mark.parametrize("spread", [0.01, 0.05, 0.2])
def test_identical_servers_are_rarely_called_slow_however_noisy_the_machine(spread: float) -> None:
    """Two loads of two arms per run: at 0.2 % each, fewer than one run in a hundred."""
    random = np.random.default_rng(7)
    called = sum(decision(np.exp(random.normal(0.0, spread, ROUNDS))) is True for _ in range(RUNS))
    assert called <= 0.002 * RUNS


@pytest.mark.parametrize(("ratio", "spread"), [(1.3, 0.05), (1.8, 0.2), (6.0, 0.5)])
def test_a_server_that_is_slow_is_found(ratio: float, spread: float) -> None:
    random = np.random.default_rng(7)
    called_slow = sum(decision(ratio * np.exp(random.normal(0.0, spread, ROUNDS))) is True for _ in range(RUNS))
    assert called_slow >= 0.95 * RUNS


@given(st.lists(st.floats(0.01, 100.0), max_size=12))
def test_too_few_rounds_decide_nothing_and_intervals_hold_their_ratio(ratios: list[float]) -> None:
    interval = estimate(ratios)
    assert (interval is None) == (len(ratios) < MIN_ROUNDS)
    if interval is not None:
        assert interval.low <= interval.ratio * (1 + 1e-9)
        assert interval.high >= interval.ratio * (1 - 1e-9)


@pytest.mark.parametrize(("tuned_s", "slow"), [(4.0, True), (2.0, False)])
def test_a_setting_that_slows_the_start_is_found_by_starts_without_it(
    tmp_path: Path, tuned_s: float, slow: bool
) -> None:
    write_run(tmp_path, Plan(pairs=4))
    arms = [ArmTuning(label=label, settings={"graphs": "all"} if label == "a" else {}) for label in "ab"]
    (tmp_path / HandicapRecord.FILE).write_bytes(msgspec.json.encode(HandicapRecord(arms=tuple(arms))))
    starts = [
        ServerStart(
            label="a", repetition=repetition, live_ns=1, first_answer_ns=9 * 10**9, plain=plain,
            ready_ns=int((2.0 if plain else tuned_s) * (1.0 + 0.002 * repetition * plain) * 1e9),
        )
        for repetition in range(4)
        for plain in (False, True)
    ]  # fmt: skip
    path = tmp_path / ServerStart.FILE
    others = [start for start in msgspec.json.decode(path.read_bytes()) if start["label"] == "b"]
    path.write_bytes(msgspec.json.encode([*others, *starts]))
    result = analyse(tmp_path)
    (of_start,) = result.of(HandicapsFound).loads
    assert (of_start.load, of_start.slower) == ("cold-start", slow)
    failed = [check.scope for check in result.checks if check.name == "handicap" and check.ok is False]
    assert failed == (["workload cold-start"] if slow else [])


def test_a_probe_has_one_user_and_the_largest_load() -> None:
    lone, largest = probe_loads([load("single"), load("batched", 32), load(concurrency=16), load(concurrency=64)])
    assert (lone.concurrency, lone.batch_size) == (1, 1)
    assert (largest.concurrency, largest.batch_size) == (64, 1)
    assert {lone.rounds, largest.rounds} == {ROUNDS}
    assert largest.requests >= 2 * largest.concurrency


def test_one_user_is_enough_for_a_comparison_of_one_user() -> None:
    (lone,) = probe_loads([load("batched", 8), load("batched", 32)])
    assert (lone.concurrency, lone.batch_size) == (1, 8)


def test_an_open_loop_is_probed_by_users_that_wait_for_their_answers() -> None:
    _, largest = probe_loads([load("open", concurrency=64, arrivals="poisson", rate_per_s=9.0)])
    assert not largest.is_open
    assert largest.concurrency == 16
