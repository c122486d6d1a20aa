"""What a tuning tells, from its stored record and the result of its final comparison; pure.

All that is claimed comes from the final: its figures were measured after everything was chosen. Until there is one, an
outcome has the standing of the search, which is not a result: the best of many looks better than it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Literal

import msgspec

from loadgen.base.quantities import Interval, join, number, ratio_with_interval, share
from loadgen.experiment.tuning import TuneSettings
from loadgen.findings.gpu.analysis import GpuFound
from loadgen.metrics.claims import claim, winner_in_words
from loadgen.metrics.comparisons import (
    Comparison,
    advantage,
    compare_all,
    judge,
    leading_comparisons,
    log_lead,
    lost_in,
    roughen,
)
from loadgen.metrics.registry import METRICS, RATES, TPOT, Metric
from loadgen.metrics.summaries import WorkloadSummary, figure_of, interval_of
from loadgen.records.run import Label, item_of
from loadgen.records.targets import TARGETS, Kind
from loadgen.records.tuning import Contender, Space, Tuning
from loadgen.stats.estimates import SIGNIFICANCE, Estimate, critical_t, t_estimate
from loadgen.tune.search import Choice, RaceLead, Search
from loadgen.verdict.headline import Alternatives, fit
from loadgen.verdict.result import Result

P99 = METRICS["latency_p99"]
ENERGY = Metric("joules_per_item", "energy per item", "J", higher_is_better=False, measured_in=lambda _: False)
"""Of the GPU, over all rounds of the final; no metric of a comparison, which has figures of its blocks."""
Z99 = 2.576


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
    chosen: Contender | None
    """Who the finalists' runs chose for the final; None before that. Where none meets the limit it is the nearest."""
    equals: tuple[Contender, ...]
    """Other finalists whose measured difference to the chosen one is below the margin of the choice."""
    race: RaceLead
    """What the search knows."""
    worth: Mapping[str, Estimate | None]
    """Of each setting of the chosen one its gain over itself with that setting put back, the largest first; None if
    that was not measured."""
    figures: Mapping[Label, Mapping[str, FinalFigure]]
    """Of the default and the chosen one in the final, by the metric's name; empty without a final."""
    lead: Comparison | None
    """The chosen one beside the defaults in the final; None without a final, or if the defaults were chosen."""
    start_error: float = 0.0
    """What the one start of each server may have added to the log of the lead, as a standard error that the screenings
    show; 0 if the final started them several times, so that its interval includes that."""

    @property
    def title(self) -> str:
        return TARGETS[self.space.target].title

    @property
    def best(self) -> Contender | None:
        """The defaults, unless the final shows that the chosen one is better: it alone keeps the limits, or neither or
        both do and it leads by the goal, or it alone could be measured. None where the final has neither. Whatever is
        called best, compared or deployed follows this."""
        measured = [c for c in (self.default, self.chosen) if c is not None and c.name in self.figures]
        if len(measured) < 2 or self.chosen is None:
            return next(iter(measured), None)
        if self.lead is None or self.lead.verdict == "invalid":
            return self.default
        default_keeps, chosen_keeps = (self.keeps_limits(contender) for contender in (self.default, self.chosen))
        leads = self.is_ahead if default_keeps == chosen_keeps else chosen_keeps
        return self.chosen if leads else self.default

    @property
    def is_ahead(self) -> bool:
        """Whether the final shows that the chosen one is better by the goal, whichever start of it one looks at."""
        if self.chosen is None or self.lead is None or self.lead.winner != self.chosen.name:
            return False
        logs = log_lead(self.lead, self.chosen.name)
        return logs is not None and logs.value > math.hypot(logs.value - (logs.low or 0.0), Z99 * self.start_error)

    def keeps_limits(self, contender: Contender) -> bool:
        """Whether the final shows that it keeps every limit; true without one."""
        figures = self.figures.get(contender.name, {}).values()
        return all(figure.state == "kept" for figure in figures if figure.limit is not None)

    @property
    def meets_limit(self) -> bool:
        """Whether the final shows that the best keeps every limit."""
        return self.best is not None and self.keeps_limits(self.best)

    @property
    def gain(self) -> Estimate | None:
        """How many times better the chosen one is than the defaults in the final, also where that is not certain."""
        logs = None if self.chosen is None else log_lead(self.lead, self.chosen.name)
        return None if logs is None else logs.exp()

    @property
    def cost_of_defaults(self) -> Estimate | None:
        """What the defaults lose against the best, as a share: of the throughput, or of the time that is added to a
        latency. None unless the final shows that they lose something."""
        if self.gain is None or self.lead is None or self.best != self.chosen or not self.is_ahead:
            return None
        higher = self.lead.higher_is_better
        return Estimate(*(1.0 - 1.0 / at if higher else at - 1.0 for at in msgspec.structs.astuple(self.gain)))


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
    """Of the targets that meet the limit, from the best down: first the best one beside the next."""

    @property
    def has_verdict(self) -> bool:
        """Whether the final gives one: not without a final, nor where a check took it away."""
        leading = () if self.final is None else leading_comparisons(self.final.comparisons)
        return any(comparison.verdict != "invalid" for comparison in leading)

    @property
    def able(self) -> list[TargetOutcome]:
        """The targets whose best is shown to meet the limit."""
        return [target for target in self.targets if target.meets_limit]

    @property
    def names(self) -> dict[Label, str]:
        """The arms of the final in a sentence: "Triton at its best", "Triton at its defaults"."""
        best = {t.best.name: f"{t.title} at its best" for t in self.targets if t.best is not None}
        return best | {target.default.name: f"{target.title} at its defaults" for target in self.targets}

    @property
    def claims(self) -> list[str]:
        """What the final says of each two targets, at their best and at their defaults."""
        compared = [*(pair.at_best for pair in self.pairs), *(pair.at_defaults for pair in self.pairs)]
        return list(dict.fromkeys(self._claim(comparison) for comparison in compared if comparison is not None))

    def _claim(self, comparison: Comparison) -> str:
        names, margin = self.names, None if self.final is None else self.final.experiment.equivalence_margin
        two = join([names[label] for label in comparison.pairing])
        return claim(comparison, names, "" if comparison.winner else f"between {two}", margin, _title(self))

    @property
    def headline(self) -> str:
        """The answer in at most 32 words: from the final alone; before it where the search stands."""
        within = limits_in_words(self.settings.limits)
        if self.final is None:
            return _unfinished(self)
        if not self.has_verdict:
            return self.final.headline
        before = ""
        if lost := [target.title for target in self.targets if target.best is None]:
            before = f"{join(lost)} could not be measured; "
        if failing := [target.title for target in self.targets if target.best is not None and not target.meets_limit]:
            before += f"{join(failing)} {'is' if len(failing) == 1 else 'are'} not shown to keep {within}; "
        if not self.able:
            return fit([(f"Nothing that was tried is shown to keep {within}",), _nearest(self), (".",)])
        if self.pairs and (main := self.pairs[0].at_best) is not None:
            parts = [_best_against_best(self, main, within), _at_defaults(self)]
        else:
            gains = [_gain(self, target) for target in self.able]
            parts = [*gains[:1], *([f"; {text}" for text in gain] for gain in gains[1:])]
        text = fit([(before,), *parts, (".",)])
        return text[0].upper() + text[1:]


