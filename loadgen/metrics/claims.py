"""Comparisons in words: which arm is better, by how much, in which workloads; and the ranking of several arms.

The ranking orders the arms of a workload from the best to the worst. The order is that of the measured ratios to the
baseline. Two arms are separated if their own comparison names a winner. All pairs of arms share Holm's correction, so
it does not matter that the order comes from the same data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, pairwise
from operator import itemgetter
from typing import get_args

import msgspec

from loadgen.base.quantities import apart, is_determined, join, measured, ratio, ratio_interval, shown_ratio, times
from loadgen.metrics.comparisons import Comparison, Outcome, advantage, leading_comparisons, winner_of
from loadgen.metrics.registry import ACHIEVED_RATE, METRICS, SERVED
from loadgen.records.run import Label, Pairing, Record, Workload, shown
from loadgen.records.scenarios import SCENARIOS

ORDER: tuple[Outcome, ...] = get_args(Outcome)
"""The order in which outcomes are listed."""


def place(workload: Workload) -> str:
    """A workload inside a sentence: "with 16 users", "at 50 requests/s"."""
    return SCENARIOS[workload.scenario].place(workload) + _at_length(workload)


def _at_length(workload: Workload) -> str:
    return f" (length {workload.sequence_length})" if workload.sequence_length is not None else ""


def places(workloads: Sequence[Workload]) -> str:
    """Several workloads: "one request at a time and at batch 4, 8"."""
    batches = [
        f"{workload.batch_size}{_at_length(workload)}" for workload in workloads if workload.scenario == "batched"
    ]
    names = [place(workload) for workload in workloads if workload.scenario != "batched"]
    names += [f"at batch {', '.join(batches)}"] if batches else []
    return join(names)


def weight(workload: Workload) -> tuple[int, int, int]:
    """Sorts workloads by load: closed loops by concurrency, before open loops by rate. Searches and cold starts come
    last, because they say nothing about the cause of a difference."""
    length = workload.sequence_length or 0
    if workload.is_search or workload.scenario == "cold-start":
        return (0, 0, length)
    return (
        (0, round(workload.rate_per_s), length)
        if workload.rate_per_s is not None
        else (workload.concurrency, workload.batch_size, length)
    )


def verdict_words(
    outcome: Outcome, pairing: Pairing, margin: float | None = None, names: Mapping[Label, str] | None = None
) -> str:
    """ "B faster", "no meaningful difference (within ±5 %)", "inconclusive" """
    if better := winner_of(outcome, pairing):
        return f"{(names or {}).get(better, shown(better))} faster"
    if outcome != "no_difference":
        return outcome
    return "no meaningful difference" + ("" if margin is None else f" (within ±{100.0 * margin:g} %)")


def winner_in_words(comparison: Comparison, names: Mapping[Label, str], where: str = "", title: str = "") -> str:
    """How much better the winner is: "Triton handles 2.4 times the load of FastAPI with 64 users (2.2 to 2.5)", "Triton
    has 1.12 times lower p50 latency than FastAPI one request at a time (1.08 to 1.16)".

    A rough one is a range: "Triton handles 1.9 to 4.0 times the load of FastAPI". `where` follows the claim; `title`
    replaces that of the metric, if it is not a registered one.
    """
    lead, winner, loser = advantage(comparison), comparison.winner, comparison.loser
    assert lead is not None
    assert winner is not None
    assert loser is not None
    factor, interval = times(lead.factor, lead.ci95)
    after = f" ({interval or 'no interval'})"
    if comparison.lost is not None:
        factor, after = f"{interval} times", ""
    title = title or METRICS[comparison.metric].title
    where = f" {where}" if where else ""
    what = f"has {factor} the {title} of" if comparison.higher_is_better else f"has {factor} lower {title} than"
    if comparison.metric in (*SERVED, ACHIEVED_RATE.name):
        what = f"handles {factor} the load of"
    return f"{names[winner]} {what} {names[loser]}{where}{after}"


def claim(
    comparison: Comparison,
    names: Mapping[Label, str] | None = None,
    where: str = "",
    margin: float | None = None,
    title: str = "",
) -> str:
    """Which arm is better, by how much, with the interval. `names` replaces labels, `title` that of the metric; `where`
    follows the claim."""
    title = title or METRICS[comparison.metric].title
    names = names or {label: shown(label) for label in comparison.pairing}
    where = f" {where}" if where else ""
    if comparison.verdict == "invalid":
        return f"no verdict on {title}{where}: {comparison.reason}"
    if comparison.winner is None or comparison.loser is None or advantage(comparison) is None:
        words = verdict_words(comparison.verdict, comparison.pairing, margin)
        return f"{words} in {title}{where} ({_as_measured(comparison, names)})"
    return winner_in_words(comparison, names, where.strip(), title)


def _as_measured(comparison: Comparison, names: Mapping[Label, str]) -> str:
    lead = advantage(comparison)
    if lead is None:
        return comparison.reason or "not measured"
    factor = ratio(lead.factor, lead.ci95)
    if lead.better is not None and shown_ratio(lead.factor, lead.ci95) > 1.0:
        factor += f" in favour of {names[lead.better]}"
    if lead.ci95 is None:
        return f"{factor}, no interval: {comparison.reason}"
    interval = ratio_interval(lead.ci95, comparison.pairs)
    return f"{factor}, 95 % interval {interval}" if is_determined(lead.ci95) else f"{factor}, {interval}"


def groups(
    comparisons: Sequence[Comparison], workloads: dict[str, Workload], margin: float, names: Mapping[Label, str]
) -> list[str]:
    """Two arms' workloads by outcome: "Triton is faster one request at a time and at batch 1, 4 (1.12–1.38×)"."""
    outcomes: dict[tuple[str, bool], list[Comparison]] = {}
    for comparison in sorted(
        comparisons, key=lambda c: (ORDER.index(c.verdict), workloads[c.workload].scenario == "cold-start")
    ):
        words = verdict_words(comparison.verdict, comparison.pairing, margin)
        text = f"{names[comparison.winner]} is faster" if comparison.winner else words
        if comparison.verdict != "invalid":
            outcomes.setdefault((text, workloads[comparison.workload].scenario == "cold-start"), []).append(comparison)
    return [
        f"{text} {places([workloads[comparison.workload] for comparison in chosen])}{_leads(chosen)}"
        for (text, _), chosen in outcomes.items()
    ]


