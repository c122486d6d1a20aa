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

from loadgen.metrics.claims import verdict_words
from loadgen.metrics.comparisons import Comparison, advantage, compare_all, judge, leading_comparisons, log_lead
from loadgen.metrics.registry import METRICS, OUTPUT_TOKENS, THROUGHPUT, TPOT, Metric
from loadgen.metrics.summaries import WorkloadSummary, figure_of, interval_of
from loadgen.probes.gpu.analysis import GpuFound
from loadgen.quantities import Interval, join, number, ratio, ratio_interval, share
from loadgen.records.run import Label, item_of
from loadgen.stats.ratios import SIGNIFICANCE, critical_t
from loadgen.tune.records import Contender, Space, Tuning
from loadgen.tune.search import Choice, Search, Standing, gain
from loadgen.tune.settings import TuneSettings
from loadgen.verdict.headline import Alternatives, fit
from loadgen.verdict.result import Result

TITLES: Mapping[str, str] = {"triton": "Triton", "fastapi": "FastAPI", "litserve": "LitServe", "vllm": "vLLM"}
"""How a target is called in a sentence, if not by its name."""
ENERGY = Metric("joules_per_item", "energy per item", "J", higher_is_better=False, measured_in=lambda _: False)
"""Of the GPU, over all rounds of the final; no metric of a comparison, which has figures of its blocks."""


@dataclass(frozen=True, slots=True)
class SettingEffect:
    """What one setting of a winner is worth: how many times better the winner is than with that setting put back."""

    setting: str
    default: str
    best: str
    factor: float | None = None
    """None if the winner was not measured without it."""
    ci95: Interval | None = None

    @property
    def matters(self) -> bool:
        """Whether putting it back certainly costs something."""
        return self.ci95 is not None and self.ci95[0] > 1.0


@dataclass(frozen=True, slots=True)
class LimitKept:
    """One limit and what an arm of the final measured, in ms."""

    metric: str
    limit_ms: float
    value_ms: float | None
    ci95_ms: Interval | None

    @property
    def state(self) -> Literal["kept", "exceeded", "not certain", "not measured"]:
        """Whether the whole interval, or the value where there is none, lies on one side of the limit."""
        if self.value_ms is None:
            return "not measured"
        low, high = self.ci95_ms or (self.value_ms, self.value_ms)
        if high <= self.limit_ms:
            return "kept"
        return "exceeded" if low > self.limit_ms else "not certain"


@dataclass(frozen=True, slots=True)
class ArmFigures:
    """One arm of the final."""

    contender: Contender
    value: float | None
    """By the metric of the goal, in its unit."""
    ci95: Interval | None
    p99_ms: float | None
    limits: tuple[LimitKept, ...]


@dataclass(frozen=True, slots=True)
class TargetOutcome:
    """One target: its defaults, its best, and what the search knows."""

    space: Space
    default: Contender
    winner: Contender | None
    """Who was chosen from the finalists; None before that. Where none meets the limit it is the nearest."""
    equals: tuple[Contender, ...]
    """Other finalists whose measured difference to the best is below the margin of the choice."""
    met_before: bool
    """Whether a finalist met the limit; true without one."""
    standings: tuple[Standing, ...]
    """Of the screenings, best first."""
    tried: int
    """Contenders that were measured or are out."""
    finalists: int
    out: tuple[tuple[Contender, str], ...]
    effects: tuple[SettingEffect, ...]
    """Of the settings of the best that differ from the defaults, those that matter most first."""
    figures: Mapping[Label, ArmFigures]
    """Of the default and the winner in the final; empty without one."""
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
    def limits(self) -> tuple[LimitKept, ...]:
        """What the final says of the best and the limits."""
        figures = None if self.best is None else self.figures.get(self.best.name)
        return () if figures is None else figures.limits

    @property
    def meets_limit(self) -> bool:
        """Whether a finalist met the limit, or the best does in the final; true without one."""
        return self.met_before or (bool(self.limits) and all(limit.state == "kept" for limit in self.limits))

    @property
    def leader(self) -> Standing | None:
        """The best of the screenings so far."""
        return next((standing for standing in self.standings if standing.racing), None)

    @property
    def gain_so_far(self) -> tuple[float, Interval] | None:
        """How many times better the leader is than the defaults in the screenings, with the interval."""
        start = next((s for s in self.standings if s.contender == self.default), None)
        return gain(self.leader, start)


