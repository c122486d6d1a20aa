"""The report of a tuning: it fits its formats, its charts show what was measured, and names stay text."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import msgspec
import plotly.graph_objects as go
import pytest
from rich.console import Console

import loadgen.report.document as doc
from loadgen.records.tuning import TuningRun
from loadgen.report.renderers.html import render_html
from loadgen.report.renderers.markdown import render_markdown
from loadgen.report.renderers.terminal import print_document
from loadgen.tune.outcome import TuningOutcome, outcome_of
from loadgen.tune.sections import tuning_document
from loadgen.verdict.result import Result
from tests.synthetic_tuning import PlantedTuning, final, tuning


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return final(tmp_path_factory.mktemp("final"))


@pytest.fixture(scope="module")
def outcome(result: Result) -> TuningOutcome:
    return outcome_of(tuning(PlantedTuning(limit_ms=150.0)), result)


def chart(outcome: TuningOutcome, name: str) -> doc.Chart:
    return next(chart for chart in tuning_document(outcome).charts if chart.name == name)


def test_plotly_takes_both_charts(outcome: TuningOutcome) -> None:
    for name in ("race", "trade-off"):
        figure = chart(outcome, name)
        text = re.sub(r'"--[a-z0-9-]+"', '"#123456"', json.dumps([figure.data, figure.layout]))
        data, layout = json.loads(text)
        go.Figure(data=data, layout=layout)


def test_the_race_has_every_score_in_the_order_of_measurement(outcome: TuningOutcome) -> None:
    figure = chart(outcome, "race")
    marks = [trace for trace in figure.data if trace["mode"] == "markers" and trace["x"] != [None]]
    scores = [score for run in outcome.tuning.runs for score in run.scores]
    assert sorted(place for trace in marks for place in trace["x"]) == list(range(1, len(scores) + 1))
    for trace in marks:
        for place, text, symbol in zip(trace["x"], trace["customdata"], trace["marker"]["symbol"], strict=True):
            name = scores[place - 1].contender
            assert text.startswith(f"{name}: ")
            assert (symbol == "star") == (name in outcome.tuning.winners)
            assert symbol.endswith("-open") == name.endswith("-0")


def test_the_front_rises_with_the_latency(outcome: TuningOutcome) -> None:
    figure = chart(outcome, "trade-off")
    for trace in (trace for trace in figure.data if trace["mode"] == "lines"):
        assert trace["x"] == sorted(trace["x"])
        assert trace["y"] == sorted(trace["y"])
        assert trace["x"]
    (limit,) = figure.layout["shapes"]
    assert limit["x0"] == limit["x1"] == 150.0


def test_the_first_servers_defaults_are_in_the_trade_off_by_the_anchor_of_each_run(outcome: TuningOutcome) -> None:
    """They are never a contender of a run, so their figures are the anchor's."""

    def as_anchor(run: TuningRun) -> TuningRun:
        anchor = next((score for score in run.scores if score.contender == "native-0"), None)
        return msgspec.structs.replace(run, scores=tuple(s for s in run.scores if s is not anchor), anchor=anchor)

    stored = msgspec.structs.replace(outcome.tuning, runs=tuple(map(as_anchor, outcome.tuning.runs)))
    told, again = (chart(each, "trade-off") for each in (outcome, outcome_of(stored, outcome.final)))
    assert [trace["x"] for trace in again.data] == [trace["x"] for trace in told.data]


def test_without_a_limit_there_is_no_line_and_of_a_latency_no_trade_off(result: Result) -> None:
    assert "shapes" not in chart(outcome_of(tuning(), result), "trade-off").layout
    by_latency = outcome_of(tuning(PlantedTuning(settings={"goal": "latency"})), result)
    assert [figure.name for figure in tuning_document(by_latency).charts] == ["race"]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_terminal_fits(outcome: TuningOutcome, width: int) -> None:
    stream = io.StringIO()
    print_document(tuning_document(outcome), Console(file=stream, width=width, color_system=None))
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)


