"""All cases, in the reference's order."""

from __future__ import annotations

from loadgen.conformance.case import Case
from loadgen.conformance.cases import (
    binary_bodies,
    identifiers,
    json_bodies,
    lifecycle,
    model_control,
    parsing,
    pictures,
    queueing,
    routes,
    shared_memory,
    sizes,
    tensors,
)

_FAMILIES = (
    json_bodies,
    binary_bodies,
    sizes,
    parsing,
    queueing,
    routes,
    tensors,
    identifiers,
    pictures,
    lifecycle,
    shared_memory,
    model_control,
)

CASES: tuple[Case, ...] = tuple(
    sorted((case for family in _FAMILIES for case in family.CASES), key=lambda case: case.order)
)


def select(numbers: str | None) -> tuple[Case, ...]:
    """Cases named as `1,2b,25`: a number takes all its letters. Raises `ValueError` for one that does not exist."""
    if not numbers:
        return CASES
    wanted = {number.strip() for number in numbers.split(",") if number.strip()}
    chosen = tuple(case for case in CASES if case.number in wanted or str(case.order[0]) in wanted)
    known = {case.number for case in CASES} | {str(case.order[0]) for case in CASES}
    if unknown := sorted(wanted - known):
        last = CASES[-1].order[0]
        known_elsewhere = f"16 is --fuzz N, and {last + 1} is --growth"
        raise ValueError(f"there is no case {', '.join(unknown)}; cases go from 1 to {last}, {known_elsewhere}")
    return chosen
