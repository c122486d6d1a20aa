"""`report.html`: one file that needs no network; the verdict and every figure are there without JavaScript too."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import markupsafe
import msgspec
from plotly.offline import get_plotlyjs

from loadgen.analysis.checks.outcome import CheckName
from loadgen.analysis.result import Result
from loadgen.quantities import sentence, share
from loadgen.report import (
    cause_chart,
    cause_tables,
    ceiling_tables,
    charts,
    check_tables,
    container_starts,
    evidence,
    fairness,
    forest,
    glance,
    run_charts,
    search_charts,
    searches,
    stage_tables,
    tables,
    threshold_rows,
)
from loadgen.report.charts import Chart

FILE_NAME = "report.html"
HERE = Path(__file__).parent / "templates"


def render_html(result: Result) -> str:
    """The whole page."""
    gpu = [sentence(check.detail) for check in result.checks if check.name == CheckName.GPU_PRESENT]
    template = _environment().get_template("report.html.j2")
    return template.render(
        result=result,
        verdict=result.verdict,
        banner=[caveat for caveat in result.verdict.caveats if caveat in gpu],
        notes=[caveat for caveat in result.verdict.caveats if caveat not in gpu],
        titles=tables.titles(result),
        verdict_words=tables.VERDICT_WORDS,
        glance_rows=glance.glance_rows(result),
        glance_edge=glance.edge(result),
        glance_size=(glance.WIDTH, glance.HEIGHT),
        proof_lines=glance.proof_lines(result),
        threshold_rows=threshold_rows.threshold_rows(result),
        broken_thresholds=threshold_rows.broken_sentence(result),
        threshold_headings=threshold_rows.HEADINGS,
        rows=tables.comparison_rows(result, measured_only=True),
        footing=tables.footing(result),
        unmeasured=[row for row in tables.comparison_rows(result) if row.comparison.ratio_b_over_a is None],
        fairness=fairness.fairness_summary(result.checks),
        check_rows=check_tables.check_rows(result),
        stage_tables={s.cell: rows for s in result.stages if (rows := stage_tables.stage_rows(result, s.cell))},
        cause_headings=cause_tables.CAUSE_HEADINGS,
        cause_tables=[(causes, cause_tables.cause_rows(causes)) for causes in result.causes],
        causes_note=cause_tables.causes_note(result),
        batch_rows=cause_tables.batch_rows(result),
        batch_headings=cause_tables.BATCH_HEADINGS,
        ceiling_title=ceiling_tables.TITLE,
        ceiling_headings=ceiling_tables.CEILING_HEADINGS,
        ceiling_numbers=ceiling_tables.NUMBERS,
        ceiling_rows=ceiling_tables.ceiling_rows(result),
        ceiling_caption=ceiling_tables.ceiling_caption(result),
        ceiling_sentences=ceiling_tables.ceiling_sentences(result),
        folded_note=stage_tables.FOLDED_NOTE,
        evidence_rows=evidence.evidence_rows(result),
        evidence_headings=evidence.HEADINGS,
        summary_rows=tables.summary_rows(result),
        summary_headings=tables.SUMMARY_HEADINGS,
        container_starts=[
            (
                label,
                container_starts.service(result, label),
                container_starts.headings(result, label),
                starts,
                container_starts.failures(result, label),
            )
            for label in container_starts.LABELS
            if (starts := container_starts.rows(result, label))
        ],
        container_caption=container_starts.CAPTION,
        searches=[
            (title, headings, rows, caption)
            for title, headings, rows_of, caption in searches.LONG_SECTIONS
            if (rows := rows_of(result))
        ],
        arm_rows=tables.arm_rows(result),
        environment_rows=tables.environment_rows(result),
        experiment_rows=tables.experiment_rows(result),
        margin=share(result.experiment.equivalence_margin),
        charts=_charts(result),
        style=(HERE / "report.css").read_text(),
        script=(HERE / "report.js").read_text(),
        plotly=get_plotlyjs(),
    )


def _charts(result: Result) -> dict[str, Chart]:
    makers = (
        forest.forest,
        cause_chart.causes,
        charts.stages,
        charts.latency,
        charts.batch_sizes,
        run_charts.executed_batches,
        run_charts.cold_starts,
        run_charts.blocks,
        search_charts.slo_trials,
        search_charts.ramp,
        evidence.gpu_chart,
    )
    made = [chart for make in makers if (chart := make(result)) is not None]
    return {chart.name: chart for chart in made}


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["script_json"] = script_json
    environment.filters["code"] = code
    environment.filters["slug"] = lambda text: re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return environment


def code(text: str) -> markupsafe.Markup:
    """Text in which `what stands in backticks` is set as code."""
    return markupsafe.Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(markupsafe.escape(text))))


def script_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in, whatever a server's name holds."""
    return msgspec.json.encode(value).decode().replace("<", "\\u003c").replace("&", "\\u0026")
