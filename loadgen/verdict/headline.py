"""The result in one sentence of at most `MOST_WORDS` words, with which every report, the terminal and the API begin.

It names the most loaded workload with a winner, the lead with its 95 % interval, a setting that explains the lead, and
in how many workloads which arm leads. What does not fit is left out, the least important first; `Verdict.sentence` has
all of it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from msgspec.structs import replace

from loadgen.base.quantities import counted, join, ratio_interval
from loadgen.checks.registry import CHECKS, in_sentence, invalidating, reached
from loadgen.checks.run import same_payload
from loadgen.metrics.claims import WorkloadRanking, neighbours, place, verdict_words, weight, winner_in_words
from loadgen.metrics.comparisons import Comparison, advantage, leading_comparisons
from loadgen.metrics.registry import METRICS, SERVED
from loadgen.metrics.surface import Surface, counts_in_words, crossing_in_words, rows_in_words, surface_of
from loadgen.records.checks import Check
from loadgen.records.run import Experiment, Label, Workload, shown

MOST_WORDS = 25
SHORT_TITLE = 30
"""Most characters of a name beside an arm's label."""

Alternatives = Sequence[str]
"""A part of the sentence, the longest wording first; the last may be empty."""


def word_count(text: str) -> int:
    """The words of a sentence: what stands between spaces, without signs that stand alone."""
    return sum(any(character.isalnum() for character in word) for word in text.split())


def headline(
    experiment: Experiment,
    titles: Mapping[Label, str],
    comparisons: Sequence[Comparison],
    rankings: Sequence[WorkloadRanking],
    checks: Sequence[Check],
    cause: str = "",
) -> str:
    """The sentence. `titles` are the arms' names; `cause` is a clause with its comma that explains the lead of the
    comparison `main_comparison`. Where every server is at its best for each load, it has one name for all of its
    configurations."""
    servers = experiment.servers
    titles = {server: titles[label] for label, server in reversed(servers.items())}
    comparisons = [replace(c, baseline=servers[c.baseline], arm=servers[c.arm]) for c in comparisons]
    rankings = [_of_servers(ranking, servers) for ranking in rankings]
    failed = invalidating(reached(checks))
    if apart := next((check for check in failed if check.name == same_payload.name), None):
        return fit([("No winner: ",), (f"{apart.detail}.", "the arms were sent different payloads.")])
    leading = leading_comparisons(comparisons)
    usable = [comparison for comparison in leading if comparison.verdict != "invalid"]
    if not usable:
        start = "No verdict" if leading else "Nothing was compared"
        return fit([(start,), (*(f": {text}" for text in _failures(failed)), ""), (".",)])
    names = _short_names(tuple(dict.fromkeys(servers.values())), titles)
    workloads = {workload.name: workload for workload in experiment.workloads}
    lost = len({c.workload for c in leading} - {c.workload for c in usable})
    total = len({c.workload for c in leading})
    before: Alternatives = ("",)
    if lost:
        before = (f"No verdict on {lost} of {total} workloads; otherwise ", f"{lost} of {total} workloads invalid: ")
    elif failed:
        before = ("Not valid; the complete workloads show: ", "Not valid; otherwise ")
    elif experiment.is_at_best:
        before = ("Each server at its best: ", "At their best: ")
    main = main_comparison(comparisons, rankings, workloads)
    surface = surface_of(experiment, comparisons)
    if surface is not None and any(point.winner for point in surface.points):
        parts = _of_surface(surface, names)
    elif main is None and (served := _most_loaded(comparisons, workloads, names)) is not None:
        parts = [_claims(served, names, place(workloads[served.workload]), None), _leading_open(served, leading)]
    elif main is None:
        parts = [_no_winner(experiment, usable, names), _besides(comparisons)]
    else:
        ranking = next((r for r in rankings if r.workload == main.workload), None) if len(names) > 2 else None
        claims = _claims(main, names, place(workloads[main.workload]), ranking)
        parts = [claims, _shortened(cause), _leads(usable, rankings, main), _besides(comparisons)]
    text = fit([before, *parts, (".",)])
    return text[0].upper() + text[1:]


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


