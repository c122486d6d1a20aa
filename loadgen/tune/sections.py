"""The report of a tuning: the answer, each target's best beside its defaults, the race, and what was left out.

Figures of the answer come from the final. Charts show the search, whose scores decided what to measure next and nothing
else; they refer to the anchor, which every run measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import loadgen.report.charts as charts
import loadgen.report.document as doc
from loadgen.metrics.registry import SERVED
from loadgen.quantities import (
    Interval,
    counted,
    join,
    measured,
    measured_interval,
    number,
    ratio,
    ratio_interval,
    sentence,
)
from loadgen.records.run import Label
from loadgen.report.sections.verdict import conditions_in_brief
from loadgen.tune.outcome import (
    ArmFigures,
    LimitKept,
    SettingEffect,
    TargetOutcome,
    TuningOutcome,
    cost_of_defaults,
    limit_in_words,
    limits_in_words,
    percent,
    settings_in_words,
)
from loadgen.tune.records import ANCHOR, Contender, Score, Stage
from loadgen.tune.search import factor_of
from loadgen.tune.settings import TuneSettings
from loadgen.verdict.checks.registry import validity

STAGES: Mapping[Stage, str] = {"screening": "screenings", "finalists": "finalists", "settings": "settings put back"}
BEST_MARK, SMALL, LARGE = "star", 7, 15
LIMIT_STYLES: Mapping[str, doc.Style] = {
    "kept": "ok", "exceeded": "failed", "not certain": "warning", "not measured": "unknown",
}  # fmt: skip
SELECTION = (
    "The winners were chosen from the finalists' fresh runs, and every figure of the answer comes from the final, "
    "which measured them once more: none is the best of many."
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
            _race(outcome),
            _trade_off(outcome),
        ],
        "Deploy": [_deploy(outcome, commands or {}, files or {})],
        "Search": [_counts(outcome), _left_out(outcome), _not_searched(outcome), _runs(outcome)],
    }
    targets = join([target.title for target in outcome.targets])
    settings = outcome.settings
    return doc.Document(
        f"{targets} at their best" if len(outcome.targets) > 1 else f"{targets} at its best",
        {title: [section for section in group if section is not None] for title, group in sections.items()},
        about=f"tuning of {settings.model} {load_in_words(settings)}",
    )


def load_in_words(settings: TuneSettings) -> str:
    """ "for 16 users, within p99 ≤ 50 ms" """
    load = f"for {counted(settings.users, 'user')}"
    if settings.rate is not None:
        load = f"at {number(settings.rate)} requests/s"
    return load + (f", within {limits_in_words(settings.limits)}" if settings.limits else "")


def target_style(outcome: TuningOutcome, target: TargetOutcome) -> doc.Style:
    """The colour of a target in tables and charts."""
    return doc.ARM_STYLES[outcome.targets.index(target) % len(doc.ARM_STYLES)]


def _answer(outcome: TuningOutcome) -> doc.Section | None:
    final, tuning = outcome.final, outcome.tuning
    failed = [] if final is None else [doc.Item(text, "failed") for text in final.verdict.failed]
    items = [
        doc.Item(_in_brief(outcome, target), target_style(outcome, target), target.title) for target in outcome.targets
    ]
    if final is None:
        badge: str = {"running": "RUNNING", "interrupted": "INTERRUPTED", "failed": "FAILED"}.get(tuning.state, "OPEN")
        style: doc.Style = "failed"
    else:
        badge, style = validity(final.checks), "ok" if final.valid else "failed"
    return doc.section(
        "",
        doc.Panel(
            badge,
            style,
            outcome.headline,
            (
                doc.Items(failed),
                doc.Items(items),
                doc.Text(sentence(tuning.error) if tuning.error else "", "failed"),
                *(doc.Text(line, "note") for line in (() if final is None else conditions_in_brief(final))),
                doc.Text(SELECTION if final is not None else "", "note", on=doc.PAGES),
                *([] if final is None else [doc.Link("The final comparison in full", "final/report.html")]),
            ),
        ),
    )


def _in_brief(outcome: TuningOutcome, target: TargetOutcome) -> str:
    """One line of a target: its best settings and what its defaults cost, or the standing of its search."""
    tried = f"{counted(target.tried, 'contender')} tried"
    if outcome.final is None or target.best is None:
        if target.leader is None:
            return f"nothing to tell yet ({tried})"
        gain = target.gain_so_far
        times = "" if gain is None else f", {ratio(*gain)} its defaults ({ratio_interval(gain[1])}) in the screenings"
        return f"best so far: {settings_in_words(target.leader.contender)}{times} ({tried})"
    if not target.meets_limit:
        within, words = limits_in_words(outcome.settings.limits), settings_in_words(target.best)
        return f"nothing that was tried meets {within}; nearest: {words} ({tried})"
    cost, lead = cost_of_defaults(target), target.lead
    if not outcome.has_verdict:
        return f"chosen: {settings_in_words(target.best)}; the final gives no verdict on it ({tried})"
    if target.lead is None or cost is None:
        return f"its defaults are the best of {tried}"
    words = settings_in_words(target.winner) if target.winner is not None else ""
    if target.best == target.default:
        return f"keep its defaults: in the final they are better than {words} ({tried})"
    assert lead is not None
    if lead.winner is None:
        return f"{words}; the final shows no difference to its defaults: {percent(*cost)} ({tried})"
    what = "cost" if lead.higher_is_better else "add"
    return f"{words}; its defaults {what} {percent(*cost)} ({tried})"


def _best_and_defaults(outcome: TuningOutcome) -> doc.Section | None:
    """The figures of the final, a row per arm, and what they say of each other."""
    if outcome.final is None or outcome.metric is None:
        return None
    limits = outcome.settings.limits
    price = outcome.settings.price if outcome.metric.name in SERVED else None
    columns = (
        *doc.names("target", "settings"),
        *doc.numbers(outcome.unit),
        *([] if price is None else doc.numbers("per million")),
        doc.Column("p99, ms", "number", on=doc.PAGES if "latency_p99" in limits else doc.READ),
        doc.Column("defaults cost", "number"),
        *(doc.Column(limit_in_words(name, limit_ms)) for name, limit_ms in limits.items()),
    )
    rows: list[tuple[doc.Value, ...]] = []
    for target in outcome.targets:
        cost = cost_of_defaults(target)
        for figures in _arms(target):
            is_winner = figures.contender == target.winner
            rows.append(
                (
                    doc.Cell(target.title, target_style(outcome, target)),
                    _named(target, figures.contender),
                    _with_interval(figures.value, figures.ci95),
                    *([] if price is None else [_cost_per_million(price, figures.value)]),
                    "–" if figures.p99_ms is None else number(figures.p99_ms),
                    percent(*cost) if cost is not None and is_winner and outcome.has_verdict else "",
                    *map(_limit_cell, figures.limits),
                )
            )
    claims = [outcome.claim(each) for each in (*outcome.between_best, *outcome.between_defaults)]
    return doc.section(
        "Best and defaults",
        doc.Table(columns, rows, grouped=True),
        doc.Items([doc.Item(sentence(text)) for text in claims] if outcome.has_verdict else ()),
        on=doc.READ,
    )


def _cost_per_million(price_per_hour: float, items_per_second: float | None) -> str:
    """Of items or output tokens, if the machine is never idle."""
    return "–" if not items_per_second else number(price_per_hour / 3600.0 / items_per_second * 1e6)


def _with_interval(value: float | None, ci95: Interval | None) -> str:
    """ "128.4 (127.6–129.2)" """
    return measured(value, ci95) + ("" if ci95 is None else f" ({measured_interval(ci95)})")


def _arms(target: TargetOutcome) -> Iterator[ArmFigures]:
    """The winner first, then the defaults."""
    for contender in dict.fromkeys(c.name for c in (target.winner, target.default) if c is not None):
        if (figures := target.figures.get(contender)) is not None:
            yield figures


def _named(target: TargetOutcome, contender: Contender) -> str:
    if contender == target.default:
        return "defaults, the best" if contender == target.winner else "defaults"
    return "best"


def _limit_cell(limit: LimitKept) -> doc.Cell:
    if limit.value_ms is None:
        return doc.Cell(limit.state, LIMIT_STYLES[limit.state])
    known = "" if limit.ci95_ms is not None else " (no interval)"
    return doc.Cell(f"{_with_interval(limit.value_ms, limit.ci95_ms)}{known}, {limit.state}", LIMIT_STYLES[limit.state])


def _settings(outcome: TuningOutcome) -> doc.Section | None:
    """What differs from the defaults, and what each of them is worth."""
    rows: list[tuple[doc.Value, ...]] = [
        (
            doc.Cell(target.title, target_style(outcome, target)),
            effect.setting,
            effect.default,
            effect.best,
            _worth(effect),
        )
        for target in outcome.targets
        for effect in target.effects
    ]
    return doc.section(
        "Settings that differ from the defaults",
        doc.Table(
            (
                *doc.names("target", "setting", "default", "best"),
                doc.Column("worth", "number"),
            ),
            rows,
            grouped=True,
        ),
        doc.Text(
            "Worth: how many times better the best is than with this one setting put back to its default, in runs of "
            "their own. If the interval includes 1, they do not show that the setting matters."
            if any(effect.factor is not None for target in outcome.targets for effect in target.effects)
            else "",
            "note",
        ),
        on=doc.READ,
    )


def _worth(effect: SettingEffect) -> doc.Cell:
    if effect.factor is None or effect.ci95 is None:
        return doc.Cell("not measured", "unknown")
    text = f"{ratio(effect.factor, effect.ci95)} ({ratio_interval(effect.ci95)})"
    return doc.Cell(text, "ok" if effect.matters else "note")


def _marks(outcome: TuningOutcome, names: Sequence[Label]) -> doc.Figure:
    """Markers: the defaults hollow, the winner a star."""
    best = {target.best.name for target in outcome.targets if target.best is not None}
    defaults = {target.default.name for target in outcome.targets}
    target = next((t for t in outcome.targets if names and names[0] in _members(t)), outcome.targets[0])
    shape = charts.MARKERS[outcome.targets.index(target) % len(charts.MARKERS)]
    return {
        "symbol": [BEST_MARK if name in best else f"{shape}-open" if name in defaults else shape for name in names],
        "size": [LARGE if name in best else 10 if name in defaults else SMALL for name in names],
        "color": f"--{target_style(outcome, target)}",
        "line": {"width": 1.5},
    }


def _members(target: TargetOutcome) -> set[Label]:
    return {standing.contender.name for standing in target.standings}


def _race(outcome: TuningOutcome) -> doc.Section | None:
    """Every score in the order of measurement, with its interval, and the best pooled one so far as a line."""
    measurements = [(run.stage, score) for run in outcome.tuning.runs if run.problem is None for score in run.scores]
    if not measurements:
        return None
    words = {s.contender.name: settings_in_words(s.contender) for t in outcome.targets for s in t.standings}
    data: list[doc.Figure] = []
    values: list[float] = [1.0]
    for target in outcome.targets:
        members = _members(target)
        own = [(place, stage, s) for place, (stage, s) in enumerate(measurements, 1) if s.contender in members]
        if not own:
            continue
        centres = [math.exp(score.log_ratio) for _, _, score in own]
        bounds = [factor_of(score.log_ratio, score.error)[1] for _, _, score in own]
        values += [bound for pair in bounds for bound in pair]
        shade = f"--{target_style(outcome, target)}"
        names = [score.contender for _, _, score in own]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": charts.label_text(target.title),
                "x": [place for place, _, _ in own],
                "y": [charts.rounded(centre) for centre in centres],
                "error_y": charts.errors(centres, bounds, color=shade, thickness=1, width=0),
                "marker": _marks(outcome, names),
                "customdata": [
                    charts.label_text(
                        f"{score.contender}: {words.get(score.contender, '')} ({STAGES.get(stage, stage)})"
                    )
                    for _, stage, score in own
                ],
                "hovertemplate": "%{y:.3~g}×<br>%{customdata}<extra></extra>",
            }
        )
        screened = [(place, score.log_ratio) for place, stage, score in own if stage == "screening"]
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": charts.label_text(target.title),
                "showlegend": False,
                "x": [place for place, _ in screened],
                "y": [charts.rounded(math.exp(best)) for best in accumulate((log for _, log in screened), max)],
                "line": {"color": shade, "width": 1.5, "shape": "hv", "dash": "dot"},
                "hoverinfo": "skip",
            }
        )
    data += _legend_of_marks()
    spans = _spans([stage for stage, _ in measurements])
    chart = doc.Chart(
        "race",
        "The race",
        f"Every score in the order of measurement, as a multiple of {_anchor(outcome)}; bars are 95 % intervals, "
        "dotted is the highest score so far. Scores chose what was measured next; none is part of the answer.",
        data,
        {
            "height": 400,
            "legend": charts.LEGEND_ABOVE,
            "xaxis": charts.axis("measurement", rangemode="tozero"),
            "yaxis": charts.axis("times the anchor", **charts.log_axis(values)),
            "shapes": [charts.upright_line(first - 0.5, "--muted", width=1) for _, first, _ in spans[1:]],
            "annotations": [
                charts.label_at((first + last) / 2, 0.01, STAGES.get(stage, stage), "--muted", yanchor="bottom")
                for stage, first, last in spans
            ],
        },
    )
    return doc.section("", chart, on=doc.HTML)


def _anchor(outcome: TuningOutcome) -> str:
    return f"the {ANCHOR}, {outcome.targets[0].title} at its defaults"


def _legend_of_marks() -> list[doc.Figure]:
    """The meaning of the shapes, which belong to no target."""
    return [
        {
            "type": "scatter", "mode": "markers", "name": name, "x": [None], "y": [None],
            "marker": {"symbol": symbol, "size": size, "color": "--muted", "line": {"width": 1.5}},
        }
        for name, symbol, size in (("best", BEST_MARK, 13), ("defaults", "circle-open", 10))
    ]  # fmt: skip


def _spans(stages: Sequence[Stage]) -> list[tuple[Stage, int, int]]:
    """Each stage with its first and last measurement, counted from 1."""
    return [
        (stage, stages.index(stage) + 1, len(stages) - stages[::-1].index(stage)) for stage in dict.fromkeys(stages)
    ]


AXES: Mapping[str, tuple[str, bool]] = {
    "throughput": ("throughput, per second", True),
    "cost": ("throughput, per second", True),
    "energy": ("energy per item, J", False),
}
"""The axis of each goal that can be traded for latency, and whether more is better."""


def _trade_off(outcome: TuningOutcome) -> doc.Section | None:
    """Each contender's latency and throughput, and the front of each target: those that no other one beats in both."""
    goal = outcome.settings.aim
    if goal not in AXES:
        return None
    title, more_is_better = AXES[goal]
    points = {target.space.target: _points(outcome, target) for target in outcome.targets}
    latencies = [x for own in points.values() for x, _ in own.values()]
    values = [y for own in points.values() for _, y in own.values()]
    if len(latencies) < 2:
        return None
    limit = outcome.settings.limits.get("latency_p99")
    words = {s.contender.name: settings_in_words(s.contender) for t in outcome.targets for s in t.standings}
    data: list[doc.Figure] = []
    for target in outcome.targets:
        own = points[target.space.target]
        shade = f"--{target_style(outcome, target)}"
        front = _front(own, more_is_better=more_is_better)
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": charts.label_text(target.title),
                "x": [charts.rounded(x) for x, _ in own.values()],
                "y": [charts.rounded(y) for _, y in own.values()],
                "marker": _marks(outcome, list(own)),
                "customdata": [charts.label_text(f"{name}: {words[name]}") for name in own],
                "hovertemplate": "p99 %{x:.3~g} ms, %{y:,.4~g}<br>%{customdata}<extra></extra>",
            }
        )
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "showlegend": False,
                "x": [charts.rounded(own[name][0]) for name in front],
                "y": [charts.rounded(own[name][1]) for name in front],
                "line": {"color": shade, "width": 2, "dash": charts.DASHES[outcome.targets.index(target)]},
                "hoverinfo": "skip",
            }
        )
    chart = doc.Chart(
        "trade-off",
        "Latency and energy" if goal == "energy" else "Latency and throughput",
        "Up and left is better. The line joins the contenders of a target that no other one of it beats in both, by "
        "the mean of their runs.",
        data,
        {
            "height": 400,
            "legend": charts.LEGEND_ABOVE,
            "xaxis": charts.axis("p99 latency, ms", **charts.log_axis([*latencies, *([limit] if limit else [])])),
            "yaxis": charts.axis(outcome.unit or title, **charts.log_axis(values)),
            **({} if limit is None else _limit_line(limit)),
        },
    )
    return doc.section("", chart, on=doc.HTML)


