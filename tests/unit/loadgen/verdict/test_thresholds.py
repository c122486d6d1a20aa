"""`--fail-if`: what the language takes, what it refuses, and that nothing unmeasured passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import msgspec
import pytest

from loadgen.cli.compare import EXIT_INVALID, EXIT_THRESHOLD, EXIT_VALID, exit_status
from loadgen.experiment.plan import PlanError
from loadgen.metrics.facts import Facts
from loadgen.records.run import Workload
from loadgen.report.contents import result_document
from loadgen.report.renderers.markdown import render_markdown
from loadgen.verdict import thresholds
from loadgen.verdict.result import Result, analyse
from loadgen.verdict.thresholds import parse_condition, plan_conditions
from tests.golden.synthetic_run import Plan, SimulatedArm, workloads, write_run
from tests.unit.loadgen.metrics.test_open_loop import noisy, open_run

WORKLOADS = workloads(4, 200)
AB = ("a", "b")


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("b.p50 > 1.05 * a.p50", True),
        ("b.p50 > 2 * a.p50", False),
        ("a.p50 < b.p50 and b.p50 <= 15", True),
        ("b.p50>=1.5*a.p50 and a.p50 != 10", False),
        ("b.p50 == .15e2 and a.p50 > -1", True),
        ("concurrent(16): b.p50 > 14", True),
    ],
)
def test_conditions_mean_what_they_say(text: str, holds: bool) -> None:
    condition = parse_condition(text, AB)
    assert condition.holds({q: 15.0 if q.side == "b" else 10.0 for q in condition.quantities}) is holds


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("b.p98 > 1", "b has no metric p98; use one of throughput, "),
        ("ratio.mean > 1", "ratio has no metric mean"),
        ("c.p50 > 1", "c is unknown; use a, b and ratio"),
        ("b > 1", r"b has no metric \(none given\)"),
        ("b.p50.middle > 1", "b.p50 has no middle; use low and high"),
        ("b.errors.low > 1", "errors are counted"),
        ("b.p50", "b.p50 is not a comparison; write one like b.p99 > 1.05 . a.p99, and join several by and"),
        ("1 > 2", "1 is unknown; use a, b"),
        ("b.p50 > 1 and a.p50", "a.p50 is not a comparison"),
        ("b.p50 > 1 and", "nothing is not a comparison"),
        ("b.p50 > True", "True is unknown"),
        ("b.p50 > '1'", "'1' is unknown"),
        ("b.p50 > 1e999", "inf is not a number"),
        ("b.p50 > 1" + "0" * 400, "inf is not a number: it is too large"),
        ("1.05 * a.p50 < b.p50", "is not a comparison"),
        ("b.p50 > a.p50 * 1.05", "is not a comparison"),
        ("b.p50 > a.p50 + 10", "is not a comparison"),
        ("a.p50 < b.p50 < 15", "is not a comparison"),
        ("b.p50 > 1 or a.p50 > 1", "is not a comparison"),
        ("not b.p50 > 1", "is not a comparison"),
        ("b.p50 >", "is not a comparison"),
        ("b.p50.__class__ > 1", "use low and high"),
        ("b.p50 > " + "1" * 500, "at most 500 characters"),
    ],
)
def test_everything_else_is_refused(text: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        parse_condition(text, AB)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("concurrent(8): b.p50 > 1", "has no workload concurrent.8.; use one of cold-start, single"),
        ("cold-start: b.p50 > 1", "cold-start has no b.p50; it has time_to_ready"),
        ("single: b.time_to_ready > 1", "single has no b.time_to_ready; it has throughput"),
        ("b.time_to_ready > 1 and b.p50 > 1", "no workload of the experiment measures all"),
        ("b.p98 > 1", "--fail-if 'b.p98 > 1': b has no metric p98"),
    ],
)
def test_what_can_never_be_measured_is_refused_before_the_run(text: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        plan_conditions([text], WORKLOADS, AB)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("b.p50 > 1", ["concurrent(16)"]),
        ("concurrent: b.p50 > 1", ["concurrent(16)"]),
        ("batched(8): b.p50 > 1", ["batched(8)"]),
        ("batched: b.p50 > 1", [f"batched({n})" for n in (1, 4, 8, 16, 32)]),
        ("all: b.p50 > 1", ["single", *(f"batched({n})" for n in (1, 4, 8, 16, 32)), "concurrent(16)"]),
        ("b.time_to_ready > 5", ["cold-start"]),
    ],
)
def test_a_condition_is_about_named_workloads(text: str, names: list[str]) -> None:
    ((_, chosen),) = plan_conditions([text], WORKLOADS, AB)
    assert [workload.name for workload in chosen] == names


def test_a_search_has_its_own_metric_and_no_latency() -> None:
    search = Workload(
        scenario="slo",
        batch_size=1,
        concurrency=64,
        requests=1,
        seconds=1.0,
        max_seconds=9.0,
        rounds=2,
        latency_bound_ms=20.0,
    )
    ((_, chosen),) = plan_conditions(["b.p50 > 1"], (*WORKLOADS, search), AB)
    assert [workload.name for workload in chosen] == ["concurrent(16)"]
    for text in ("ratio.slo_rate.low < 0.95", "slo: b.slo_rate < 50", "slo(p99≤20ms): b.slo_rate < a.slo_rate"):
        ((_, chosen),) = plan_conditions([text], (*WORKLOADS, search), AB)
        assert chosen == (search,)


ABC = ("a", "b", "c")


@pytest.mark.parametrize(
    ("text", "labels", "arms"),
    [
        ("c.p99 > 1.05 * a.p99", ABC, {"c.p99": "c", "a.p99": "a"}),
        ("ratio(c).p99.low < 1 and ratio( b ).p99 > 1", ABC, {"ratio(c).p99.low": "c", "ratio(b).p99": "b"}),
        ("ratio.p99 > 1 and ratio(b).p99 > 1", AB, {"ratio.p99": "b", "ratio(b).p99": "b"}),
        (
            "torch-fp16.p50>torch.p50 and ratio(torch-fp16).p50.high<1",
            ("torch", "onnx", "torch-fp16"),
            {"torch-fp16.p50": "torch-fp16", "torch.p50": "torch", "ratio(torch-fp16).p50.high": "torch-fp16"},
        ),
        ("fp16.p50 > 2*torch-fp16.p50", ("torch-fp16", "fp16"), {"fp16.p50": "fp16", "torch-fp16.p50": "torch-fp16"}),
        ("x-and.p50 > 1 and and-1.p50 > 1", ("and-1", "x-and"), {"x-and.p50": "x-and", "and-1.p50": "and-1"}),
        ("torch-fp16-eager.p50 > 1", ("fp16-eager", "torch-fp16-eager"), {"torch-fp16-eager.p50": "torch-fp16-eager"}),
    ],
)
def test_any_arm_is_called_by_its_label(text: str, labels: tuple[str, ...], arms: dict[str, str]) -> None:
    assert {str(quantity): quantity.arm for quantity in parse_condition(text, labels).quantities} == arms


@pytest.mark.parametrize(
    ("text", "labels", "said"),
    [
        ("d.p50 > 1", ABC, r"d is unknown; use a, b, c, ratio\(b\) and ratio\(c\) \(that arm over a\)"),
        ("ratio.p50 > 1", ABC, r"ratio is unknown; use a, b, c, ratio\(b\) and ratio\(c\)"),
        ("ratio(a).p50 > 1", ABC, r"ratio\(a\) is unknown; use"),
        ("ratio(c).p50 > 1", AB, r"ratio\(c\) is unknown; use a, b and ratio \(b over a\)"),
        ("ratio(c).mean > 1", ABC, r"ratio\(c\) has no metric mean"),
        ("ratio(c) > 1", ABC, r"ratio\(c\) has no metric .none given."),
        ("ratio(b, c).p50 > 1", ABC, r"ratio\(b,c\) is unknown"),
        ("b.p50 > 1", ("torch", "onnx"), "use torch, onnx and ratio .onnx over torch., as in onnx.p99"),
        ("torch-fp8.p50 > 1", ("torch", "torch-fp16"), "torch-fp8 is unknown"),
        ("torch-fp16.p50", ("torch", "torch-fp16"), "write one like torch-fp16.p99 > 1.05 . torch.p99"),
    ],
)
def test_an_arm_that_there_is_not_is_refused_with_those_that_there_are(
    text: str, labels: tuple[str, ...], said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        plan_conditions([text], WORKLOADS, labels)


def run_with(tmp_path: Path, plan: Plan, *conditions: str) -> Result:
    return with_conditions(write_run(tmp_path, plan), *conditions)


def with_conditions(directory: Path, *conditions: str) -> Result:
    path = directory / "experiment.json"
    document = msgspec.json.decode(path.read_bytes())
    document["settings"] = {"fail_if": list(conditions)}
    path.write_bytes(msgspec.json.encode(document))
    return analyse(directory)


def test_outcomes_come_from_the_run_and_decide_the_exit_status(tmp_path: Path) -> None:
    """B of the synthetic run serves 1.2 to 1.5 times the images of A, and its first answer takes 5.5 s."""
    result = run_with(
        tmp_path,
        Plan(pairs=4),
        "b.throughput < a.throughput",
        "ratio.throughput.low < 1.05",
        "b.throughput.low < a.throughput.high",
        "b.time_to_first_answer > 5",
        "single: b.p99 > 1",
        "all: b.errors > 0",
    )
    states = [threshold.state for threshold in result.thresholds]
    assert states[:5] == ["kept", "kept", "kept", "broken", "not_measurable"]
    assert states[5:] == ["kept"] * 7
    broken, missing = result.thresholds[3:5]
    assert broken.detail.startswith("b.time_to_first_answer = 5.")
    assert broken.values["b.time_to_first_answer"] == pytest.approx(5.5, rel=0.1)
    assert "b.p99 could not be measured: p99 latency needs 662 samples" in missing.detail
    assert missing.values == {"b.p99": None}
    assert exit_status(result) == EXIT_THRESHOLD
    text = render_markdown(result_document(result))
    assert "## Thresholds" in text
    assert "not measurable" in text


def test_a_run_that_keeps_its_thresholds_passes_and_one_that_is_invalid_does_not(tmp_path: Path) -> None:
    condition = "b.throughput < 0.9 * a.throughput"
    kept = run_with(tmp_path / "kept", Plan(pairs=4), condition)
    assert [threshold.state for threshold in kept.thresholds] == ["kept"]
    assert exit_status(kept) == EXIT_VALID
    invalid = run_with(tmp_path / "invalid", Plan(pairs=4, parity_cosine=0.9), condition)
    (outcome,) = invalid.thresholds
    assert outcome.state == "not_measurable"
    assert "is invalid" in outcome.detail
    assert exit_status(invalid) == EXIT_INVALID


def test_a_percentile_is_that_of_all_blocks_together_with_its_interval(tmp_path: Path) -> None:
    result = run_with(tmp_path, Plan(pairs=8, requests=400), "b.p99 > 10000", "b.p99.high > 10000", "ratio.p99 > 100")
    assert [threshold.state for threshold in result.thresholds] == ["kept"] * 3
    (summary,) = [s for s in result.summaries if (s.workload, s.label) == ("concurrent(16)", "b")]
    assert result.thresholds[0].values["b.p99"] == pytest.approx(summary.latency_ms("p99"), rel=0.05)
    high, p99 = result.thresholds[1].values["b.p99.high"], result.thresholds[0].values["b.p99"]
    assert high is not None
    assert p99 is not None
    assert high > p99


def test_each_arm_of_three_is_judged_by_its_own_values(tmp_path: Path) -> None:
    """C takes 8.5 ms for a single image, B 13.5 and A 16."""
    plan = Plan(others=(SimulatedArm(3.0, 4.0, 1.5),), pairs=4, workloads=(WORKLOADS[1],))
    result = run_with(
        tmp_path,
        plan,
        "c.p50 > b.p50",
        "ratio(c).throughput > 1.5",
        "ratio(b).throughput > 1.5",
        "ratio(c).throughput.low > ratio(b).throughput.high",
        "c.throughput.low > a.throughput.high",
    )
    assert [threshold.state for threshold in result.thresholds] == ["kept", "broken", "kept", "broken", "broken"]
    ratios = {
        comparison.arm: comparison
        for comparison in result.comparisons
        if comparison.metric == "throughput" and comparison.baseline == "a"
    }
    assert result.thresholds[1].values == {"ratio(c).throughput": ratios["c"].ratio}
    low, high = ratios["c"].ci95, ratios["b"].ci95
    assert low is not None
    assert high is not None
    assert result.thresholds[3].values == {"ratio(c).throughput.low": low[0], "ratio(b).throughput.high": high[1]}
    assert result.thresholds[0].values["c.p50"] == pytest.approx(8.5, rel=0.05)
    assert result.thresholds[0].values["b.p50"] == pytest.approx(13.6, rel=0.05)


@pytest.mark.parametrize(("ends", "holds"), [((1.0, 2.0), True), ((0.5, 2.0), False)])
def test_many_quantities_of_a_rough_run_are_judged_one_by_one(
    monkeypatch: pytest.MonkeyPatch, ends: tuple[float, float], holds: bool
) -> None:
    """All ends of sixteen quantities together are 65,536 cases, of thirty a thousand million."""
    asked = 0

    def above(left: float, right: float) -> bool:
        nonlocal asked
        asked += 1
        return left > right

    monkeypatch.setattr(thresholds, "_ends", lambda *_: ends)
    labels = tuple("abcdefgh")
    text = " and ".join(f"{label}.{metric} > 0.9" for label in labels for metric in ("p50", "p90"))
    parsed = parse_condition(text, labels)
    condition = replace(parsed, bounds=tuple(replace(bound, compare=above) for bound in parsed.bounds))
    assert thresholds._holds_at_all_ends(condition, "single", cast("Facts", None), {}) is holds
    assert asked <= 32


def test_the_baselines_value_comes_from_a_comparison_that_could_be_made(tmp_path: Path) -> None:
    """At 50 requests/s B is saturated, so its latency is not compared; those of A and C are."""
    open_run(tmp_path, {"a": noisy(20.0), "b": noisy(200.0), "c": noisy(24.0)}, 50.0)
    result = with_conditions(tmp_path, "c.p99 > 1.1 * a.p99", "ratio(b).p99 > 1", "a.p99.high > 1000")
    assert [threshold.state for threshold in result.thresholds] == ["broken", "not_measurable", "kept"]
    assert "Triton was saturated at this rate" in result.thresholds[1].detail
    (made,) = [
        comparison
        for comparison in result.comparisons
        if (comparison.metric, comparison.pairing) == ("latency_p99", ("a", "c"))
    ]
    assert made.baseline_ci95 is not None
    assert result.thresholds[0].values == {"c.p99": made.arm_value, "a.p99": made.baseline_value}
    assert result.thresholds[2].values == {"a.p99.high": made.baseline_ci95[1]}


def test_a_ratio_is_to_the_baseline_and_to_no_other_arm(tmp_path: Path) -> None:
    """A is saturated at 50 requests/s; B and C, which are compared to rank them, are not."""
    open_run(tmp_path, {"a": noisy(200.0), "b": noisy(20.0), "c": noisy(24.0)}, 50.0)
    result = with_conditions(tmp_path, "ratio(c).p99 > 1")
    (ranked,) = [
        comparison
        for comparison in result.comparisons
        if (comparison.metric, comparison.pairing) == ("latency_p99", ("b", "c"))
    ]
    assert ranked.ratio is not None
    assert [(threshold.state, threshold.values) for threshold in result.thresholds] == [
        ("not_measurable", {"ratio(c).p99": None})
    ]
