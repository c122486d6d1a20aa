"""The decision surface in reports: the map reads without colour, the table says the same, the headline names it."""

from __future__ import annotations

import io
import json
from itertools import product
from pathlib import Path

import plotly.graph_objects as go
import pytest
from rich.console import Console

import loadgen.report.document as doc
from loadgen.records.run import Workload
from loadgen.report.contents import result_document
from loadgen.report.renderers.html import render_html
from loadgen.report.renderers.markdown import render_markdown
from loadgen.report.renderers.terminal import print_document
from loadgen.report.sections.surface import decision_surface, surface_chart
from loadgen.verdict.headline import MOST_WORDS, word_count
from loadgen.verdict.result import Result, analyse, encode_result, read_result
from tests.golden.synthetic_run import Plan, SimulatedArm, write_run

USERS, SIZES = (1, 2, 4, 16), (1, 8)
LOADS = tuple(
    Workload(
        scenario="surface", batch_size=size, concurrency=users, requests=60, seconds=0.0, max_seconds=9.0, rounds=6
    )
    for size, users in product(SIZES, USERS)
)
NEAR, FAR = SimulatedArm(2.0, 3.0, 0.5), SimulatedArm(2.0, 2.0, 4.0)
"""One answers a lone request sooner, the other serves more at once."""


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return analyse(write_run(tmp_path_factory.mktemp("run"), Plan(NEAR, FAR, workloads=LOADS, block_noise=0.004)))


def chart_of(result: Result) -> doc.Chart:
    chart = surface_chart(result)
    assert chart is not None
    return chart


def test_the_crossing_is_in_the_result_the_headline_and_the_sentence(result: Result, tmp_path: Path) -> None:
    surface = result.verdict.surface
    assert surface is not None
    (crossing,) = [each for each in surface.crossings if each.size == 1]
    assert (crossing.below, crossing.above) == ("a", "b")
    assert result.headline == (
        f"Triton is faster from {crossing.words} on at batch 1, PyTorch (native) below; "
        "Triton is faster at batch 8 with any number of users."
    )
    assert word_count(result.headline) <= MOST_WORDS
    assert crossing.words in result.verdict.sentence
    path = tmp_path / "result.json"
    path.write_bytes(encode_result(result))
    assert read_result(path).verdict.surface == surface


def test_every_field_has_the_letter_of_its_winner_or_a_sign(result: Result) -> None:
    surface, chart = result.verdict.surface, chart_of(result)
    assert surface is not None
    bars = [trace for trace in chart.data if trace["type"] == "bar"]
    fields = {
        (SIZES[x], USERS[round(base + 0.5)]): text
        for bar in bars
        for x, base, text in zip(bar["x"], bar["base"], bar["text"], strict=True)
    }
    assert len(fields) == len(LOADS)
    for point in surface.points:
        text = fields[point.size, point.users]
        assert text.split()[0] == {"winner": (point.winner or "").upper(), "no_difference": "="}.get(point.state, "?")
    undecided = [bar for bar in bars if "?" in bar["text"]]
    assert all(bar["marker"]["pattern"]["shape"] for bar in undecided), "hatched too"
    line = next(trace for trace in chart.data if trace.get("mode") == "lines")
    assert line["y"].count(None) == len(surface.crossings)
    raw = json.dumps([chart.data, chart.layout])
    for name in ("--card", "--ink", "--grid", "--muted", "--arm-0", "--arm-1"):
        raw = raw.replace(name, "#333333")
    go.Figure(data=json.loads(raw)[0], layout=json.loads(raw)[1])


def test_the_table_in_markdown_and_on_a_terminal_is_the_map(result: Result) -> None:
    section = decision_surface(result)
    assert section is not None
    (table,) = [block for block in section.blocks if isinstance(block, doc.Table)]
    assert [column.title for column in table.columns] == ["load", "batch 1", "batch 8"]
    assert [row[0] for row in table.rows] == ["1 user", "2 users", "4 users", "16 users"]
    assert doc.text_of(table.rows[0][1]).startswith("A ")
    assert doc.text_of(table.rows[-1][1]).startswith("B ")
    stream = io.StringIO()
    print_document(result_document(result), Console(file=stream, width=80))
    for text in (stream.getvalue(), render_markdown(result_document(result))):
        assert "Decision surface" in text
        assert doc.text_of(table.rows[0][1]) in text
        assert "users (" in text


def test_the_map_takes_the_place_of_the_bars_under_the_headline(result: Result) -> None:
    names = [chart.name for chart in result_document(result).charts]
    assert "surface" in names
    assert "throughput" not in names
    assert "surface" in render_html(result_document(result))


def test_identical_arms_have_no_winner_and_no_crossing(tmp_path: Path) -> None:
    result = analyse(write_run(tmp_path, Plan(NEAR, NEAR, workloads=LOADS)))
    assert result.verdict.surface is not None
    assert result.verdict.surface.crossings == ()
    assert result.headline.startswith("No winner between PyTorch (native) and Triton")
    assert not any(trace.get("mode") == "lines" for trace in chart_of(result).data)


def test_a_third_arm_has_its_letter_and_other_runs_have_no_surface(tmp_path: Path) -> None:
    fast = SimulatedArm(1.0, 1.0, 0.2)
    result = analyse(write_run(tmp_path, Plan(NEAR, FAR, others=(fast,), workloads=LOADS[:2])))
    surface = result.verdict.surface
    assert surface is not None
    assert {point.winner for point in surface.points} == {"c"}
    assert {point.runner_up for point in surface.points} <= {"a", "b"}
    single = Workload(
        scenario="single", batch_size=1, concurrency=1, requests=40, seconds=0.0, max_seconds=9.0, rounds=4
    )
    other = analyse(write_run(tmp_path / "other", Plan(workloads=(single,))))
    assert (other.verdict.surface, surface_chart(other), decision_surface(other)) == (None, None, None)
