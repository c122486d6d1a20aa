"""All cases, in the reference's order."""

from __future__ import annotations

from loadgen.conformance.case import Case, Section
from loadgen.conformance.cases import bodies, framing, lifecycle, names, pictures, queueing, shared_memory, tensors

TABLES = (bodies, framing, names, tensors, pictures, queueing, lifecycle, shared_memory)
SECTIONS: tuple[Section, ...] = tuple(
    sorted((section for table in TABLES for section in table.SECTIONS), key=lambda section: section.cases[0].order)
)
CASES: tuple[Case, ...] = tuple(
    sorted((case for section in SECTIONS for case in section.cases), key=lambda case: case.order)
)


def select(numbers: str | None) -> tuple[Case, ...]:
    """Cases named as `1,2b,25`: a number takes all its letters. Raises `ValueError` for one that does not exist."""
    if not numbers:
        return CASES
    wanted = {number.strip() for number in numbers.split(",") if number.strip()}
    known = {case.number for case in CASES} | {str(case.order[0]) for case in CASES}
    if unknown := sorted(wanted - known):
        last = CASES[-1].order[0]
        known_elsewhere = f"16 is --fuzz N, and {last + 1} is --growth"
        raise ValueError(f"there is no case {', '.join(unknown)}; cases go from 1 to {last}, {known_elsewhere}")
    return tuple(case for case in CASES if {case.number, str(case.order[0])} & wanted)
