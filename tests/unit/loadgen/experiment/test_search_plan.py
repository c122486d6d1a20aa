"""Options of searches and ramps become workloads, or a sentence with the remedy."""

from __future__ import annotations

import pytest

from loadgen.experiment.plan import make_workloads
from loadgen.experiment.settings import ExperimentSettings
from loadgen.records.run import Workload
from loadgen.stats.percentiles import late_allowed


def workloads(**settings: object) -> tuple[Workload, ...]:
    found = make_workloads(ExperimentSettings.model_validate({"scenarios": "single", **settings}))
    return tuple(workload for workload in found if workload.scenario in ("slo", "ramp"))


def test_a_search_for_every_bound() -> None:
    found = workloads(slo_p99_ms=(100.0, 50.0, 100.0), connections=32)
    assert [workload.name for workload in found] == ["slo(p99≤50ms)", "slo(p99≤100ms)"]
    assert all(
        workload.arrivals == "poisson" and workload.concurrency == 32 and not workload.has_blocks for workload in found
    )
    assert late_allowed(found[0].requests) == 2


def test_a_trial_is_much_longer_than_its_bound() -> None:
    (workload,) = workloads(slo_p99_ms=4000.0)
    assert (workload.seconds, workload.max_seconds) == (80.0, 160.0)


def test_more_queries_take_longer() -> None:
    (few,) = workloads(slo_p99_ms=10.0)
    (many,) = workloads(slo_p99_ms=10.0, slo_queries=4590)
    assert many.requests / many.max_seconds == pytest.approx(few.requests / few.max_seconds)


def test_a_ramp_is_asked_for_by_its_name() -> None:
    assert workloads(preset="full") == ()
    (workload,) = workloads(preset="full", scenarios="single,ramp", ramp_users=64, rounds=2)
    assert (workload.name, workload.concurrency, workload.rounds, workload.is_open, workload.has_blocks) == (
        "ramp",
        64,
        2,
        False,
        False,
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"scenarios": "slo"}, "needs --slo-p99-ms"),
        ({"slo_p99_ms": -1.0}, "greater than 0"),
        ({"slo_p99_ms": 50.0, "slo_queries": 100}, "greater than or equal to 459"),
    ],
)
def test_what_cannot_be_searched_is_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(Exception, match=words):
        workloads(**settings)