@dataclass(frozen=True, slots=True)
class TuningOutcome:
    """The whole: what reports show."""

    tuning: Tuning
    final: Result | None
    metric: Metric | None
    """Of the goal, in the final."""
    unit: str
    targets: tuple[TargetOutcome, ...]
    between_best: tuple[Comparison, ...]
    """Of each pair of targets at their best, in the final; the pair that the headline is about first."""
    between_defaults: tuple[Comparison, ...]
    """Of the same pairs at their defaults, in the same order."""

    @property
    def settings(self) -> TuneSettings:
        return settings_of(self.tuning)

    @property
    def has_verdict(self) -> bool:
        """Whether the final gives one: not without a final, nor where a check took it away."""
        leading = () if self.final is None else leading_comparisons(self.final.comparisons)
        return any(comparison.verdict != "invalid" for comparison in leading)

    @property
    def names(self) -> dict[Label, str]:
        """The arms of the final in a sentence: "Triton at its best", "Triton at its defaults"."""
        names = {}
        for target in self.targets:
            for contender, words in ((target.default, "defaults"), (target.winner, "best")):
                if contender is not None:
                    names[contender.name] = f"{target.title} at its {words}"
        return names

    @property
    def headline(self) -> str:
        """The answer in at most 25 words."""
        return _headline(self)

    def relation(self, comparison: Comparison, factor: str) -> str:
        """ "serves 1.12× the images/s of", "has 1.12× lower p50 latency than" """
        if comparison.higher_is_better:
            return f"serves {factor} the {comparison.unit} of"
        return f"has {factor} lower {'' if self.metric is None else self.metric.title} than"

    def claim(self, comparison: Comparison) -> str:
        """What the final says of two of its arms, with the interval."""
        lead, names = advantage(comparison), self.names
        if comparison.verdict == "invalid" or lead is None:
            return f"no verdict on {' and '.join(names[label] for label in comparison.pairing)}: {comparison.reason}"
        factor, interval = ratio(lead.factor, lead.ci95), f"95 % interval {ratio_interval(lead.ci95)}"
        if comparison.winner is None or comparison.loser is None:
            assert self.final is not None
            words = verdict_words(comparison.verdict, comparison.pairing, self.final.experiment.equivalence_margin)
            better = "" if lead.better is None else f" in favour of {names[lead.better]}"
            pair = " and ".join(names[label] for label in comparison.pairing)
            return f"{words} between {pair} ({factor}{better}, {interval})"
        return f"{names[comparison.winner]} {self.relation(comparison, factor)} {names[comparison.loser]} ({interval})"