def outcome_of(tuning: Tuning, final: Result | None) -> TuningOutcome:
    """`final` is the result of the folder `final`, if that comparison has run."""
    settings = TuneSettings.model_validate(tuning.settings)
    search = Search(tuning.spaces, settings.seed, contenders=tuning.contenders, runs=tuning.runs)
    choices = {choice.target: choice for choice in search.winners()} if tuning.winners else {}
    compared = _Compared(settings, final)
    targets = tuple(
        _target(tuning, place, choices.get(space.target), search, compared) for place, space in enumerate(tuning.spaces)
    )
    pairs = [
        PairOutcome(compared.of(one.best, other.best), compared.of(one.default, other.default))
        for one, other in combinations(_best_first([t for t in targets if t.meets_limit], compared), 2)
    ]
    metric = compared.metric
    unit = "" if metric is None or final is None else metric.unit_for(item_of(final.environment))
    return TuningOutcome(tuning, settings, final, metric, unit, targets, tuple(pairs))


def _best_first(targets: Sequence[TargetOutcome], compared: _Compared) -> list[TargetOutcome]:
    """By what the final measured of the best of each beside that of the first; last what it did not compare."""

    def lead(target: TargetOutcome) -> float:
        if target is targets[0] or target.best is None:
            return 0.0
        logs = log_lead(compared.of(targets[0].best, target.best), target.best.name)
        return -math.inf if logs is None else logs.value

    return sorted(targets, key=lead, reverse=True)


