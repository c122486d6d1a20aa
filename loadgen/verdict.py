"""The verdict in words: valid or not, which arm by how much in each scenario, why, and with which reservations.

Every sentence is computed from comparisons, checks and the account of time; no arm is called faster where the
comparison is undecided. It decides nothing itself: outcomes come from `comparisons`, validity from `checks`.
"""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.checks import Check, CheckName, complaint, complaints, invalidating
from loadgen.comparisons import METRICS, Comparison, Outcome
from loadgen.quantities import inverse, measured, number, ratio, ratio_interval, sentence, share, signed_ms
from loadgen.records import Cell, Experiment, Record
from loadgen.run_checks import leading_comparisons
from loadgen.stages import TITLES, StageAccount
from loadgen.summaries import CellSummary

MIN_STAGE_SHARE = 0.05
MAX_STAGES = 3
CAVEATS = (
    CheckName.GPU_PRESENT,
    CheckName.TRAINED_WEIGHTS,
    CheckName.NATIVE_BACKEND,
)


class ScenarioVerdict(Record, frozen=True, kw_only=True):
    """One scenario: the outcome of its leading metric, in one sentence, and why in a few more."""

    scenario: str
    metric: str
    outcome: Outcome
    sentence: str
    reasons: tuple[str, ...]


class Verdict(Record, frozen=True, kw_only=True):
    """What a reader takes away. `caveats` come first where they are shown, then `headline`."""

    valid: bool
    headline: str
    main_scenario: str | None
    """The most loaded scenario; its reasons stand for the others where there is room for one."""
    scenarios: tuple[ScenarioVerdict, ...]
    failed: tuple[str, ...]
    """Each check that took a verdict away, with what it covers."""
    caveats: tuple[str, ...]


def reach_verdict(
    experiment: Experiment,
    titles: dict[str, str],
    comparisons: Sequence[Comparison],
    checks: Sequence[Check],
    accounts: Sequence[StageAccount],
    cells: Sequence[CellSummary],
) -> Verdict:
    """`titles` names the arms for people, by label."""
    failed = invalidating(checks)
    scenarios = tuple(
        _scenario(experiment, leading, comparisons, accounts, cells) for leading in leading_comparisons(comparisons)
    )
    return Verdict(
        valid=not failed,
        headline=_headline(experiment, titles, comparisons, failed),
        main_scenario=_main_scenario(experiment, scenarios),
        scenarios=scenarios,
        failed=complaints(checks),
        caveats=_caveats(checks),
    )


def _caveats(checks: Sequence[Check]) -> tuple[str, ...]:
    order = {name.value: place for place, name in enumerate(CAVEATS)}
    chosen = [check for check in checks if check.ok is not True and (check.name in order or _deliberate(check))]
    chosen.sort(key=lambda check: order.get(check.name, len(order)))
    return tuple(sentence(check.detail) for check in chosen)


def _deliberate(check: Check) -> bool:
    return check.ok is False and check.name.startswith("same_") and check.severity == "warns"


def place(cell: Cell) -> str:
    """Where a statement holds, in a sentence: "at concurrency 16", "at 50 requests/s"."""
    if cell.is_open:
        return f"at {cell.rate_per_s or 0.0:g} requests/s"
    if cell.scenario == "batched":
        return f"at batch {cell.batch_size}"
    if cell.scenario == "concurrent":
        size = f", batch {cell.batch_size}" if cell.batch_size > 1 else ""
        return f"at concurrency {cell.concurrency}{size}"
    return "one request at a time" if cell.scenario == "single" else "from a cold start"


