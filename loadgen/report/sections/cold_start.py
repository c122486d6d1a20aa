"""Sections of cold starts: how long a server takes to its first answer, and a container step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

import loadgen.report.charts as charts
import loadgen.report.document as doc
from loadgen.base.quantities import join, number
from loadgen.findings.cold_start import ColdStartsFound
from loadgen.records.probes import ContainerStart, ServerStart
from loadgen.records.run import shown
from loadgen.verdict.result import Result

PHASES = (
    ("live_ns", "process start to live", 0.45),
    ("ready_ns", "live to ready: load and warm-up", 0.75),
    ("first_answer_ns", "ready to first answer", 1.0),
)
"""Field, title and opacity of its bar."""


STAGES = (
    "command", "describe", "import", "build", "load", "choose", "verify", "warm-up", "capture", "rest", "ready",
    "first answer",
)  # fmt: skip
"""Rows of the table of stages."""
STAGES_NOTE = (
    "Seconds by each server's log; – means that it does not say, or has no such stage. Command: abserve plans the "
    "start, before the process. The process's stages: describe the model, import libraries, build the module with its "
    "weights, load the rest, choose among forms, verify answers, warm up, capture CUDA graphs; rest: what is left "
    "until it is ready. Ready and first answer count from the start of the process. Later starts: the median of those "
    "compared. All starts find the exported file, and files in the page cache."
)
STEPS = (
    ("process", "first log line"),
    ("imported", "imported"),
    ("weights_loaded", "weights"),
    ("engine_ready", "graphs or engine"),
)
"""Milestones of a container that the table shows → their headings."""


CAPTION = (
    "Seconds since the Docker engine was asked to start the container; – means that the server does not log the step. "
    "Graphs or engine: graphs captured and warmed up, or the engine loaded. The last columns are the latency of the "
    "first request of each batch size, one size after the other. Cached: the compile caches of torch and Triton were "
    "kept; uncached: they were emptied first. The page cache was warm."
)


def cold_starts(result: Result) -> doc.Section | None:
    """One bar per start, from the creation of the process to its first answer."""
    known = [start for start in result.of(ColdStartsFound).starts if not start.plain]
    starts = [
        start
        for start in known
        if (start.first_answer_ns is not None or start.ready_ns is not None) and (start.compared or start.error is None)
    ]
    if not starts:
        return None
    starts.sort(key=lambda start: (charts.place_of(result, start.label), start.compared, start.repetition))
    rows = [
        charts.label_text(
            f"{shown(start.label)} {f'start {start.repetition + 1}' if start.compared else 'first start'}"
        )
        for start in starts
    ]
    data: list[doc.Figure] = []
    reached = [0] * len(starts)
    for attribute, title, opacity in PHASES:
        moments = [getattr(start, attribute) for start in starts]
        moments = [before if moment is None else moment for moment, before in zip(moments, reached, strict=True)]
        seconds = [(moment - before) / 1e9 for moment, before in zip(moments, reached, strict=True)]
        reached = moments
        colours = [charts.colour(result, start.label) for start in starts]
        marker = {"color": colours, "opacity": opacity, "line": {"color": "--card", "width": 1}}
        hover = title + ": %{x:.3~g} s<extra>%{y}</extra>"
        data.append(charts.bars_across(title, rows, seconds, marker, showlegend=False, hovertemplate=hover))
    chart = doc.Chart(
        "cold-starts",
        "Cold start",
        "From the creation of the process; from pale to full: until it is live, until it is ready (model loaded and "
        "warm), until its first answer. A first start has no choices and no compiled code of earlier ones.",
        data,
        {
            "height": 110 + 26 * len(rows),
            "barmode": "stack",
            "bargap": 0.3,
            "xaxis": charts.axis("seconds since process start", rangemode="tozero"),
            "yaxis": charts.ROWS,
        },
    )
    return doc.section("Cold start", chart, *start_stages(result, known))


def start_stages(result: Result, starts: Sequence[ServerStart]) -> Iterator[doc.Block]:
    """A column for each arm's first start and its later ones, a row for each stage, and which caches were warm."""
    kinds: dict[str, dict[str, float]] = {}
    warm = []
    for label in result.experiment.labels:
        own = [start for start in starts if start.label == label and start.error is None]
        for title, alike in (
            ("first start", [start for start in own if not start.compared]),
            ("later starts", [start for start in own if start.compared]),
        ):
            if alike:
                measured = list(map(_stages, alike))
                kinds[f"{shown(label)} {title}"] = {
                    name: median(stages[name] for stages in measured if name in stages)
                    for name in set[str]().union(*measured)
                }
        first = next((start for start in starts if start.label == label and start.caches == "uncached"), None)
        if first is not None and first.error is not None:
            warm.append(doc.Item(f"{shown(label)}: its first start is not shown: {first.error}"))
        elif first is not None:
            kept = join(list(first.filled)) if first.filled else "nothing"
            warm.append(doc.Item(f"{shown(label)}: its first start kept {kept} for the later ones"))
    if not any(start.stages_s or start.command_ns for start in starts):
        return
    known = set[str]().union(*kinds.values())
    rows = [*(name for name in STAGES if name in known), *sorted(known.difference(STAGES))]
    yield doc.Table(
        (*doc.names("stage"), *doc.numbers(*kinds)),
        [(name, *("–" if name not in k else f"{k[name]:.2f} s" for k in kinds.values())) for name in rows],
        title="Where a start's seconds go",
        caption=STAGES_NOTE,
        on=doc.READ,
    )
    yield doc.Items(warm)