def outcome_of(tuning: Tuning, final: Result | None) -> TuningOutcome:
    """`final` is the result of the folder `final`, if that comparison has run."""
    search = Search(tuning.spaces, 0, contenders=tuning.contenders, runs=tuning.runs)
    is_chosen = any(run.stage == "finalists" and run.problem is None for run in tuning.runs)
    choices = {choice.target: choice for choice in search.winners()} if is_chosen else {}
    metric = None if final is None else goal_metric(settings_of(tuning), final)
    by_energy = settings_of(tuning).aim == "energy"
    compared = _Compared(final, metric, by_energy=by_energy)
    metric = ENERGY if metric is not None and by_energy else metric
    targets = tuple(_target(tuning, space, choices.get(space.target), search, compared) for space in tuning.spaces)
    pairs = sorted(
        combinations([target for target in targets if target.best is not None and target.meets_limit], 2),
        key=lambda pair: compared.weight(*(target.best for target in pair)),
    )
    best = [compared.of(one.best, other.best) for one, other in pairs]
    defaults = [compared.of(one.default, other.default) for one, other in pairs]
    return TuningOutcome(
        tuning=tuning,
        final=final,
        metric=metric,
        unit="" if metric is None or final is None else metric.unit_for(item_of(final.environment)),
        targets=targets,
        between_best=tuple(filter(None, best)),
        between_defaults=tuple(filter(None, defaults)),
    )


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
    """Finds the comparison of two contenders in the final."""

    def __init__(self, final: Result | None, metric: Metric | None, *, by_energy: bool) -> None:
        self.final, self.metric, self.by_energy = final, metric, by_energy

    def of(self, one: Contender | None, other: Contender | None) -> Comparison | None:
        """By the metric of the goal; None for a contender beside itself, or one that the final does not have."""
        if self.final is None or self.metric is None or one is None or other is None or one.name == other.name:
            return None
        pair = {one.name, other.name}
        if not pair <= set(self.final.experiment.labels):
            return None
        stored = (c for c in self.final.comparisons if c.metric == self.metric.name and {c.baseline, c.arm} == pair)
        comparison = next(stored, None) or self._beside(one.name, other.name)
        return self._of_energy(comparison) if self.by_energy and comparison is not None else comparison

    def _joules(self, label: Label, workload: str) -> float | None:
        assert self.final is not None
        return self.final.of(GpuFound).joules_per_item(label, workload)

    def _of_energy(self, comparison: Comparison) -> Comparison:
        """The same arms by the energy per item, which is known over all rounds only. Its error is that of the
        throughput: at a nearly constant power the energy per item varies as the time per item does. A winner is named
        after Bonferroni's correction for all pairs of arms."""
        assert self.final is not None
        baseline, arm = (self._joules(label, comparison.scenario) for label in comparison.pairing)
        by_energy = msgspec.structs.replace(
            comparison,
            metric=ENERGY.name,
            unit=ENERGY.unit,
            higher_is_better=False,
            baseline_value=baseline,
            arm_value=arm,
            ratio=None,
            ci95=None,
            verdict="invalid" if comparison.verdict == "invalid" else "inconclusive",
            reason=comparison.reason or "the energy of an arm is not known",
        )
        error = comparison.error_log
        if not baseline or not arm or error is None:
            return by_energy
        log, pairs = math.log(arm / baseline), math.comb(len(self.final.experiment.arms), 2)
        half = critical_t(comparison.degrees, SIGNIFICANCE) * error
        ci95 = math.exp(log - half), math.exp(log + half)
        is_apart = abs(log) > critical_t(comparison.degrees, SIGNIFICANCE / pairs) * error
        margin = self.final.experiment.equivalence_margin
        verdict = judge(ci95, 0.0 if is_apart else 1.0, margin, higher_is_better=False)
        return msgspec.structs.replace(
            by_energy,
            ratio=arm / baseline,
            ci95=ci95,
            verdict="invalid" if comparison.verdict == "invalid" else verdict,
            reason=comparison.reason,
        )

    def _beside(self, baseline: Label, arm: Label) -> Comparison | None:
        """A metric that does not lead is stored beside the run's baseline only: compare its blocks as if these two arms
        had been alone, and keep the reason of a check that took the verdict of the leading one."""
        assert self.final is not None
        assert self.metric is not None
        experiment = self.final.experiment
        arms = {request.label: request for request in experiment.arms}
        alone = msgspec.structs.replace(experiment, arms=(arms[baseline], arms[arm]))
        blocks = [block for block in self.final.blocks if block.label in (baseline, arm)]
        item = item_of(self.final.environment)
        made = next((c for c in compare_all(alone, blocks, item=item) if c.metric == self.metric.name), None)
        refused = next((c for c in leading_comparisons(self.final.comparisons) if c.verdict == "invalid"), None)
        if made is None or refused is None:
            return made
        return msgspec.structs.replace(made, verdict="invalid", reason=refused.reason)

    def weight(self, one: Contender | None, other: Contender | None) -> tuple[bool, float]:
        """Sorts pairs: those with a winner first, of these the closest, which are the best two of three."""
        comparison = self.of(one, other)
        lead = None if comparison is None else advantage(comparison)
        return comparison is None or comparison.winner is None, math.inf if lead is None else lead.factor

    def figures(self, contender: Contender, limits: Mapping[str, float]) -> ArmFigures | None:
        """What the final measured of one contender."""
        if self.final is None or self.metric is None:
            return None
        summary = next((s for s in self.final.summaries if s.label == contender.name), None)
        if summary is None:
            return None
        kept = tuple(self._limit(summary, metric, limit_ms) for metric, limit_ms in limits.items())
        return ArmFigures(
            contender=contender,
            value=self._joules(contender.name, summary.workload) if self.by_energy else figure_of(summary, self.metric),
            ci95=None if self.by_energy else self._interval(summary, self.metric),
            p99_ms=summary.latency.p99_ms,
            limits=kept,
        )

    def _limit(self, summary: WorkloadSummary, name: str, limit_ms: float) -> LimitKept:
        metric = METRICS[name]
        return LimitKept(name, limit_ms, figure_of(summary, metric), self._interval(summary, metric))

    def _interval(self, summary: WorkloadSummary, metric: Metric) -> Interval | None:
        """Of the figure by itself: a percentile's stands in its comparison."""
        assert self.final is not None
        for comparison in self.final.comparisons:
            if comparison.metric == metric.name and summary.label in comparison.pairing:
                is_arm = comparison.arm == summary.label
                interval = comparison.arm_ci95 if is_arm else comparison.baseline_ci95
                if interval is not None:
                    return interval
        return interval_of(summary, metric)


