"""What a comparison says, in words: who wins where, by how much, with which interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loadgen.comparison.comparisons import Comparison, Outcome, winner_of
from loadgen.comparison.pairs import METRICS
from loadgen.comparison.summaries import CellSummary
from loadgen.quantities import inverse, measured, ratio, ratio_interval
from loadgen.records.run import Cell, Label, Pairing, shown


def place(cell: Cell) -> str:
    """Where a statement holds, in a sentence: "at concurrency 16", "at 50 requests/s"."""
    if cell.latency_bound_ms is not None:
        return f"within p99 ≤ {cell.latency_bound_ms:g} ms"
    if cell.scenario == "ramp":
        return "at saturation"
    if cell.is_open:
        return f"at {cell.rate_per_s or 0.0:g} requests/s"
    if cell.scenario == "batched":
        return f"at batch {cell.batch_size}"
    if cell.scenario == "concurrent":
        size = f", batch {cell.batch_size}" if cell.batch_size > 1 else ""
        return f"at concurrency {cell.concurrency}{size}"
    return "one request at a time" if cell.scenario == "single" else "from a cold start"


def claim(comparison: Comparison, names: Mapping[Label, str] | None = None, where: str = "") -> str:
    """Who wins one comparison, by how much, with the interval; the winner is the subject of the sentence. `names` are
    those of the arms, where their labels do not suffice."""
    metric = METRICS[comparison.metric]
    base, arm = ((names or {}).get(label, shown(label)) for label in comparison.pairing)
    if comparison.verdict == "no_difference":
        return f"{base} and {arm} are equivalent in {metric.title}{where} ({_as_measured(comparison)})"
    if comparison.verdict == "inconclusive":
        return f"undecided in {metric.title}{where} ({_as_measured(comparison)})"
    if comparison.verdict == "invalid":
        return f"no verdict on {metric.title}{where}: {comparison.reason}"
    arm_wins = comparison.verdict == "arm_better"
    winner, loser = (arm, base) if arm_wins else (base, arm)
    value, interval = comparison.ratio, comparison.ci95
    if value is not None and not arm_wins:
        value, interval = 1.0 / value, inverse(interval)
    bounds = f"(95 % interval {ratio_interval(interval)})"
    if metric.name in ("throughput", "achieved_rate", "slo_rate", "saturation"):
        return f"{winner} serves {ratio(value, interval)} the {metric.unit} of {loser}{where} {bounds}"
    return f"{winner}'s {metric.title} is {ratio(value, interval)} that of {loser}{where} {bounds}"


def _as_measured(comparison: Comparison) -> str:
    what = f"{shown(comparison.arm)}/{shown(comparison.baseline)}"
    if comparison.ratio is None:
        return comparison.reason or "not measured"
    if comparison.ci95 is None:
        return f"{what} {ratio(comparison.ratio, None)}, no interval: {comparison.reason}"
    return f"{what} {ratio(comparison.ratio, comparison.ci95)}, {ratio_interval(comparison.ci95)}"


def weight(cell: Cell) -> tuple[int, int]:
    """The most loaded cell stands for a server's work; one of a closed loop before any of an open one, and a search, a
    ramp or a cold start last: they say how much, and nothing of why."""
    if cell.scenario in ("slo", "ramp", "cold-start"):
        return (0, 0)
    return (0, round(cell.rate_per_s)) if cell.rate_per_s is not None else (cell.concurrency, cell.batch_size)


WITHOUT_WINNER = {"no_difference": "equivalent", "inconclusive": "undecided", "invalid": "invalid"}


def verdict_words(outcome: Outcome, pairing: Pairing) -> str:
    """ "B faster", "equivalent" """
    better = winner_of(outcome, pairing)
    return WITHOUT_WINNER[outcome] if better is None else f"{shown(better)} faster"


def groups(comparisons: Sequence[Comparison], cells: dict[str, Cell]) -> list[str]:
    """The other scenarios of two arms by outcome: "B leads one request at a time and at batch 1, 4 (1.12–1.38×)"."""
    outcomes: dict[tuple[str, bool], list[Comparison]] = {}
    for one in sorted(
        comparisons, key=lambda one: (ORDER.index(one.verdict), cells[one.scenario].scenario == "cold-start")
    ):
        text = f"{shown(one.winner)} leads" if one.winner else WITHOUT_WINNER[one.verdict]
        if one.verdict != "invalid":
            outcomes.setdefault((text, cells[one.scenario].scenario == "cold-start"), []).append(one)
    return [
        f"{text} {places([cells[one.scenario] for one in chosen])}{_leads(chosen)}"
        for (text, _), chosen in outcomes.items()
    ]


ORDER: tuple[Outcome, ...] = ("arm_better", "baseline_better", "no_difference", "inconclusive", "invalid")
"""Of outcomes, as they are listed."""


def decided_besides(comparisons: Sequence[Comparison], cells: dict[str, Cell]) -> list[str]:
    """Every decided metric that does not lead its scenario. Those that name the same arm as their scenario's leading
    metric share one clause; each other one says where and by how much: "but A has the lower p99 latency at batch 4
    (1.90×)"."""
    leading = {(c.scenario, c.pairing): c.winner for c in comparisons if c.leading}
    several = len({c.pairing for c in comparisons}) > 1
    agreeing: dict[str, None] = {}
    against: dict[tuple[Label, Label, str], list[Comparison]] = {}
    for one in comparisons:
        if one.leading or one.winner is None or one.loser is None:
            continue
        if leading.get((one.scenario, one.pairing)) == one.winner:
            agreeing[METRICS[one.metric].title] = None
        else:
            against.setdefault((one.winner, one.loser, one.metric), []).append(one)
    parts = []
    if agreeing:
        few = len(agreeing) == 1
        ends = "agrees with this where it is" if few else "agree with this where they are"
        parts.append(f"{join(list(agreeing))} {ends} decided")
    for (winner, loser, name), chosen in against.items():
        best = "higher" if METRICS[name].higher_is_better else "lower"
        where = places([cells[c.scenario] for c in chosen])
        than = f" than {shown(loser)}" if several else ""
        article = "a" if several else "the"
        parts.append(f"but {shown(winner)} has {article} {best} {METRICS[name].title}{than} {where}{_leads(chosen)}")
    return parts


