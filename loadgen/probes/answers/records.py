"""The result of comparing answers."""

from __future__ import annotations

from loadgen.records.run import Label, Record


class AnswersCompared(Record, frozen=True, kw_only=True):
    """Answers of an arm under load in one workload and one start of the servers, compared with the answers to the same
    inputs sent alone."""

    FILE = "answers.json"
    workload: str
    label: Label
    restart: int
    answers: int
    """Answers that were compared, chosen by the seed before each block."""
    items: int
    """Items in these answers."""
    wrong: int
    """Answers with an item that differs by more than the tolerance."""
    relative_max: float | None
    """Largest relative error of an item; None without any, or if one is infinite."""
    tolerance_relative: float
    top1: float | None = None
    """Share of items with the same highest logit; None without logits."""
    top5: float | None = None
    """Share of items with the same five highest logits; None without logits, or with five classes or fewer."""
    fault: str | None = None
    """The first wrong answer: which request, and how it is wrong."""
    error: str | None = None
    """Why the answers could not be compared."""