def _target(tuning: Tuning, space: Space, choice: Choice | None, search: Search, compared: _Compared) -> TargetOutcome:
    standings = tuple(search.standings(space.target))
    default = next(c for c in search.contenders if c.target == space.target and not c.settings)
    winner = next((c for c in search.contenders if c.name in tuning.winners and c.target == space.target), None)
    limits = settings_of(tuning).limits
    figures = (compared.figures(contender, limits) for contender in (default, winner) if contender is not None)
    return TargetOutcome(
        space=space,
        default=default,
        winner=winner,
        equals=() if choice is None else tuple(c for c in (choice.winner, *choice.equals) if c not in (None, winner)),
        met_before=choice is None or choice.winner is not None or not limits,
        standings=standings,
        tried=sum(standing.times > 0 or standing.out is not None for standing in standings),
        finalists=sum(standing.times > 0 for standing in search.standings(space.target, "finalists")),
        out=tuple((standing.contender, standing.out) for standing in standings if standing.out is not None),
        effects=_effects(space, winner, search),
        figures={figure.contender.name: figure for figure in figures if figure is not None},
        lead=compared.of(default, winner),
    )


def settings_of(tuning: Tuning) -> TuneSettings:
    """The stored settings."""
    return TuneSettings.model_validate(tuning.settings)


def _effects(space: Space, winner: Contender | None, search: Search) -> tuple[SettingEffect, ...]:
    """The winner beside itself without each of its settings, by the runs that put them back."""
    if winner is None:
        return ()
    measured = {standing.contender.name: standing for standing in search.standings(space.target, "settings")}
    defaults = {setting.name: setting.default for setting in space.settings}
    whole = measured.get(winner.name)
    effects = []
    for name, contender in search.put_back(winner).items():
        part = measured.get(contender.name)
        factor, ci95 = gain(whole, part) or (None, None)
        effects.append(SettingEffect(name, defaults[name], winner.settings[name], factor, ci95))
    return tuple(sorted(effects, key=lambda effect: -(effect.factor or 0.0)))


def settings_in_words(contender: Contender) -> str:
    """ "max-batch-size=16, instances=2" """
    return ", ".join(f"{name}={value}" for name, value in contender.settings.items()) or "all at their defaults"


def limits_in_words(limits: Mapping[str, float]) -> str:
    """ "p99 ≤ 50 ms"; `limits` are in ms by the names of their metrics."""
    return join([limit_in_words(name, limit_ms) for name, limit_ms in limits.items()])


def limit_in_words(metric: str, limit_ms: float) -> str:
    """ "p99 ≤ 50 ms" """
    return f"{METRICS[metric].title.removesuffix(' latency')} ≤ {number(limit_ms)} ms"


def cost_of_defaults(target: TargetOutcome) -> tuple[float, Interval | None] | None:
    """What the defaults lose against the best, as a share: of the throughput, or of the time that is added to a
    latency. Below 0 they are better. None where the final does not have both."""
    if target.winner is None or (lead := log_lead(target.lead, target.winner.name)) is None:
        return None
    assert target.lead is not None
    higher = target.lead.higher_is_better

    def cost(log: float) -> float:
        return -math.expm1(-log) if higher else math.expm1(log)

    centre, low, high = map(cost, lead)
    return centre, (low, high) if target.lead.ci95 is not None else None


def percent(value: float, interval: Interval | None) -> str:
    """ "31 % (28–34)" """
    words = share(value) if value >= 0.0 else f"−{share(-value)}"
    if interval is None:
        return words
    low, high = (f"{'−' if bound < 0.0 else ''}{number(abs(bound) * 100.0, 2)}" for bound in interval)
    return f"{words} ({low}{' to ' if interval[0] < 0.0 else '–'}{high})"


def _headline(outcome: TuningOutcome) -> str:
    """From the final alone; before it where the search stands."""
    final, limits = outcome.final, outcome.settings.limits
    if final is None:
        return _unfinished(outcome)
    within = limits_in_words(limits)
    if not outcome.has_verdict:
        return final.headline
    if not any(target.meets_limit for target in outcome.targets):
        return fit([(f"Nothing that was tried meets {within}",), _nearest(outcome), (".",)])
    failing = [target.title for target in outcome.targets if not target.meets_limit]
    missed = [
        target.title
        for target in outcome.targets
        if target.meets_limit and any(limit.state == "exceeded" for limit in target.limits)
    ]
    before: Alternatives = ("",)
    if failing:
        before = (f"{join(failing)} cannot meet {within}; ",)
    elif missed:
        before = (f"{join(missed)} missed {within} in the final; ",)
    parts: list[Alternatives] = []
    if outcome.between_best:
        parts = [_best_against_best(outcome, within), _at_defaults(outcome)]
    else:
        parts = [_gain(target, outcome) for target in outcome.targets if target.best is not None and target.meets_limit]
    text = fit([before, *parts, (".",)])
    return text[0].upper() + text[1:]