def _limit_line(limit_ms: float) -> doc.Figure:
    text, corner = f"limit {number(limit_ms)} ms ", {"xanchor": "right", "yanchor": "top"}
    return {
        "shapes": [charts.upright_line(limit_ms, "--bad", width=2, dash="dash")],
        "annotations": [charts.label_at(math.log10(limit_ms), 1, text, "--bad", **corner)],
    }


def _points(outcome: TuningOutcome, target: TargetOutcome) -> dict[Label, tuple[float, float]]:
    """p99 in ms and the goal's value of each contender, geometric means over its runs."""
    scores: dict[Label, list[Score]] = {}
    members = _members(target)
    for run in outcome.tuning.runs:
        for score in run.scores if run.problem is None else ():
            if score.contender in members and score.p99_ms and score.value > 0.0:
                scores.setdefault(score.contender, []).append(score)
    return {
        name: (_mean([score.p99_ms or 0.0 for score in own]), _mean([score.value for score in own]))
        for name, own in scores.items()
    }


def _mean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def _front(points: Mapping[Label, tuple[float, float]], *, more_is_better: bool) -> list[Label]:
    """Those that no other point beats in both, by latency."""
    front: list[Label] = []
    best = -math.inf
    for name, (_, value) in sorted(points.items(), key=lambda point: point[1]):
        gain = value if more_is_better else -value
        if gain > best:
            front.append(name)
            best = gain
    return front


