"""The report of a tuning: the answer, each target's best beside its defaults, the race, and what was left out.

Figures of the answer come from the final. Charts show the search, whose scores decided what to measure next and nothing
else; they refer to the anchor, which every run measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

import loadgen.report.charts as charts
import loadgen.report.document as doc
from loadgen.base.quantities import counted, excludes_one, join, measured, measured_with_interval, number, sentence
from loadgen.checks.registry import validity
from loadgen.experiment.tuning import TuneSettings
from loadgen.metrics.registry import SERVED
from loadgen.metrics.tokens import per_million
from loadgen.records.run import Label
from loadgen.records.tuning import ANCHOR
from loadgen.report.sections.checks import standing_style
from loadgen.report.sections.verdict import conditions_in_brief
from loadgen.stats.estimates import Estimate, pareto_front
from loadgen.stats.ratios import geometric_mean
from loadgen.tune.outcome import (
    P99,
    FinalFigure,
    TargetOutcome,
    TuningOutcome,
    limit_in_words,
    limits_in_words,
    percent,
    settings_in_words,
    times_in_words,
)
from loadgen.tune.race import STAGE_TITLES
from loadgen.tune.search import factor_of

BEST_MARK, SMALL, LARGE = "star", 7, 15
LIMIT_STYLES: Mapping[str, doc.Style] = {
    "kept": "ok", "exceeded": "failed", "not certain": "warning", "not measured": "unknown",
}  # fmt: skip
SELECTION = (
    "Every figure of the answer comes from the final, which measured the winners freshly after they had been chosen: "
    "none is the best of many."
)
WORTH = (
    "Worth: how many times better the best is than with this one setting put back to its default, in runs of their "
    "own, or in the final if it is the only one. If the interval includes 1, they do not show that the setting matters."
)


def tuning_document(
    outcome: TuningOutcome, commands: Mapping[str, str] | None = None, files: Mapping[str, str] | None = None
) -> doc.Document:
    """`commands` start each target at its best. `files` deploy them: paths relative to the report, and what each is."""
    sections = {
        "": [
            _answer(outcome),
            _best_and_defaults(outcome),
            _settings(outcome),
            doc.section("", _race(outcome), on=doc.HTML),
            doc.section("", _trade_off(outcome), on=doc.HTML),
        ],
        "Deploy": [_deploy(outcome, commands or {}, files or {})],
        "Search": [_left_out(outcome), _not_searched(outcome), _runs(outcome)],
    }
    targets = join([target.title for target in outcome.targets])
    return doc.Document(
        f"{targets} at {'their' if len(outcome.targets) > 1 else 'its'} best",
        {title: [section for section in group if section is not None] for title, group in sections.items()},
        about=f"tuning of {outcome.settings.model} {load_in_words(outcome.settings)}",
    )


def load_in_words(settings: TuneSettings) -> str:
    """ "for 16 users, within p99 ≤ 50 ms" """
    load = f"for {counted(settings.users, 'user')}"
    if settings.rate is not None:
        load = f"at {number(settings.rate)} requests/s"
    elif settings.traffic is not None:
        load = "with recorded traffic"
    return load + (f", within {limits_in_words(settings.limits)}" if settings.limits else "")


def _style(target: TargetOutcome) -> doc.Style:
    """The colour of a target in tables and charts."""
    return charts.style_at(target.place)


def _name(target: TargetOutcome) -> doc.Cell:
    return doc.Cell(target.title, _style(target))


def _item(target: TargetOutcome, text: str) -> doc.Item:
    return doc.Item(text, _style(target), target.title)


def _answer(outcome: TuningOutcome) -> doc.Section | None:
    final, tuning = outcome.final, outcome.tuning
    unfinished = {"running": "RUNNING", "interrupted": "INTERRUPTED", "failed": "FAILED"}
    badge = unfinished.get(tuning.state, "OPEN") if final is None else validity(final.checks)
    blocks: list[doc.Block] = [
        doc.Items([] if final is None else [doc.Item(text, "failed") for text in final.verdict.failed]),
        doc.Items(
            [
                _item(target, f"{_standing(outcome, target)} ({counted(target.race.tried, 'contender')} tried)")
                for target in outcome.targets
            ]
        ),
        doc.Text(sentence(tuning.error) if tuning.error else "", "failed"),
    ]
    if final is not None:
        blocks += [doc.Text(line, "note") for line in conditions_in_brief(final)]
        blocks.append(doc.Text(SELECTION, "note", on=doc.PAGES))
        blocks.append(doc.Link("The final comparison in full", "final/report.html"))
    style: doc.Style = "failed" if final is None else standing_style(final)
    return doc.section("", doc.Panel(badge, style, outcome.headline, tuple(blocks)))


def _standing(outcome: TuningOutcome, target: TargetOutcome) -> str:
    """A target's best settings and what its defaults cost, or the standing of its search."""
    lead, cost, chosen = target.lead, target.cost_of_defaults, target.chosen
    if outcome.final is None or target.best is None or chosen is None:
        if target.race.best is None:
            return "nothing to tell yet" if outcome.final is None else "could not be measured"
        gain = (
            ""
            if target.race.gain is None
            else f", {times_in_words(target.race.gain)} of its defaults in the screenings"
        )
        return f"best so far: {settings_in_words(target.race.best.contender)}{gain}"
    words, within = settings_in_words(chosen), limits_in_words(outcome.settings.limits)
    if not outcome.has_verdict:
        return f"chosen: {words}; the final gives no verdict on it"
    if not target.meets_limit:
        kept = "keep its defaults" if target.best == target.default else settings_in_words(target.best)
        return f"nothing that was tried is shown to keep {within}; {kept}"
    if chosen == target.default:
        return "keep its defaults: nothing that was tried did better"
    gain = "" if target.gain is None else f": {times_in_words(target.gain)} of its defaults"
    if target.best == target.default:
        if lead is not None and lead.winner == target.default.name:
            return f"keep its defaults: in the final they are better than {words}"
        why = ", not certain after the adjustment for several comparisons" if lead and excludes_one(lead.ci95) else ""
        if lead is not None and lead.winner == chosen.name:
            why = ", which one start of each server does not show"
        return f"keep its defaults; {words} is not shown to be better{gain}{why}"
    if cost is None or lead is None:
        return f"{words}; its defaults {f'are not shown to keep {within}' if lead else 'could not be measured'}"
    return f"{words}; its defaults {'cost' if lead.higher_is_better else 'add'} {percent(cost.value, cost.interval)}"