def _stages(start: ServerStart) -> dict[str, float]:
    """The seconds of each row of the table that are known."""
    known = {name.replace("_", "-"): seconds for name, seconds in start.stages_s.items()}
    moments = {"command": start.command_ns, "ready": start.ready_ns, "first answer": start.first_answer_ns}
    known |= {name: ns / 1e9 for name, ns in moments.items() if ns is not None}
    if start.stages_s and start.ready_ns is not None:
        known["rest"] = max(0.0, start.ready_ns / 1e9 - sum(start.stages_s.values()))
    return known


def container_starts(result: Result) -> doc.Section | None:
    """One table per arm's container with one row per start, in the order in which they ran."""
    blocks: list[doc.Table | doc.Items] = []
    for label in result.experiment.labels:
        starts = [start for start in result.of(ColdStartsFound).containers if start.label == label]
        if not starts:
            continue
        sizes = sorted({size for start in starts for size in start.batch_answers_ns})
        headings = (
            "container",
            *(title for _, title in STEPS),
            "ready",
            "first answer",
            *(f"batch {n}" for n in sizes),
        )
        blocks.append(
            doc.Table(
                (*doc.names("start"), *doc.numbers(*headings)),
                [_row(start, sizes) for start in starts],
                title=f"{shown(label)}: {starts[0].service} ({starts[0].image})",
            )
        )
        blocks.append(
            doc.Items(
                [doc.Item(f"{_name(start)}: {start.error}", "failed") for start in starts if start.error is not None]
            )
        )
    return doc.section("Cold starts of the containers", *blocks, doc.Text(CAPTION if blocks else "", "note"))


def _name(start: ContainerStart) -> str:
    return f"{start.repetition + 1} {start.caches}"


def _row(start: ContainerStart, sizes: list[int]) -> tuple[str, ...]:
    steps = (start.started_ns, *(start.milestones_ns.get(name) for name, _ in STEPS))
    answers = (start.batch_answers_ns.get(size) for size in sizes)
    return (
        _name(start) + (" failed" if start.error is not None else ""),
        *("–" if ns is None else f"{ns / 1e9:.2f} s" for ns in (*steps, start.ready_ns, start.first_answer_ns)),
        *("–" if ns is None else f"{number(ns / 1e6)} ms" for ns in answers),
    )


SECTIONS = {"Detail": (cold_starts, container_starts)}
