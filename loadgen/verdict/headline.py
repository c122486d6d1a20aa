"""The result in at most `MOST_WORDS` words, with which every report, the terminal and the API begin, and what it means.

The headline calls the arms by their names (`names_of`). It says who leads in the most loaded workload with a
winner, by how much, with the 95 % interval, a setting that explains the lead, and at how many loads which arm is ahead;
of several arms the order. What does not fit is left out, the least important first; `Verdict.sentence` has all of it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from msgspec.structs import replace

from loadgen.base.quantities import capital, counted, join, number
from loadgen.checks.registry import CHECKS, Fault, fault_of, in_sentence, invalidating, reached, roughening
from loadgen.checks.run import same_payload
from loadgen.metrics.claims import WorkloadRanking, neighbours, place, verdict_words, weight, winner_in_words
from loadgen.metrics.comparisons import Comparison, leading_comparisons
from loadgen.metrics.registry import METRICS, SERVED
from loadgen.metrics.surface import Surface, counts_in_words, crossing_in_words, rows_in_words, surface_of
from loadgen.metrics.tokens import per_million
from loadgen.records.checks import Check
from loadgen.records.names import names_of
from loadgen.records.run import ArmRecord, ArmRequest, Experiment, Label, Workload

MOST_WORDS = 32

Alternatives = Sequence[str]
"""A part of the headline, the longest wording first; the last may be empty."""
TO_BLAME: Mapping[Fault | None, str] = {
    "busy machine": "the machine",
    "overloaded load generator": "the load generator",
    "unfair configuration": "the settings",
}
"""Who is to blame for a fault where no arm is."""


def word_count(text: str) -> int:
    """The words of a sentence: what stands between spaces, without signs that stand alone."""
    return sum(any(character.isalnum() for character in word) for word in text.split())


def headline(
    experiment: Experiment,
    arms: Sequence[ArmRecord],
    comparisons: Sequence[Comparison],
    rankings: Sequence[WorkloadRanking],
    checks: Sequence[Check],
    cause: str = "",
) -> str:
    """The headline. `cause` is a clause with its comma that explains the lead of `main_comparison`. Where every server
    is at its best for each load, it has one name for all of its configurations."""
    servers, names = experiment.servers, _server_names(experiment, arms)
    comparisons = [replace(c, baseline=servers[c.baseline], arm=servers[c.arm]) for c in comparisons]
    rankings = [_of_servers(ranking, servers) for ranking in rankings]
    failed = invalidating(reached(checks))
    if apart := next((check for check in failed if check.name == same_payload.name), None):
        return fit([("No winner: ",), (f"{apart.detail}.", "the arms were sent different payloads.")])
    leading = leading_comparisons(comparisons)
    usable = [comparison for comparison in leading if comparison.verdict != "invalid"]
    if not usable:
        start = "No verdict" if leading else "Nothing was compared"
        return fit([(start,), (*(text for text in _failures(failed, names_of(experiment.arms, arms))), ""), (".",)])
    workloads = experiment.by_name
    lost = len({c.workload for c in leading} - {c.workload for c in usable})
    total = len({c.workload for c in leading})
    before: Alternatives = ("",)
    if lost:
        before = (f"No verdict at {lost} of {total} loads; otherwise ", f"{lost} of {total} loads invalid: ")
    elif failed:
        before = ("Not valid; the complete loads show: ", "Not valid; otherwise ")
    elif experiment.is_at_best:
        before = ("Each server at its best: ", "At their best: ")
    if rough := roughening(checks):
        before = tuple(f"Rough: {text[:1].lower()}{text[1:]}" for text in before)
    main = main_comparison(comparisons, rankings, workloads)
    surface = surface_of(experiment, comparisons)
    if surface is not None and any(point.winner for point in surface.points):
        parts = _of_surface(surface, names)
    elif main is None and (served := _most_loaded(comparisons, workloads, names)) is not None:
        claim = winner_in_words(served, names, place(workloads[served.workload]))
        parts = [(claim,), _leading_open(served, leading, names)]
    elif main is None:
        parts = [_no_winner(experiment, usable, names), _besides(comparisons, names)]
    else:
        ranking = next((r for r in rankings if r.workload == main.workload), None) if len(names) > 2 else None
        claims = _claims(main, names, place(workloads[main.workload]), ranking)
        parts = [claims, _shortened(cause), _leads(usable, rankings, main, names), _besides(comparisons, names)]
    text = fit([before, *parts, _rough_because(rough), (".",)])
    return capital(text)


def _server_names(experiment: Experiment, arms: Sequence[ArmRecord]) -> dict[Label, str]:
    """The names of the servers as the user named them: one for all configurations of a server at its best, without the
    settings in which these differ."""
    requests: dict[Label, list[ArmRequest]] = {}
    for arm in experiment.arms:
        requests.setdefault(experiment.servers[arm.label], []).append(arm)
    alike = [
        replace(
            first, label=server, settings=dict(set.intersection(*(set(arm.settings.items()) for arm in configured)))
        )
        for server, configured in requests.items()
        for first in configured[:1]
    ]
    told = {arm.label: arm for arm in arms}
    records = [replace(told[of[0].label], label=server) for server, of in requests.items() if of[0].label in told]
    return names_of(alike, records)


def consequence(
    experiment: Experiment,
    arms: Sequence[ArmRecord],
    comparisons: Sequence[Comparison],
    rankings: Sequence[WorkloadRanking],
) -> str:
    """What the headline's comparison means: the p99 of both arms, and how many servers a load takes, or what it costs
    where the price of the machine is known. Empty without a winner."""
    names = names_of(experiment.arms, arms)
    workloads = experiment.by_name
    main = main_comparison(comparisons, rankings, workloads)
    if main is None:
        return ""
    beside = [c for c in comparisons if (c.workload, c.pairing) == (main.workload, main.pairing)]
    values = {c.metric: (c.baseline_value, c.arm_value) for c in (*beside, main)}
    called = [names[label] for label in main.pairing]
    parts = []
    tail = next((name for name in ("latency_p99", "ttft_p99") if None not in values.get(name, (None,))), None)
    if tail is not None:
        each = (f"{number(value or 0.0)} ms by {name}" for name, value in zip(called, values[tail], strict=True))
        what = "requests are answered" if tail == "latency_p99" else "requests get their first token"
        parts.append(f"99 of 100 {what} within {join(list(each))}")
    served = [value for value in (main.baseline_value, main.arm_value) if value]
    if main.metric in SERVED and len(served) == 2 and not workloads[main.workload].is_open:
        items = main.unit.removesuffix("/s")
        if experiment.price is not None:
            costs = [number(per_million(experiment.price, value)) for value in served]
            parts.append(f"a million {items} cost {' or '.join(map(' with '.join, zip(costs, called, strict=True)))}")
        else:
            goal = 10 ** math.ceil(math.log10(5.0 * max(served)))
            servers = [math.ceil(goal / value) for value in served]
            each = (f"{counted(count, 'server')} with {name}" for count, name in zip(servers, called, strict=True))
            parts.append(f"{goal:,} {main.unit} at this load take {' or '.join(each)}")
    return " ".join(f"{capital(part)}." for part in parts)


def _rough_because(checks: Sequence[Check]) -> Alternatives:
    """Why the figures are not to be cited; empty for a run that is not rough."""
    if not checks:
        return ("",)
    return tuple(f". Do not cite it: {text}" for text in (checks[0].detail, in_sentence(CHECKS[checks[0].name].failed)))


def _of_servers(ranking: WorkloadRanking, servers: Mapping[Label, Label]) -> WorkloadRanking:
    return replace(
        ranking,
        order=tuple(servers[label] for label in ranking.order),
        not_separated=tuple((servers[one], servers[other]) for one, other in ranking.not_separated),
    )


def main_comparison(
    comparisons: Sequence[Comparison], rankings: Sequence[WorkloadRanking], workloads: Mapping[str, Workload]
) -> Comparison | None:
    """The decided comparison that the headline is about: in the most loaded workload, by throughput if that decided
    any; with several arms the best arm beside the next one that it beats."""
    decided = [c for c in leading_comparisons(comparisons) if c.winner and c.verdict != "invalid"]
    if len({c.pairing for c in comparisons}) > 1:
        ranked = (neighbours(comparisons, ranking) for ranking in rankings)
        decided = [first for pairs in ranked if (first := next((c for c in pairs if c.winner), None)) is not None]
    loads = [c for c in decided if c.metric in SERVED] or decided
    return max(loads, key=lambda c: weight(workloads[c.workload]), default=None)


def _most_loaded(
    comparisons: Sequence[Comparison], workloads: Mapping[str, Workload], names: Mapping[Label, str]
) -> Comparison | None:
    """Of two arms, the decided comparison of what they serve, in the most loaded workload, where no leading metric is
    decided: such as the tokens per second where TPOT leads. None if these contradict each other."""
    served = [c for c in comparisons if c.metric in SERVED and c.winner and c.verdict != "invalid"]
    if len(names) > 2 or len({c.winner for c in served}) != 1:
        return None
    return max(served, key=lambda c: weight(workloads[c.workload]))


def _leading_open(served: Comparison, leading: Sequence[Comparison], names: Mapping[Label, str]) -> Alternatives:
    """What the leading metric of that workload shows."""
    open_ones = [c for c in leading if c.workload == served.workload and c.metric != served.metric]
    texts = [f"; {METRICS[c.metric].title}: {verdict_words(c.verdict, c.pairing, names=names)}" for c in open_ones]
    return ("".join(texts), "")


def fit(parts: Sequence[Alternatives]) -> str:
    """The parts in the longest wording that keeps to the limit. A shorter wording is a smaller loss than none, and
    later parts are shortened first."""

    def loss(choice: tuple[int, ...]) -> int:
        return sum(n + bool(n and not part[n]) for part, n in zip(parts, choice, strict=True))

    choices = sorted(product(*(range(len(part)) for part in parts)), key=loss)
    texts = ("".join(part[n] for part, n in zip(parts, choice, strict=True)) for choice in choices)
    return next((text for text in texts if word_count(text) <= MOST_WORDS), "".join(part[-1] for part in parts))


def _failures(failed: Sequence[Check], names: Mapping[Label, str]) -> Iterator[str]:
    """Who took the verdict away and how, from the whole detail to the name of the check; a check without data by its
    name."""
    if failed:
        first, checks = failed[0], {check.name for check in failed}
        blamed = () if set(names) <= set(first.arms) else first.arms
        who = join([names[label] for label in blamed if label in names]) or TO_BLAME.get(fault_of(first), "")
        because = f" because of {who}: " if who and not first.detail.startswith(who) else ": "
        more = f" ({counted(len(checks) - 1, 'more failed check')})" if len(checks) > 1 else ""
        if first.ok is False:
            yield because + first.detail + more
            yield because + first.detail
        yield because + _condition(first) + more
        yield because + _condition(first)


def _condition(check: Check) -> str:
    """A check in a few words: its title where that says what is wrong or not known, else the condition, which is all
    that a result of an older version has."""
    definition = CHECKS.get(check.name)
    if definition is not None and check.title in (definition.failed, definition.not_known):
        return in_sentence(check.title)
    return f"“{check.title}” is not available" if check.ok is None else f"“{check.title}” failed"


def _claims(
    comparison: Comparison, names: Mapping[Label, str], where: str, ranking: WorkloadRanking | None
) -> Alternatives:
    """Who leads by how much, with the interval; of several arms their order, and the best beside the next that it
    beats."""
    claim = winner_in_words(comparison, names, where)
    if ranking is None:
        return (claim,)
    ahead = ranking.order[: ranking.order.index(comparison.winner or "") + 1]
    alone = winner_in_words(comparison, names)
    is_shown = all((label, comparison.loser) not in ranking.not_separated for label in ahead)
    first = (
        f"{join([names[label] for label in ahead])} are ahead, not separated: " if len(ahead) > 1 and is_shown else ""
    )
    return (
        f"ranking {where}: {ranking.words(names)}. {capital(alone)}",
        f"{first}{claim}, the next of {len(names)}",
        f"{len(ahead)} of {len(names)} are ahead, not separated: {claim}" if first else claim,
    )


def _of_surface(surface: Surface, names: Mapping[Label, str]) -> list[Alternatives]:
    """The crossing that is known best and what holds at the other sizes; without a crossing who wins how often."""
    if not surface.crossings:
        text = counts_in_words(surface, names)
        return [(text, text.partition(";")[0], text.partition(",")[0])]
    main = min(surface.crossings, key=lambda crossing: crossing.ci95[1] / crossing.ci95[0])
    clauses = dict(zip(surface.rows, rows_in_words(surface, names), strict=True))
    others = [clause for size, clause in clauses.items() if size != main.size]
    shorter = [clause for clause in others if "no winner" not in clause]
    rest = tuple(dict.fromkeys("".join(f"; {clause}" for clause in some) for some in (others, shorter, ())))
    return [(crossing_in_words(surface, main, names),), rest]


def _shortened(clause: str) -> Alternatives:
    """A clause, and the same without what stands in brackets."""
    return tuple(dict.fromkeys((clause, re.sub(r" \([^)]*\)", "", clause), "")))


def _leads(
    usable: Sequence[Comparison], rankings: Sequence[WorkloadRanking], main: Comparison, names: Mapping[Label, str]
) -> Alternatives:
    """At how many loads which arm is ahead: of the other, or with several arms of all others. One whose figures vary
    may be last in the order, and yet not be shown to be slower than the first."""
    if len({c.pairing for c in usable}) > 1:
        firsts = [(ranking.order[0], {faster for faster, _ in ranking.not_separated}) for ranking in rankings]
        winners = [first for first, not_ahead in firsts if first not in not_ahead]
        total = len(rankings)
    else:
        winners = [c.winner for c in usable if c.winner]
        total = len(usable)
    leads = Counter(winners)
    mine = leads.pop(main.winner or "", 0)
    if total == 1 or not (mine or leads):
        return ("",)
    others = join([names[label] for label in leads])
    elsewhere = f". {capital(others)} {'is' if len(leads) == 1 else 'are'} ahead at other loads"
    if not mine:
        return (elsewhere, "")
    who = "It" if len(names) == 2 else capital(names[main.winner or ""])
    if mine == total:
        return (f". {who} is ahead at {'both loads' if total == 2 else 'every load'} tested", "")
    others = "".join(f", {names[label]} at {count}" for label, count in leads.items())
    undecided = total - mine - leads.total()
    text = f". {who} is ahead at {mine} of {total} loads{others}"
    longer = f"{text}; no winner at {undecided}" if undecided else text
    return tuple(dict.fromkeys((longer, text, elsewhere if leads else "")))


def _besides(comparisons: Sequence[Comparison], names: Mapping[Label, str]) -> Alternatives:
    """The metrics by which an arm wins that does not lead its workload."""
    leading = {(c.workload, c.pairing): c.winner for c in comparisons if c.leading}
    against: dict[Label, dict[str, None]] = {}
    where: set[str] = set()
    for c in comparisons:
        if not c.leading and c.verdict != "invalid" and c.winner not in (None, leading.get((c.workload, c.pairing))):
            against.setdefault(c.winner or "", {})[METRICS[c.metric].title] = None
            where.add(c.workload)
    if not against:
        return ("",)
    words = [f"{names[label]} has better {join(list(metrics))}" for label, metrics in against.items()]
    return (f", but {join(words)}{'' if where == {'cold-start'} else ' at some loads'}", "")


def _no_winner(experiment: Experiment, usable: Sequence[Comparison], names: Mapping[Label, str]) -> Alternatives:
    """The arms that have no winner, and how many workloads are equal within the margin or inconclusive."""
    outcomes = Counter(c.verdict for c in usable)
    several = len(names) > 2
    what = "comparisons" if several else "loads"
    parts = []
    if same := outcomes["no_difference"]:
        margin = f"within ±{100.0 * experiment.equivalence_margin:g} %"
        parts.append(f"no meaningful difference ({margin}) at {same} of {len(usable)} {what}")
    if unknown := outcomes["inconclusive"]:
        parts.append(f"inconclusive at {unknown}" + ("" if parts else f" of {len(usable)} {what}"))
    who = f"among {len(names)} servers" if several else f"between {' and '.join(names.values())}"
    return (f"no winner {who}: {', '.join(parts)}",)