def _best_and_defaults(outcome: TuningOutcome) -> doc.Section | None:
    """The figures of the final, a row per arm, and what they say of each other."""
    goal, limits = outcome.metric, outcome.settings.limits
    if goal is None:
        return None
    price = outcome.settings.price if goal.name in SERVED else None
    columns = (
        *doc.names("target", "settings"),
        *doc.numbers(outcome.unit),
        *([] if price is None else doc.numbers("per million")),
        doc.Column("p99, ms", "number", on=doc.PAGES if P99.name in limits else doc.READ),
        doc.Column("defaults cost", "number"),
        *(doc.Column(limit_in_words(name, limit_ms)) for name, limit_ms in limits.items()),
    )
    rows: list[tuple[doc.Value, ...]] = []
    for target in outcome.targets:
        cost = target.cost_of_defaults if outcome.has_verdict else None
        for arm, figures in target.figures.items():
            value = figures[goal.name].value
            is_best = arm != target.default.name and target.best == target.chosen
            tried = "best" if is_best else "chosen, not shown to be better"
            rows.append(
                (
                    _name(target),
                    "defaults" if arm == target.default.name else tried,
                    measured_with_interval(figures[goal.name].value, figures[goal.name].ci95),
                    *([] if price is None else [number(per_million(price, value)) if value else "–"]),
                    measured(figures[P99.name].value),
                    percent(cost.value, cost.interval) if cost is not None and is_best else "",
                    *(_limit_cell(figures[name]) for name in limits),
                )
            )
    claims = outcome.claims if outcome.has_verdict else []
    return doc.section(
        "Best and defaults",
        doc.Table(columns, rows, grouped=True),
        doc.Items([doc.Item(sentence(text)) for text in claims]),
        on=doc.READ,
    )


def _limit_cell(figure: FinalFigure) -> doc.Cell:
    words = measured_with_interval(figure.value, figure.ci95)
    words += f"{' (no interval)' if figure.ci95 is None else ''}, {figure.state}"
    return doc.Cell(words if figure.value is not None else figure.state, LIMIT_STYLES[figure.state])


def _settings(outcome: TuningOutcome) -> doc.Section | None:
    """What differs from the defaults, what each of them is worth, and which finalists are as good: of targets whose
    defaults are not kept."""
    rows: list[tuple[doc.Value, ...]] = []
    changed = [target for target in outcome.targets if target.best in (None, target.chosen)]
    for target in changed:
        defaults = {setting.name: setting.default for setting in target.space.settings}
        best = {} if target.chosen is None else target.chosen.settings
        told = any(target.worth.values())
        rows += [
            (_name(target), name, defaults[name], best[name], _worth(gain) if told else "")
            for name, gain in target.worth.items()
        ]
    equals = [
        _item(target, f"as good in the finalists' runs: {settings_in_words(contender)}")
        for target in changed
        for contender in target.equals
    ]
    return doc.section(
        "Settings that differ from the defaults",
        doc.Table((*doc.names("target", "setting", "default", "best"), *doc.numbers("worth")), rows, grouped=True),
        doc.Text(WORTH if any(gain for target in changed for gain in target.worth.values()) else "", "note"),
        doc.Items(equals),
        on=doc.READ,
    )