def other_decided_metrics(
    comparisons: Sequence[Comparison], workloads: dict[str, Workload], names: Mapping[Label, str]
) -> list[str]:
    """List every decided metric that does not lead its workload. Metrics that favour the same arm as the leading one
    share a clause; each of the others gets a clause: "but Triton has the lower p99 latency at batch 4 (1.90×)"."""
    leading = {(c.workload, c.pairing): c.winner for c in comparisons if c.leading}
    several = len({c.pairing for c in comparisons}) > 1
    agreeing: dict[str, None] = {}
    against: dict[tuple[Label, Label, str], list[Comparison]] = {}
    for comparison in comparisons:
        if comparison.leading or comparison.winner is None or comparison.loser is None:
            continue
        if leading.get((comparison.workload, comparison.pairing)) == comparison.winner:
            agreeing[METRICS[comparison.metric].title] = None
        else:
            against.setdefault((comparison.winner, comparison.loser, comparison.metric), []).append(comparison)
    parts = []
    if agreeing:
        verb = "favours" if len(agreeing) == 1 else "favour"
        parts.append(f"{join(list(agreeing))} {verb} the same arm wherever decided")
    for (winner, loser, name), chosen in against.items():
        best = "higher" if METRICS[name].higher_is_better else "lower"
        where = places([workloads[c.workload] for c in chosen])
        than = f" than {names[loser]}" if several else ""
        article = "a" if several else "the"
        parts.append(f"but {names[winner]} has {article} {best} {METRICS[name].title}{than} {where}{_leads(chosen)}")
    return parts