def _leading_open(served: Comparison, leading: Sequence[Comparison]) -> Alternatives:
    """What the leading metric of that workload shows."""
    open_ones = [c for c in leading if c.workload == served.workload and c.metric != served.metric]
    texts = [f"; {METRICS[c.metric].title}: {verdict_words(c.verdict, c.pairing)}" for c in open_ones]
    return ("".join(texts), "")


def fit(parts: Sequence[Alternatives]) -> str:
    """The parts in the longest wording that keeps to the limit. A shorter wording is a smaller loss than none, and
    later parts are shortened first."""

    def loss(choice: tuple[int, ...]) -> int:
        return sum(n + bool(n and not part[n]) for part, n in zip(parts, choice, strict=True))

    choices = sorted(product(*(range(len(part)) for part in parts)), key=loss)
    texts = ("".join(part[n] for part, n in zip(parts, choice, strict=True)) for choice in choices)
    return next((text for text in texts if word_count(text) <= MOST_WORDS), "".join(part[-1] for part in parts))


def _failures(failed: Sequence[Check]) -> Iterator[str]:
    """What took the verdict away, from the whole detail to the name of the check; a check without data by its name."""
    if failed:
        first, names = failed[0], {check.name for check in failed}
        more = f" ({counted(len(names) - 1, 'more failed check')})" if len(names) > 1 else ""
        if first.ok is False:
            yield first.detail + more
            yield first.detail
        yield _condition(first) + more
        yield _condition(first)


def _condition(check: Check) -> str:
    """A check in a few words: its title where that says what is wrong or not known, else the condition, which is all
    that a result of an older version has."""
    definition = CHECKS.get(check.name)
    if definition is not None and check.title in (definition.failed, definition.not_known):
        return in_sentence(check.title)
    return f"“{check.title}” is not available" if check.ok is None else f"“{check.title}” failed"


def _short_names(labels: Sequence[Label], titles: Mapping[Label, str]) -> dict[Label, str]:
    """ "B (Triton)": the label and the first word of the arm's name, where that tells all arms apart."""
    words = {label: titles[label].split()[0].split("://")[-1] if titles[label].split() else "" for label in labels}
    apart = len(set(words.values())) == len(words) and all(0 < len(word) <= SHORT_TITLE for word in words.values())
    return {label: f"{shown(label)} ({words[label]})" if apart else shown(label) for label in labels}


def _claims(
    comparison: Comparison, names: Mapping[Label, str], where: str, ranking: WorkloadRanking | None
) -> Alternatives:
    """Who leads by how much, with the interval; of several arms the best beside the next that it beats."""
    lead, winner = advantage(comparison), comparison.winner
    assert lead is not None
    assert winner is not None
    interval = ratio_interval(lead.ci95)
    ahead = () if ranking is None else ranking.order[: ranking.order.index(winner) + 1]
    texts = []
    for called in (names, {label: shown(label) for label in names}):
        if len(ahead) > 2:
            start = f"{len(ahead)} of {len(names)} arms lead {where}, not separated: "
        else:
            start = (
                f"{join([called[label] for label in sorted(ahead)])} lead {where}, not separated: " if ahead[1:] else ""
            )
        after = f", the next of {len(names)} arms, {where}" if len(names) > 2 else f" {where}"
        after = "" if start else after
        text = start + winner_in_words(comparison, {**called, winner: shown(winner)} if start else called)
        texts += [f"{text}{after} (95 % interval {interval})", f"{text}{after} ({interval})"]
    return (texts[0], texts[1], texts[3], f"{text.removeprefix(start)} {where} ({interval})")


