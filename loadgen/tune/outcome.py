"""What a tuning tells, from its stored record and the result of its final comparison; pure.

All that is claimed comes from the final: its figures were measured after everything was chosen. Until there is one, an
outcome has the standing of the search, which is not a result: the best of many looks better than it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Literal

import msgspec

from loadgen.metrics.claims import claim, winner_in_words
from loadgen.metrics.comparisons import Comparison, advantage, compare_all, judge, leading_comparisons, log_lead
from loadgen.metrics.registry import METRICS, OUTPUT_TOKENS, THROUGHPUT, TPOT, Metric
from loadgen.metrics.summaries import WorkloadSummary, figure_of, interval_of
from loadgen.probes.gpu.analysis import GpuFound
from loadgen.quantities import Interval, join, number, ratio, ratio_interval, share
from loadgen.records.run import Label, item_of
from loadgen.stats.ratios import SIGNIFICANCE, critical_t
from loadgen.tune.records import Contender, Space, Tuning
from loadgen.tune.search import Choice, RaceLead, Search, gain
from loadgen.tune.settings import TuneSettings
from loadgen.verdict.headline import Alternatives, fit
from loadgen.verdict.result import Result

TITLES: Mapping[str, str] = {"triton": "Triton", "fastapi": "FastAPI", "litserve": "LitServe", "vllm": "vLLM"}
"""How a target is called in a sentence, if not by its name."""
P99 = METRICS["latency_p99"]
ENERGY = Metric("joules_per_item", "energy per item", "J", higher_is_better=False, measured_in=lambda _: False)
"""Of the GPU, over all rounds of the final; no metric of a comparison, which has figures of its blocks."""
Gain = tuple[float, Interval]
"""How many times better, with the 95 % interval."""


@dataclass(frozen=True, slots=True)
class FinalFigure:
    """What the final measured of one arm by one metric, in its unit, and the limit that the user set for it."""

    value: float | None
    ci95: Interval | None
    limit: float | None = None

    @property
    def state(self) -> Literal["kept", "exceeded", "not certain", "not measured"]:
        """Whether the whole interval, or the value where there is none, lies on one side of the limit."""
        if self.value is None or self.limit is None:
            return "not measured"
        low, high = self.ci95 or (self.value, self.value)
        if high <= self.limit:
            return "kept"
        return "exceeded" if low > self.limit else "not certain"

    @property
    def times_limit(self) -> float:
        """The value over the limit; 0 if one of them is missing."""
        return self.value / self.limit if self.value and self.limit else 0.0


@dataclass(frozen=True, slots=True)
class TargetOutcome:
    """One target: its defaults, its best, and what the search knows."""

    place: int
    """Among the targets of the tuning."""
    space: Space
    contenders: tuple[Contender, ...]
    """All that were named."""
    default: Contender
    winner: Contender | None
    """Who was chosen from the finalists; None before that. Where none meets the limit it is the nearest."""
    equals: tuple[Contender, ...]
    """Other finalists whose measured difference to the best is below the margin of the choice."""
    met_before: bool
    """Whether a finalist met the limit; true without one."""
    race: RaceLead
    """What the search knows."""
    worth: Mapping[str, Gain | None]
    """Of each setting of the winner its gain over itself with that setting put back, the largest first; None if that
    was not measured."""
    figures: Mapping[Label, Mapping[str, FinalFigure]]
    """Of the default and the winner in the final, by the metric's name; empty without a final."""
    lead: Comparison | None
    """The winner beside the defaults in the final; None without a final, or if the defaults won."""

    @property
    def title(self) -> str:
        return TITLES.get(self.space.target, self.space.target)

    @property
    def best(self) -> Contender | None:
        """The winner, or the defaults if the final shows that they are better."""
        if self.lead is not None and self.lead.winner == self.default.name:
            return self.default
        return self.winner

    @property
    def limited(self) -> list[FinalFigure]:
        """The figures of the best in the final that have a limit."""
        figures = {} if self.best is None else self.figures.get(self.best.name, {})
        return [figure for figure in figures.values() if figure.limit is not None]

    @property
    def meets_limit(self) -> bool:
        """Whether a finalist met the limit, or the best does in the final; true without one."""
        return self.met_before or (bool(self.limited) and all(figure.state == "kept" for figure in self.limited))

    @property
    def cost_of_defaults(self) -> tuple[float, Interval | None] | None:
        """What the defaults lose against the winner, as a share: of the throughput, or of the time that is added to a
        latency. Below 0 they are better. None where the final does not have both."""
        lead = None if self.winner is None else log_lead(self.lead, self.winner.name)
        if lead is None or self.lead is None:
            return None
        cost, *bounds = (-math.expm1(-log) if self.lead.higher_is_better else math.expm1(log) for log in lead)
        return cost, None if self.lead.ci95 is None else (bounds[0], bounds[1])


