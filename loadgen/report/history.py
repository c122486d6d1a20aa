"""The runs in a folder as one page: what was compared, the verdicts, and how figures changed from run to run.

A question is what a comparison asks: these servers, this model, these loads. A trend follows a model's loads; runs of
one question lie over each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import loadgen.report.document as doc
from loadgen.base.documents import kind_of, one_line, results_in
from loadgen.base.quantities import counted
from loadgen.checks.registry import validity
from loadgen.metrics.comparisons import Comparison, leading_comparisons, log_lead
from loadgen.metrics.registry import METRICS
from loadgen.records.run import Label, shown
from loadgen.records.store import StoredRunError, is_running
from loadgen.records.targets import ROUTES
from loadgen.report.charts import LEGEND_ABOVE, add_view, axis, errors, joined, label_text, value_axis
from loadgen.report.published import Published
from loadgen.report.renderers.tables import render_csv
from loadgen.report.sections.comparisons import against_baseline
from loadgen.verdict.result import FILE_NAME, Result, read_result, readable, stored_result

PAGE, SUMMARY, RUNS = "history.html", "history.md", "runs"
_STYLES: Mapping[str, doc.Style] = {"VALID": "ok", "ROUGH": "warning"}
SHOWN = 2
"""The runs of a question that its chart shows before a reader chooses others in the legend."""


class PastRun(NamedTuple):
    """A comparison that was measured."""

    folder: Path
    result: Result

    @property
    def started(self) -> str:
        """Date and time in UTC; empty if the run did not get that far."""
        environment = self.result.environment
        return "" if environment is None else environment.started_at[:19].replace("T", " ")

    @property
    def servers(self) -> tuple[str, ...]:
        """What was compared, in the order of the arms."""
        return tuple(arm.target for arm in self.result.experiment.arms)

    @property
    def subject(self) -> tuple[object, ...]:
        """What a trend keeps together."""
        asked = self.result.experiment
        return asked.model, self.servers, asked.transport, asked.payload

    @property
    def question(self) -> tuple[object, ...]:
        """What two runs share that can be compared."""
        return self.subject, tuple(workload.name for workload in self.result.experiment.workloads)

    @property
    def leading(self) -> list[Comparison]:
        """The leading metric of each load, against the baseline."""
        return leading_comparisons(against_baseline(self.result))


def past_runs(folder: Path) -> tuple[list[PastRun], dict[Path, str]]:
    """The comparisons in a folder, the oldest first, and why others in it cannot be read."""
    runs, faults = list[PastRun](), dict[Path, str]()
    try:
        inner = [folder] if kind_of(folder) is not None else sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError as exc:
        return [], {folder: exc.strerror or str(exc)}
    for path in inner:
        try:
            found = list(results_in(path))
        except OSError as exc:
            faults[path] = exc.strerror or str(exc)
            continue
        if not found:
            faults[path] = "it holds no run"
        for each in found:
            try:
                if kind_of(each) == "comparison":
                    runs.append(PastRun(each, _result(each)))
            except StoredRunError as exc:
                faults[each] = one_line(str(exc))
    return sorted(runs, key=lambda run: (run.started, run.folder)), faults


def _result(folder: Path) -> Result:
    if is_running(folder):
        raise StoredRunError("it still runs")
    with readable(folder):
        with suppress(StoredRunError):  # of an older version: analyse its records again
            return read_result(folder / FILE_NAME)
        return stored_result(folder)


def last_of_its_question(folder: Path, run: Path | None = None) -> tuple[Path, Path]:
    """The run before a run (None: before the last run in the folder) that asked the same question, and that run. `run`
    may also be the folder of a tuning, for its final. Raises `StoredRunError` if there is none."""
    runs = [past for past in past_runs(folder)[0] if past.result.comparisons]
    places = [place for place, past in enumerate(runs) if run is None or past.folder.resolve().is_relative_to(run)]
    if not places:
        raise StoredRunError(f"{run or folder} holds no run with a comparison; give OLD and NEW")
    new = runs[places[-1]]
    for old in reversed(runs[: places[-1]]):
        if old.question == new.question:
            return old.folder, new.folder
    raise StoredRunError(
        f"{folder} holds no run before {new.folder.name} of the same model, servers and loads; give OLD and NEW"
    )


def stored(folder: Path) -> Published:
    """The page of all runs in a folder. Raises `StoredRunError` if none can be read."""
    runs, faults = past_runs(folder)
    if not runs:
        reasons = "; ".join(f"{path}: {reason}" for path, reason in faults.items())
        raise StoredRunError(f"{folder} holds no comparison that can be read ({reasons or 'it is empty'})")
    document = history_document(runs, faults, folder)
    csv = {"csv": lambda: render_csv({"": document}, RUNS)}
    return Published(document, {}, csv, page=PAGE, summary=SUMMARY)


def history_document(runs: Sequence[PastRun], faults: Mapping[Path, str], folder: Path) -> doc.Document:
    """All runs in a table, the newest first, then charts of what was measured more than once."""
    subjects: dict[tuple[object, ...], list[PastRun]] = {}
    for run in runs:
        subjects.setdefault(run.subject, []).append(run)
    names = (f"history-{number}" for number in count())
    several = [group for group in subjects.values() if len(group) > 1]
    skipped = [doc.Item(reason, "warning", str(path)) for path, reason in faults.items()]
    on, rows = doc.PAGES | doc.CSV, [_row(run, folder) for run in reversed(runs)]
    below = (doc.Column(title, "text", below=True, on=on) for title in ("compared", "loads"))
    columns = (
        *doc.names("started, UTC"),
        *doc.texts("model"),
        *doc.names("verdict"),
        *doc.texts("result", "run"),
        *below,
    )
    table = doc.Table(columns, rows, name=RUNS, filtered=True)
    summary = f"{counted(len(runs), 'run')} of {counted(len(subjects), 'question')}"
    sections = [
        doc.section("", doc.Text(f"{summary}; {len(faults)} could not be read" if faults else summary), table),
        doc.section("Not read", doc.Items(skipped)),
    ]
    charts = [
        doc.section("", *(make(group, next(names)) for group in several for make in (_trend, _overlay)), on=doc.HTML)
    ]
    chapters = {"": sections, "From run to run": charts}
    shown_chapters = {title: [part for part in parts if part is not None] for title, parts in chapters.items()}
    return doc.Document(f"Runs in {folder}", {title: parts for title, parts in shown_chapters.items() if parts})


def _row(run: PastRun, root: Path) -> list[doc.Value]:
    result, word = run.result, validity(run.result.checks)
    loads = [workload.name for workload in result.experiment.workloads if workload.has_blocks]
    place = run.folder.relative_to(root)
    page = next((name for name in ("report.html", "summary.md") if (run.folder / name).is_file()), "")
    return [
        run.started,
        result.experiment.model,
        doc.Cell(word, _STYLES.get(word.partition(":")[0], "failed")),
        result.headline,
        doc.Cell(str(place) if place.parts else root.name, target=quote(str(place / page))),
        " / ".join(f"{shown(label)} {title}" for label, title in result.titles.items()),
        ", ".join(loads),
    ]


def _title(group: Sequence[PastRun]) -> str:
    asked = group[-1].result.experiment
    sent = f"{asked.payload} over {ROUTES[asked.transport].title}"
    return f"{asked.model}, {' against '.join(group[-1].servers)}, {sent}"


def _trend(group: Sequence[PastRun], name: str) -> doc.Chart | None:
    """What each server reached in every run, with a button per load."""
    data, views = list[doc.Figure](), list[doc.View]()
    often = Counter(load for run in group for load in dict.fromkeys(c.workload for c in run.leading))
    for load, _ in often.most_common():
        points: dict[Label, list[tuple[str, float, str]]] = {}
        about = next(c for run in reversed(group) for c in run.leading if c.workload == load)
        for run in group:
            found = [c for c in run.leading if (c.workload, c.metric, c.unit) == (load, about.metric, about.unit)]
            for label, value in dict(_values(found)).items():
                word = validity(run.result.checks)
                points.setdefault(label, []).append((run.started, value, f"{run.folder.name}: {word}"))
        traces = [_over_time(group[-1], label, places, about.unit) for label, places in points.items()]
        every = [value for places in points.values() for _, value, _ in places]
        views.append(
            add_view(data, load, traces, yaxis=value_axis(f"{METRICS[about.metric].title}, {about.unit}", every))
        )
    layout = {"height": 380, "xaxis": axis("start of the run, UTC", type="date"), "legend": LEGEND_ABOVE}
    caption = "Each point is one run; hollow ones are not valid. The runs need not have the same conditions: see diff."
    return doc.Chart(name, f"{_title(group)}: trend", caption, data, layout, views) if data else None


def _values(comparisons: Iterable[Comparison]) -> Iterator[tuple[Label, float]]:
    for comparison in comparisons:
        pairs = (comparison.baseline, comparison.baseline_value), (comparison.arm, comparison.arm_value)
        yield from ((label, value) for label, value in pairs if value is not None)


def _over_time(last: PastRun, label: Label, points: Sequence[tuple[str, float, str]], unit: str) -> doc.Figure:
    labels = last.result.experiment.labels
    place = labels.index(label) if label in labels else 0
    name = label_text(f"{shown(label)} {last.servers[place] if label in labels else ''}")
    hover = f"%{{text}}<br>%{{y:,.4~g}} {label_text(unit)}<extra></extra>"
    drawn = joined(place, name, [(started, value) for started, value, _ in points], hover, size=9)
    marker = drawn["marker"]
    marker["symbol"] = [marker["symbol"] + ("" if text.endswith(": VALID") else "-open") for _, _, text in points]
    return drawn | {"text": [label_text(text) for _, _, text in points]}


def _overlay(group: Sequence[PastRun], name: str) -> doc.Chart | None:
    """The ratio of the servers under every load, a line per run; the legend chooses which runs lie over each other."""
    lines: list[doc.Figure] = []
    for number, run in enumerate(group):
        for pairing in dict.fromkeys(c.pairing for c in run.leading):
            comparisons = [c for c in run.leading if c.pairing == pairing and c.ratio]
            if not comparisons:
                continue
            leads = [lead.exp() for c in comparisons if (lead := log_lead(c, pairing.arm)) is not None]
            ratios = [lead.value for lead in leads]
            limits = [None if c.ci95 is None else lead.interval for c, lead in zip(comparisons, leads, strict=True)]
            line = f"{run.started or run.folder.name}, {shown(pairing.arm)} over {shown(pairing.baseline)}"
            loads = [label_text(c.workload) for c in comparisons]
            hover = f"{label_text(run.folder.name)}<br>%{{x}}: %{{y:.3~g}}×<extra></extra>"
            drawn = joined(number, label_text(line), zip(loads, ratios, strict=True), hover)
            drawn["error_y"] = errors(ratios, limits, color=drawn["line"]["color"])
            lines.append(drawn | {"visible": True if number >= len(group) - SHOWN else "legendonly"})
    ratios = [y for drawn in lines for y in drawn["y"]]
    one: dict[str, Any] = {"type": "line", "xref": "paper", "yref": "y", "x0": 0, "x1": 1, "y0": 1, "y1": 1}
    layout = {
        "height": 380 + 22 * len(lines),
        "xaxis": axis("load", type="category"),
        "yaxis": value_axis("times the first server, above 1 is better", ratios),
        "shapes": [{**one, "line": {"color": "--muted", "dash": "dot", "width": 1}}],
        "legend": LEGEND_ABOVE,
    }
    caption = (
        "The ratio of the leading metric with its 95 % interval, so that above 1 the other server is better than the "
        f"first. The last {SHOWN} runs are shown; click a run in the legend to show or hide it."
    )
    return (
        doc.Chart(f"{name}-runs", f"{_title(group)}: runs over each other", caption, lines, layout) if lines else None
    )
