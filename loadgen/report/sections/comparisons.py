"""Who is faster, by how much: every comparison with its interval, the ranking and the thresholds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import loadgen.report.document as doc
from loadgen.base.quantities import Interval, counted, detectable, inverse, measured, ratio_interval, share
from loadgen.metrics.claims import claim, figures, neighbours, verdict_words
from loadgen.metrics.comparisons import Comparison, Outcome, advantage, better_arm
from loadgen.metrics.registry import METRICS
from loadgen.records.run import Label, Pairing, shown
from loadgen.report.charts import arm_style, round_ticks, several
from loadgen.verdict.result import Result

WITHOUT_WINNER: dict[Outcome, doc.Style] = {"no_difference": "ok", "inconclusive": "note", "invalid": "failed"}
CSV_FIELDS = (
    "scenario", "metric", "unit", "higher_is_better", "baseline", "arm", "baseline_value", "arm_value", "ratio",
    "ci95_low", "ci95_high", "verdict", "pairs", "restarts", "method", "p_value", "p_adjusted", "p_equivalence",
    "minimal_detectable_effect", "reason",
)  # fmt: skip
LEAST_SPAN = math.log(1.1)
BETTER = (doc.Column("better arm", "number", "better\narm"), doc.Column("95 % interval", "number"))
_THRESHOLDS: dict[str, doc.Cell] = {
    "kept": doc.Cell("kept", "ok"),
    "broken": doc.Cell("broken", "failed"),
    "not_measurable": doc.Cell("not measurable", "failed"),
}


def against_baseline(result: Result) -> list[Comparison]:
    """The comparisons with the baseline that have a ratio."""
    baseline_in = result.experiment.baseline_in
    return [c for c in result.comparisons if c.baseline == baseline_in(c.workload) and c.ratio is not None]


def better_of(
    pairing: Pairing,
    value: float | None,
    ci95: Interval | None,
    higher_is_better: bool,
    rounds: int | None = None,
    names: Mapping[Label, str] | None = None,
) -> tuple[str, str]:
    """A ratio of arm to baseline, shown as the better arm's, with its interval: ("A 2.02×", "1.91–2.15"). `names`
    replaces labels."""
    better = better_arm(pairing, value, ci95, higher_is_better)
    return ("–", "–") if better is None else (better.words(names), ratio_interval(better.ci95, rounds))


def comparison_table(
    result: Result, made: Sequence[Comparison], more: Mapping[str, Callable[[Comparison], str]] | None = None
) -> doc.Table:
    """With two arms a column for each, with more a row for each but the baseline; `more` adds columns on pages. HTML
    draws the intervals on one axis. A narrow screen leaves out what the verdict does not need."""
    more = more or {}
    base, *others = map(shown, result.experiment.labels)
    values = [doc.Column(others[0], "number", roomy=True)]
    if several(result):
        values = [doc.Column("arm"), doc.Column("its value", "number", "value", roomy=True)]
    span = max((reach(*_arm_factor(comparison)) for comparison in made), default=LEAST_SPAN)
    arm = "arm" if several(result) else others[0]
    columns = (
        *doc.names("scenario", "metric"),
        doc.Column(base, "number", roomy=True),
        *values,
        *BETTER,
        doc.Column(f"← {base} better · {arm} better →", "drawn", ticks=_ticks(span), on=doc.HTML),
        *doc.names("verdict"),
        *(doc.Column(title, "number", roomy=True, on=doc.PAGES) for title in more),
    )
    rows = []
    for comparison in made:
        which = (doc.Cell(shown(comparison.arm), arm_style(result, comparison.arm)),) if several(result) else ()
        better, interval, verdict = _outcome(result, comparison)
        of_baseline, of_arm = figures(comparison)
        drawn: doc.Style = "note" if comparison.verdict == "invalid" else verdict.style or "note"
        hint = f"{better.text}, 95 % interval {interval.text}"
        rows.append(
            (
                comparison.workload,
                _metric(comparison),
                of_baseline,
                *which,
                of_arm,
                better,
                interval,
                _strip(comparison, result.experiment.equivalence_margin, span, drawn, hint),
                verdict,
                *(describe(comparison) for describe in more.values()),
            )
        )
    return doc.Table(columns, rows, grouped=True, on=doc.READ)


def _metric(comparison: Comparison) -> doc.Cell:
    """The metric with its unit; shorter on a terminal."""
    title, unit = METRICS[comparison.metric].title, comparison.unit
    short = unit if unit.endswith("/s") else f"{title.removesuffix(' latency').removeprefix('time to ')}, {unit}"
    return doc.Cell(f"{title}, {unit}", short=short)


def _outcome(result: Result, comparison: Comparison) -> tuple[doc.Cell, doc.Cell, doc.Cell]:
    """The better arm, its interval and the verdict; dimmed where the verdict names no winner."""
    lead = advantage(comparison)
    better, interval = ("–", "–") if lead is None else (lead.words(), ratio_interval(lead.ci95, comparison.pairs))
    style = WITHOUT_WINNER[comparison.verdict] if comparison.winner is None else arm_style(result, comparison.winner)
    dim: doc.Style | None = None if comparison.winner else "note"
    words = verdict_words(comparison.verdict, comparison.pairing)
    return (
        doc.Cell(better, style if comparison.winner else dim),
        doc.Cell(interval, dim),
        doc.Cell(words, style, words.replace("meaningful ", ""), comparison.reason or ""),
    )


def _arm_factor(comparison: Comparison) -> tuple[float, Interval | None]:
    """How many times better the arm is than the baseline, below 1 where it is worse, whichever way the metric goes."""
    value = comparison.ratio or 1.0
    return (value, comparison.ci95) if comparison.higher_is_better else (1.0 / value, inverse(comparison.ci95))


def reach(value: float, interval: Interval | None) -> float:
    """How far from 1 an axis must go for a ratio, as a logarithm; a very wide interval is cut rather than squeezing the
    others."""
    centre = abs(math.log(value))
    widest = max((abs(math.log(bound)) for bound in interval or ()), default=0.0)
    return max(LEAST_SPAN, centre * 1.15, min(widest * 1.05, 3.0 * max(centre, LEAST_SPAN)))


def _ticks(span: float) -> tuple[tuple[float, str], ...]:
    """Round ratios on an axis that reaches `span` to both sides: 0.5×, 1×, 2×."""
    ticks = round_ticks(math.exp(-span), math.exp(span), gap=1 / 7)
    return tuple((math.log(tick) / span, f"{tick:.10g}×") for tick in ticks)


def _strip(comparison: Comparison, margin: float, span: float, style: doc.Style, hint: str) -> doc.Strip:
    """The interval on an axis that reaches `span` to both sides; right of its middle the arm is better."""

    def place(factor: float) -> float:
        return min(max(math.log(factor) / span, -1.0), 1.0)

    value, interval = _arm_factor(comparison)
    low, high = (None, None) if interval is None else map(place, interval)
    return doc.Strip(place(value), low, high, (place(1.0 / (1.0 + margin)), place(1.0 + margin)), style, hint)


def comparisons(result: Result) -> doc.Section | None:
    """Every arm beside the baseline; comparisons that could not be made are listed with their reasons."""
    made = [comparison for comparison in result.comparisons if comparison.ratio is not None]
    missing = [comparison for comparison in result.comparisons if comparison.ratio is None]
    more = {
        "pairs": lambda comparison: str(comparison.pairs),
        "detectable": lambda comparison: detectable(comparison.minimal_detectable_effect),
    }
    if made:
        notes = [
            doc.Text(
                "Better arm: a throughput is that many times higher, a time that many times lower. No meaningful "
                f"difference: the whole interval lies within ±{share(result.experiment.equivalence_margin)}.",
                "note",
            ),
            doc.Text(
                f"A pair is two {'blocks of one round' if several(result) else 'adjacent blocks'}, one per arm. A "
                f"winner needs an interval without 1 and p < 5 % after Holm's adjustment for all {len(made)} "
                f"comparisons{', those of the ranking included' if several(result) else ''}. Detectable: the smallest "
                "true difference that 80 % of such runs would find.",
                "note",
                on=doc.PAGES,
            ),
            doc.Text(_footing(result), "note"),
        ]
    else:
        notes = [doc.Text("Nothing can be compared: the run has no pair of complete blocks.", "note")]
    reasons = [
        (comparison.workload, METRICS[comparison.metric].title, _arms(result, comparison), comparison.reason)
        for comparison in missing
    ]
    return doc.section(
        "Comparisons",
        comparison_table(result, against_baseline(result), more),
        *notes,
        _cpu_table(result),
        doc.Fold(
            f"{counted(len(missing), 'comparison')} could not be made",
            (doc.Table((*doc.names("scenario", "metric", "arms"), *doc.texts("reason")), reasons),),
            on=doc.HTML,
        ),
        doc.Table(
            doc.names(*CSV_FIELDS),
            [_values(comparison) for comparison in result.comparisons],
            name="comparisons",
            on=doc.CSV,
        ),
        _cases(result),
    )


def _cpu_table(result: Result) -> doc.Table | None:
    """CPU time per request, which tells arms apart that are equally fast; only where no arm is on a GPU."""
    if any(str(arm.in_effect.get("device")).startswith("cuda") for arm in result.arms):
        return None
    cpu_ms = {
        (summary.workload, summary.label): summary.server_cpu_ms
        for summary in result.summaries
        if summary.server_cpu_ms is not None
    }
    labels = result.experiment.labels
    rows = [
        (name, *(measured(cpu_ms.get((name, label))) for label in labels))
        for name in dict.fromkeys(workload for workload, _ in cpu_ms)
    ]
    columns = (*doc.names("scenario"), *doc.numbers(*(f"{shown(label)}, ms" for label in labels)))
    return doc.Table(columns, rows, title="CPU time of the server per request", on=doc.READ) if rows else None


def _arms(result: Result, comparison: Comparison) -> str:
    """The two arms, if there are more than two in the run."""
    return f"{shown(comparison.arm)} against {shown(comparison.baseline)}" if several(result) else ""


def ranking(result: Result) -> doc.Section | None:
    """With three or more arms: their order in each scenario, each arm beside the next, and every comparison of the
    other arms with each other."""
    if not several(result):
        return None
    base, baseline_in = result.experiment.baseline.label, result.experiment.baseline_in
    others = [c for c in result.comparisons if c.baseline != baseline_in(c.workload) and c.ratio is not None]
    rows: list[tuple[str | doc.Cell, ...]] = []
    for order in result.verdict.rankings:
        for place, pair in enumerate(neighbours(result.comparisons, order)):
            first: tuple[str | doc.Cell, ...] = ("", "") if place else (_metric(pair), order.words())
            rows.append((order.workload, *first, _two(pair), *_outcome(result, pair)))
    between = (*doc.names("arms"), *BETTER, doc.Column("verdict", on=doc.PAGES))
    return doc.section(
        "Ranking",
        doc.Table(
            (*doc.names("scenario", "metric"), *doc.texts("best to worst"), *between), rows, grouped=True, on=doc.READ
        ),
        doc.Text(
            "By the leading metric of each scenario, each arm beside the next one. Not separated: the run does not "
            "show which of them is better."
            if rows
            else "",
            "note",
        ),
        doc.Fold(
            f"The arms other than {result.names[base]} with each other",
            (
                doc.Table(
                    (*doc.names("scenario", "metric"), *between),
                    [(other.workload, _metric(other), _two(other), *_outcome(result, other)) for other in others],
                    grouped=True,
                ),
            ),
        ),
    )


def _two(comparison: Comparison) -> str:
    return f"{shown(comparison.arm)}/{shown(comparison.baseline)}"


def _footing(result: Result) -> str:
    """How the run ended and how reliable its intervals are, unless the verdict says so already."""
    parts = [result.noise_floor_sentence]
    if result.stopping is not None:
        parts = [result.stopping.sentence, result.stopping.coverage, *parts]
    return " ".join(part for part in parts if part and part not in result.verdict.caveats)


def _values(comparison: Comparison) -> list[str | float | bool | None]:
    low, high = comparison.ci95 or (None, None)
    other = {"scenario": comparison.workload, "ci95_low": low, "ci95_high": high}
    return [other[name] if name in other else getattr(comparison, name) for name in CSV_FIELDS]


def _cases(result: Result) -> doc.Table:
    """Test cases for CI: a comparison passes with any verdict, is skipped if inconclusive, and fails if invalid."""
    rows = []
    outcomes: list[doc.RowOutcome] = []
    for comparison in result.comparisons:
        text = claim(comparison)
        if comparison.verdict == "invalid":
            text = f"no verdict: {comparison.reason}"
            outcomes.append(("failure", "invalid"))
        elif comparison.verdict == "inconclusive":
            text = f"inconclusive: {comparison.reason}"
            outcomes.append(("skipped", ""))
        else:
            outcomes.append(("passed", "" if comparison.lost is None else "rough"))
        which = f" of {_arms(result, comparison)}" if several(result) else ""
        rows.append((f"{METRICS[comparison.metric].title}{which} [{comparison.workload}]", text))
    seconds = sum(block.duration_s for block in result.blocks)
    return doc.Table(doc.names("name", "text"), rows, "comparisons", outcomes=outcomes, seconds=seconds, on=doc.JUNIT)


def thresholds(result: Result) -> doc.Section | None:
    """Every condition of --fail-if, those that are not kept first."""
    ordered = sorted(result.thresholds, key=lambda threshold: threshold.state == "kept")
    return doc.section(
        "Thresholds",
        doc.Table(
            (*doc.names("fails if", "scenario", ""), *doc.texts("found")),
            [
                (threshold.condition, threshold.workload, _THRESHOLDS[threshold.state], threshold.detail)
                for threshold in ordered
            ],
            on=doc.READ,
        ),
        doc.Table(
            doc.names("name", "text"),
            [
                (f"fail if {threshold.condition} [{threshold.workload}]", threshold.detail)
                for threshold in result.thresholds
            ],
            name="thresholds",
            outcomes=[
                ("passed", "") if threshold.state == "kept" else ("failure", threshold.state)
                for threshold in result.thresholds
            ],
            on=doc.JUNIT,
        ),
    )


def threshold_sentence(result: Result) -> str | None:
    """How many thresholds are kept; None if none was set."""
    if not result.thresholds:
        return None
    total = len(result.thresholds)
    broken = [threshold for threshold in result.thresholds if threshold.state != "kept"]
    if not broken:
        return f"All {total} thresholds are kept." if total > 1 else "The threshold is kept."
    first = f"{broken[0].condition} in {broken[0].workload} ({broken[0].detail})"
    return f"{'Threshold' if total == 1 else f'{len(broken)} of {total} thresholds'} not kept: {first}."