def _leads(comparisons: Sequence[Comparison]) -> str:
    """The least and the largest factor of the winner: " (1.12–1.38×)"; empty without a winner."""
    advantages = [(advantage(comparison), comparison.winner) for comparison in comparisons]
    factors = sorted((lead.factor, lead.ci95) for lead, winner in advantages if lead is not None and winner is not None)
    if not factors:
        return ""
    least, largest = ratio(*factors[0]), ratio(*factors[-1])
    return f" ({largest})" if least == largest else f" ({least.removesuffix('×')}–{largest})"


def figures(comparison: Comparison) -> list[str]:
    """The baseline's and the arm's value of a comparison, without their unit. Beside a winner they differ."""
    values = (comparison.baseline_value, comparison.arm_value)
    if comparison.winner is None or None in values:
        return [measured(value) for value in values]
    return apart([value for value in values if value is not None])


class WorkloadRanking(Record, frozen=True, kw_only=True):
    """The order of the arms in one workload, by its leading metric."""

    workload: str = msgspec.field(name="scenario")
    metric: str
    order: tuple[Label, ...]
    """The arms that have a valid value, the best first."""
    not_separated: tuple[tuple[Label, Label], ...]
    """Pairs of these arms, in this order, whose comparison does not name the first as better."""

    def words(self, names: Mapping[Label, str] | None = None) -> str:
        """ "B, then A and C (not separated)"; arms share a place if no comparison separates them."""
        called = {label: (names or {}).get(label, shown(label)) for label in self.order}
        places = [[self.order[0]]]
        for label in self.order[1:]:
            if all((other, label) in self.not_separated for other in places[-1]):
                places[-1].append(label)
            else:
                places.append([label])
        parts = []
        for before, place in zip([[], *places], places, strict=False):
            alike = [called[other] for other in before if any((other, label) in self.not_separated for label in place)]
            note = f" (not separated from {join(alike)})" if alike else " (not separated)" if len(place) > 1 else ""
            parts.append(join(sorted(called[label] for label in place)) + note)
        return ", then ".join(parts)


def rank(comparisons: Sequence[Comparison], baseline_in: Callable[[str], Label]) -> tuple[WorkloadRanking, ...]:
    """The ranking of each workload that has a valid comparison with its baseline, in their order."""
    by_workload: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        if comparison.verdict != "invalid" and comparison.ratio is not None:
            by_workload.setdefault(comparison.workload, []).append(comparison)
    rankings = (_rank(workload, compared, baseline_in(workload)) for workload, compared in by_workload.items())
    return tuple(ranking for ranking in rankings if ranking is not None)


def _rank(workload: str, comparisons: Sequence[Comparison], baseline: Label) -> WorkloadRanking | None:
    """Rank one workload. If an arm cannot sustain an open loop, by the achieved rate, which all arms have."""
    leading = {comparison.metric for comparison in leading_comparisons(comparisons)}
    metric = ACHIEVED_RATE.name if ACHIEVED_RATE.name in leading else min(leading, default=None)
    by_metric = [comparison for comparison in comparisons if comparison.metric == metric]
    ratios = {
        comparison.arm: comparison.ratio
        for comparison in by_metric
        if comparison.baseline == baseline and comparison.ratio is not None
    }
    if metric is None or not ratios:
        return None
    order = sorted({baseline: 1.0, **ratios}.items(), key=itemgetter(1), reverse=by_metric[0].higher_is_better)
    labels = tuple(label for label, _ in order)
    won = {(comparison.winner, comparison.loser) for comparison in by_metric}
    apart = tuple(two for two in combinations(labels, 2) if two not in won)
    return WorkloadRanking(workload=workload, metric=metric, order=labels, not_separated=apart)


def neighbours(comparisons: Sequence[Comparison], ranking: WorkloadRanking) -> list[Comparison]:
    """The comparison of each arm with the next one, in the order of the ranking."""
    place = (ranking.workload, ranking.metric)
    by_arms = {
        frozenset(comparison.pairing): comparison
        for comparison in comparisons
        if (comparison.workload, comparison.metric) == place
    }
    return [by_arms[two] for two in map(frozenset, pairwise(ranking.order)) if two in by_arms]
