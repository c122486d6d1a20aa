"""The arms of a scenario from the best to the worst, and which neighbours cannot be told apart.

The order is that of the measured ratios to the baseline. Two neighbours are separated where the comparison of the two
names a winner; the comparisons of all pairs of arms belong to one family for Holm's correction, so it makes no
difference that the order was found in the same data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise

from loadgen.comparison.claims import join
from loadgen.comparison.comparisons import Comparison, leading_comparisons
from loadgen.comparison.pairs import ACHIEVED_RATE
from loadgen.records.run import Label, Record, shown


class Ranking(Record, frozen=True, kw_only=True):
    """One scenario by its leading metric."""

    scenario: str
    metric: str
    order: tuple[Label, ...]
    """The best first. Arms without a valid value are left out."""
    not_separated: tuple[tuple[Label, Label], ...]
    """Pairs of these arms of which no comparison says that the one that comes first is better."""

    @property
    def separated(self) -> tuple[bool, ...]:
        """Of each arm but the last: whether it is better than the next one."""
        return tuple(two not in self.not_separated for two in pairwise(self.order))

    def words(self, names: Mapping[Label, str] | None = None) -> str:
        """ "B, then A and C (not separated)"; arms share a place where none of them is better than another."""
        called = {label: (names or {}).get(label, shown(label)) for label in self.order}
        places = [[self.order[0]]]
        for label in self.order[1:]:
            if all((other, label) in self.not_separated for other in places[-1]):
                places[-1].append(label)
            else:
                places.append([label])
        told = []
        for before, own in zip([[], *places], places, strict=False):
            notes = ["not separated"] if len(own) > 1 else []
            if from_whom := [
                called[other] for other in before if any((other, one) in self.not_separated for one in own)
            ]:
                notes = [*notes, f"not separated from {join(from_whom)}"][-1:]
            told.append(join(sorted(called[one] for one in own)) + (f" ({notes[0]})" if notes else ""))
        return ", then ".join(told)


def rank(comparisons: Sequence[Comparison], baseline: Label) -> tuple[Ranking, ...]:
    """One a scenario that has a valid comparison with the baseline, in their order."""
    by_scenario: dict[str, list[Comparison]] = {}
    for one in comparisons:
        if one.verdict != "invalid" and one.ratio is not None:
            by_scenario.setdefault(one.scenario, []).append(one)
    rankings = (_rank(scenario, found, baseline) for scenario, found in by_scenario.items())
    return tuple(ranking for ranking in rankings if ranking is not None)


def _rank(scenario: str, comparisons: Sequence[Comparison], baseline: Label) -> Ranking | None:
    """In an open loop that an arm does not sustain, by the achieved rate, which all have."""
    leading = {one.metric for one in leading_comparisons(comparisons)}
    if not leading:
        return None
    metric = ACHIEVED_RATE.name if ACHIEVED_RATE.name in leading else leading.pop()
    own = [one for one in comparisons if one.metric == metric]
    against = [one for one in own if one.baseline == baseline]
    if not against:
        return None
    ratios = {one.arm: one.ratio for one in own if one.baseline == baseline and one.ratio is not None}
    order = sorted({baseline: 1.0, **ratios}.items(), key=lambda one: one[1], reverse=against[0].higher_is_better)
    labels = tuple(label for label, _ in order)
    won = {(one.winner, one.loser) for one in own}
    apart = tuple(two for two in combinations(labels, 2) if two not in won)
    return Ranking(scenario=scenario, metric=metric, order=labels, not_separated=apart)


def neighbours(comparisons: Sequence[Comparison], ranking: Ranking) -> list[Comparison]:
    """The comparison of each arm with the next one, in the order of the ranking."""
    found = {frozenset(one.pairing): one for one in comparisons if (one.scenario, one.metric) == _of(ranking)}
    return [found[two] for two in map(frozenset, pairwise(ranking.order)) if two in found]


def _of(ranking: Ranking) -> tuple[str, str]:
    return ranking.scenario, ranking.metric