@dataclass(frozen=True, slots=True)
class PairOutcome:
    """Two targets beside each other in the final; None where it does not compare them."""

    at_best: Comparison | None
    at_defaults: Comparison | None


@dataclass(frozen=True, slots=True)
class TuningOutcome:
    """The whole: what reports show."""

    tuning: Tuning
    settings: TuneSettings
    final: Result | None
    metric: Metric | None
    """Of the goal, in the final."""
    unit: str
    targets: tuple[TargetOutcome, ...]
    pairs: tuple[PairOutcome, ...]
    """Of the targets that meet the limit; the pair that the headline is about first."""

    @property
    def has_verdict(self) -> bool:
        """Whether the final gives one: not without a final, nor where a check took it away."""
        leading = () if self.final is None else leading_comparisons(self.final.comparisons)
        return any(comparison.verdict != "invalid" for comparison in leading)

    @property
    def names(self) -> dict[Label, str]:
        """The arms of the final in a sentence: "Triton at its best", "Triton at its defaults"."""
        defaults = {target.default.name: f"{target.title} at its defaults" for target in self.targets}
        return defaults | {t.winner.name: f"{t.title} at its best" for t in self.targets if t.winner is not None}

    @property
    def claims(self) -> list[str]:
        """What the final says of each two targets, at their best and at their defaults."""
        compared = [*(pair.at_best for pair in self.pairs), *(pair.at_defaults for pair in self.pairs)]
        return list(dict.fromkeys(self._claim(comparison) for comparison in compared if comparison is not None))

    def _claim(self, comparison: Comparison) -> str:
        names, margin = self.names, None if self.final is None else self.final.experiment.equivalence_margin
        two = join([names[label] for label in comparison.pairing])
        return claim(comparison, names, "" if comparison.winner else f" between {two}", margin, _title(self))

    @property
    def headline(self) -> str:
        """The answer in at most 25 words: from the final alone; before it where the search stands."""
        within = limits_in_words(self.settings.limits)
        able = [target for target in self.targets if target.meets_limit]
        if self.final is None:
            return _unfinished(self)
        if not self.has_verdict:
            return self.final.headline
        if not able:
            return fit([(f"Nothing that was tried is shown to keep {within}",), _nearest(self), (".",)])
        missed = [target.title for target in able if any(figure.state == "exceeded" for figure in target.limited)]
        before: Alternatives = (f"{join(missed)} missed {within} in the final; ",) if missed else ("",)
        if failing := [target.title for target in self.targets if not target.meets_limit]:
            before = (f"{join(failing)} {'is' if len(failing) == 1 else 'are'} not shown to keep {within}; ",)
        parts = [_gain(self, target) for target in able if target.best is not None]
        if self.pairs and (main := self.pairs[0].at_best) is not None:
            parts = [_best_against_best(self, main, within), _at_defaults(self)]
        text = fit([before, *parts, (".",)])
        return text[0].upper() + text[1:]


def outcome_of(tuning: Tuning, final: Result | None) -> TuningOutcome:
    """`final` is the result of the folder `final`, if that comparison has run."""
    settings = TuneSettings.model_validate(tuning.settings)
    search = Search(tuning.spaces, 0, contenders=tuning.contenders, runs=tuning.runs)
    choices = {choice.target: choice for choice in search.winners()} if tuning.winners else {}
    compared = _Compared(settings, final)
    targets = tuple(
        _target(tuning, place, choices.get(space.target), search, compared) for place, space in enumerate(tuning.spaces)
    )
    able = [target for target in targets if target.best is not None and target.meets_limit]
    pairs = [
        PairOutcome(compared.of(one.best, other.best), compared.of(one.default, other.default))
        for one, other in combinations(able, 2)
    ]
    metric = compared.metric
    unit = "" if metric is None or final is None else metric.unit_for(item_of(final.environment))
    return TuningOutcome(tuning, settings, final, metric, unit, targets, tuple(sorted(pairs, key=_weight)))