def test_the_page_needs_nothing_and_is_small(outcome: TuningOutcome) -> None:
    page = render_html(tuning_document(outcome, {"native": "abserve serve native"}, {"deploy/native.sh": "starts it"}))
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', page)
    assert len(page) < 1_500_000
    for link in ("final/report.html", "deploy/native.sh"):
        assert f'href="{link}"' in page


def test_texts_of_servers_stay_text(result: Result) -> None:
    evil = "<script>alert(1)</script> `x` | y"
    stored = tuning()
    first = msgspec.structs.replace(stored.runs[0], out={"native-4": evil}, problem=None)
    space = msgspec.structs.replace(stored.spaces[0], not_searched=(evil,))
    stored = msgspec.structs.replace(stored, runs=(first, *stored.runs[1:]), spaces=(space, stored.spaces[1]))
    document = tuning_document(outcome_of(stored, result), {"native": evil}, {})
    assert "<script>alert" not in render_html(document)
    assert "| y" not in render_markdown(document).replace("\\| y", "").replace(f"```\n{evil}\n```", "")


def test_an_unfinished_tuning_shows_how_far_it_got() -> None:
    stopped = outcome_of(tuning(PlantedTuning(stages=("screening",), state="interrupted")), None)
    text = render_markdown(tuning_document(stopped))
    assert text.startswith("# INTERRUPTED\n\nNo verdict: the tuning was interrupted after 11 tries")
    assert "best so far: engine=onnxruntime, max-batch-size=16, 1." in text
    assert "## Best and defaults" not in text
    assert "How to deploy" not in text


def test_nothing_measured_is_a_report_too(tmp_path: Path) -> None:
    empty = msgspec.structs.replace(tuning(), runs=(), winners=(), state="failed", error="no server started")
    page = render_html(tuning_document(outcome_of(empty, None)))
    assert "No verdict: the tuning failed" in page
    assert "No server started." in page


def test_finalists_that_are_as_good_are_named(result: Result) -> None:
    stored = tuning()
    runs = [
        msgspec.structs.replace(
            run,
            scores=tuple(
                msgspec.structs.replace(score, log_ratio=0.2) if score.contender in ("native-2", "native-3") else score
                for score in run.scores
            ),
        )
        for run in stored.runs
    ]
    equal = outcome_of(msgspec.structs.replace(stored, runs=tuple(runs)), result)
    text = "**native**: as good in the finalists' runs: engine=onnxruntime\n"
    assert text in render_markdown(tuning_document(equal))
    assert text not in render_markdown(tuning_document(outcome_of(stored, result)))


def test_a_price_is_told_in_money(result: Result) -> None:
    priced = outcome_of(tuning(PlantedTuning(settings={"goal": "cost", "price": 3.6})), result)
    (table,) = [t for t in tuning_document(priced).tables if any(c.title == "per million" for c in t.columns)]
    place = [column.title for column in table.columns].index("per million")
    best = priced.targets[0].figures["native-3"]["throughput"].value
    assert best is not None
    assert table.rows[0][place] == f"{3.6 / 3600 / best * 1e6:.2f}"


def test_a_final_without_a_verdict_claims_nothing(result: Result) -> None:
    refused = tuple(msgspec.structs.replace(c, verdict="invalid", reason="busy") for c in result.comparisons)
    verdict = msgspec.structs.replace(result.verdict, headline="No verdict: other programs used the CPU.")
    refusing = msgspec.structs.replace(result, comparisons=refused, verdict=verdict, valid=False)
    outcome = outcome_of(tuning(), refusing)
    text = render_markdown(tuning_document(outcome))
    assert "chosen: engine=onnxruntime, max-batch-size=16; the final gives no verdict on it" in text
    assert " serves " not in text
    assert "its defaults cost" not in text
    assert "19 %" not in text