def _target(tuning: Tuning, place: int, choice: Choice | None, search: Search, compared: _Compared) -> TargetOutcome:
    space = tuning.spaces[place]
    contenders = tuple(contender for contender in search.contenders if contender.target == space.target)
    default = next(contender for contender in contenders if not contender.settings)
    chosen = next((contender for contender in contenders if contender.name in tuning.winners), None)
    arms = [contender for contender in (chosen, default) if contender is not None]
    lead, final = compared.of(default, chosen), compared.final
    is_one_start = final is not None and final.experiment.restarts == 1
    return TargetOutcome(
        place=place,
        space=space,
        contenders=contenders,
        default=default,
        chosen=chosen,
        equals=() if choice is None else tuple(c for c in (choice.winner, *choice.equals) if c not in (None, chosen)),
        race=search.lead(space.target),
        worth={} if chosen is None else _worth(chosen, search, lead),
        figures={arm.name: figures for arm in arms if (figures := compared.figures(arm))},
        lead=lead,
        start_error=math.sqrt(2.0) * search.start_spread if is_one_start else 0.0,
    )


def _worth(winner: Contender, search: Search, lead: Comparison | None) -> dict[str, Estimate | None]:
    """The winner beside itself without each of its settings, by the runs that put them back; without its only one it is
    the defaults, which the final measured."""
    gains = {name: search.gain(winner, without, "settings") for name, without in search.put_back(winner).items()}
    if len(gains) == 1 and lead is not None and lead.ci95 is not None and (logs := log_lead(lead, winner.name)):
        gains = dict.fromkeys(gains, logs.exp())
    return dict(sorted(gains.items(), key=lambda item: 0.0 if item[1] is None else -item[1].value))


def goal_metric(settings: TuneSettings, final: Result) -> Metric | None:
    """The metric of the final that the goal is judged by: that of the search where the final compares the arms by it,
    else the one that leads."""
    compared = {comparison.metric for comparison in final.comparisons if comparison.ratio is not None}
    leading = (comparison.metric for comparison in leading_comparisons(final.comparisons))
    name = next(chain((m.name for m in goal_metrics(settings) if m.name in compared), leading), None)
    return None if name is None else METRICS[name]


_LATENCIES = {Kind.TENSORS: (METRICS["latency_p50"], METRICS["latency_mean"]), Kind.TOKENS: (TPOT,)}


def goal_metrics(settings: TuneSettings) -> tuple[Metric, ...]:
    """The metrics of blocks that the goal may be measured by, the best first: that of which every block has a figure
    counts. Of the goal energy it is that of the throughput, whose scatter is the energy's."""
    if settings.aim == "latency":
        return _LATENCIES[settings.kind]
    return (RATES[settings.kind],)


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
                value = self.final.of(GpuFound).joules_per_item(contender.name, summary.workload)
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