def _weight(pair: PairOutcome) -> tuple[bool, float]:
    """Sorts pairs: those with a winner first, of these the closest, which are the best two of three."""
    lead = None if pair.at_best is None else advantage(pair.at_best)
    return pair.at_best is None or pair.at_best.winner is None, math.inf if lead is None else lead.factor


def _target(tuning: Tuning, place: int, choice: Choice | None, search: Search, compared: _Compared) -> TargetOutcome:
    space = tuning.spaces[place]
    contenders = tuple(contender for contender in search.contenders if contender.target == space.target)
    default = next(contender for contender in contenders if not contender.settings)
    winner = next((contender for contender in contenders if contender.name in tuning.winners), None)
    arms = [contender for contender in (winner, default) if contender is not None]
    lead = compared.of(default, winner)
    return TargetOutcome(
        place=place,
        space=space,
        contenders=contenders,
        default=default,
        winner=winner,
        equals=() if choice is None else tuple(c for c in (choice.winner, *choice.equals) if c not in (None, winner)),
        met_before=choice is None or choice.winner is not None or not compared.limits,
        race=search.lead(space.target),
        worth={} if winner is None else _worth(winner, search, lead),
        figures={arm.name: figures for arm in arms if (figures := compared.figures(arm))},
        lead=lead,
    )


def _worth(winner: Contender, search: Search, lead: Comparison | None) -> dict[str, Gain | None]:
    """The winner beside itself without each of its settings, by the runs that put them back; without its only one it is
    the defaults, which the final measured."""
    measured = {standing.contender.name: standing for standing in search.standings(winner.target, "settings")}
    put_back = search.put_back(winner).items()
    gains = {name: gain(measured.get(winner.name), measured.get(without.name)) for name, without in put_back}
    if len(gains) == 1 and lead is not None and lead.ci95 is not None and (logs := log_lead(lead, winner.name)):
        factor, low, high = map(math.exp, logs)
        gains = dict.fromkeys(gains, (factor, (low, high)))
    return dict(sorted(gains.items(), key=lambda item: 0.0 if item[1] is None else -item[1][0]))


def goal_metric(settings: TuneSettings, final: Result) -> Metric | None:
    """The metric of the final that the goal is judged by: that of the search where the final compares the arms by it,
    else the one that leads."""
    compared = {comparison.metric for comparison in final.comparisons if comparison.ratio is not None}
    leading = (comparison.metric for comparison in leading_comparisons(final.comparisons))
    name = next(chain((m.name for m in goal_metrics(settings) if m.name in compared), leading), None)
    return None if name is None else METRICS[name]


def goal_metrics(settings: TuneSettings) -> tuple[Metric, ...]:
    """The metrics of blocks that the goal may be measured by, the best first: that of which every block has a figure
    counts. Of the goal energy it is that of the throughput, whose scatter is the energy's."""
    if settings.aim == "latency":
        return (TPOT,) if settings.is_language else (METRICS["latency_p50"], METRICS["latency_mean"])
    return (OUTPUT_TOKENS,) if settings.is_language else (THROUGHPUT,)


