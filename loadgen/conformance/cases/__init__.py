"""All cases in order of their numbers: one table for each theme, in the module that also holds how they are sent."""

from __future__ import annotations

from loadgen.conformance.case import Case, Theme
from loadgen.conformance.cases import http, language, queueing, shared_memory, tensors

THEMES: tuple[Theme, ...] = tuple(
    sorted(
        (theme for module in (tensors, http, queueing, shared_memory) for theme in module.THEMES),
        key=lambda theme: theme.cases[0].order,
    )
)
CASES: tuple[Case, ...] = tuple(sorted((case for theme in THEMES for case in theme.cases), key=lambda case: case.order))


def select(numbers: str | None, *, language_model: bool | None = False) -> tuple[Case, ...]:
    """Cases named like `1,2b,25`: a number selects all its letters. Those of language models are others than those of
    tensors; None: of either, to check the numbers. Raises `ValueError` for an unknown number."""
    of_kind = {None: (*CASES, *language.CASES), False: CASES, True: language.CASES}[language_model]
    if not numbers:
        return of_kind
    chosen = {number.strip() for number in numbers.split(",") if number.strip()}
    numbered = {case.number for case in of_kind} | {str(case.order[0]) for case in of_kind}
    if unknown := sorted(chosen - numbered):
        first, last = language.CASES[0].order[0], language.CASES[-1].order[0]
        last_of_tensors = CASES[-1].order[0]
        raise ValueError(
            f"there is no case {', '.join(unknown)}; cases go from 1 to {last_of_tensors}, those of language models "
            f"from {first} to {last}; 16 is --fuzz N, and {last_of_tensors + 1} is --growth"
        )
    return tuple(case for case in of_kind if {case.number, str(case.order[0])} & chosen)
