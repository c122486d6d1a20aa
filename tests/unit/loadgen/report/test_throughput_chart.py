"""The chart under the headline, and the rule by which an axis becomes logarithmic."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import plotly.graph_objects as go
import pytest

import loadgen.report.document as doc
from loadgen.report.charts import SQUEEZED, squeezed, value_axis
from loadgen.report.sections.throughput import FAINT, MOST_LOADS, leader_words, throughput_chart
from loadgen.verdict.result import Result, analyse
from tests.golden.synthetic_run import Plan, SimulatedArm, write_run
from tests.golden.test_golden_reports import PLANS


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return analyse(write_run(tmp_path_factory.mktemp("run"), PLANS["four-arms"]))


def chart_of(result: Result) -> doc.Chart:
    chart = throughput_chart(result)
    assert chart is not None
    return chart


def drawn(chart: doc.Chart) -> list[doc.Figure]:
    return [trace for trace in chart.data if trace.get("mode") != "text"]


def test_every_arm_has_a_bar_with_its_interval_for_every_load(result: Result) -> None:
    chart = chart_of(result)
    bars = drawn(chart)
    loads = [w.name for w in result.experiment.workloads if w.has_blocks]
    assert [bar["type"] for bar in bars] == ["bar"] * 4
    served = {(s.label, s.workload): s for s in result.summaries}
    for label, bar in zip(result.experiment.labels, bars, strict=True):
        assert bar["y"] == loads
        for n, load in enumerate(loads):
            summary = served[label, load]
            assert summary.intervals["throughput"] is not None
            assert bar["x"][n] == pytest.approx(summary.throughput_per_s, rel=1e-4)
            high = bar["x"][n] + bar["error_x"]["array"][n]
            low = bar["x"][n] - bar["error_x"]["arrayminus"][n]
            assert (low, high) == pytest.approx(summary.intervals["throughput"], rel=1e-3)
    raw = json.loads(json.dumps([chart.data, chart.layout]).replace("--card", "#111111").replace("--ink", "#222222"))
    for n in range(8):
        raw = json.loads(json.dumps(raw).replace(f"--arm-{n}", "#333333"))
    go.Figure(data=raw[0], layout=raw[1])


def test_arms_and_winners_can_be_told_apart_without_colour(result: Result) -> None:
    chart = chart_of(result)
    assert len({bar["marker"]["pattern"]["shape"] for bar in drawn(chart)}) == 4
    texts = [trace["text"][0].split()[0] for trace in chart.data if trace.get("mode") == "text"]
    assert texts == ["A", "B", "C", "D"]
    under = dict(zip(chart.layout["yaxis"]["tickvals"], chart.layout["yaxis"]["ticktext"], strict=True))
    assert under["concurrent(16)"] == "<b>concurrent(16)</b><br>B and C not separated"
    assert "leads, " in under["single"]


@pytest.mark.parametrize(
    ("name", "words"), [("decided", "B faster, 1.47×"), ("identical", "no difference"), ("no-parity", "no verdict")]
)
def test_two_arms_say_who_is_faster_or_that_no_one_is(tmp_path: Path, name: str, words: str) -> None:
    assert leader_words(analyse(write_run(tmp_path, PLANS[name])), "concurrent(16)") == words


def test_a_slow_arm_is_not_squeezed_against_the_axis(tmp_path: Path) -> None:
    slow = Plan(pairs=2, requests=40, b=SimulatedArm(overhead_ms=5 * SQUEEZED * 15, item_ms=9.0))
    chart = chart_of(analyse(write_run(tmp_path, slow)))
    assert chart.layout["xaxis"]["type"] == "log"
    assert "log scale" in chart.layout["xaxis"]["title"]["text"]
    assert {trace["type"] for trace in drawn(chart)} == {"scatter"}, "the length of a bar on such an axis says nothing"
    assert chart.marks == "points"
    assert len({trace["marker"]["color"] for trace in drawn(chart)}) == 2


def test_more_loads_than_fit_get_a_view_per_scenario(result: Result) -> None:
    single = next(s for s in result.experiment.workloads if s.scenario == "batched")
    more = tuple(msgspec.structs.replace(single, batch_size=n) for n in range(100, 100 + MOST_LOADS))
    workloads = (*result.experiment.workloads, *more)
    served = next(s for s in result.summaries if s.workload == "batched(8)")
    summaries = tuple(msgspec.structs.replace(served, workload=workload.name) for workload in more)
    chart = chart_of(
        msgspec.structs.replace(
            result,
            experiment=msgspec.structs.replace(result.experiment, workloads=workloads),
            summaries=(*result.summaries, *summaries),
        )
    )
    assert [view.label for view in chart.views] == ["single", "batched", "concurrent"]
    assert chart.views[1].layout["height"] > chart.views[0].layout["height"]


def test_without_a_throughput_there_is_no_chart(tmp_path: Path) -> None:
    assert throughput_chart(analyse(write_run(tmp_path, Plan(pairs=2, state="failed", cut_after=0)))) is None


@pytest.mark.parametrize(
    ("values", "is_log"),
    [([1.0, SQUEEZED], False), ([1.0, 1.01 * SQUEEZED], True), ([0.0, 5.0, 6.0], False), ([], False), ([0.0], False)],
)
def test_an_axis_is_logarithmic_where_a_linear_one_squeezes(values: list[float], is_log: bool) -> None:
    assert squeezed(values) is is_log
    axis = value_axis("ms", values)
    assert (axis.get("type") == "log") is is_log
    assert axis["title"]["text"] == ("ms, log scale" if is_log else "ms")
    assert (axis.get("rangemode") == "tozero") is not is_log


def test_bars_of_loads_without_a_verdict_are_faint(tmp_path: Path) -> None:
    invalid = chart_of(analyse(write_run(tmp_path, Plan(pairs=2, requests=40, parity_cosine=0.9))))
    assert {opacity for trace in drawn(invalid) for opacity in trace["marker"]["opacity"]} == {FAINT}