def _worth(gain: Estimate | None) -> doc.Cell:
    if gain is None:
        return doc.Cell("not measured", "unknown")
    return doc.Cell(times_in_words(gain), "ok" if (gain.low or 0.0) > 1.0 else "note")


# Charts


def _marks(target: TargetOutcome, points: Sequence[tuple[Label, float, float]], **more: object) -> doc.Figure:
    """A marker per contender at its place: the defaults hollow, the winner a star."""
    best, shape = "" if target.best is None else target.best.name, charts.MARKERS[target.place % len(charts.MARKERS)]
    names = [name for name, _, _ in points]
    symbols = {target.default.name: f"{shape}-open", best: BEST_MARK}
    sizes = {target.default.name: 10, best: LARGE}
    words = {contender.name: settings_in_words(contender) for contender in target.contenders}
    marker: doc.Figure = {
        "symbol": [symbols.get(name, shape) for name in names],
        "size": [sizes.get(name, SMALL) for name in names],
        "color": f"--{_style(target)}",
        "line": {"width": 1.5},
    }
    texts = [charts.label_text(f"{name}: {words[name]}") for name in names]
    places = [(x, y) for _, x, y in points]
    title = charts.label_text(target.title)
    return charts.scatter(places, "markers", name=title, marker=marker, customdata=texts, **more)


def _race(outcome: TuningOutcome) -> doc.Chart | None:
    """Every score in the order of measurement, with its interval, and the best one so far as a line."""
    scores = [(run.stage, score) for run in outcome.tuning.runs if run.problem is None for score in run.scores]
    if not scores:
        return None
    data: list[doc.Figure] = []
    values: list[float] = [1.0]
    for target in outcome.targets:
        members = {contender.name for contender in target.contenders}
        own = [(place, stage, s) for place, (stage, s) in enumerate(scores, 1) if s.contender in members]
        factors = [factor_of(score.log_ratio, score.error) for _, _, score in own]
        centres, bounds = [factor.value for factor in factors], [factor.interval for factor in factors]
        values += [bound for interval in bounds for bound in interval or ()]
        points = [(score.contender, place, centre) for (place, _, score), centre in zip(own, centres, strict=True)]
        bars = charts.errors(centres, bounds, color=f"--{_style(target)}", thickness=1, width=0)
        hover = "%{y:.3~g}×<br>%{customdata}<extra></extra>"
        data.append(_marks(target, points, error_y=bars, hovertemplate=hover))
        screened = [
            (place, centre) for (place, stage, _), centre in zip(own, centres, strict=True) if stage == "screening"
        ]
        best = accumulate((centre for _, centre in screened), max)
        steps = list(zip((place for place, _ in screened), best, strict=True))
        data.append(charts.front(steps, f"--{_style(target)}", width=1.5, shape="hv", dash="dot"))
    stages = [stage for stage, _ in scores]
    spans = [(s, stages.index(s) + 1, len(stages) - stages[::-1].index(s)) for s in dict.fromkeys(stages)]
    return doc.Chart(
        "race",
        "The race",
        f"Every score in the order of measurement, as a multiple of the {ANCHOR}, {outcome.targets[0].title} at its "
        "defaults; bars are 95 % intervals, dotted is the highest score so far. A star is the best, hollow are the "
        "defaults. Scores chose what was measured next; none is part of the answer.",
        data,
        {
            "height": 400,
            "legend": charts.LEGEND_ABOVE,
            "xaxis": charts.axis("measurement", rangemode="tozero"),
            "yaxis": charts.axis("times the anchor", **charts.log_axis(values)),
            "shapes": [charts.upright_line(first - 0.5, "--muted", width=1) for _, first, _ in spans[1:]],
            "annotations": [
                charts.label_at((first + last) / 2, 0.01, STAGE_TITLES[stage], "--muted", yanchor="bottom")
                for stage, first, last in spans
            ],
        },
    )


