"""From options to the cells of searches and ramps: which bounds, how many queries a trial, how many users at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.experiment.plan import CONNECTIONS, PlanError
from loadgen.records.run import Cell
from loadgen.statistics.early_stopping import queries_needed

RAMP_USERS = 256
BOUNDS_A_TRIAL = 20.0
"""A trial lasts at least so many times the bound: a shorter one ends before the queue of a rate that is 5 % too high
has grown to it."""


@dataclass(frozen=True, slots=True)
class SearchAmount:
    """How much of everything a preset spends. Seconds are of a trial, at least; `longest` bounds one at a low rate."""

    rounds: int
    queries: int
    trial_seconds: float
    longest_seconds: float
    rung_requests: int
    rung_seconds: float
    rung_longest_seconds: float


AMOUNTS = {
    "quick": SearchAmount(3, queries_needed(2), 4.0, 90.0, 20, 1.2, 12.0),
    "full": SearchAmount(6, queries_needed(10), 10.0, 300.0, 60, 3.0, 20.0),
}


def make_search_cells(
    preset: str,
    scenarios: Sequence[str],
    *,
    bounds_ms: Sequence[float] = (),
    queries: int | None = None,
    connections: int = CONNECTIONS,
    ramp_users: int = RAMP_USERS,
    rounds: int | None = None,
) -> tuple[Cell, ...]:
    """A search for every bound, and a ramp where the scenario is asked for. `rounds` replaces the preset's number, and
    `queries` that of a trial's requests. Raises `PlanError`."""
    if "slo" in scenarios and not bounds_ms:
        raise PlanError("--scenarios slo: say within which p99, in milliseconds, as in --slo-p99-ms 50")
    wrong = [bound for bound in bounds_ms if not 0.0 < bound <= 60_000.0]
    if wrong:
        raise PlanError(f"--slo-p99-ms {wrong[0]:g}: give milliseconds above 0 and up to 60,000, as in 50,100")
    amount = AMOUNTS[preset]
    least = queries_needed(0)
    if queries is not None and queries < least:
        raise PlanError(f"--slo-queries {queries}: a claim about p99 at 99 % confidence takes at least {least} of them")
    number = amount.queries if queries is None else queries
    searches = [
        Cell(
            scenario="slo",
            batch_size=1,
            concurrency=connections,
            requests=number,
            seconds=max(amount.trial_seconds, BOUNDS_A_TRIAL * bound / 1000.0),
            max_seconds=max(
                amount.longest_seconds * max(1.0, number / amount.queries), 2.0 * BOUNDS_A_TRIAL * bound / 1000.0
            ),
            rounds=rounds or amount.rounds,
            arrivals="poisson",
            latency_bound_ms=float(bound),
        )
        for bound in sorted(set(bounds_ms))
    ]
    if "ramp" not in scenarios:
        return tuple(searches)
    ramp = Cell(
        scenario="ramp",
        batch_size=1,
        concurrency=ramp_users,
        requests=amount.rung_requests,
        seconds=amount.rung_seconds,
        max_seconds=amount.rung_longest_seconds,
        rounds=rounds or amount.rounds,
    )
    return (*searches, ramp)
