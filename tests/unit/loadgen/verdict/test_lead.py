"""What makes a lead stands beside it in the headline, with the factor that was measured; nothing else does."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadgen.findings.causes import Explanation
from loadgen.records.run import Workload
from loadgen.verdict.result import Result, analyse
from tests.golden.synthetic_run import Plan, SimulatedArm, workloads, write_run
from tests.unit.loadgen.findings.test_explained_run import explain

QUICK = SimulatedArm(2.0, 0.5, 0.5)
DELAYED = replace(QUICK, queue_delay_ms=10.0)
DELAY = {"max_queue_delay_us": 10_000}


def load(name: str) -> tuple[Workload, ...]:
    return tuple(workload for workload in workloads(6, 900) if workload.name == name)


def result_of(directory: Path, a: SimulatedArm, b: SimulatedArm, name: str = "single", **plan: Any) -> Result:
    return analyse(write_run(directory, Plan(**{"a": a, "b": b, "workloads": load(name), **plan})))


def clause(result: Result) -> str:
    """What follows the claim about the main workload: the claim ends with its interval."""
    claim = re.match(r".*?\([0-9.,]+ to [0-9.,]+\)(.*)\.$", result.verdict.sentence)
    return "" if claim is None else claim[1].partition(";")[0]


def factor(text: str) -> float:
    match = re.search(r"([0-9.]+)×", text)
    assert match is not None, text
    return float(match[1])


def edit_arms(directory: Path, *in_effect: Mapping[str, object]) -> Result:
    arms = json.loads((directory / "arms.json").read_text())
    for arm, changes in zip(arms, in_effect, strict=True):
        arm["in_effect"] |= changes
    (directory / "arms.json").write_text(json.dumps(arms))
    return analyse(directory)


@pytest.mark.parametrize("name", ["single", "concurrent(16)"])
def test_a_lead_without_a_handicap_has_no_clause(tmp_path: Path, name: str) -> None:
    result = result_of(tmp_path, QUICK, replace(QUICK, overhead_ms=6.0), name)
    assert result.verdict.sentence.startswith("PyTorch (native) ")
    assert clause(result) == ""


@pytest.mark.parametrize("arm", [QUICK, DELAYED, replace(QUICK, stall_share=0.1)])
def test_identical_arms_have_no_clause(tmp_path: Path, arm: SimulatedArm) -> None:
    result = result_of(tmp_path, arm, arm)
    assert "of which" not in result.verdict.sentence
    assert ", with" not in result.verdict.sentence


def test_a_queue_delay_that_makes_a_lead_is_named_with_its_factor(tmp_path: Path) -> None:
    """B takes 3 ms by itself and waits 10 ms; it is also 1 ms slower."""
    result = result_of(tmp_path, QUICK, replace(DELAYED, overhead_ms=3.0), b_in_effect=DELAY)
    said = clause(result)
    assert said.startswith(", of which ")
    assert said.endswith("× is Triton's queue delay")
    assert factor(said) == pytest.approx(14.0 / 4.0, rel=0.05)


def test_a_part_that_is_the_whole_lead_is_told_as_such(tmp_path: Path) -> None:
    said = clause(result_of(tmp_path, replace(QUICK, overhead_ms=2.5), DELAYED, b_in_effect=DELAY))
    assert said.startswith(", all of which is Triton's queue delay (")


def test_a_part_of_less_than_half_the_lead_is_not_named(tmp_path: Path) -> None:
    result = result_of(tmp_path, QUICK, replace(DELAYED, overhead_ms=62.0), b_in_effect=DELAY)
    assert result.verdict.sentence.startswith("PyTorch (native) ")
    assert clause(result) == ""


def test_a_wait_without_a_queue_delay_is_no_queue_delay(tmp_path: Path) -> None:
    """B waits as long, but its server reports no delay, or one that a lone request does not wait."""
    assert clause(result_of(tmp_path, QUICK, DELAYED)) == ""
    assert clause(edit_arms(tmp_path, {}, {**DELAY, "lone_requests_wait": "false"})) == ""


def test_a_wait_beyond_the_queue_delay_is_not_the_delays(tmp_path: Path) -> None:
    """B's requests wait 25 ms in its queue on average, because of its stalls, and its delay is 1 ms."""
    result = result_of(tmp_path, QUICK, replace(QUICK, stall_share=0.05), b_in_effect={"max_queue_delay_us": 1000})
    assert "stalls of 0.5 s on Triton" in clause(result)


@pytest.mark.parametrize("name", ["single", "concurrent(16)"])
def test_stalls_that_make_a_lead_are_named_with_their_factor(tmp_path: Path, name: str) -> None:
    stalling = replace(QUICK, stall_share=0.05)
    said = clause(result_of(tmp_path / "stalls", QUICK, stalling, name))
    assert "× is stalls of 0.5 s on Triton" in said or "all of which is stalls of 0.5 s on Triton" in said
    without, with_stalls = (
        next(summary.latency_ms("mean") for summary in run.summaries if summary.label == "b") or 0.0
        for run in (
            result_of(tmp_path / "a", QUICK, QUICK, name),
            result_of(tmp_path / "b", QUICK, stalling, name),
        )
    )
    assert factor(said) == pytest.approx(with_stalls / without, rel=0.15)