def claim(comparison: Comparison, a: str = "A", b: str = "B", where: str = "") -> str:
    """Who wins one comparison, by how much, with the interval; the winner is the subject of the sentence."""
    metric = METRICS[comparison.metric]
    if comparison.verdict == "equivalent":
        return f"{a} and {b} are equivalent in {metric.title}{where} ({_b_over_a(comparison)})"
    if comparison.verdict == "undecided":
        return f"undecided in {metric.title}{where} ({_b_over_a(comparison)})"
    if comparison.verdict == "invalid":
        return f"no verdict on {metric.title}{where}: {comparison.reason}"
    winner, loser = (b, a) if comparison.verdict == "b_faster" else (a, b)
    value, interval = comparison.ratio_b_over_a, comparison.ci95
    if value is not None and winner == a:
        value, interval = 1.0 / value, inverse(interval)
    bounds = f"(95 % interval {ratio_interval(interval)})"
    if metric.name == "throughput":
        return f"{winner} serves {ratio(value, interval)} the {metric.unit} of {loser}{where} {bounds}"
    return f"{winner}'s {metric.title} is {ratio(value, interval)} that of {loser}{where} {bounds}"


def _b_over_a(comparison: Comparison) -> str:
    if comparison.ratio_b_over_a is None:
        return comparison.reason or "not measured"
    if comparison.ci95 is None:
        return f"B/A {ratio(comparison.ratio_b_over_a, None)}, no interval: {comparison.reason}"
    return f"B/A {ratio(comparison.ratio_b_over_a, comparison.ci95)}, {ratio_interval(comparison.ci95)}"


def _main_scenario(experiment: Experiment, scenarios: Sequence[ScenarioVerdict]) -> str | None:
    usable = {s.scenario for s in scenarios if s.outcome != "invalid"} or {s.scenario for s in scenarios}
    return max((cell for cell in experiment.cells if cell.name in usable), key=_weight).name if usable else None


def _headline(
    experiment: Experiment, titles: dict[str, str], comparisons: Sequence[Comparison], failed: Sequence[Check]
) -> str:
    apart = next((check for check in failed if check.name == CheckName.SAME_PAYLOAD), None)
    if apart is not None:
        return f"Not a comparison of servers, so no winner is named: {apart.detail.partition(':')[0]}."
    cells = {cell.name: cell for cell in experiment.cells}
    leading = leading_comparisons(comparisons)
    if not leading:
        return "Nothing was compared."
    usable = [c for c in leading if c.verdict != "invalid"]
    if not usable:
        return f"No verdict: {complaint(failed[0])}." if failed else "No verdict."
    stands = ""
    lost = len(leading) - len(usable)
    if lost:
        stands = f"No verdict on {lost} of {len(leading)} scenarios, see the failed checks; otherwise: "
    elif failed:
        stands = "The run is not valid as a whole, see the failed checks; in what stands: "
    loads = [c for c in usable if c.metric == "throughput"] or usable
    decided = [c for c in loads if c.verdict in ("a_faster", "b_faster")]
    if not decided:
        decided = [c for c in usable if c.verdict in ("a_faster", "b_faster")]
    a, b = f"A ({titles['a']})", f"B ({titles['b']})"
    if not decided:
        parts = _groups(usable, cells)
        return f"{stands}{'no' if stands else 'No'} winner between {a} and {b}: {'; '.join(parts)}."
    main = max(decided, key=lambda c: _weight(cells[c.scenario]))
    first = claim(main, a, b, f" {place(cells[main.scenario])}")
    rest = _groups([c for c in usable if c is not main], cells)
    return stands + "; ".join([first, *rest]) + "."


def _weight(cell: Cell) -> tuple[int, int]:
    """The most loaded cell stands for a server's work."""
    return (cell.concurrency, cell.batch_size)


def _groups(comparisons: Sequence[Comparison], cells: dict[str, Cell]) -> list[str]:
    """The other scenarios by outcome: "B leads one request at a time and at batch 1, 4 (1.12–1.38×)"."""
    texts = {"b_faster": "B leads", "a_faster": "A leads", "equivalent": "equivalent", "undecided": "undecided"}
    parts = []
    for outcome, text in texts.items():
        for cold in (False, True):
            chosen = [
                c for c in comparisons if c.verdict == outcome and (cells[c.scenario].scenario == "cold-start") == cold
            ]
            if chosen:
                parts.append(f"{text} {_places([cells[c.scenario] for c in chosen])}{_leads(chosen)}")
    return parts


