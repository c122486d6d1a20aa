"""What the first screen of the page shows: one line a scenario with its interval drawn, and what stands behind it.

The intervals are drawn by the server of nothing: a few lines of SVG in the page, which need no script and are printed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.analysis.checks.outcome import CheckName
from loadgen.analysis.checks.run import leading_comparisons
from loadgen.analysis.claims import figure
from loadgen.analysis.comparisons import METRICS, Comparison
from loadgen.analysis.result import Result
from loadgen.quantities import inverse, ratio, ratio_interval, sentence
from loadgen.report import evidence
from loadgen.report.check_tables import CheckRow, CheckState, check_rows, counts
from loadgen.report.tables import VERDICT_WORDS
from loadgen.report.threshold_rows import threshold_sentence

WIDTH, HEIGHT = 240.0, 22.0
"""Of a strip, in its own units."""
_LEAST_SPAN = math.log(1.1)
_MARKS = {"failed": "✗", "warning": "!", "unknown": "?", "note": "·", "ok": "✓"}
_MOST_TITLES = 3


@dataclass(frozen=True, slots=True)
class Strip:
    """Places on the logarithmic axis of B's advantage, 0 to WIDTH, 1 in the middle; None without an interval."""

    centre: float | None
    low: float | None
    high: float | None
    band: tuple[float, float]
    """Of equivalence."""


@dataclass(frozen=True, slots=True)
class GlanceRow:
    """The leading comparison of one scenario."""

    scenario: str
    metric: str
    a: str
    b: str
    """In `unit`."""
    unit: str
    ratio: str
    interval: str
    outcome: str
    """Name of the verdict, for its colour."""
    verdict: str
    strip: Strip


@dataclass(frozen=True, slots=True)
class ProofLine:
    """One thing that stands behind the figures, or does not."""

    state: CheckState
    mark: str
    text: str


def glance_rows(result: Result) -> list[GlanceRow]:
    """One a scenario, of those that have a ratio."""
    leading = [one for one in leading_comparisons(result.comparisons) if one.ratio_b_over_a is not None]
    span = _span(leading)
    margin = math.log1p(result.experiment.equivalence_margin)
    band = (_place(-margin, span), _place(margin, span))
    return [
        GlanceRow(
            scenario=one.scenario,
            metric=METRICS[one.metric].title,
            a=figure(one, result.summaries, "a"),
            b=figure(one, result.summaries, "b"),
            unit=one.unit,
            ratio=ratio(one.ratio_b_over_a, one.ci95),
            interval=ratio_interval(one.ci95),
            outcome=one.verdict,
            verdict=VERDICT_WORDS[one.verdict],
            strip=_strip(one, span, band),
        )
        for one in leading
    ]


def edge(result: Result) -> str:
    """The factor at both ends of the axis: "9.4×"."""
    return f"{math.exp(_span(leading_comparisons(result.comparisons))):.2f}×"


def proof_lines(result: Result) -> list[ProofLine]:
    """Same answers, where the arms ran, the requests, the checks, the thresholds."""
    lines = [_line(*_parity(result))]
    lines += _devices(result)
    requests = sum(summary.requests for summary in result.summaries)
    errors = sum(summary.errors for summary in result.summaries)
    if requests:
        lines.append(_line("failed" if errors else "ok", f"{errors:,} of {requests:,} requests failed"))
    lines += _checks(result)
    if text := threshold_sentence(result):
        kept = all(one.state == "kept" for one in result.thresholds)
        lines.append(_line("ok" if kept else "failed", text.rstrip(".")))
    return lines


def _line(state: CheckState, text: str) -> ProofLine:
    return ProofLine(state, _MARKS[state], sentence(text))


def _parity(result: Result) -> tuple[CheckState, str]:
    parity = result.parity
    if parity is None or not parity.cases:
        return "unknown", "whether both arms give the same answers was not measured"
    lowest = min(case.cosine_min for case in parity.cases)
    text = f"lowest cosine {lowest:.6f} in {len(parity.cases)} cases"
    return ("ok", f"both arms give the same answers: {text}") if parity.ok else ("failed", f"different answers: {text}")


def _devices(result: Result) -> list[ProofLine]:
    rows = [row for row in evidence.evidence_rows(result) if row.scenario == evidence.ALL_SCENARIOS]
    if rows:
        return [_line(row.state, f"where {row.arm} ran, all scenarios together: {row.finding}") for row in rows]
    present = next((check for check in result.checks if check.name == CheckName.GPU_PRESENT), None)
    return [_line("note", "no GPU did any of the work")] if present is not None and present.ok is not True else []


def _checks(result: Result) -> list[ProofLine]:
    rows = check_rows(result)
    by_state: dict[CheckState, list[CheckRow]] = {}
    for row in rows:
        by_state.setdefault(row.state, []).append(row)
    lines = []
    if failed := by_state.get("failed"):
        lines.append(_line("failed", f"no verdict, or not on all, because of: {_titles(failed)}"))
    if warned := by_state.get("warning"):
        lines.append(_line("warning", f"to be read with care because of: {_titles(warned)}"))
    lines.append(_line("note" if failed else "ok", f"{len(rows)} checks: {counts(rows)}"))
    return lines


def _titles(rows: Sequence[CheckRow]) -> str:
    named = "; ".join(f"“{row.title}”" for row in rows[:_MOST_TITLES])
    return named + (f" and {len(rows) - _MOST_TITLES} more" if len(rows) > _MOST_TITLES else "")


def _advantage(comparison: Comparison) -> tuple[float, tuple[float, float] | None]:
    """Of B, as a factor above 1 where B is better, whichever way the metric goes."""
    value = comparison.ratio_b_over_a or 1.0
    if comparison.higher_is_better:
        return value, comparison.ci95
    return 1.0 / value, inverse(comparison.ci95)


def _span(comparisons: Sequence[Comparison]) -> float:
    return max((_reach(one) for one in comparisons if one.ratio_b_over_a is not None), default=_LEAST_SPAN)


def _reach(comparison: Comparison) -> float:
    """How far from 1 the axis must go; a very wide interval is cut rather than squeezing the others."""
    value, interval = _advantage(comparison)
    centre = abs(math.log(value))
    widest = max((abs(math.log(bound)) for bound in interval or ()), default=0.0)
    return max(_LEAST_SPAN, centre * 1.15, min(widest * 1.05, 3.0 * max(centre, _LEAST_SPAN)))


def _strip(comparison: Comparison, span: float, band: tuple[float, float]) -> Strip:
    value, interval = _advantage(comparison)
    bounds = None if interval is None else (_place(math.log(interval[0]), span), _place(math.log(interval[1]), span))
    return Strip(_place(math.log(value), span), bounds and bounds[0], bounds and bounds[1], band)


def _place(log_ratio: float, span: float) -> float:
    inner = WIDTH / 2.0 - 6.0
    return round(WIDTH / 2.0 + min(max(log_ratio / span, -1.0), 1.0) * inner, 1)