class _Compared:
    """Finds the figures of contenders in the final, and the comparison of two of them."""

    def __init__(self, settings: TuneSettings, final: Result | None) -> None:
        self.final, self.limits = final, settings.limits
        self.of_blocks = None if final is None else goal_metric(settings, final)
        self.metric = ENERGY if self.of_blocks is not None and settings.aim == "energy" else self.of_blocks

    def of(self, one: Contender | None, other: Contender | None) -> Comparison | None:
        """By the metric of the goal; None for a contender beside itself, or one that the final does not have."""
        final, metric = self.final, self.of_blocks
        if final is None or metric is None or one is None or other is None or one == other:
            return None
        pair = {one.name, other.name}
        if not pair <= set(final.experiment.labels):
            return None
        stored = (c for c in final.comparisons if c.metric == metric.name and {*c.pairing} == pair)
        comparison = next(stored, None) or _beside(final, metric, one.name, other.name)
        return _by_energy(final, comparison) if self.metric is ENERGY and comparison is not None else comparison

    def figures(self, contender: Contender) -> dict[str, FinalFigure]:
        """By the metric of the goal, the p99 latency and what is limited; empty if the final does not have it."""
        if self.final is None or self.metric is None:
            return {}
        summary = next((s for s in self.final.summaries if s.label == contender.name), None)
        if summary is None:
            return {}
        figures = {}
        for metric in (self.metric, P99, *(METRICS[name] for name in self.limits)):
            value = figure_of(summary, metric)
            if metric is ENERGY:
                value = _joules(self.final, contender.name, summary.workload)
            figures[metric.name] = FinalFigure(
                value, _interval(self.final, summary, metric), self.limits.get(metric.name)
            )
        return figures


def _interval(final: Result, summary: WorkloadSummary, metric: Metric) -> Interval | None:
    """Of the figure by itself: a percentile's stands in its comparison."""
    for comparison in final.comparisons:
        if comparison.metric == metric.name and summary.label in comparison.pairing:
            interval = comparison.arm_ci95 if comparison.arm == summary.label else comparison.baseline_ci95
            if interval is not None:
                return interval
    return interval_of(summary, metric)


def _joules(final: Result, label: Label, workload: str) -> float | None:
    return final.of(GpuFound).joules_per_item(label, workload)


def _by_energy(final: Result, comparison: Comparison) -> Comparison:
    """The same arms by the energy per item, which is known over all rounds only. Its error is that of the throughput:
    at a nearly constant power the energy per item varies as the time per item does. A winner is named after
    Bonferroni's correction for all pairs of arms."""
    baseline, arm = (_joules(final, label, comparison.scenario) for label in comparison.pairing)
    error, margin = comparison.error_log, final.experiment.equivalence_margin
    quotient, ci95, is_apart = None, None, False
    if baseline and arm and error is not None:
        log, pairs = math.log(arm / baseline), math.comb(len(final.experiment.arms), 2)
        half = critical_t(comparison.degrees, SIGNIFICANCE) * error
        quotient, ci95 = arm / baseline, (math.exp(log - half), math.exp(log + half))
        is_apart = abs(log) > critical_t(comparison.degrees, SIGNIFICANCE / pairs) * error
    reason = comparison.reason or (None if ci95 else "the energy of an arm is not known")
    verdict = judge(ci95, 0.0 if is_apart else 1.0, margin, higher_is_better=False)
    return msgspec.structs.replace(
        comparison, metric=ENERGY.name, unit=ENERGY.unit, higher_is_better=False, baseline_value=baseline,
        arm_value=arm, ratio=quotient, ci95=ci95, reason=reason,
        verdict="invalid" if comparison.verdict == "invalid" else verdict,
    )  # fmt: skip


def _beside(final: Result, metric: Metric, baseline: Label, arm: Label) -> Comparison | None:
    """A metric that does not lead is stored beside the run's baseline only: compare its blocks as if these two arms
    had been alone, and keep the reason of a check that took the verdict of the leading one."""
    arms = {request.label: request for request in final.experiment.arms}
    alone = msgspec.structs.replace(final.experiment, arms=(arms[baseline], arms[arm]))
    blocks = [block for block in final.blocks if block.label in (baseline, arm)]
    compared = compare_all(alone, blocks, item=item_of(final.environment))
    comparison = next((c for c in compared if c.metric == metric.name), None)
    refused = next((c for c in leading_comparisons(final.comparisons) if c.verdict == "invalid"), None)
    if comparison is None or refused is None:
        return comparison
    return msgspec.structs.replace(comparison, verdict="invalid", reason=refused.reason)


# In words


def settings_in_words(contender: Contender) -> str:
    """ "max-batch-size=16, instances=2" """
    return ", ".join(f"{name}={value}" for name, value in contender.settings.items()) or "all at their defaults"


