"""The breakdown of time adds up for both arms, whatever each of them reports."""

from __future__ import annotations

import io
import json
from itertools import permutations
from pathlib import Path

import pytest
from rich.console import Console

from loadgen.metrics.breakdown import STAGES, folded
from loadgen.report.contents import result_document
from loadgen.report.renderers.html import render_html
from loadgen.report.renderers.markdown import render_markdown
from loadgen.report.renderers.terminal import print_document
from loadgen.report.sections.causes import stage_rows
from loadgen.verdict.result import analyse
from loadgen.verdict.verdict import explain_stages
from tests.golden.synthetic_run import Plan, SimulatedArm, write_run

LETTERS = {"a": "A", "b": "B"}


def test_every_breakdown_adds_up(tmp_path: Path) -> None:
    result = analyse(write_run(tmp_path, Plan(pairs=2)))
    assert len(result.stages) == 7
    for breakdown in result.stages:
        assert breakdown.baseline_stages is not None
        assert breakdown.arm_stages is not None
        for arm, other in permutations((breakdown.baseline_stages, breakdown.arm_stages)):
            assert set(arm.stages_ms) == set(STAGES)
            assert sum(v for v in arm.stages_ms.values() if v is not None) == pytest.approx(arm.client_total_ms)
            assert sum(folded(arm, other).values()) == pytest.approx(arm.client_total_ms)
        assert sum(d.difference_ms for d in breakdown.differences) == pytest.approx(breakdown.difference_ms)
        assert sum(d.share or 0.0 for d in breakdown.differences) == pytest.approx(1.0)


def test_a_stage_that_one_arm_lacks_is_folded_into_where_the_other_keeps_it(tmp_path: Path) -> None:
    breakdown = analyse(write_run(tmp_path, Plan(pairs=2))).stages[0]
    assert breakdown.baseline_stages is not None
    assert breakdown.arm_stages is not None
    assert breakdown.arm_stages.stages_ms["decode"] is None
    shared = folded(breakdown.baseline_stages, breakdown.arm_stages)
    assert set(shared) == {"send_delay", "queue", "compute_input", "compute_infer", "compute_output", "unattributed"}
    assert shared["compute_input"] == pytest.approx(
        (breakdown.baseline_stages.stages_ms["compute_input"] or 0)
        + (breakdown.baseline_stages.stages_ms["decode"] or 0)
    )


@pytest.mark.parametrize(
    ("b", "stage"),
    [
        (SimulatedArm(item_ms=14.0, reports_http=False), "executing the model +"),
        (SimulatedArm(transport_ms=9.0, reports_http=False), "network and client +"),
    ],
)
def test_the_planted_cause_leads_the_reasons(tmp_path: Path, b: SimulatedArm, stage: str) -> None:
    breakdown = analyse(write_run(tmp_path, Plan(b=b, pairs=3))).stages[0]
    text = explain_stages(breakdown, LETTERS)[0]
    assert f"come from {stage}" in text


def test_an_arm_without_stages_gets_no_explanation(tmp_path: Path) -> None:
    write_run(tmp_path, Plan(pairs=2))
    for path in (tmp_path / "blocks").glob("*.json"):
        block = json.loads(path.read_text())
        if block["label"] == "b":
            path.write_text(json.dumps(block | {"stages": None}))
    result = analyse(tmp_path)
    assert all(breakdown.arm_stages is None and breakdown.baseline_stages is not None for breakdown in result.stages)
    assert all(explain_stages(breakdown, LETTERS) == [] for breakdown in result.stages)


def test_a_block_without_request_counts_counts_on_neither_side(tmp_path: Path) -> None:
    write_run(tmp_path, Plan(pairs=3))
    counted = analyse(tmp_path).stages[-1].baseline_stages
    first = next(path for path in sorted((tmp_path / "blocks").glob("*.json")) if _is(path, "a", "concurrent(16)"))
    block = json.loads(first.read_text())
    assert block["cool_down"] > 0
    first.write_text(json.dumps(block | {"stages": block["stages"] | {"requests": None}}))
    left = analyse(tmp_path).stages[-1].baseline_stages
    assert counted is not None
    assert left is not None
    assert left.requests == left.client_requests
    assert counted.client_requests - left.client_requests == block["requests"] + block["cool_down"]


def test_the_client_s_mean_includes_the_cool_down_as_the_server_s_does(tmp_path: Path) -> None:
    """Its requests wait less, so without them the stages of a short block exceed the requests."""
    write_run(tmp_path, Plan(pairs=2))
    whole = analyse(tmp_path).stages[-1].baseline_stages
    assert whole is not None
    for path in (tmp_path / "blocks").glob("*.json"):
        block = json.loads(path.read_text())
        path.write_text(json.dumps(block | {"cool_down_ns": block["cool_down"] * 10**9}))
    longer = analyse(tmp_path).stages[-1].baseline_stages
    assert longer is not None
    cool_down = whole.client_requests - 2 * workload_requests(tmp_path)
    assert cool_down > 0
    assert longer.client_total_ms * longer.client_requests > 1000 * cool_down
    assert longer.stages_ms["queue"] == whole.stages_ms["queue"]


def workload_requests(directory: Path) -> int:
    """Measured requests of A in one block of the last workload."""
    path = next(path for path in sorted((directory / "blocks").glob("*.json")) if _is(path, "a", "concurrent(16)"))
    return int(json.loads(path.read_text())["requests"])


def _is(path: Path, label: str, workload: str) -> bool:
    block = json.loads(path.read_text())
    return (block["label"], block["workload"]) == (label, workload)


