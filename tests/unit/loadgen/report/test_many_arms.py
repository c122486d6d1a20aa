"""With three or more arms every table, chart and format says which of them it compares; names may be longer than a
letter."""

from __future__ import annotations

import csv
import io
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

import loadgen.report.document as doc
from loadgen.findings.causes import Cause, CauseEffect, CausesFound, WorkloadCauses
from loadgen.measure.progress import LiveRatios
from loadgen.metrics.summaries import summarise_blocks
from loadgen.records.store import read_run
from loadgen.report.contents import result_document
from loadgen.report.files import published
from loadgen.report.progress import RichProgress, ratio_table, round_line
from loadgen.report.renderers.html import render_html
from loadgen.report.renderers.markdown import render_markdown
from loadgen.report.sections.causes import cause_table, causes_chart, why
from loadgen.report.sections.comparisons import comparisons, ranking
from loadgen.report.sections.verdict import overview
from loadgen.verdict.result import Result, analyse
from tests.golden.synthetic_run import Plan, SimulatedArm, write_run
from tests.report_page import check_figures

PLAN = Plan(pairs=4, requests=120, others=(SimulatedArm(4.0, 5.4, 1.0), SimulatedArm()))
NAMES = {"a": "torch", "b": "triton", "c": "torch-compiled", "d": "torch-again"}


