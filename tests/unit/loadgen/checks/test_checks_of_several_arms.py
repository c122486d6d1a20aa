"""Three arms: a check names the arm that it is about, and whatever fails on one arm covers its whole scenario."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from loadgen.checks.gpu import gpu_present
from loadgen.checks.noise_floor import is_self_comparison
from loadgen.checks.registry import make_checks
from loadgen.metrics.facts import Facts
from loadgen.records.checks import Check
from loadgen.records.probes import ArmConditions, Conditions
from loadgen.records.run import ArmRequest, Environment, Pairing, Workload
from loadgen.records.store import StoredRun
from loadgen.verdict.result import Result, analyse
from tests.golden.synthetic_arms import arms
from tests.golden.synthetic_run import Plan, SimulatedArm, write_run
from tests.unit.loadgen.checks.test_checks import bigger, edit_blocks, edit_json, edit_samples
from tests.unit.loadgen.checks.test_fairness import EXPERIMENT
from tests.unit.loadgen.checks.test_taken_processors import take

FAST = SimulatedArm(3.0, 4.0, 1.5)
WORKLOADS = tuple(
    Workload(scenario="single", batch_size=1, concurrency=1, requests=40, seconds=1.0, max_seconds=30.0, rounds=4)
    if users == 1
    else Workload(
        scenario="concurrent", batch_size=1, concurrency=16, requests=80, seconds=1.0, max_seconds=30.0, rounds=4
    )
    for users in (1, 16)
)
STARTS = Workload(scenario="cold-start", batch_size=1, concurrency=1, requests=1, seconds=0, max_seconds=60, rounds=2)
PLAN = Plan(others=(FAST,), workloads=WORKLOADS)


def run_of(*, asked: dict[str, dict[str, str]] | None = None, **in_effect: dict[str, object]) -> StoredRun:
    """Arms that are alike but for what is in effect, and was asked for, by their labels."""
    requests = tuple(
        ArmRequest(label=label, target="native", settings=(asked or {}).get(label, {})) for label in ("a", "b", "c")
    )
    records = tuple(
        msgspec.structs.replace(arm, in_effect={**arm.in_effect, "instances": 1} | in_effect.get(arm.label, {}))
        for arm in arms({}, {}, ["c"])
    )
    environment = Environment(started_at="", command="", git_commit=None, host={"cpu_count": 2}, packages={}, gpu={})
    return StoredRun(Path(), msgspec.structs.replace(EXPERIMENT, arms=requests), environment, records)


def checks(result: Result, name: str, workload: str | None = None) -> list[Check]:
    return [
        check
        for check in result.checks
        if check.name == name and (workload is None or check.scope == f"workload {workload}")
    ]


def before(run: StoredRun, name: str) -> list[tuple[bool | None, str, str]]:
    return [
        (made.ok, made.severity, made.detail) for made in make_checks(Facts(run), before_load=True) if made.name == name
    ]


@pytest.mark.parametrize(
    ("name", "setting", "value", "severity", "detail"),
    [
        ("same_model", "model", "resnet50", "invalidates", "native (A) openclip_vit_b32, native (C) resnet50"),
        ("same_weights", "weights", "laion2b", "invalidates", "native (A) random weights (seed 0), native (C) laion2b"),
        ("same_precision", "precision", "tf32", "invalidates", "native (A) fp32, native (C) tf32"),
        ("same_device", "device", "cuda:0", "invalidates", "native (A) cpu, native (C) cuda:0"),
        ("same_threads", "threads", 1, "invalidates", "native (A) 2, native (C) 1"),
        ("same_max_batch_size", "max_batch_size", 8, "invalidates", "native (A) 32, native (C) 8"),
        ("same_queue_delay", "max_queue_delay_us", 500, "warns", "native (A) 0, native (C) 500"),
        ("same_instances", "instances", 4, "warns", "native (A) 1, native (C) 4"),
    ],
)
def test_the_arm_that_differs_is_named_and_the_others_are_not(
    name: str, setting: str, value: object, severity: str, detail: str
) -> None:
    ((found, effect, text),) = before(run_of(c={setting: value}), name)
    assert (found, effect) == (False, severity)
    assert f" ({detail}), which was not requested" in text
    ((ok, _, _),) = before(run_of(), name)
    assert ok


def test_an_instance_with_two_batches_in_flight_counts_as_two() -> None:
    flying: dict[str, object] = {"batches_in_flight": "2"}
    two: dict[str, object] = {"instances": 2}
    ((ok, _, text),) = before(run_of(a=flying, b=flying, c=two), "same_instances")
    assert (ok, text) == (True, "2")
    ((ok, _, text),) = before(run_of(a=flying, b=flying, c={"instances": 4}), "same_instances")
    assert not ok
    assert "(native (A) 2, native (C) 4)" in text


def test_the_padding_of_batches_is_compared_where_there_is_any() -> None:
    padded: dict[str, object] = {"pad_to": "32,64"}
    assert before(run_of(), "same_pad_to") == []
    assert before(run_of(a=padded, b=padded, c=padded), "same_pad_to") == [(True, "invalidates", "32,64")]
    ((ok, effect, text),) = before(run_of(a=padded, b={"pad_to": "none"}, c=padded), "same_pad_to")
    assert (ok, effect) == (False, "invalidates")
    assert (
        "the arms differ in padding of batches (native (A) 32,64, ONNX Runtime (native) none), which was not requested"
        in text
    )


def test_a_difference_in_padding_that_abserve_cannot_remove_is_named() -> None:
    padded: dict[str, object] = {"pad_to": "32,64"}
    asked = run_of(asked={"a": {"pad-to": "32,64"}}, a=padded, b={"pad_to": "none"}, c={"pad_to": "none"})
    ((ok, effect, text),) = before(asked, "same_pad_to")
    assert (ok, effect) == (False, "warns")
    assert text.endswith(
        "(native with pad to 32,64 32,64, ONNX Runtime (native) none, native with pad to none none), as requested: "
        "this compares settings, not only servers"
    )
    run = run_of(a=padded, b={"pad_to": "none"}, c=padded)
    by_url = ArmRequest(label="b", target="http://127.0.0.1:1")
    with_url = msgspec.structs.replace(run.experiment, arms=(run.experiment.arms[0], by_url, run.experiment.arms[2]))
    stack = msgspec.structs.replace(run.experiment, deployment="compose")
    for experiment in (with_url, stack):
        ((ok, effect, text),) = before(replace(run, experiment=experiment), "same_pad_to")
        assert (ok, effect) == (False, "warns")
        assert " none), as the servers that abserve does not configure are set" in text


def test_a_triton_that_merges_no_requests_of_different_shapes_pads_nothing() -> None:
    none: dict[str, object] = {"pad_to": "none"}
    run = run_of(a=none, b=none, c=none)
    config = {"backend": "onnxruntime", "input": [{"name": "ids", "dims": [-1]}]}
    first, second, third = run.arms
    silent = msgspec.structs.replace(second, in_effect={}, model_config=config)
    assert before(replace(run, arms=(first, silent, third)), "same_pad_to") == [(True, "invalidates", "none")]
    ragged = msgspec.structs.replace(silent, model_config={"input": [{"dims": [-1], "allow_ragged_batch": True}]})
    assert before(replace(run, arms=(first, ragged, third)), "same_pad_to") == [
        (None, "warns", "native (B) does not report it")
    ]


def test_an_arm_that_could_pad_and_does_not_is_named(tmp_path: Path) -> None:
    """The caveat stands only where requests of different lengths wait for each other."""
    path = write_run(tmp_path, PLAN)

    def caveats(lengths: tuple[int, int], cannot_pad: dict[str, str]) -> list[str]:
        edit_json(path / "experiment.json", pad_to=[], cannot_pad=cannot_pad)
        inputs = {"kind": "token ids", "length_min": lengths[0], "length_max": lengths[1]}
        edit_json(path / "environment.json", inputs=inputs)
        result = analyse(path)
        assert result.verdict.valid
        assert len(checks(result, "padding_held_back")) == sum(
            "pad batches" in caveat for caveat in result.verdict.caveats
        )
        return [caveat for caveat in result.verdict.caveats if "pad batches" in caveat]

    (caveat,) = caveats((6, 40), {"b": "it does not pad"})
    assert "cannot make Triton (it does not pad) do so" in caveat
    assert "add --a-option pad-to=32,40 --c-option pad-to=32,40 to let native (A) and native (C) pad" in caveat
    assert caveats((40, 40), {"b": "it does not pad"}) == []
    assert caveats((6, 40), dict.fromkeys("abc", "it does not pad")) == []


def test_spinning_is_compared_where_an_arm_reports_it() -> None:
    assert before(run_of(), "same_spinning") == []
    off: dict[str, object] = {"spinning": "off"}
    assert before(run_of(a=off, b=off, c=off), "same_spinning") == [(True, "warns", "off")]
    ((ok, effect, text),) = before(run_of(a=off, b={"spinning": "on"}, c=off), "same_spinning")
    assert (ok, effect) == (False, "warns")
    assert "the arms differ in thread spinning (native (A) off, ONNX Runtime (native) on)" in text


def test_arms_with_the_same_settings_execute_the_same() -> None:
    """What servers chose at their starts is compared among those that have the same settings and report it."""
    one: dict[str, object] = {"choices": "05e70a41"}
    other: dict[str, object] = {"choices": "5c7d126a"}
    assert before(run_of(), "same_choices") == before(run_of(a=one), "same_choices") == []
    assert before(run_of(a=one, c=other | {"threads": 1}), "same_choices") == []
    assert [(ok, effect) for ok, effect, _ in before(run_of(a=one, c=one), "same_choices")] == [(True, "invalidates")]
    ((ok, effect, text),) = before(run_of(a=one, c=other | {"fronts": 0}), "same_choices")
    assert (ok, effect) == (False, "invalidates")
    assert "(native (A) 05e70a41, native (C) 5c7d126a)" in text
    run = run_of(a=one, c=other)
    by_url = msgspec.structs.replace(run.experiment, deployment="compose")
    assert [made[:2] for made in before(replace(run, experiment=by_url), "same_choices")] == [(False, "warns")]


def test_arms_whose_engine_is_auto_have_the_same_engine() -> None:
    """Unless one was asked for another engine, another mode, or other choices."""
    other: dict[str, object] = {"engine": "onnxruntime", "engine_version": "1.31.1", "mode": "session"}
    ((ok, effect, text),) = before(run_of(c=other), "same_choices")
    assert (ok, effect) == (False, "invalidates")
    assert "(PyTorch (native) torch, native (C) onnxruntime)" in text
    for asked in ({"engine": "onnxruntime"}, {"choices": "off"}):
        assert before(run_of(asked={"c": asked}, c=other), "same_choices") == []
    assert before(run_of(a=other, b=other, c=other), "same_choices") == []
    assert before(run_of(asked={"c": {"mode": "eager"}}, c={"mode": "eager"}), "same_choices") == []


def test_what_was_asked_for_is_told_apart_from_what_was_not() -> None:
    """B was asked for FP16, C fell to TF32 by itself."""
    run = run_of(asked={"b": {"precision": "fp16"}}, b={"precision": "fp16"}, c={"precision": "tf32"})
    unasked, asked = before(run, "same_precision")
    assert (unasked[:2], asked[:2]) == ((False, "invalidates"), (False, "warns"))
    assert "(native (A) fp32, native (C) tf32)" in unasked[2]
    assert "(native (A) fp32, ONNX Runtime (native) fp16)" in asked[2]
    assert "compares settings" in asked[2]


def test_another_model_has_other_weights_and_both_were_asked_for() -> None:
    """As in --model net.py:net --b-model net.onnx."""
    run = run_of(b={"weights": "ONNX file net.onnx"})
    requests = tuple(
        msgspec.structs.replace(arm, model="net.onnx" if arm.label == "b" else None) for arm in run.experiment.arms
    )
    changed = replace(run, experiment=msgspec.structs.replace(run.experiment, arms=requests))
    ((ok, effect, text),) = before(changed, "same_weights")
    assert (ok, effect) == (False, "warns")
    assert text.endswith("as requested: only the parity check shows whether they compute the same")


def test_a_silent_arm_hides_no_difference_between_the_others() -> None:
    apart, unknown = before(run_of(a={"precision": None}, c={"precision": "fp16"}), "same_precision")
    assert apart[:2] == (False, "invalidates")
    assert "(ONNX Runtime (native) fp32, native (C) fp16)" in apart[2]
    assert unknown == (None, "warns", "native (A) does not report it")
    silent = run_of(b={"precision": None}, c={"precision": None})
    assert before(silent, "same_precision") == [
        (None, "warns", "ONNX Runtime (native) and native (C) do not report it")
    ]


def test_threads_are_compared_as_long_as_one_arm_is_on_the_cpu() -> None:
    gpu: dict[str, object] = {"device": "cuda:0"}
    all_on_gpu = run_of(a=gpu, b=gpu, c={**gpu, "threads": 1})
    assert before(all_on_gpu, "same_threads")[0][0] is True
    one_on_cpu = run_of(a=gpu, b=gpu, c={"threads": 1})
    assert before(one_on_cpu, "same_threads")[0][0] is False


def test_an_arm_that_is_farther_away_is_seen() -> None:
    near = [ArmConditions(label=label, loopback=True, connect_ms=0.03, pids=()) for label in "ab"]
    away = ArmConditions(label="c", loopback=False, connect_ms=0.4, pids=())
    conditions = Conditions(taken_at="", arms=(*near, away), cpu_busy_share=0.0, cpu_governors=None, gpus=())
    ((ok, _, detail),) = before(replace(run_of(), records={Conditions: (conditions,)}), "client_distance")
    assert ok is False
    assert detail.endswith("native (C) LAN (0.400 ms): the arms are not equally far away")


def test_arms_in_different_places_are_each_named() -> None:
    (judged,) = gpu_present.checks(Facts(run_of(a={"device": "cuda:0"}, b={"device": "cpu"}, c={"device": None})))
    assert judged.detail.startswith("native (A) ran on a GPU and ONNX Runtime (native) ran on the CPU")
    (judged,) = gpu_present.checks(Facts(run_of()))
    assert (judged.value, judged.detail.startswith("all arms ran on the CPU")) == ("cpu", True)


def test_one_arm_with_another_payload_is_named_in_the_sentence(tmp_path: Path) -> None:
    write_run(tmp_path, PLAN)
    experiment = json.loads((tmp_path / "experiment.json").read_text())
    experiment["arms"][2]["payload"] = "jpeg"
    edit_json(tmp_path / "experiment.json", arms=experiment["arms"])
    result = analyse(tmp_path)
    (judged,) = checks(result, "same_payload")
    assert (judged.ok, judged.value) == (False, "fp32, jpeg")
    assert result.verdict.sentence.startswith("No winner: ")
    assert "native fp32, Triton fp32 and native with jpeg payloads" in result.verdict.sentence
    assert {comparison.verdict for comparison in result.comparisons} == {"invalid"}


def test_the_largest_request_is_compared_with_the_smallest(tmp_path: Path) -> None:
    write_run(tmp_path, PLAN)
    edit_samples(tmp_path, "single", bigger, "c")
    result = analyse(tmp_path)
    (judged,) = checks(result, "same_payload_bytes", "single")
    assert (judged.ok, judged.value) == (False, 602_412)
    assert "602,412 bytes to native (A), 602,412 bytes to Triton and 1,204,824 bytes to native (C)" in judged.detail
    assert checks(result, "same_payload_bytes", "concurrent(16)")[0].ok


def test_a_failure_on_one_arm_takes_the_verdict_of_its_whole_scenario_and_no_other(tmp_path: Path) -> None:
    write_run(tmp_path, PLAN)
    edit_blocks(tmp_path, "single", generator_cpu_ns=0)
    for path in (tmp_path / "blocks").glob("*.json"):
        block = json.loads(path.read_text())
        if (block["workload"], block["label"]) == ("single", "c"):
            edit_json(path, generator_cpu_ns=10**12)
    result = analyse(tmp_path)
    assert not checks(result, "generator_cpu", "single")[0].ok
    verdicts = {
        (comparison.workload, comparison.pairing): comparison.verdict
        for comparison in result.comparisons
        if comparison.leading
    }
    for pairing in (Pairing("a", "b"), Pairing("a", "c"), Pairing("b", "c")):
        assert verdicts["single", pairing] == "invalid"
        assert verdicts["concurrent(16)", pairing] == "arm_better"
    assert [ranking.workload for ranking in result.verdict.rankings] == ["concurrent(16)"]
    assert result.verdict.sentence.startswith("No verdict on 1 of 2 workloads")


def test_blocks_starts_and_pairs_are_counted_over_all_arms(tmp_path: Path) -> None:
    write_run(tmp_path, Plan(others=(FAST,), workloads=(STARTS, WORKLOADS[0])))
    whole = analyse(tmp_path)
    assert checks(whole, "blocks_complete")[0].detail == "12 of 12 blocks are complete"
    assert checks(whole, "cold_starts_succeeded")[0].value == 6
    assert [check.value for check in checks(whole, "enough_pairs", "single")] == [4]
    assert whole.stopping is not None
    assert whole.stopping.sentence == "As planned: 4 rounds of each workload, 2 of cold starts."
    third = next(
        path for path in sorted((tmp_path / "blocks").glob("*")) if json.loads(path.read_text())["label"] == "c"
    )
    edit_json(third, complete=False)
    cut = analyse(tmp_path)
    assert checks(cut, "blocks_complete")[0].detail == "11 of 12 blocks are complete"
    assert [check.value for check in checks(cut, "enough_pairs", "single")] == [3]
    assert {(c.pairing, c.pairs) for c in cut.comparisons if c.leading and c.workload == "single"} == {
        (("a", "b"), 4), (("a", "c"), 3), (("b", "c"), 3),
    }  # fmt: skip
    assert cut.stopping is not None
    assert cut.stopping.pairs == {"single": 3}


def test_an_arm_whose_processors_were_taken_is_not_on_the_same_machine(tmp_path: Path) -> None:
    write_run(tmp_path, PLAN)
    take(tmp_path, a=0.0, b=0.0, c=0.1, field="steal_ns")
    (judged,) = checks(analyse(tmp_path), "cpu_steal", "single")
    assert (judged.ok, judged.severity) == (False, "roughens")
    assert (
        "0 % of the CPU's time in the blocks of native (A), 0 % in those of Triton and 10 % in those of native (C)"
        in judged.detail
    )
    assert "(4 of 12 blocks" in judged.detail
    assert judged.detail.endswith("so the arms did not have the same machine")


def test_every_arm_has_its_stages_once(tmp_path: Path) -> None:
    result = analyse(write_run(tmp_path, PLAN))
    facts = Facts(StoredRun(Path(), result.experiment, None, ()), blocks=result.blocks, breakdowns=result.stages)
    assert [(arm.label, load.scope) for load in facts.loads for arm in load.stages] == [
        (label, f"workload {workload.name}") for workload in WORKLOADS for label in ("a", "b", "c")
    ]


def test_a_noise_floor_takes_arms_that_are_all_alike() -> None:
    same = run_of().experiment
    assert is_self_comparison(same)
    changed = msgspec.structs.replace(same.arms[2], settings={"threads": "1"})
    assert not is_self_comparison(msgspec.structs.replace(same, arms=(*same.arms[:2], changed)))
