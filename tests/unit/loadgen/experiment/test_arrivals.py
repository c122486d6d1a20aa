"""Schedules of an open loop: pure, seeded, the same for both arms, and as irregular as they should be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.experiment.plan import make_workloads
from loadgen.experiment.schedule import arrival_count, drain_ns, due_offsets_ns, schedule_seed
from loadgen.experiment.settings import ExperimentSettings
from loadgen.records.run import Arrivals, Workload


def test_constant_arrivals_are_equally_far_apart() -> None:
    assert due_offsets_ns("constant", 50.0, 4, seed=1).tolist() == [0, 20_000_000, 40_000_000, 60_000_000]


def test_poisson_gaps_are_exponential_and_independent() -> None:
    gaps = np.diff(due_offsets_ns("poisson", 200.0, 20_001, seed=7)) / 1e9
    assert gaps.mean() == pytest.approx(1 / 200.0, rel=0.03)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05), "an exponential's spread is its mean"
    assert np.quantile(gaps, 0.5) == pytest.approx(np.log(2) / 200.0, rel=0.05)
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.03


@given(
    st.sampled_from(["constant", "poisson"]),
    st.floats(0.1, 10_000),
    st.integers(2, 500),
    st.integers(0, 2**32 - 1),
)
def test_the_same_arguments_give_the_same_ascending_schedule(
    arrivals: Arrivals, rate_per_s: float, count: int, seed: int
) -> None:
    offsets = due_offsets_ns(arrivals, rate_per_s, count, seed)
    assert (offsets == due_offsets_ns(arrivals, rate_per_s, count, seed)).all()
    assert len(offsets) == count
    assert offsets[0] == 0
    assert (np.diff(offsets) >= 0).all()


def test_a_closed_loop_has_no_schedule() -> None:
    with pytest.raises(ValueError, match="no schedule"):
        due_offsets_ns("closed", 10.0, 5, 0)


def test_both_arms_of_a_pair_share_a_seed_that_no_other_pair_has() -> None:
    seeds = {
        schedule_seed(run, workload, pair)
        for run in (0, 1)
        for workload in ("open(5/s)", "open(6/s)")
        for pair in (0, 1)
    }
    assert len(seeds) == 8
    assert schedule_seed(3, "open(5/s)", 2) == schedule_seed(3, "open(5/s)", 2)
    assert schedule_seed(-1, "open(5/s)", 0) >= 0


def test_a_block_holds_what_was_asked_for_and_never_more_than_fits() -> None:
    assert arrival_count(50.0, 1, 2.0, 10.0) == 100
    assert arrival_count(50.0, 300, 2.0, 10.0) == 300
    assert arrival_count(50.0, 9_000, 2.0, 10.0) == 500
    assert arrival_count(0.1, 1, 1.0, 1.0) == 2
    assert drain_ns(20_000_000_000) == 5_000_000_000
    assert drain_ns(0) == 1_000_000_000


def workloads_of(**settings: object) -> tuple[Workload, ...]:
    return make_workloads(ExperimentSettings.model_validate(settings))


def test_rates_make_open_workloads_beside_the_others() -> None:
    workloads = workloads_of(scenarios="single", rates="50,20.5", connections=8, open_seconds=2.0)
    assert [workload.name for workload in workloads] == ["single", "poisson(20.5/s)", "poisson(50/s)"]
    assert workloads[1].is_open
    assert not workloads[0].is_open
    assert (workloads[2].concurrency, workloads[2].seconds, workloads[2].rate_per_s) == (8, 2.0, 50.0)
    (constant,) = workloads_of(scenarios="open", rates=5, arrivals="constant")
    assert constant.name == "open(5/s)"
    batched = Workload(
        scenario="open", batch_size=8, concurrency=4, requests=1, seconds=1, max_seconds=1, rounds=1,
        arrivals="constant", rate_per_s=2.5,
    )  # fmt: skip
    assert batched.name == "open(2.5/s, batch 8)"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scenarios": "open"}, "--rates 20,50"),
        ({"scenarios": "single", "rates": 0}, "greater than 0"),
        ({"scenarios": "single", "rates": 5, "arrivals": "closed"}, "'poisson' or 'constant'"),
        ({"scenarios": "single", "rates": 5, "connections": 0}, "connections"),
    ],
)
def test_open_loops_that_cannot_be_are_refused(options: dict, words: str) -> None:
    with pytest.raises(Exception, match=words):
        workloads_of(**options)