def _nearest(outcome: TuningOutcome) -> Alternatives:
    """The target that exceeds its limit least in the final, by the limit that it exceeds most."""
    worst: dict[str, LimitKept] = {}
    for target in outcome.targets:
        known = [limit for limit in target.limits if limit.value_ms is not None]
        if known:
            worst[target.title] = max(known, key=lambda limit: (limit.value_ms or 0.0) / limit.limit_ms)
    if not worst:
        return ("",)
    title, limit = min(worst.items(), key=lambda item: (item[1].value_ms or 0.0) / item[1].limit_ms)
    return (f"; {title} comes nearest with {number(limit.value_ms or 0.0)} ms",)


def _best_against_best(outcome: TuningOutcome, within: str) -> Alternatives:
    main, under = outcome.between_best[0], f" within {within}" if within else ""
    if main.winner is None or main.loser is None or (lead := advantage(main)) is None:
        names = join([target.title for target in outcome.targets if target.best is not None and target.meets_limit])
        what = "no meaningful difference" if main.verdict == "no_difference" else main.verdict
        return (f"no winner between {names} at their best{under}: {what}", f"no winner between {names}: {what}")
    winner, loser = outcome.names[main.winner], outcome.names[main.loser]
    factor, interval = ratio(lead.factor, lead.ci95), ratio_interval(lead.ci95)
    serves = outcome.relation(main, factor)
    after = f", the next of {len(outcome.targets)}" if len(outcome.targets) > 2 else ""
    return (
        f"{winner} {serves} {loser}{after}{under} (95 % interval {interval})",
        f"{winner} {serves} {loser}{after}{under} ({interval})",
        f"{winner} {serves} {loser}{after} ({interval})",
        f"{winner} {serves} {loser} ({interval})",
    )


def _at_defaults(outcome: TuningOutcome) -> Alternatives:
    """What the same two targets show at their defaults, where that is another question."""
    main, titles = outcome.between_best[0], {target.default.name: target.title for target in outcome.targets}
    pairs = {
        frozenset(c.name for c in (one.default, other.default)): frozenset(c.name for c in (one.best, other.best) if c)
        for one, other in combinations(outcome.targets, 2)
    }
    for comparison in outcome.between_defaults:
        best = pairs.get(frozenset(comparison.pairing))
        if best != frozenset(main.pairing) or best == frozenset(comparison.pairing):
            continue
        lead = advantage(comparison)
        if comparison.winner is None or lead is None:
            return ("; at their defaults neither leads", "")
        interval, factor = ratio_interval(lead.ci95), ratio(lead.factor, lead.ci95)
        who = titles[comparison.winner]
        return (f"; at their defaults {who} leads {factor} ({interval})", f"; at their defaults {who} leads", "")
    return ("",)


def _gain(target: TargetOutcome, outcome: TuningOutcome) -> Alternatives:
    """A single target: its best against its defaults."""
    comparison = target.lead
    lead = None if comparison is None else advantage(comparison)
    if comparison is None or comparison.winner is None or lead is None:
        return (f"nothing that was tried is shown to be better than the defaults of {target.title}",)
    interval, factor = ratio_interval(lead.ci95), ratio(lead.factor, lead.ci95)
    names = outcome.names
    better, other = names[comparison.winner], names[comparison.loser or ""].removeprefix(f"{target.title} at ")
    text = f"{better} {outcome.relation(comparison, factor)} {other}"
    return (f"{text} (95 % interval {interval})", f"{text} ({interval})")


def _unfinished(outcome: TuningOutcome) -> str:
    """The state of the search, which is not a result."""
    tried = sum(target.tried for target in outcome.targets)
    chosen = any(target.winner is not None for target in outcome.targets)
    where = "the best are chosen, the final did not run" if chosen else "nothing is chosen yet"
    start = "No verdict yet"
    if outcome.tuning.state == "failed":
        start = "No verdict: the tuning failed"
    if outcome.tuning.state == "interrupted":
        start = "No verdict: the tuning was interrupted"
    return fit([(start,), (f" after {tried} tries",), (f"; {where}", ""), (".",)])