def _deploy(outcome: TuningOutcome, commands: Mapping[str, str], files: Mapping[str, str]) -> doc.Section | None:
    """The command line of each target's best, and the files for everything else."""
    blocks: list[doc.Block] = []
    for target in outcome.targets:
        if (command := commands.get(target.space.target)) is not None:
            blocks += [doc.Text(f"{outcome.names[(target.best or target.default).name]}:"), doc.Text(command, "code")]
    blocks += [doc.Link(f"{path}: {what}", path) for path, what in files.items()]
    blocks.append(doc.Items([doc.Item(what, lead=path) for path, what in files.items()], on=doc.TERMINAL))
    return doc.section("How to deploy the best", *blocks, on=doc.READ)


def _counts(outcome: TuningOutcome) -> doc.Section | None:
    """How the winners were selected: how many were tried and how many are as good."""
    rows: list[tuple[doc.Value, ...]] = []
    for target in outcome.targets:
        equals = ", ".join(contender.name for contender in target.equals) or "none"
        rows.append(
            (
                doc.Cell(target.title, target_style(outcome, target)),
                str(target.tried),
                str(target.finalists or "–"),
                "–" if target.winner is None else target.winner.name,
                equals if target.finalists else "–",
                str(len(target.out)),
            )
        )
    return doc.section(
        "Tried and chosen",
        doc.Table(
            (
                *doc.names("target"),
                *doc.numbers("tried", "finalists"),
                *doc.names("chosen"),
                doc.Column("as good", "text"),
                *doc.numbers("out"),
            ),
            rows,
        ),
        doc.Text(
            "As good: finalists whose measured difference to the best is too small to matter. The one nearest to the "
            "defaults is chosen."
            if any(target.finalists for target in outcome.targets)
            else "",
            "note",
        ),
        on=doc.READ,
    )