def _by_energy(final: Result, comparison: Comparison) -> Comparison:
    """The same arms by the energy per item, which is known over all rounds only. Its error is that of the throughput:
    at a nearly constant power the energy per item varies as the time per item does. A winner is named after
    Bonferroni's correction for all pairs of arms."""
    joules_per_item = final.of(GpuFound).joules_per_item
    baseline, arm = (joules_per_item(label, comparison.workload) for label in comparison.pairing)
    error, margin = comparison.error_log, final.experiment.equivalence_margin
    quotient, ci95, is_apart = None, None, False
    if baseline and arm and error is not None:
        log, pairs = math.log(arm / baseline), math.comb(len(final.experiment.arms), 2)
        quotient, ci95 = arm / baseline, t_estimate(log, error, comparison.degrees).exp().interval
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
    compared = roughen(compared, lost_in(final.comparisons), final.experiment.equivalence_margin)
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


def times_in_words(gain: Estimate) -> str:
    """ "1.20× (1.10–1.30)" """
    return ratio_with_interval(gain.value, gain.interval)


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
        for figures in target.figures.values()
        if (known := [figure for figure in figures.values() if figure.limit is not None and figure.value is not None])
    ]
    figure, title = min(worst, key=lambda item: item[0].times_limit, default=(None, ""))
    return ("",) if figure is None else (f"; {title} comes nearest with {number(figure.value or 0.0)} ms",)


def _best_against_best(outcome: TuningOutcome, main: Comparison, within: str) -> Alternatives:
    """The best target beside the next one, which may not be told apart from it."""
    under, lead, many = f" within {within}" if within else "", advantage(main), len(outcome.able)
    if main.winner is None or lead is None:
        names = join([t.title for t in outcome.able if t.best is not None and t.best.name in main.pairing])
        of_all = f", the first two of {many}," if many > 2 else ""
        what = "no meaningful difference" if main.verdict == "no_difference" else main.verdict
        return (
            f"no winner between {names}{of_all} at their best{under}: {what}",
            f"no winner between {names}{of_all}: {what}",
        )
    texts = [winner_in_words(main, outcome.names, where, _title(outcome)) for where in (under.strip(), "")]
    return (texts[0] + (f", the next of {many}" if many > 2 else ""), *texts)


def _at_defaults(outcome: TuningOutcome) -> Alternatives:
    """What the same two targets show at their defaults, where that is another question."""
    comparison, titles = outcome.pairs[0].at_defaults, {target.default.name: target.title for target in outcome.targets}
    if comparison is None or comparison == outcome.pairs[0].at_best:
        return ("",)
    lead = advantage(comparison)
    if comparison.winner is None or lead is None:
        return ("; at their defaults neither leads", "")
    text = f"; at their defaults {titles[comparison.winner]} leads"
    return (f"{text} {ratio_with_interval(lead.factor, lead.ci95)}", text, "")


def _gain(outcome: TuningOutcome, target: TargetOutcome) -> Alternatives:
    """A single target: its best against its defaults."""
    if target.lead is None or target.cost_of_defaults is None:
        if target.best == target.default:
            if any(other.best is not None and not other.meets_limit for other in outcome.targets):
                return (f"the defaults of {target.title} do, and nothing that was tried is shown to be better",)
            return (f"nothing that was tried is shown to be better than the defaults of {target.title}",)
        alone = "keeps the limit, which its defaults are not shown to do"
        return (f"{target.title} at its best {alone if target.lead else 'works, its defaults could not be measured'}",)
    names = outcome.names
    names[target.default.name] = "its defaults"
    return (winner_in_words(target.lead, names, title=_title(outcome)),)


def _title(outcome: TuningOutcome) -> str:
    return "" if outcome.metric is None else outcome.metric.title


def _unfinished(outcome: TuningOutcome) -> str:
    """The state of the search, which is not a result."""
    tried = sum(target.race.tried for target in outcome.targets)
    chosen = any(target.chosen is not None for target in outcome.targets)
    where = "the best are chosen, the final did not run" if chosen else "nothing is chosen yet"
    ends = {"failed": ": the tuning failed", "interrupted": ": the tuning was interrupted"}
    start = f"No verdict{ends.get(outcome.tuning.state, ' yet')}"
    return fit([(start,), (f" after {tried} tries",), (f"; {where}", ""), (".",)])
