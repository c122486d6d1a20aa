"""A report of language models says tokens: in its headline, its table, its charts and its costs."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import msgspec
import pytest

import abserve
from loadgen.findings.causes import CausesFound, Explanation
from loadgen.metrics.tokens import per_million
from loadgen.records.run import TokenLimits
from loadgen.report.contents import result_document
from loadgen.report.document import Document
from loadgen.report.renderers.html import render_html
from loadgen.report.renderers.markdown import render_markdown
from loadgen.report.renderers.tables import render_csv, render_junit
from loadgen.verdict.result import Result, analyse, encode_result, read_result
from tests.language_runs import LanguagePlan, TokenArm, write_language_run
from tests.unit.loadgen.findings.test_explained_run import explain

LIMITS = TokenLimits(ttft_ms=60.0, tpot_ms=20.0)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    directory = tmp_path_factory.mktemp("run")
    arms = (TokenArm(), TokenArm(45.0, 12.0, 1.1, chunk=2, title="Triton 2.51, python backend, slots fp32"))
    write_language_run(directory, LanguagePlan(arms=arms, users=(1, 4, 16), rates=(2.0,), limits=LIMITS))
    path = directory / "experiment.json"
    conditions = ["all: b.tpot > 100", "concurrent(16): ratio.output_tokens_per_s > 0.9", "poisson(2/s): a.goodput < 1"]
    changes = {"price": 3.6, "settings": {"fail_if": conditions}}
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | changes))
    return analyse(directory)


@pytest.fixture(scope="module")
def document(result: Result) -> Document:
    return result_document(result)


def test_the_headline_says_tokens(result: Result) -> None:
    assert result.headline.startswith("Native handles 2.0")
    assert "A million tokens cost 0.918 with native" in result.verdict.consequence
    assert result.valid


def test_each_load_is_led_by_its_own_metric(result: Result) -> None:
    leading = {comparison.workload: comparison.metric for comparison in result.comparisons if comparison.leading}
    assert leading == {
        "single": "answer_time",
        "concurrent(4)": "output_tokens_per_s",
        "concurrent(16)": "output_tokens_per_s",
        "poisson(2/s)": "goodput",
    }


def test_the_charts_show_tokens_and_the_page_stays_small(document: Document) -> None:
    charts = {chart.name: chart for chart in document.charts}
    assert {"throughput", "ttft-tpot", "pareto", "gaps", "timeline"} <= set(charts)
    assert "latency" not in charts
    assert charts["throughput"].caption.startswith("Output tokens/s by load")
    for trace in charts["pareto"].data:
        assert trace["text"] == ["1 user", "4 users", "16 users"]
        assert trace["x"] == sorted(trace["x"], reverse=True), "more users, slower for each"
        assert trace["y"] == sorted(trace["y"]), "more users, more tokens"
    of_a = charts["timeline"].data[0]
    assert (of_a["x"][0], of_a["y"][0], of_a["y"][-1]) == (0.0, 0.0, 64.0)
    assert of_a["y"] == sorted(of_a["y"])
    assert len(render_html(document)) < 1_500_000


def test_tables_programs_and_conditions_have_the_metrics(result: Result, document: Document) -> None:
    text = render_markdown(document)
    for words in ("prompts of 32 tokens and answers of 64 over OpenAI's completions", "TPOT, ms", "good requests/s"):
        assert words in text
    rows = list(csv.DictReader(io.StringIO(render_csv({"": document}, "blocks"))))
    assert {"ttft", "tpot", "worst_gap_p99", "goodput", "tokens_per_chunk"} <= rows[0].keys()
    assert "token throughput [concurrent(16)]" in render_junit({"": document})
    assert [outcome.state for outcome in result.thresholds].count("broken") == 0


def test_a_million_tokens_have_a_price(document: Document) -> None:
    """3.60 per hour is 0.001 per second: at 1,000 tokens/s a million costs 1."""
    assert per_million(3.6, 1000.0) == pytest.approx(1.0)
    (table,) = [table for section in document.sections for table in section.blocks if section.title == "Cost of tokens"]
    full, good = (float(str(table.rows[0][place])) for place in (3, 5))  # type: ignore[union-attr]
    assert full == pytest.approx(per_million(3.6, 1090.0), rel=0.05)
    assert good == pytest.approx(per_million(3.6, 2.0 * 64), rel=0.05)


def test_samples_have_their_tokens(tmp_path: Path) -> None:
    folder = write_language_run(tmp_path, LanguagePlan(users=(1,), pairs=2, answers=4))
    (first, *_) = samples = abserve.load(folder).samples("single").to_dicts()
    assert len(samples) == 2 * 2 * 4
    assert (first["output_tokens"], first["chunks"], first["asked"], first["error"]) == (64, 64, 64, None)
    assert first["ttft_ms"] == pytest.approx(30.0, rel=0.2)
    assert first["tpot_ms"] == pytest.approx(8.0, rel=0.2)
    assert first["worst_gap_ms"] > first["tpot_ms"]


def test_streamed_answers_have_no_stages(result: Result, document: Document) -> None:
    text = render_markdown(document)
    assert result.stages == ()
    assert "stages" not in text
    assert "Where the time of a token goes is not known: no ablation was run; add \\`--explain\\`." in text
    assert "stages" not in {chart.name for chart in document.charts}


def test_a_cause_costs_so_much_per_answer_and_per_token(tmp_path: Path) -> None:
    """B's answers of 64 tokens take 271 ms longer than A's: 4.2 ms per token."""
    write_language_run(tmp_path, LanguagePlan(users=(1,)))
    done = explain(tmp_path, "server", "b", "b", "a")
    record = Explanation(workloads=("single",), left_out=(), done=(done,), untested=())
    (tmp_path / "causes.json").write_bytes(msgspec.json.encode(record))
    result = analyse(tmp_path)
    (causes,) = result.of(CausesFound).workloads
    assert "ms less per answer, 4.2" in causes.sentence
    assert causes.sentence.endswith(" ms per token): 100 % serving layer of Triton, 0 % unattributed.")
    text = render_markdown(result_document(result))
    lines = text.splitlines()
    header = next(line for line in lines if line.startswith("| cause |")).split("|")
    row = next(line for line in lines if line.startswith("| serving layer |")).split("|")
    assert row[header.index(" per token ")].strip().startswith("+4.2")
    assert "Times are means per answer." in text


def test_the_result_is_read_back_as_it_was(result: Result, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(encode_result(result))
    assert encode_result(read_result(path)) == encode_result(result)