def join(words: Sequence[str]) -> str:
    """ "p50, p90 and p99" """
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def places(cells: Sequence[Cell]) -> str:
    """Where the same holds: "one request at a time and at batch 4, 8"."""
    batches = [str(cell.batch_size) for cell in cells if cell.scenario == "batched"]
    names = [place(cell) for cell in cells if cell.scenario != "batched"]
    names += [f"at batch {', '.join(batches)}"] if batches else []
    return join(names)


def _leads(comparisons: Sequence[Comparison]) -> str:
    """The winner's advantages as factors above 1, the least and the largest."""
    factors = []
    for comparison in comparisons:
        value, interval = comparison.ratio, comparison.ci95
        if value is None or comparison.winner is None:
            return ""
        factors.append((value, interval) if value >= 1.0 else (1.0 / value, inverse(interval)))
    factors.sort(key=lambda factor: factor[0])
    least, largest = ratio(*factors[0]), ratio(*factors[-1])
    return f" ({largest})" if least == largest else f" ({least.removesuffix('×')}–{largest})"


def figure(comparison: Comparison, cells: Sequence[CellSummary], label: Label) -> str:
    """One arm's value of a comparison, without its unit, with the digits that its interval supports."""
    value = comparison.arm_value if label == comparison.arm else comparison.baseline_value
    interval = None
    for summary in cells:
        if summary.cell == comparison.scenario and summary.label == label:
            interval = {"throughput": summary.throughput_ci95, "latency_p50": summary.p50_ci95_ms}.get(
                comparison.metric
            )
    return measured(value, interval)