def limits_in_words(limits: Mapping[str, float]) -> str:
    """ "p99 ≤ 50 ms"; `limits` are in ms by the names of their metrics."""
    return join([limit_in_words(name, limit_ms) for name, limit_ms in limits.items()])


def limit_in_words(metric: str, limit_ms: float) -> str:
    """ "p99 ≤ 50 ms" """
    return f"{METRICS[metric].title.removesuffix(' latency')} ≤ {number(limit_ms)} ms"


def percent(value: float, interval: Interval | None) -> str:
    """ "31 % (28–34)", "−1.2 % (−3.4 to 1.0)" """
    words = share(value)
    if interval is not None:
        low, high = (number(bound * 100.0, 2) for bound in interval)
        words += f" ({low}{' to ' if interval[0] < 0.0 else '–'}{high})"
    return words.replace("-", "−")


def _nearest(outcome: TuningOutcome) -> Alternatives:
    """The target that exceeds its limit least in the final, by the limit that it exceeds most."""
    worst = [
        (max(known, key=lambda figure: figure.times_limit), target.title)
        for target in outcome.targets
        if (known := [figure for figure in target.limited if figure.value is not None])
    ]
    figure, title = min(worst, key=lambda item: item[0].times_limit, default=(None, ""))
    return ("",) if figure is None else (f"; {title} comes nearest with {number(figure.value or 0.0)} ms",)


def _best_against_best(outcome: TuningOutcome, main: Comparison, within: str) -> Alternatives:
    under, lead = f" within {within}" if within else "", advantage(main)
    if main.winner is None or lead is None:
        names = join([target.title for target in outcome.targets if target.best is not None and target.meets_limit])
        what = "no meaningful difference" if main.verdict == "no_difference" else main.verdict
        return (f"no winner between {names} at their best{under}: {what}", f"no winner between {names}: {what}")
    text, interval = winner_in_words(main, outcome.names, _title(outcome)), ratio_interval(lead.ci95)
    after = f", the next of {len(outcome.targets)}" if len(outcome.targets) > 2 else ""
    shorter = [f"{text}{more} ({interval})" for more in (after + under, after, "")]
    return (f"{text}{after}{under} (95 % interval {interval})", *shorter)


def _at_defaults(outcome: TuningOutcome) -> Alternatives:
    """What the same two targets show at their defaults, where that is another question."""
    comparison, titles = outcome.pairs[0].at_defaults, {target.default.name: target.title for target in outcome.targets}
    if comparison is None or comparison == outcome.pairs[0].at_best:
        return ("",)
    lead = advantage(comparison)
    if comparison.winner is None or lead is None:
        return ("; at their defaults neither leads", "")
    text = f"; at their defaults {titles[comparison.winner]} leads"
    return (f"{text} {ratio(lead.factor, lead.ci95)} ({ratio_interval(lead.ci95)})", text, "")


def _gain(outcome: TuningOutcome, target: TargetOutcome) -> Alternatives:
    """A single target: its best against its defaults."""
    lead = None if target.lead is None else advantage(target.lead)
    if target.lead is None or target.lead.winner is None or target.lead.loser is None or lead is None:
        return (f"nothing that was tried is shown to be better than the defaults of {target.title}",)
    names, loser = outcome.names, target.lead.loser
    names[loser] = names[loser].removeprefix(f"{target.title} at ")
    text, interval = winner_in_words(target.lead, names, _title(outcome)), ratio_interval(lead.ci95)
    return (f"{text} (95 % interval {interval})", f"{text} ({interval})")


def _title(outcome: TuningOutcome) -> str:
    return "" if outcome.metric is None else outcome.metric.title


def _unfinished(outcome: TuningOutcome) -> str:
    """The state of the search, which is not a result."""
    tried = sum(target.race.tried for target in outcome.targets)
    chosen = any(target.winner is not None for target in outcome.targets)
    where = "the best are chosen, the final did not run" if chosen else "nothing is chosen yet"
    ends = {"failed": ": the tuning failed", "interrupted": ": the tuning was interrupted"}
    start = f"No verdict{ends.get(outcome.tuning.state, ' yet')}"
    return fit([(start,), (f" after {tried} tries",), (f"; {where}", ""), (".",)])