def _trade_off(outcome: TuningOutcome) -> doc.Chart | None:
    """Each contender's latency and throughput, and the front of each target: those that no other one beats in both."""
    goal, limit_ms = outcome.settings.aim, outcome.settings.limits.get(P99.name)
    by_target = [_points(outcome, target) for target in outcome.targets]
    everything = [point for points in by_target for point in points]
    if goal == "latency" or len(everything) < 2:
        return None
    sign, unit = (1.0, "J") if goal == "energy" else (-1.0, "per second")
    data: list[doc.Figure] = []
    for target, points in zip(outcome.targets, by_target, strict=True):
        hover = "p99 %{x:.3~g} ms, %{y:,.4~g}<br>%{customdata}<extra></extra>"
        data.append(_marks(target, points, hovertemplate=hover))
        places = pareto_front([(x, sign * y) for _, x, y in points])
        best = sorted(points[place][1:] for place in places)
        data.append(charts.front(best, f"--{_style(target)}", width=2, dash=charts.DASHES[target.place]))
    latencies = [x for _, x, _ in everything] + ([] if limit_ms is None else [limit_ms])
    return doc.Chart(
        "trade-off",
        "Latency and energy" if goal == "energy" else "Latency and throughput",
        f"{'Down' if goal == 'energy' else 'Up'} and left is better. The line joins the contenders of a target that no "
        "other one of it beats in both, by the mean of their runs.",
        data,
        {
            "height": 400,
            "legend": charts.LEGEND_ABOVE,
            "xaxis": charts.axis("p99 latency, ms", **charts.log_axis(latencies)),
            "yaxis": charts.axis(outcome.unit or unit, **charts.log_axis([y for _, _, y in everything])),
            **({} if limit_ms is None else _limit_line(limit_ms)),
        },
    )


def _limit_line(limit_ms: float) -> doc.Figure:
    text, corner = f"limit {number(limit_ms)} ms ", {"xanchor": "right", "yanchor": "top"}
    return {
        "shapes": [charts.upright_line(limit_ms, "--bad", width=2, dash="dash")],
        "annotations": [charts.label_at(math.log10(limit_ms), 1, text, "--bad", **corner)],
    }


def _points(outcome: TuningOutcome, target: TargetOutcome) -> list[tuple[Label, float, float]]:
    """p99 in ms and the goal's value of each contender, geometric means over its runs."""
    scores: dict[Label, list[tuple[float, float]]] = {contender.name: [] for contender in target.contenders}
    for run in outcome.tuning.runs:
        for score in (*run.scores, run.anchor) if run.problem is None else ():
            if score is not None and score.contender in scores and score.p99_ms and score.value > 0.0:
                scores[score.contender].append((score.p99_ms, score.value))
    means = ((name, [geometric_mean(v) for v in zip(*own, strict=True)]) for name, own in scores.items() if own)
    return [(name, p99_ms, value) for name, (p99_ms, value) in means]


# What else a reader may need


def _deploy(outcome: TuningOutcome, commands: Mapping[str, str], files: Mapping[str, str]) -> doc.Section | None:
    """The command line of each target's best, and the files for everything else."""
    blocks: list[doc.Block] = []
    for target in outcome.targets:
        if (command := commands.get(target.space.target)) is not None:
            blocks += [doc.Text(f"{outcome.names[(target.best or target.default).name]}:"), doc.Text(command, "code")]
    blocks += [doc.Link(f"{path}: {what}", path) for path, what in files.items()]
    blocks.append(doc.Items([doc.Item(what, lead=path) for path, what in files.items()], on=doc.TERMINAL))
    return doc.section("How to deploy the best", *blocks, on=doc.READ)


def _left_out(outcome: TuningOutcome) -> doc.Section | None:
    """Contenders that may never win, each with its reason."""
    rows = [(_name(target), settings_in_words(c), why) for target in outcome.targets for c, why in target.race.out]
    problems = [doc.Item(sentence(run.problem), "warning", run.folder) for run in outcome.tuning.runs if run.problem]
    return doc.section(
        "Out of the race",
        doc.Table((*doc.names("target"), *doc.texts("settings", "reason")), rows, grouped=True),
        doc.Items(problems),
        on=doc.READ,
    )


def _not_searched(outcome: TuningOutcome) -> doc.Section | None:
    """What could still be faster, and why it was not tried."""
    items = []
    for target in outcome.targets:
        fixed = ", ".join(f"{name}={value}" for name, value in target.space.fixed.items())
        items += [_item(target, text) for text in ([f"fixed: {fixed}"] if fixed else [])]
        items += [_item(target, text) for text in target.space.not_searched]
    return doc.section("Not searched", doc.Items(items), on=doc.READ)


def _runs(outcome: TuningOutcome) -> doc.Section | None:
    """Every run with its folder, for whoever wants to look closer."""
    rows = [
        (run.folder, str(len(run.scores) or "–"), str(len(run.out) or "–"), f"{number(run.seconds)} s")
        for run in outcome.tuning.runs
    ]
    minutes = math.fsum(run.seconds for run in outcome.tuning.runs) / 60.0
    table = doc.Table((*doc.names("folder"), *doc.numbers("contenders", "out", "time")), rows)
    summary = f"{counted(len(rows), 'run')} in {number(minutes)} minutes"
    return doc.section("Runs", doc.Fold(summary, (table,))) if rows else None
