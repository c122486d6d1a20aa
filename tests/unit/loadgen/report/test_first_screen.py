"""The first screen: verdict, leading ratios with their intervals, why, proof; in this order and without a script."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from loadgen.records.run import Pairing
from loadgen.report.contents import result_document
from loadgen.report.document import Items, Panel, Section, Strip, Style, Table, Text, Value, style_of, text_of
from loadgen.report.renderers.html import STRIP_WIDTH, render_html, strip_x
from loadgen.report.sections.causes import why
from loadgen.report.sections.comparisons import better_of
from loadgen.report.sections.verdict import brief_why, conditions_in_brief, overview, proof, verdict
from loadgen.verdict.result import Result, analyse
from tests.golden.synthetic_run import Plan, SimulatedArm, write_run


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return analyse(write_run(tmp_path_factory.mktemp("run"), Plan(pairs=4, requests=120)))


def table(result: Result) -> Table:
    """Of the overview."""
    section = overview(result)
    assert section is not None
    assert isinstance(section.blocks[0], Table)
    return section.blocks[0]


def strip_of(row: Sequence[Value]) -> Strip:
    (strip,) = [cell for cell in row if isinstance(cell, Strip)]
    return strip


def test_a_row_a_scenario_with_its_interval_on_the_better_arms_side(result: Result) -> None:
    rows = table(result).rows
    assert [row[0] for row in rows] == [workload.name for workload in result.experiment.workloads]
    styles: set[Style | None] = set()
    for row in rows:
        strip = strip_of(row)
        assert strip.low is not None
        assert strip.high is not None
        assert -1 < strip.low < strip.centre < strip.high < 1
        assert strip.band[0] < 0 < strip.band[1]
        style = style_of(row[-1])
        if style == "arm-1":
            assert strip.low > 0
        if style == "arm-0":  # a cold start: less is better, and A's side is left
            assert text_of(row[4]).startswith("A 1.8")
            assert strip.high < 0
        styles.add(style)
    assert styles == {"arm-0", "arm-1"}
    (axis,) = [column for column in table(result).columns if column.kind == "drawn"]
    assert axis.title == "← A better · B better →"
    assert [label for _, label in axis.ticks] == ["0.5×", "0.7×", "1×", "1.5×", "2×"]
    assert [place for place, label in axis.ticks if label == "1×"] == [0.0]


def test_an_interval_that_is_much_wider_than_the_differences_is_cut_and_does_not_squeeze_the_others(
    result: Result,
) -> None:
    comparison, *others = [c for c in result.comparisons if c.leading]
    wide = msgspec.structs.replace(comparison, ratio=1.1, ci95=(1e-6, 1e6))
    rows = table(msgspec.structs.replace(result, comparisons=(wide, *others))).rows
    strips = [strip_of(row) for row in rows]
    assert (strips[0].low, strips[0].high) == (-1.0, 1.0)
    assert max(abs(strip.centre) for strip in strips) > 0.5
    assert (strip_x(-1.0), strip_x(0.0), strip_x(1.0)) == (16.0, STRIP_WIDTH / 2, STRIP_WIDTH - 16.0)


def test_proof_says_what_stands_behind_it_and_what_does_not(tmp_path: Path, result: Result) -> None:
    texts = {line.text: line.style for line in proof(result)}
    words = "largest relative error 2.0e-05 (tolerance 1.0e-04), lowest cosine 0.999998 in 4 cases"
    assert texts[f"Both arms give the same answers: {words}."] == "ok"
    assert texts["This machine has no GPU: this is a CPU comparison."] == "note"
    requests = sum(summary.requests for summary in result.summaries)
    assert texts[f"0 of {requests:,} requests failed."] == "ok"
    bad = analyse(write_run(tmp_path, Plan(pairs=2, requests=60, parity_cosine=0.9, failing_block=3)))
    states = [line.style for line in proof(bad)]
    assert states.count("failed") == 3
    assert any("“The arms give different answers”" in line.text for line in proof(bad))


def words_of(section: Section | None) -> str:
    assert section is not None
    texts = [block.text for block in section.blocks if isinstance(block, Text)]
    lists = [block for block in section.blocks if isinstance(block, Items)]
    return " | ".join([*texts, *(f"{item.lead} {item.text}" for block in lists for item in block.items)])


def test_without_reasons_it_says_where_the_time_goes_and_what_that_cannot_tell(result: Result) -> None:
    silent = tuple(msgspec.structs.replace(scenario, reasons=()) for scenario in result.verdict.scenarios)
    quiet = msgspec.structs.replace(result, verdict=msgspec.structs.replace(result.verdict, scenarios=silent))
    text = words_of(brief_why(quiet))
    assert f"In {result.verdict.main_scenario}:" in text
    assert re.search(r"native\) [\d.]+ ms per request: \d+ % executing the model, \d+ % waiting in the queue", text)
    assert re.search(r"Triton [\d.]+ ms per request: \d+ % executing the model", text)
    assert "does not prove a cause: no ablation was run; add `--explain`." in text


def test_why_is_never_empty_and_names_the_command_that_would_tell(result: Result) -> None:
    silent = tuple(msgspec.structs.replace(scenario, reasons=()) for scenario in result.verdict.scenarios)
    verdict = msgspec.structs.replace(result.verdict, scenarios=silent)
    unreported = tuple(
        msgspec.structs.replace(stages, baseline_stages=None, arm_stages=None, differences=())
        for stages in result.stages
    )
    unknown = msgspec.structs.replace(result, verdict=verdict, stages=unreported)
    for section in (brief_why(unknown), why(unknown)):
        text = words_of(section)
        assert "PyTorch (native) 15" in text
        assert "its server reports no stages" in text
        assert "where a request spends its time is not known, and no ablation was run; add `--explain`." in text
    assert f"{result.environment and result.environment.command} --explain" in words_of(why(unknown))
    assert unknown.environment is not None
    tuned = msgspec.structs.replace(unknown.environment, command="abserve tune --minutes 20")
    final = words_of(why(msgspec.structs.replace(unknown, environment=tuned)))
    assert "abserve compare experiment.yaml --explain" in final, "abserve tune has no --explain"
    nothing = msgspec.structs.replace(unknown, summaries=())
    assert words_of(brief_why(nothing)) == "No request was measured under load, so there is nothing to explain."
    assert words_of(why(nothing)) == "No request was measured under load, so there is nothing to explain."


def test_a_stage_has_one_name(result: Result) -> None:
    page = render_html(result_document(result))
    shown = page.split("<main")[1].split("<script>")[0]
    assert "executing the model" in shown
    assert '"name":"network and client"' in shown, "also in the chart"
    for key in ("compute_infer", "compute_input", "compute_output", '"name":"unattributed"'):
        assert key not in shown


def test_the_first_lines_name_what_was_measured_and_on_what(result: Result) -> None:
    first, second = conditions_in_brief(result)
    assert first == "openclip_vit_b32 · random weights (seed 0) · fp32 · Simulated CPU 2.0 GHz"
    assert second == "fp32 over HTTP · batch sizes 1, 4, 8, 16, 32 · 2026-03-02 10:00 UTC"
    page = render_html(result_document(result)).split("<body>")[1]
    assert page.index(first) < page.index("<h3>Overview</h3>")


@pytest.mark.parametrize(
    ("inputs", "length", "words"),
    [
        ({"kind": "photographs", "count": 18}, None, "photographs as fp32 over HTTP"),
        ({"kind": "synthetic", "count": 16}, None, "random values as fp32 over HTTP"),
        (
            {"kind": "token ids", "length_min": 9, "length_median": 40, "length_max": 381}, None,
            "token ids of length 9 to 381 (median 40) as fp32 over HTTP",
        ),
        (
            {"kind": "token ids", "length_min": 64, "length_median": 64, "length_max": 64}, None,
            "token ids of length 64 as fp32 over HTTP",
        ),
        (
            {"kind": "token ids", "length_min": 32, "length_median": 32, "length_max": 128}, 128,
            "token ids of length 128 as fp32 over HTTP",
        ),
    ],
)  # fmt: skip
def test_the_second_line_names_the_inputs_and_what_shares_a_batch(
    result: Result, inputs: dict[str, str | int], length: int | None, words: str
) -> None:
    assert result.environment is not None
    environment = msgspec.structs.replace(result.environment, inputs=inputs)
    workloads = tuple(
        msgspec.structs.replace(workload, sequence_length=length) for workload in result.experiment.workloads
    )
    changed = msgspec.structs.replace(
        result, environment=environment, experiment=msgspec.structs.replace(result.experiment, workloads=workloads)
    )
    assert conditions_in_brief(changed)[1].startswith(f"{words} · batch sizes 1, 4")
    for pad_to, rule in (("none", "only equal lengths share a batch"), ("32,64", "batches padded to 32,64")):
        arms = tuple(
            msgspec.structs.replace(arm, in_effect={**arm.in_effect, "pad_to": pad_to, "model": "bert:base"})
            for arm in result.arms
        )
        first, second = conditions_in_brief(msgspec.structs.replace(changed, arms=arms))
        assert f" · {rule} · 2026" in second
        assert first.startswith("bert:base · ")
    a, b = changed.arms
    apart = (
        msgspec.structs.replace(a, in_effect={**a.in_effect, "pad_to": "32,64"}),
        msgspec.structs.replace(b, model_config={"input": [{"dims": [-1]}]}),
    )
    _, second = conditions_in_brief(msgspec.structs.replace(changed, arms=apart))
    assert " · PyTorch (native) batches padded to 32,64, Triton only equal lengths share a batch · " in second


def test_what_a_server_does_not_report_is_not_claimed(result: Result) -> None:
    remote = [msgspec.structs.replace(arm, launched=False, in_effect={}) for arm in result.arms]
    first, _ = conditions_in_brief(msgspec.structs.replace(result, arms=tuple(remote)))
    assert first == "openclip_vit_b32 · precision not reported · device not reported"
    mixed = (result.arms[0], msgspec.structs.replace(result.arms[1], in_effect={"precision": "fp16", "device": "cpu"}))
    first, _ = conditions_in_brief(msgspec.structs.replace(result, arms=mixed))
    assert first.split(" · ")[1:3] == [
        "PyTorch (native) random weights (seed 0), Triton weights not reported",
        "PyTorch (native) fp32, Triton fp16",
    ]


def test_warnings_stand_beside_valid(result: Result) -> None:
    checks = tuple(
        msgspec.structs.replace(check, state="failed", severity="warns") if check.name == "noise_floor" else check
        for check in result.checks
    )
    section = verdict(msgspec.structs.replace(result, checks=checks))
    assert section is not None
    (panel,) = section.blocks
    assert isinstance(panel, Panel)
    assert panel.badge == "VALID, 1 warning"


@pytest.mark.parametrize(
    ("value", "ci95", "higher", "shown"),
    [
        (2.0, (1.6, 2.5), True, ("B 2.00×", "1.60–2.50")),
        (0.5, (0.4, 0.625), True, ("A 2.00×", "1.60–2.50")),
        (2.0, (1.6, 2.5), False, ("A 2.00×", "1.60–2.50")),
        (0.5, None, False, ("B 2.00×", "–")),
        (1.0, None, True, ("1.00×", "–")),
        (None, None, True, ("–", "–")),
        (0.5, (0.001, 250.0), True, ("A 2.00×", "not determined")),
    ],
)
def test_a_ratio_is_read_from_the_better_arm(
    value: float | None, ci95: tuple[float, float] | None, higher: bool, shown: tuple[str, str]
) -> None:
    assert better_of(Pairing("a", "b"), value, ci95, higher) == shown


def test_the_order_is_verdict_ratios_why_proof_then_detail(result: Result) -> None:
    body = render_html(result_document(result)).split("<main")[1]
    marks = [
        result.headline, 'id="throughput"', result.verdict.sentence,
        "<h3>Overview</h3>", "<h3>Why</h3>", "<h3>Proof</h3>", 'id="comparisons"',
        'id="why"', 'id="proof"', "Conditions",
    ]  # fmt: skip
    places = [body.index(mark) for mark in marks]
    assert places == sorted(places)
    for target in re.findall(r'href="#([a-z]+)"', body):
        assert f'id="{target}"' in body
    first = body[: places[6]]
    assert first.count('<svg class="strip') == len(table(result).rows)
    assert first.count("<script") == first.count('<script type="application/json"') == 1, "the data of the chart"


def test_a_threshold_that_is_not_kept_stands_beside_the_verdict(tmp_path: Path) -> None:
    run = write_run(tmp_path, Plan(pairs=2, requests=60, b=SimulatedArm()))
    document = msgspec.json.decode((run / "experiment.json").read_bytes())
    document["settings"] = {"fail_if": ["b.p50 > 1", "b.p50 > 1e9"]}
    (run / "experiment.json").write_bytes(msgspec.json.encode(document))
    body = render_html(result_document(analyse(run))).split("<body>")[1]
    said = "1 of 2 thresholds not kept: b.p50 &gt; 1 in concurrent(16)"
    assert said in body[: body.index("<h3>Overview</h3>")]
    assert "<h3>Thresholds</h3>" in body