def _left_out(outcome: TuningOutcome) -> doc.Section | None:
    """Contenders that may never win, each with its reason."""
    rows = [
        (doc.Cell(target.title, target_style(outcome, target)), settings_in_words(contender), why)
        for target in outcome.targets
        for contender, why in target.out
    ]
    problems = [
        doc.Item(sentence(run.problem), "warning", run.folder) for run in outcome.tuning.runs if run.problem is not None
    ]
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
        space = target.space
        fixed = [f"{name}={value}" for name, value in space.fixed.items()]
        texts = [*([f"fixed: {', '.join(fixed)}"] if fixed else []), *space.not_searched]
        items += [doc.Item(text, target_style(outcome, target), target.title) for text in texts]
    return doc.section("Not searched", doc.Items(items), on=doc.READ)


def _runs(outcome: TuningOutcome) -> doc.Section | None:
    """Every run with its folder, for whoever wants to look closer."""
    rows = [
        (
            run.folder,
            STAGES.get(run.stage, run.stage),
            str(len(run.scores)) if run.scores else "–",
            str(len(run.out) or "–"),
            f"{number(run.seconds)} s",
        )
        for run in outcome.tuning.runs
    ]
    minutes = math.fsum(run.seconds for run in outcome.tuning.runs) / 60.0
    table = doc.Table((*doc.names("folder", "stage"), *doc.numbers("contenders", "out", "time")), rows)
    summary = f"{counted(len(rows), 'run')} in {number(minutes)} minutes"
    return doc.section("Runs", doc.Fold(summary, (table,))) if rows else None
