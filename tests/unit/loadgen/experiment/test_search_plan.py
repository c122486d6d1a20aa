"""Options of searches and ramps become workloads, or a sentence with the remedy."""

from __future__ import annotations

import pytest

from loadgen.experiment.plan import make_cells
from loadgen.experiment.settings import ExperimentSettings
from loadgen.records.run import Cell
from loadgen.statistics.early_stopping import late_allowed


def cells(**settings: object) -> tuple[Cell, ...]:
    found = make_cells(ExperimentSettings.model_validate({"scenarios": "single", **settings}))
    return tuple(cell for cell in found if cell.scenario in ("slo", "ramp"))


def test_a_search_for_every_bound() -> None:
    found = cells(slo_p99_ms=(100.0, 50.0, 100.0), connections=32)
    assert [cell.name for cell in found] == ["slo(p99≤50ms)", "slo(p99≤100ms)"]
    assert all(cell.arrivals == "poisson" and cell.concurrency == 32 and not cell.has_blocks for cell in found)
    assert late_allowed(found[0].requests) == 2


def test_a_trial_is_much_longer_than_its_bound() -> None:
    (cell,) = cells(slo_p99_ms=4000.0)
    assert (cell.seconds, cell.max_seconds) == (80.0, 160.0)


def test_more_queries_take_longer() -> None:
    (few,) = cells(slo_p99_ms=10.0)
    (many,) = cells(slo_p99_ms=10.0, slo_queries=4590)
    assert many.requests / many.max_seconds == pytest.approx(few.requests / few.max_seconds)


def test_a_ramp_is_asked_for_by_its_name() -> None:
    assert cells(preset="full") == ()
    (cell,) = cells(preset="full", scenarios="single,ramp", ramp_users=64, rounds=2)
    assert (cell.name, cell.concurrency, cell.rounds, cell.is_open, cell.has_blocks) == ("ramp", 64, 2, False, False)


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
        cells(**settings)