def test_a_difference_of_the_delay_under_concurrent_load_is_named_without_a_figure(tmp_path: Path) -> None:
    """What the delay makes of a wait in the queue was not measured there."""
    result = result_of(tmp_path, QUICK, DELAYED, "concurrent(16)", b_in_effect=DELAY)
    assert clause(result) == ", with different queue delays (PyTorch (native) 0 µs, Triton 10,000 µs)"
    both = edit_arms(tmp_path, {**DELAY, "lone_requests_wait": "false"}, {})
    assert clause(both) == ", with different queue delays (PyTorch (native) 10,000 µs, not when idle, Triton 10,000 µs)"
    assert clause(edit_arms(tmp_path, {"lone_requests_wait": "true"}, {})) == ""


def test_a_delay_that_cannot_make_half_the_lead_is_not_named(tmp_path: Path) -> None:
    result = result_of(
        tmp_path, QUICK, replace(QUICK, overhead_ms=40.0), "concurrent(16)", b_in_effect={"max_queue_delay_us": 500}
    )
    assert result.verdict.sentence.startswith("PyTorch (native) ")
    assert clause(result) == ""


def test_an_ablation_gives_the_factor_also_under_concurrent_load(tmp_path: Path) -> None:
    """The stored ablation is one of `single`: B without its delay is as fast as A."""
    write_run(tmp_path, Plan(a=QUICK, b=replace(DELAYED, overhead_ms=3.0), workloads=load("single")))
    done = explain(tmp_path, "queue_delay", "b", "b", "a")
    record = Explanation(workloads=("single",), left_out=(), done=(done,), untested=())
    (tmp_path / "causes.json").write_bytes(msgspec.json.encode(record))
    said = clause(analyse(tmp_path))
    assert said.endswith("Triton's queue delay") or "all of which is Triton's queue delay" in said
    assert factor(said) == pytest.approx(14.0 / 3.0, rel=0.05)


def test_a_queue_delay_that_an_ablation_did_not_find_is_not_named(tmp_path: Path) -> None:
    plan = Plan(a=QUICK, b=replace(DELAYED, overhead_ms=3.0), workloads=load("single"), b_in_effect=dict(DELAY))
    write_run(tmp_path, plan)
    assert "Triton's queue delay" in clause(analyse(tmp_path)), "by the latency breakdown"
    done = explain(tmp_path, "queue_delay", "b", "b", "b")
    record = Explanation(workloads=("single",), left_out=(), done=(done,), untested=())
    (tmp_path / "causes.json").write_bytes(msgspec.json.encode(record))
    assert clause(analyse(tmp_path)) == ""


@pytest.mark.parametrize(
    ("setting", "a", "b", "said"),
    [
        ("precision", "fp16", "fp32", "different precision (PyTorch (native) FP16, Triton FP32)"),
        ("threads", "2", 1, "different threads (PyTorch (native) 2, Triton 1)"),
        ("pad_to", "32,64", "none", "different padding (PyTorch (native) 32,64, Triton none)"),
        ("spinning", "off", "on", "different thread spinning (PyTorch (native) off, Triton on)"),
    ],
)
def test_settings_that_cost_are_named_where_they_differ(
    tmp_path: Path, setting: str, a: object, b: object, said: str
) -> None:
    plan = Plan(
        a=QUICK, b=replace(QUICK, overhead_ms=6.0), workloads=load("single"), b_settings={setting: str(b)}
    )  # asked for: a difference that was not takes the verdict
    write_run(tmp_path, plan)
    assert clause(edit_arms(tmp_path, {setting: a}, {setting: b})) == f", with {said}"
    assert clause(edit_arms(tmp_path, {setting: b}, {})) == ""
    assert clause(edit_arms(tmp_path, {}, {setting: None})) == ""


def test_threads_are_not_named_on_gpus(tmp_path: Path) -> None:
    write_run(tmp_path, Plan(a=QUICK, b=replace(QUICK, overhead_ms=6.0), workloads=load("single")))
    on_gpu = {"device": "cuda:0"}
    assert "threads" not in clause(edit_arms(tmp_path, {"threads": 2, **on_gpu}, {"threads": 4, **on_gpu}))


def test_a_queue_policy_is_named_where_its_stalls_cannot_be_told_apart(tmp_path: Path) -> None:
    slow = SimulatedArm(260.0, 1.0, 1.0)
    write_run(tmp_path, Plan(a=slow, b=replace(slow, overhead_ms=500.0), workloads=load("single")))
    policy = {"queue_policy": "priority_levels: 2"}
    assert clause(edit_arms(tmp_path, {}, policy)) == ", with a queue policy on Triton"


def test_of_several_arms_each_lead_has_its_own_clause(tmp_path: Path) -> None:
    """B is behind A by its delay, C behind B by its work."""
    slow = replace(QUICK, overhead_ms=60.0)
    plan = Plan(a=QUICK, b=DELAYED, others=(slow,), workloads=load("single"), b_in_effect=dict(DELAY))
    sentence = analyse(write_run(tmp_path, plan)).verdict.sentence
    assert re.search(r"Native \(A\) handles [^;]*Triton's queue delay", sentence)
    assert re.search(r"Triton handles [^;]*\([0-9.]+ to [0-9.]+\)\. ", sentence)
