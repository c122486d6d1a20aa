"""The first screen: verdict, leading ratios with their intervals, why, proof; in this order and without a script."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from loadgen.analysis.analysis import analyse
from loadgen.analysis.result import Result
from loadgen.report.glance import WIDTH, edge, glance_rows, proof_lines
from loadgen.report.html import render_html
from tests.golden.synthetic_run import Plan, SimulatedArm, write_run


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return analyse(write_run(tmp_path_factory.mktemp("run"), Plan(pairs=4, requests=60)))


def test_a_row_a_scenario_with_its_interval_on_the_better_arms_side(result: Result) -> None:
    rows = glance_rows(result)
    assert [row.scenario for row in rows] == [cell.name for cell in result.experiment.cells]
    middle = WIDTH / 2
    for row in rows:
        strip = row.strip
        assert strip.centre is not None
        assert strip.low is not None
        assert strip.high is not None
        assert 0 < strip.low < strip.centre < strip.high < WIDTH
        assert strip.band[0] < middle < strip.band[1]
        if row.outcome == "b_faster":
            assert strip.low > middle
        if row.outcome == "a_faster":  # a cold start: less is better, so the ratio is above 1 and A's side is left
            assert row.ratio.startswith("1.8")
            assert strip.high < middle
    assert {row.outcome for row in rows} == {"a_faster", "b_faster"}
    assert re.fullmatch(r"2\.\d+×", edge(result))


def test_an_interval_that_is_much_wider_than_the_differences_is_cut_and_does_not_squeeze_the_others(
    result: Result,
) -> None:
    one, *others = [c for c in result.comparisons if c.leading]
    wide = msgspec.structs.replace(one, ratio_b_over_a=1.1, ci95=(1e-6, 1e6))
    strips = [row.strip for row in glance_rows(msgspec.structs.replace(result, comparisons=(wide, *others)))]
    assert strips[0].low == pytest.approx(6.0)
    assert strips[0].high == pytest.approx(WIDTH - 6.0)
    assert max(abs((strip.centre or 0) - WIDTH / 2) for strip in strips) > WIDTH / 4


def test_proof_says_what_stands_behind_it_and_what_does_not(tmp_path: Path, result: Result) -> None:
    texts = {line.text: line.state for line in proof_lines(result)}
    assert texts["Both arms give the same answers: lowest cosine 0.999998 in 4 cases."] == "ok"
    assert texts["No GPU did any of the work."] == "note"
    requests = sum(summary.requests for summary in result.summaries)
    assert texts[f"0 of {requests:,} requests failed."] == "ok"
    bad = analyse(write_run(tmp_path, Plan(pairs=2, requests=60, parity_cosine=0.9, failing_block=3)))
    states = [line.state for line in proof_lines(bad)]
    assert states.count("failed") == 3
    assert any("“both arms give the same answers”" in line.text for line in proof_lines(bad))


def test_the_order_is_verdict_ratios_why_proof_then_detail(result: Result) -> None:
    body = render_html(result).split("<body>")[1]
    marks = [
        result.verdict.headline, 'class="card glance"', "<h3>Why</h3>", "<h3>Proof</h3>", 'id="comparisons"',
        'id="why"', 'id="proof"', "Conditions",
    ]  # fmt: skip
    places = [body.index(mark) for mark in marks]
    assert places == sorted(places)
    for target in re.findall(r'href="#([a-z]+)"', body):
        assert f'id="{target}"' in body
    first = body[: places[4]]
    assert first.count("<svg") == len(glance_rows(result))
    assert "<script" not in first


def test_a_threshold_that_is_not_kept_stands_beside_the_verdict(tmp_path: Path) -> None:
    run = write_run(tmp_path, Plan(pairs=2, requests=60, b=SimulatedArm()))
    document = msgspec.json.decode((run / "experiment.json").read_bytes())
    document["settings"] = {"fail_if": ["b.p50 > 1", "b.p50 > 1e9"]}
    (run / "experiment.json").write_bytes(msgspec.json.encode(document))
    body = render_html(analyse(run)).split("<body>")[1]
    said = "1 of 2 thresholds not kept: b.p50 &gt; 1 in concurrent(16)"
    assert said in body[: body.index('class="card glance"')]
    assert "<h3>Thresholds</h3>" in body