def _of_surface(surface: Surface, names: Mapping[Label, str]) -> list[Alternatives]:
    """The crossing that is known best and what holds at the other sizes; without a crossing who wins how often."""
    letters = {label: shown(label) for label in names}
    if not surface.crossings:
        texts = [counts_in_words(surface, called) for called in (names, letters)]
        return [(*texts, texts[1].partition(";")[0], texts[1].partition(",")[0])]
    main = min(surface.crossings, key=lambda crossing: crossing.ci95[1] / crossing.ci95[0])
    clauses = dict(zip(surface.rows, rows_in_words(surface), strict=True))
    others = [clause for size, clause in clauses.items() if size != main.size]
    shorter = [clause for clause in others if "no winner" not in clause]
    rest = tuple(dict.fromkeys("".join(f"; {clause}" for clause in some) for some in (others, shorter, ())))
    return [tuple(crossing_in_words(surface, main, called) for called in (names, letters)), rest]


def _shortened(clause: str) -> Alternatives:
    """A clause, and the same without what stands in brackets."""
    return tuple(dict.fromkeys((clause, re.sub(r" \([^)]*\)", "", clause), "")))


def _leads(usable: Sequence[Comparison], rankings: Sequence[WorkloadRanking], main: Comparison) -> Alternatives:
    """In how many workloads which arm leads: against the other, or with several arms before all others."""
    if len({c.pairing for c in usable}) > 1:
        winners = [ranking.order[0] for ranking in rankings if ranking.order[:2] not in ranking.not_separated]
        total = len(rankings)
    else:
        winners = [c.winner for c in usable if c.winner]
        total = len(usable)
    leads = Counter(winners)
    mine = leads.pop(main.winner or "", 0)
    if total == 1 or not (mine or leads):
        return ("",)
    others = [f"{shown(label)} in {count}" for label, count in leads.items()]
    if not mine:
        return (f"; {join([shown(label) for label in leads])} leads elsewhere", "")
    every = f"{mine} of {total}" if mine < total else "both" if total == 2 else f"all {total}"
    text = f"; {shown(main.winner or '')} leads in {every} workloads" + (f", {join(others)}" if others else "")
    return (text, f"; {join([shown(label) for label in leads])} leads elsewhere") if others else (text, "")


def _besides(comparisons: Sequence[Comparison]) -> Alternatives:
    """The metrics by which an arm wins that does not lead its workload."""
    leading = {(c.workload, c.pairing): c.winner for c in comparisons if c.leading}
    against: dict[Label, dict[str, None]] = {}
    for c in comparisons:
        if not c.leading and c.verdict != "invalid" and c.winner not in (None, leading.get((c.workload, c.pairing))):
            against.setdefault(c.winner or "", {})[METRICS[c.metric].title] = None
    if not against:
        return ("",)
    words = [f"{shown(label)} has better {join(list(metrics))}" for label, metrics in against.items()]
    return (f", but {join(words)} in some", "")


def _no_winner(experiment: Experiment, usable: Sequence[Comparison], names: Mapping[Label, str]) -> Alternatives:
    """The arms that have no winner, and how many workloads are equal within the margin or inconclusive."""
    outcomes = Counter(c.verdict for c in usable)
    several = len(names) > 2
    what = "comparisons" if several else "workloads"
    parts = []
    if same := outcomes["no_difference"]:
        margin = f"within ±{100.0 * experiment.equivalence_margin:g} %"
        parts.append(f"no meaningful difference ({margin}) in {same} of {len(usable)} {what}")
    if unknown := outcomes["inconclusive"]:
        parts.append(f"inconclusive in {unknown}" + ("" if parts else f" of {len(usable)} {what}"))
    who = f"among {len(names)} arms" if several else f"between {' and '.join(names.values())}"
    labels = who if several else f"between {join(list(map(shown, names)))}"
    return f"no winner {who}: {', '.join(parts)}", f"no winner {labels}: {', '.join(parts)}"