def _places(cells: Sequence[Cell]) -> str:
    batches = [str(cell.batch_size) for cell in cells if cell.scenario == "batched"]
    names = [place(cell) for cell in cells if cell.scenario != "batched"]
    names += [f"at batch {', '.join(batches)}"] if batches else []
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _leads(comparisons: Sequence[Comparison]) -> str:
    """The winner's advantages as factors above 1, the least and the largest."""
    factors = []
    for comparison in comparisons:
        value, interval = comparison.ratio_b_over_a, comparison.ci95
        if value is None or comparison.verdict not in ("a_faster", "b_faster"):
            return ""
        factors.append((value, interval) if value >= 1.0 else (1.0 / value, inverse(interval)))
    factors.sort(key=lambda factor: factor[0])
    least, largest = ratio(*factors[0]), ratio(*factors[-1])
    return f" ({largest})" if least == largest else f" ({least.removesuffix('×')}–{largest})"


def _scenario(
    experiment: Experiment,
    leading: Comparison,
    comparisons: Sequence[Comparison],
    accounts: Sequence[StageAccount],
    cells: Sequence[CellSummary],
) -> ScenarioVerdict:
    main = claim(leading)
    others = [
        claim(c)
        for c in comparisons
        if c.scenario == leading.scenario and c is not leading and c.verdict in ("a_faster", "b_faster", "equivalent")
    ]
    reasons: list[str] = []
    if leading.verdict != "invalid":
        for account in accounts:
            if account.cell == leading.scenario:
                reasons += explain_stages(account)
        reasons += _explain_batching(
            next(cell for cell in experiment.cells if cell.name == leading.scenario),
            [summary for summary in cells if summary.cell == leading.scenario],
        )
    return ScenarioVerdict(
        scenario=leading.scenario,
        metric=leading.metric,
        outcome=leading.verdict,
        sentence=sentence("; ".join([main, *others])),
        reasons=tuple(reasons),
    )


def explain_stages(account: StageAccount) -> list[str]:
    """Which stages make up the difference of the mean latencies, the largest first; empty without both accounts."""
    if account.a is None or account.b is None or account.total_b_minus_a_ms is None:
        return []
    total = account.total_b_minus_a_ms
    larger = max(account.a.client_total_ms, account.b.client_total_ms)
    means = f"{number(account.a.client_total_ms)} ms on A and {number(account.b.client_total_ms)} ms on B"
    if abs(total) < 0.01 * larger:
        return [f"Requests take the same time on both arms ({means})."]
    parts = [
        f"{TITLES[d.stage]} {signed_ms(d.b_minus_a_ms)}" + (f" ({_percent(d.share)})" if d.share is not None else "")
        for d in account.differences[:MAX_STAGES]
        if abs(d.b_minus_a_ms) >= MIN_STAGE_SHARE * abs(total)
    ]
    return [f"Requests take {means} on average. B's {signed_ms(total)} are: {'; '.join(parts)}."]


def _percent(value: float) -> str:
    return share(value) if value >= 0 else f"−{share(-value)}"


def _explain_batching(cell: Cell, summaries: Sequence[CellSummary]) -> list[str]:
    if cell.concurrency <= 1:
        return []
    means = {s.label.upper(): s.executed_batch_mean for s in summaries if s.executed_batch_mean is not None}
    if not means:
        return []
    text = ", ".join(f"{number(mean)} on {label}" for label, mean in sorted(means.items()))
    idle = [label for label, mean in sorted(means.items()) if mean < 1.1 * cell.batch_size]
    return [f"Mean executed batch: {text}" + (f"; batching never formed on {' and '.join(idle)}." if idle else ".")]


def figure(comparison: Comparison, cells: Sequence[CellSummary], label: str) -> str:
    """One arm's value of a comparison, without its unit, with the digits that its interval supports."""
    value = comparison.a if label == "a" else comparison.b
    interval = None
    for summary in cells:
        if summary.cell == comparison.scenario and summary.label == label:
            interval = {"throughput": summary.throughput_ci95, "latency_p50": summary.p50_ci95_ms}.get(
                comparison.metric
            )
    return measured(value, interval)
