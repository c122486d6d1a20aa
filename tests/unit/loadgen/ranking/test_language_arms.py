"""Comparisons of language models as options: tokens, their times, and their costs at full load and at the goodput."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadgen.base.quantities import number
from loadgen.findings.rate_search import RatesFound
from loadgen.metrics.summaries import items_per_request
from loadgen.ranking.analyse import from_result, rank
from loadgen.ranking.report import published
from loadgen.records.ranks import TOKEN, Price, PriceMatch
from loadgen.records.run import TokenLimits, Workload
from loadgen.report.contents import result_document
from loadgen.report.renderers.markdown import render_markdown
from loadgen.verdict.result import Result, analyse
from tests.language_runs import PROMPT, TOKENS, LanguagePlan, TokenArm, write_language_run
from tests.unit.loadgen.findings.test_searches import search

LIMITS = TokenLimits(ttft_ms=60.0, tpot_ms=20.0)
GOODPUT = Workload(
    scenario="goodput", batch_size=1, concurrency=64, requests=459, seconds=1.0, max_seconds=60.0, rounds=2,
    arrivals="poisson", limits=LIMITS, prompt_tokens=PROMPT, output_tokens=TOKENS,
)  # fmt: skip
PRICE = Price(
    machine="m", match=PriceMatch(), price_per_hour=3.6, currency="USD", kind="on-demand",
    provider="P", source="https://example.org", date=date(2026, 11, 1),
)  # fmt: skip


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return analyse(write_searched_run(tmp_path_factory.mktemp("run")))


def write_searched_run(folder: Path) -> Path:
    """A at 8 ms per token, B at 12 ms over another protocol; A is good at up to 30 answers/s and B at up to 15."""
    arms = (TokenArm(), TokenArm(45.0, 12.0, 1.1, transport="generate_stream", title="Triton 2.51, slots fp32"))
    write_language_run(folder, LanguagePlan(arms=arms, users=(1, 4), limits=LIMITS))
    path = folder / "experiment.json"
    document = msgspec.json.decode(path.read_bytes())
    document["workloads"].append(msgspec.to_builtins(GOODPUT))
    path.write_bytes(msgspec.json.encode(document | {"price": 3.6}))
    (folder / "trials").mkdir()
    trials = [
        trial
        for round_ in (0, 1)
        for label, rate in (("a", 30.0), ("b", 15.0))
        for trial in search(label, rate, round_=round_, workload=GOODPUT)
    ]
    for place, trial in enumerate(trials):
        (folder / "trials" / f"{place:04d}.json").write_bytes(msgspec.json.encode(trial))
    compared = folder / "token_answers.json"
    answers = msgspec.json.decode(compared.read_bytes())
    of_searches = [answer | {"workload": GOODPUT.name} for answer in answers if answer["workload"] == "single"]
    compared.write_bytes(msgspec.json.encode([*answers, *of_searches]))
    return folder


def test_tokens_their_times_and_what_they_cost(result: Result) -> None:
    assert result.valid
    native, triton = rank([from_result("r", result)], [PRICE]).groups
    assert (native.work.transport, triton.work.transport) == ("completions", "generate_stream")
    assert (native.work.item, native.work.length) == (TOKEN, "32 → 64 tokens")
    (option,) = native.options
    points = {point.name: point for point in option.points}
    alone = points["single"]
    assert alone.items_per_second.value == pytest.approx(64 / (0.030 + 63 * 0.008), rel=0.05)
    assert alone.first_token_ms == pytest.approx(30.0, rel=0.1)
    assert alone.latency_ms is not None
    assert alone.latency_ms.value == pytest.approx(8.0, rel=0.1)
    goodput = points["goodput(ttft=60ms,tpot=20ms)"]
    assert goodput.items_per_second.value == pytest.approx(30.0 * 64, rel=0.06)
    (cost,) = option.costs
    assert cost.full.value == pytest.approx(1_000.0 / option.point.items_per_second.value)
    assert cost.slo is not None
    assert cost.slo.value == pytest.approx(1_000.0 / goodput.items_per_second.value)
    assert {option.points[place].name for place in cost.front} == {"single", "concurrent(4)"}


def test_reports_show_the_costs_of_a_million_and_of_a_thousand(result: Result) -> None:
    ranking = rank([from_result("r", result)], [PRICE])
    written = published(ranking).printable
    page = written["markdown"]()
    cost = ranking.groups[0].options[0].costs[0]
    assert cost.slo is not None
    for words in ("32 → 64 tokens, served over completions", "at the goodput rate", "per 1,000 at 100 %",
                  number(cost.full.value / 1000), number(cost.slo.value / 1000)):  # fmt: skip
        assert words in page
    (single,) = (
        row for row in csv.DictReader(io.StringIO(written["csv-points"]()))
        if (row["point"], row["transport"]) == ("single", "completions")
    )  # fmt: skip
    assert float(single["latency_ms"]) == pytest.approx(8.0, rel=0.1)
    assert float(single["first_token_ms"]) == pytest.approx(30.0, rel=0.1)
    assert f"| {number(cost.slo.value)} |" in render_markdown(result_document(result)), "the run's own table of costs"


def test_recorded_prompts_count_by_their_answers_and_not_by_the_longest(result: Result) -> None:
    """The answers have 64 tokens on average, and the longest of the recording has 640."""
    single, several, goodput = result.experiment.workloads
    recorded = {"traffic": "recorded", "output_tokens": 640}
    replay, search_ = (msgspec.structs.replace(load, **recorded) for load in (several, goodput))
    names = {several.name: replay.name, goodput.name: search_.name}

    def renamed(rows: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(msgspec.structs.replace(row, workload=names.get(row.workload, row.workload)) for row in rows)

    rates = msgspec.structs.replace(result.of(RatesFound), rates=renamed(result.of(RatesFound).rates))
    changed = msgspec.structs.replace(
        result,
        experiment=msgspec.structs.replace(result.experiment, workloads=(single, replay, search_)),
        summaries=renamed(result.summaries),
        studies={**result.studies, RatesFound.STUDY: rates},
    )
    options = from_result("r", changed).candidates
    held = [point.items_per_second.value for o in options for point in o.points if point.name == search_.name]
    assert held == pytest.approx([30.0 * 64, 15.0 * 64], rel=0.06)
    tables = result_document(changed).tables
    costs = next(t for t in tables if "price per million, goodput" in [column.title for column in t.columns])
    assert float(str(costs.rows[0][6])) == pytest.approx(1_000.0 / (30.0 * 64), rel=0.06)
    alone = msgspec.structs.replace(changed.experiment, workloads=(single, search_))
    left_out = from_result("r", msgspec.structs.replace(changed, experiment=alone)).left_out
    assert any("no recorded request was answered" in left.reason for left in left_out)


def test_the_items_of_recorded_requests_are_counted(result: Result) -> None:
    _, several, goodput = result.experiment.workloads
    replay = msgspec.structs.replace(several, output_tokens=None, prompt_tokens=None, traffic="recorded")
    rates = msgspec.structs.replace(goodput, output_tokens=None, prompt_tokens=None, traffic="recorded")
    blocks = [msgspec.structs.replace(b, workload=replay.name, items=8 * b.requests, errors=0) for b in result.blocks]
    assert items_per_request(rates, "a", (replay, rates), (), blocks) == pytest.approx(8.0)
    assert items_per_request(rates, "a", (rates,), (), blocks) is None


def test_other_prompts_are_in_other_tables(result: Result) -> None:
    single, several, goodput = result.experiment.workloads
    shared = msgspec.structs.replace(several, shared_prefix=24)
    changed = msgspec.structs.replace(result.experiment, workloads=(single, shared, goodput))
    summaries = tuple(
        msgspec.structs.replace(s, workload=shared.name if s.workload == several.name else s.workload)
        for s in result.summaries
    )
    read = from_result("r", msgspec.structs.replace(result, experiment=changed, summaries=summaries))
    lengths = {candidate.work.length for candidate in read.candidates}
    assert lengths == {"32 → 64 tokens", "32 → 64 tokens, 24 of them shared"}


def test_the_answers_of_a_search_are_judged(tmp_path: Path) -> None:
    path = write_searched_run(tmp_path) / "token_answers.json"
    records = msgspec.json.decode(path.read_bytes())
    wrong = [record for record in records if (record["workload"], record["label"]) == (GOODPUT.name, "b")]
    for answer in wrong[0]["answers"]:
        answer["deficit"] = 9.0
    for stored, words in (
        (records, "answers of Triton have wrong tokens"),
        ([record for record in records if record not in wrong], "no answers of Triton were compared"),
    ):
        path.write_bytes(msgspec.json.encode(stored))
        result = analyse(tmp_path)
        (judged,) = (c for c in result.checks if c.name == "tokens_agree" and GOODPUT.name in c.scope)
        assert words in judged.detail
        assert not result.valid
        verdicts = {c.verdict for c in result.comparisons if c.workload == GOODPUT.name}
        assert verdicts == {"invalid"}
