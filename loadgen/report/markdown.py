"""`summary.md`: the verdict and its tables for an issue, a pull request or a terminal without colour."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.analysis.result import Result
from loadgen.quantities import share
from loadgen.report import container_starts, threshold_rows
from loadgen.report.cause_tables import BATCH_HEADINGS, CAUSE_HEADINGS, batch_rows, cause_rows, causes_note
from loadgen.report.ceiling_tables import (
    CEILING_HEADINGS,
    NUMBERS,
    TITLE,
    ceiling_caption,
    ceiling_rows,
    ceiling_sentences,
)
from loadgen.report.check_tables import check_rows
from loadgen.report.evidence import HEADINGS, evidence_rows
from loadgen.report.fairness import fairness_summary
from loadgen.report.searches import SECTIONS
from loadgen.report.stage_tables import FOLDED, FOLDED_NOTE, stage_rows
from loadgen.report.tables import (
    SUMMARY_HEADINGS,
    comparison_rows,
    environment_rows,
    experiment_rows,
    footing,
    summary_rows,
    titles,
)

FILE_NAME = "summary.md"
MARKS = {"failed": "**failed**", "warning": "warning", "unknown": "unknown", "note": "note", "ok": "ok"}


def render_markdown(result: Result) -> str:
    """The whole document, ending in a newline."""
    verdict = result.verdict
    names = titles(result)
    parts = []
    caveats = list(verdict.caveats)
    if caveats:
        parts.append("\n".join(f"> {caveat}" for caveat in caveats))
    parts += [
        f"# {'VALID' if verdict.valid else 'INVALID'}",
        escape(verdict.headline),
        f"- **A**: {escape(names['a'])}\n- **B**: {escape(names['b'])}",
    ]
    if verdict.failed:
        parts.append("Why there is no verdict:\n\n" + "\n".join(f"- {escape(text)}" for text in verdict.failed))
    rows = comparison_rows(result, measured_only=True)
    if rows:
        parts.append("## Comparisons")
        parts.append(
            make_table(
                ("scenario", "metric", "unit", "A", "B", "B/A", "95 % interval", "verdict", "pairs", "detectable"),
                [
                    (r.scenario, r.metric, r.unit, r.a, r.b, r.ratio, r.interval, r.verdict, str(r.pairs), r.detectable)
                    for r in rows
                ],
                right=(3, 4, 5, 6, 8, 9),
            )
        )
        parts.append(
            f"Equivalent means: the interval lies within ±{share(result.experiment.equivalence_margin)}. "
            "Detectable: the smallest true difference that 80 % of such runs would name."
        )
        parts.append(escape(footing(result)))
    if result.thresholds:
        parts.append("## Thresholds")
        parts.append(make_table(threshold_rows.HEADINGS, threshold_rows.threshold_rows(result)))
    reasons = [(s.scenario, s.reasons) for s in verdict.scenarios if s.reasons]
    if reasons:
        parts.append("## Why")
        parts.append("\n".join(f"- **{name}**: {escape(' '.join(texts))}" for name, texts in reasons))
    for causes in result.causes:
        parts.append(f"What each cause makes of the difference in {causes.cell}:")
        parts.append(make_table(CAUSE_HEADINGS, cause_rows(causes), right=(1, 2, 3, 6, 7)))
    parts += [note] if (note := causes_note(result)) else []
    if verdict.main_scenario and (stages := stage_rows(result, verdict.main_scenario)):
        parts.append(f"Where the time of a request goes in {verdict.main_scenario}:")
        parts.append(make_table(("stage", "A", "B", "B − A", "share"), stages, right=(1, 2, 3, 4)))
        parts += [FOLDED_NOTE] if any(FOLDED in row for row in stages) else []
    parts.append("## Checks")
    parts += [f"Before the load: {fairness}."] if (fairness := fairness_summary(result.checks)) else []
    parts.append(
        make_table(
            ("check", "state", "value", "covers", "remedy"),
            [
                (row.title, MARKS[row.state], row.detail, row.scope, "" if row.state == "ok" else row.remedy)
                for row in check_rows(result)
            ],
        )
    )
    if found := evidence_rows(result):
        parts.append("## Where the arms ran")
        parts.append(
            make_table(
                HEADINGS,
                [(r.arm, r.scenario, r.finding, *r.figures, r.inputs, r.why) for r in found],
                right=(3, 4, 5, 6, 7),
            )
        )
    if summaries := summary_rows(result):
        parts.append("## Measurements")
        parts.append(make_table(SUMMARY_HEADINGS, summaries, right=tuple(range(2, len(SUMMARY_HEADINGS)))))
    if batches := batch_rows(result):
        parts.append("## Executed batches")
        parts.append(make_table(BATCH_HEADINGS, batches, right=(2, 3)))
    parts += _ceilings(result)
    parts += _container_starts(result)
    parts += _searches(result)
    parts.append("## Conditions")
    parts.append(make_table(("", ""), [*experiment_rows(result), *environment_rows(result)]))
    if result.environment:
        parts.append(f"Made by:\n\n```\n{result.environment.command}\n```")
    return "\n\n".join(parts) + "\n"


def _ceilings(result: Result) -> list[str]:
    said = ceiling_sentences(result)
    rows = ceiling_rows(result)
    table = [make_table(CEILING_HEADINGS, rows, right=NUMBERS), ceiling_caption(result)] if rows else []
    return [f"## {TITLE}", *table, "\n".join(f"- {escape(text)}" for text in said)] if said else []


def _container_starts(result: Result) -> list[str]:
    parts = []
    for label in container_starts.LABELS:
        if starts := container_starts.rows(result, label):
            names = container_starts.headings(result, label)
            parts.append(f"**{label.upper()}**: {escape(container_starts.service(result, label))}")
            parts.append(make_table(names, starts, right=tuple(range(1, len(names)))))
            parts += [f"- {escape(text)}" for text in container_starts.failures(result, label)]
    return ["## Cold starts of the containers", *parts, container_starts.CAPTION] if parts else []


def _searches(result: Result) -> list[str]:
    parts = []
    for title, names, rows_of, caption in SECTIONS:
        if rows := rows_of(result):
            texts = [index for index, name in enumerate(names) if name not in ("scenario", "arm", "note")]
            parts += [f"## {title}", make_table(names, rows, right=texts), *([caption] if caption else [])]
    return parts


def make_table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Rows of text, escaped; the columns numbered in `right` are aligned there."""
    rule = ["---:" if index in right else "---" for index in range(len(headings))]
    lines = [headings, rule, *[[escape(cell) for cell in row] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def escape(text: str) -> str:
    """Text from servers may hold what Markdown would take for markup or a new cell."""
    clean = " ".join(text.split())
    for mark in ("\\", "|", "*", "_", "`", "<", "["):
        clean = clean.replace(mark, "\\" + mark)
    return clean
