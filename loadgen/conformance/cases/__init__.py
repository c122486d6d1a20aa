"""All cases in order of their numbers: one table for each theme, in the module that also holds how they are sent."""

from __future__ import annotations

from loadgen.conformance.case import Case, Theme
from loadgen.conformance.cases import http, queueing, shared_memory, tensors

THEMES: tuple[Theme, ...] = tuple(
    sorted(
        (theme for module in (tensors, http, queueing, shared_memory) for theme in module.THEMES),
        key=lambda theme: theme.cases[0].order,
    )
)
CASES: tuple[Case, ...] = tuple(sorted((case for theme in THEMES for case in theme.cases), key=lambda case: case.order))


def select(numbers: str | None) -> tuple[Case, ...]:
    """Cases named like `1,2b,25`: a number selects all its letters. Raises `ValueError` for an unknown number."""
    if not numbers:
        return CASES
    chosen = {number.strip() for number in numbers.split(",") if number.strip()}
    numbered = {case.number for case in CASES} | {str(case.order[0]) for case in CASES}
    if unknown := sorted(chosen - numbered):
        last = CASES[-1].order[0]
        known_elsewhere = f"16 is --fuzz N, and {last + 1} is --growth"
        raise ValueError(f"there is no case {', '.join(unknown)}; cases go from 1 to {last}, {known_elsewhere}")
    return tuple(case for case in CASES if {case.number, str(case.order[0])} & chosen)
