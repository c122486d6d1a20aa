"""Options of searches and ramps become cells, or a sentence with the remedy."""

from __future__ import annotations

import pytest

from loadgen.experiment.plan import PlanError
from loadgen.experiment.search_plan import make_search_cells
from loadgen.statistics.early_stopping import late_allowed


def test_a_search_for_every_bound() -> None:
    cells = make_search_cells("quick", ("single",), bounds_ms=(100.0, 50.0, 100.0), connections=32)
    assert [cell.name for cell in cells] == ["slo(p99≤50ms)", "slo(p99≤100ms)"]
    assert all(cell.arrivals == "poisson" and cell.concurrency == 32 and not cell.has_blocks for cell in cells)
    assert late_allowed(cells[0].requests) == 2


def test_a_trial_is_much_longer_than_its_bound() -> None:
    (cell,) = make_search_cells("quick", (), bounds_ms=(4000.0,))
    assert (cell.seconds, cell.max_seconds) == (80.0, 160.0)


def test_more_queries_take_longer() -> None:
    (few,) = make_search_cells("quick", (), bounds_ms=(10.0,))
    (many,) = make_search_cells("quick", (), bounds_ms=(10.0,), queries=4590)
    assert many.requests / many.max_seconds == pytest.approx(few.requests / few.max_seconds)


def test_a_ramp_is_asked_for_by_its_name() -> None:
    assert make_search_cells("full", ("single",)) == ()
    (cell,) = make_search_cells("full", ("single", "ramp"), ramp_users=64, rounds=2)
    assert (cell.name, cell.concurrency, cell.rounds, cell.is_open, cell.has_blocks) == ("ramp", 64, 2, False, False)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"scenarios": ("slo",)}, "--scenarios slo: say within which p99"),
        ({"scenarios": (), "bounds_ms": (-1.0,)}, "--slo-p99-ms -1: give milliseconds above 0"),
        (
            {"scenarios": (), "bounds_ms": (50.0,), "queries": 100},
            "--slo-queries 100: a claim about p99 .* at least 459",
        ),
    ],
)
def test_what_cannot_be_searched_is_refused(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        make_search_cells("quick", **options)  # type: ignore[arg-type]