def renamed(value: object) -> object:
    """Stored records whose arms have names of their own."""
    if isinstance(value, dict):
        return {key: NAMES[child] if key == "label" else renamed(child) for key, child in value.items()}
    return [renamed(part) for part in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return analyse(write_run(tmp_path_factory.mktemp("letters"), PLAN))


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Result:
    run = write_run(tmp_path_factory.mktemp("names"), PLAN)
    for path in run.rglob("*.json"):
        path.write_text(json.dumps(renamed(json.loads(path.read_text()))))
    return analyse(run)


def tables(section: doc.Section | None) -> list[doc.Table]:
    assert section is not None
    return [block for block in section.blocks if isinstance(block, doc.Table)]


def workloads(table: doc.Table, scenario: str, metric: str) -> list[dict[str, str]]:
    titles = [column.title for column in table.columns]
    rows = [dict(zip(titles, map(doc.text_of, row), strict=True)) for row in table.rows]
    return [row for row in rows if (row["scenario"], row["metric"]) == (scenario, metric)]


def test_each_arm_has_a_row_beside_the_baseline(result: Result) -> None:
    for table in (tables(comparisons(result))[0], tables(overview(result))[0]):
        rows = workloads(table, "concurrent(16)", "throughput, images/s")
        assert [row["arm"] for row in rows] == ["B", "C", "D"]
        assert [row["verdict"] for row in rows[:2]] == ["B faster", "C faster"]
        assert len({row["A"] for row in rows}) == 1
        for row in rows:
            better, factor = row["better arm"].removesuffix("×").split()
            measured = float(row["its value"]) / float(row["A"])
            assert better == (row["arm"] if measured > 1 else "A")
            assert float(factor) == pytest.approx(max(measured, 1 / measured), abs=0.02)
        assert "B" not in [column.title for column in table.columns]
    styles = [doc.style_of(row[3]) for row in tables(overview(result))[0].rows]
    assert styles == ["arm-1", "arm-2", "arm-3"] * len(result.experiment.workloads)


def test_the_ranking_has_the_order_and_the_neighbours_and_no_comparison_is_hidden(result: Result) -> None:
    section = ranking(result)
    (table,) = tables(section)
    first, *others = workloads(table, "batched(1)", "throughput, images/s")
    assert first["best to worst"] == next(
        order.words() for order in result.verdict.rankings if order.workload == "batched(1)"
    )
    assert first["best to worst"].startswith("C, then B, then ")
    assert (first["arms"], first["verdict"]) == ("C/B", "C faster")
    assert others == [], "the scenario is said in each row, the metric once"
    assert sum(row[0] == "batched(1)" for row in table.rows) == 3
    assert section is not None
    (fold,) = [block for block in section.blocks if isinstance(block, doc.Fold)]
    (rest,) = [block for block in fold.blocks if isinstance(block, doc.Table)]
    assert {doc.text_of(row[2]) for row in rest.rows} == {"C/B", "D/B", "D/C"}
    shown = len(tables(comparisons(result))[0].rows) + len(rest.rows)
    assert shown == sum(comparison.ratio is not None for comparison in result.comparisons)


def test_two_arms_have_no_ranking(tmp_path: Path) -> None:
    assert ranking(analyse(write_run(tmp_path, Plan(pairs=2, requests=40)))) is None


def test_every_interval_is_drawn_on_the_side_of_the_better_arm(result: Result) -> None:
    for row in tables(comparisons(result))[0].rows:
        (strip,) = [value for value in row if isinstance(value, doc.Strip)]
        if strip.style in doc.ARM_STYLES:
            assert (strip.centre < 0) == (strip.style == "arm-0")
        assert strip.low is None or strip.low <= strip.centre


def test_other_programs_are_told_which_arms_a_comparison_is_of(result: Result) -> None:
    known = published(result).printable
    rows = list(csv.DictReader(io.StringIO(known["csv"]())))
    compared = [(row["scenario"], row["metric"], row["baseline"], row["arm"]) for row in rows]
    assert compared == [
        (comparison.workload, comparison.metric, comparison.baseline, comparison.arm)
        for comparison in result.comparisons
    ]
    cases = ET.fromstring(known["junit"]()).findall("testsuite[@name='abserve.comparisons']/testcase")
    names = [case.attrib["name"] for case in cases]
    assert len(set(names)) == len(names) == len(result.comparisons)
    assert "throughput of C against A [single]" in names
    assert "throughput of D against C [single]" in names


def test_where_the_time_goes_is_a_table_for_each_arm(result: Result) -> None:
    main = result.verdict.main_scenario
    stages = [table for table in tables(why(result)) if "breakdown" in table.title]
    assert [table.title.partition(f"{main}, ")[2] for table in stages] == ["B against A", "C against A", "D against A"]
    assert [column.title for column in stages[1].columns] == ["stage", "A", "C", "C − A", "share"]


def test_causes_are_told_for_each_arm(result: Result) -> None:
    effect = CauseEffect(
        label="c", changed="sent fp16", as_is_ms=9.0, without_ms=6.0, saved_ms=3.0, ci95_ms=(2.0, 4.0), ratio=1.5,
        ratio_ci95=None, pairs=4, folder="causes/00-transfer-c",
    )  # fmt: skip
    cause = Cause(
        name="transfer", title="payload transfer", difference_ms=3.0, ci95_ms=(2.0, 4.0), share=-0.5, found=True,
        effects=(effect,), untested=(),
    )  # fmt: skip
    causes = WorkloadCauses(
        workload="single", baseline="a", arm="c", baseline_ms=15.0, arm_ms=9.0, difference_ms=-6.0,
        ci95_ms=(-7.0, -5.0),
        slower="a", ratio=1.67, causes=(cause,), unattributed_ms=-9.0, unattributed_ci95_ms=None,
        unattributed_share=1.5, sentence="A is slower.", notes=(),
    )  # fmt: skip
    both = CausesFound(workloads=(causes, msgspec.structs.replace(causes, arm="d")))
    explained = msgspec.structs.replace(result, studies={**result.studies, CausesFound.STUDY: both})
    table = cause_table(explained, causes)
    assert table.title == "Causes of the difference in single, C against A"
    assert [column.title for column in table.columns][1] == "C − A"
    assert table.rows[0][1] == "+3.00 ms"
    assert list(table.rows[-1][-3:]) == ["A 15.0 ms", "C 9.00 ms", "blocks"]
    chart = causes_chart(explained)
    assert chart is not None
    assert [view.label for view in chart.views] == ["single, C against A", "single, D against A"]
    assert chart.data[0]["marker"]["color"][1] == "--arm-2", "it makes C slower"
    assert "its cost to the arm minus its cost to A" in render_markdown(result_document(explained))


def test_names_are_written_as_they_are_and_coloured_by_their_place(named: Result) -> None:
    document = result_document(named)
    text, page = render_markdown(document), render_html(document)
    for name in NAMES.values():
        assert f"**{name}**: " in text
        assert name.upper() not in text + page.partition("<script")[0]
    assert "torch-compiled faster" in text
    assert "torch-compiled/triton" in text
    assert [doc.style_of(row[3]) for row in tables(overview(named))[0].rows[:3]] == ["arm-1", "arm-2", "arm-3"]
    assert '<li class="is-arm-2"><b>torch-compiled</b>' in page
    check_figures(page)


@pytest.mark.parametrize("width", [80, 120])
def test_a_run_shows_a_row_for_each_arm_while_it_goes_on(tmp_path: Path, width: int) -> None:
    run = read_run(write_run(tmp_path, PLAN))
    live = LiveRatios(run.experiment)
    for summary in summarise_blocks(run.blocks):
        live.add(summary)
    assert round_line(4, live.latest).startswith("round 4 of 4: ")
    assert round_line(4, live.latest).count(" C against A ") == len(run.experiment.workloads) - 1
    table = io.StringIO()
    Console(file=table, width=width).print(ratio_table(live.latest, width))
    lines = table.getvalue().splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    assert "…" not in table.getvalue()
    assert lines[0].split()[:5] == ["workload", "pairs", "metric", "arm", "better"]
    assert [line.split()[3] for line in lines[1:4]] == ["B", "C", "D"]


def test_a_table_higher_than_the_terminal_does_not_hide_what_moves(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, PLAN))
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100, height=12, color_system=None)
    with RichProgress(console, LiveRatios(run.experiment)) as progress:
        progress.phase("load")
        for block, summary in zip(run.blocks, summarise_blocks(run.blocks), strict=True):
            progress.block_done(block, summary)
        before = shown.getvalue()
        progress.phase("stopping the servers")
    assert "concurrent(16): " in before
    assert re.search(r"single +4/4", shown.getvalue().removeprefix(before)), "in the end the whole table"