def lie(directory: Path, **told: int) -> None:
    """B's statistics of every block say this, per request; `requests` and `items` as a factor of what is true."""
    for path in (directory / "blocks").glob("*.json"):
        block = json.loads(path.read_text())
        if block["label"] == "b":
            stages = block["stages"]
            for name, value in told.items():
                stages[name] = stages[name] * value if name in ("requests", "items") else value * block["requests"]
            path.write_text(json.dumps(block))


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"compute_infer_ns": 100_000_000}, "its stages add up to 10"),
        ({"queue_ns": -5_000_000}, "its counters ran backwards in block 1"),
        ({"requests": 3}, "it counted 198 requests where 66 were answered"),
        ({"items": 2}, "it counted 132 items where 66 were answered"),
        ({"requests": 0, "items": 0}, "it counted 0 requests where 66 were answered"),
    ],
)
def test_statistics_that_contradict_the_latency_are_no_reason(tmp_path: Path, told: dict[str, int], words: str) -> None:
    """The attacker's server: "executing the model +10.2 ms (560 %)" was printed as the reason, over a failed check."""
    write_run(tmp_path, Plan(pairs=3))
    lie(tmp_path, **told)
    result = analyse(tmp_path)
    breakdown = result.stages[0]
    assert breakdown.workload == "single"
    assert breakdown.arm_stages is not None
    assert breakdown.differences == ()
    reasons = explain_stages(breakdown, LETTERS)
    assert len(reasons) == 1
    assert reasons[0].startswith("B's own statistics do not account for the measured latency (13.")
    assert words in reasons[0]
    verdict = next(scenario for scenario in result.verdict.scenarios if scenario.workload == "single")
    assert not any("executing the model" in reason for reason in verdict.reasons)
    check = next(c for c in result.checks if (c.name, c.scope) == ("latency_breakdown", "workload single"))
    assert (check.ok, check.severity) == (False, "warns")
    assert f"Triton: {words}" in check.detail
    rows = stage_rows(breakdown)
    assert {row[2] for row in rows[:-1]} == {"–"}, "B's stages"
    assert all(row[1] != "–" and row[3] == "–" for row in rows), "A's are shown"
    stream = io.StringIO()
    print_document(result_document(result), Console(file=stream, width=100, color_system=None))
    for shown in (
        " ".join(stream.getvalue().split()),
        render_markdown(result_document(result)),
        render_html(result_document(result)),
    ):
        assert "own statistics do not account for the measured latency" in shown.replace("&#39;", "'")
        assert "executing the model +" not in shown


def as_ensemble(directory: Path, requests: float | None, calls: int = 1) -> None:
    """B is an ensemble: per request to it, this many reach the only model that it calls; None: it cannot be read."""
    for path in (directory / "blocks").glob("*.json"):
        block = json.loads(path.read_text())
        if block["label"] == "b":
            stages = block["stages"]
            seen = {} if requests is None else {"requests": round(requests * stages["requests"])}
            step = {"model": "m", "calls": calls, "decodes": False, "executes": True}
            stages["steps"] = [step | {"totals": None if requests is None else stages | seen}]
            path.write_text(json.dumps(block))


@pytest.mark.parametrize(
    ("requests", "calls", "words"),
    [
        (None, 1, "the configuration or the statistics of its step m cannot be read in block 1"),
        (2, 1, "its step m counted 132 requests where 66 were expected, so others send it requests in block 1"),
        (0.5, 1, "its step m counted 33 requests where 66 were expected in block 1"),
        (1, 2, "its step m counted 66 requests where 132 were expected in block 1"),
    ],
)
def test_statistics_of_a_step_that_are_not_the_ensembles_are_no_reason(
    tmp_path: Path, requests: float | None, calls: int, words: str
) -> None:
    write_run(tmp_path, Plan(pairs=3))
    as_ensemble(tmp_path, requests, calls)
    result = analyse(tmp_path)
    breakdown = result.stages[0]
    assert breakdown.differences == ()
    assert [words in reason for reason in explain_stages(breakdown, LETTERS)] == [True]
    assert {s.executed_batch_mean for s in result.summaries if s.label == "b"} == {None}
    merged = next(c for c in result.checks if c.name == "batching_formed")
    assert (merged.ok, merged.detail) == (None, "Triton does not report executed batches")


@pytest.mark.parametrize(("requests", "calls"), [(1, 1), (2, 2)])
def test_statistics_of_a_step_that_fit_are_the_ensembles(tmp_path: Path, requests: int, calls: int) -> None:
    write_run(tmp_path, Plan(pairs=3))
    as_ensemble(tmp_path, requests, calls)
    result = analyse(tmp_path)
    assert result.stages[0].differences
    assert all(s.executed_batch_mean is not None for s in result.summaries)


def test_batches_that_the_counts_contradict_are_not_told(tmp_path: Path) -> None:
    write_run(tmp_path, Plan(pairs=3))
    lie(tmp_path, items=2)
    result = analyse(tmp_path)
    means = {(s.workload, s.label): s.executed_batch_mean for s in result.summaries}
    assert means["concurrent(16)", "b"] is None
    assert means["concurrent(16)", "a"] is not None


def test_one_request_more_or_less_is_no_contradiction(tmp_path: Path) -> None:
    """Statistics are counted a moment after the answer."""
    write_run(tmp_path, Plan(pairs=3))
    path = tmp_path / "blocks" / "0001.json"
    block = json.loads(path.read_text())
    block["stages"]["requests"] += 1
    path.write_text(json.dumps(block))
    arms = [arm for breakdown in analyse(tmp_path).stages for arm in (breakdown.baseline_stages, breakdown.arm_stages)]
    assert not any(arm.contradictions for arm in arms if arm is not None)
