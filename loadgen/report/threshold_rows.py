"""The thresholds of a run as rows of text, the same in every format."""

from __future__ import annotations

from loadgen.analysis.result import Result
from loadgen.analysis.thresholds import ThresholdOutcome
from loadgen.report.check_tables import CheckState

WORDS: dict[str, tuple[str, CheckState]] = {
    "kept": ("kept", "ok"),
    "broken": ("broken", "failed"),
    "not_measurable": ("not measurable", "failed"),
}
HEADINGS = ("fails if", "scenario", "", "found")


def threshold_rows(result: Result) -> list[tuple[str, str, str, str]]:
    """(condition, scenario, outcome, found), those that are not kept first."""
    ordered = sorted(result.thresholds, key=lambda one: one.state == "kept")
    return [(one.condition, one.scenario, WORDS[one.state][0], one.detail) for one in ordered]


def threshold_sentence(result: Result) -> str | None:
    """How many are kept, in a sentence; None where none was set."""
    if not result.thresholds:
        return None
    kept = sum(1 for one in result.thresholds if one.state == "kept")
    total = len(result.thresholds)
    if kept == total:
        return f"All {total} thresholds are kept." if total > 1 else "The threshold is kept."
    how_many = "Threshold" if total == 1 else f"{total - kept} of {total} thresholds"
    return f"{how_many} not kept: {_first(result.thresholds)}."


def broken_sentence(result: Result) -> str | None:
    """The same, only where one is not kept."""
    return None if all(one.state == "kept" for one in result.thresholds) else threshold_sentence(result)


def _first(outcomes: tuple[ThresholdOutcome, ...]) -> str:
    one = next(outcome for outcome in outcomes if outcome.state != "kept")
    return f"{one.condition} in {one.scenario} ({one.detail})"
