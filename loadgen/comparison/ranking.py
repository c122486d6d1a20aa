"""The arms of a workload from the best to the worst, and which of them cannot be told apart.

The order is that of the measured ratios to the baseline. Two arms are separated if their own comparison names a winner.
All pairs of arms share Holm's correction, so it does not matter that the order comes from the same data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise

from loadgen.comparison.claims import join
from loadgen.comparison.comparisons import Comparison, leading_comparisons
from loadgen.comparison.pairs import ACHIEVED_RATE
from loadgen.records.run import Label, Record, shown


class Ranking(Record, frozen=True, kw_only=True):
    """The order of the arms in one workload, by its leading metric."""

    scenario: str
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
        for before, own in zip([[], *places], places, strict=False):
            alike = [called[other] for other in before if any((other, one) in self.not_separated for one in own)]
            note = f" (not separated from {join(alike)})" if alike else " (not separated)" if len(own) > 1 else ""
            parts.append(join(sorted(called[one] for one in own)) + note)
        return ", then ".join(parts)


def rank(comparisons: Sequence[Comparison], baseline: Label) -> tuple[Ranking, ...]:
    """The ranking of each workload that has a valid comparison with the baseline, in their order."""
    by_scenario: dict[str, list[Comparison]] = {}
    for one in comparisons:
        if one.verdict != "invalid" and one.ratio is not None:
            by_scenario.setdefault(one.scenario, []).append(one)
    rankings = (_rank(scenario, found, baseline) for scenario, found in by_scenario.items())
    return tuple(ranking for ranking in rankings if ranking is not None)


def _rank(scenario: str, comparisons: Sequence[Comparison], baseline: Label) -> Ranking | None:
    """Rank one workload. If an arm cannot sustain an open loop, by the achieved rate, which all arms have."""
    leading = {one.metric for one in leading_comparisons(comparisons)}
    metric = ACHIEVED_RATE.name if ACHIEVED_RATE.name in leading else min(leading, default=None)
    own = [one for one in comparisons if one.metric == metric]
    ratios = {one.arm: one.ratio for one in own if one.baseline == baseline and one.ratio is not None}
    if metric is None or not ratios:
        return None
    order = sorted({baseline: 1.0, **ratios}.items(), key=lambda one: one[1], reverse=own[0].higher_is_better)
    labels = tuple(label for label, _ in order)
    won = {(one.winner, one.loser) for one in own}
    apart = tuple(two for two in combinations(labels, 2) if two not in won)
    return Ranking(scenario=scenario, metric=metric, order=labels, not_separated=apart)


def neighbours(comparisons: Sequence[Comparison], ranking: Ranking) -> list[Comparison]:
    """The comparison of each arm with the next one, in the order of the ranking."""
    place = (ranking.scenario, ranking.metric)
    found = {frozenset(one.pairing): one for one in comparisons if (one.scenario, one.metric) == place}
    return [found[two] for two in map(frozenset, pairwise(ranking.order)) if two in found]
