"""Every check can fail, is never ok without its data, and takes the verdict from what it covers and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from loadgen.checks.registry import CHECKS, Judgement, validity
from loadgen.checks.registry import check as declare
from loadgen.metrics.facts import Facts
from loadgen.records.checks import Check
from loadgen.records.targets import Kind
from loadgen.report.contents import result_document
from loadgen.report.renderers.markdown import render_markdown
from loadgen.verdict.result import Result, analyse
from tests.golden.synthetic_run import Plan, SimulatedArm, workloads, write_run

SMALL: dict[str, Any] = {"pairs": 4, "requests": 80, "batches": (8,)}
Edit = Callable[[Path], None]


def check(result: Result, name: str, workload: str | None = None) -> Check:
    named = [c for c in result.checks if c.name == name and (workload is None or c.scope == f"workload {workload}")]
    return min(named, key=lambda c: (c.ok is not False, c.ok is not None))


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_arm(directory: Path, label: int, **in_effect: object) -> None:
    path = directory / "arms.json"
    arms = json.loads(path.read_text())
    arms[label]["in_effect"] |= in_effect
    path.write_text(json.dumps(arms))


def edit_blocks(directory: Path, workload: str, **changes: object) -> None:
    for path in (directory / "blocks").glob("*.json"):
        if json.loads(path.read_text())["workload"] == workload:
            edit_json(path, **changes)


def edit_samples(directory: Path, workload: str, change: Callable[[np.ndarray], object], label: str = "ab") -> None:
    for path in (directory / "blocks").glob("*.json"):
        block = json.loads(path.read_text())
        if block["workload"] == workload and block["label"] in label:
            samples = np.load(directory / block["samples"])
            change(samples)
            np.save(directory / block["samples"], samples)


def bigger(samples: np.ndarray) -> None:
    samples["request_bytes"] *= 2


def answered(directory: Path, workload: str, **changes: object) -> None:
    """Change what is stored of B's answers under load."""
    path = directory / "answers.json"
    records = json.loads(path.read_text())
    next(record for record in records if (record["workload"], record["label"]) == (workload, "b")).update(changes)
    path.write_text(json.dumps(records))


def late(samples: np.ndarray) -> None:
    samples["intended_ns"] -= np.where(np.arange(len(samples)) % 20 == 0, 50_000_000, 0)


def break_sample_file(directory: Path) -> None:
    path = directory / "samples" / "0003.npy"
    path.write_bytes(path.read_bytes()[:-80])


def waited(samples: np.ndarray, extra_ms: Sequence[float], refused: int = 0) -> None:
    """The first requests take that much longer; the last ones of them are refused instead."""
    samples["end_ns"][: len(extra_ms)] += (np.array(extra_ms) * 1e6).astype(np.int64)
    samples["status"][len(extra_ms) - refused : len(extra_ms)] = 503
    samples["error"][len(extra_ms) - refused : len(extra_ms)] = 0


def used_by_others(directory: Path) -> None:
    """B is at a URL, where others ask it half as often as the run does."""
    path = directory / "arms.json"
    arms = json.loads(path.read_text())
    arms[1]["launched"] = False
    path.write_text(json.dumps(arms))
    for path in (directory / "blocks").glob("*.json"):
        block = json.loads(path.read_text())
        if block["label"] == "b":
            edit_json(path, stages=block["stages"] | {"requests": block["requests"] * 3 // 2})


def disagree(directory: Path) -> None:
    path = directory / "parity.json"
    parity = json.loads(path.read_text())
    parity["ok"] = parity["cases"][1]["ok"] = False
    parity["cases"][1]["cosine_min"] = 0.93
    path.write_text(json.dumps(parity))


def refuse(directory: Path) -> None:
    words = "B does not answer a recorded request (x FP32 [16, 2]): HTTP 400: at most 8 items"
    edit_json(directory / "parity.json", ok=False, cases=[], error=words, failed_arm="b", refused_items=16)


def time_out(directory: Path) -> None:
    words = "B does not answer the inputs of the parity check: no answer within 120 s"
    edit_json(directory / "parity.json", ok=False, cases=[], error=words, failed_arm="b", answered=False)


def differ_from_the_recording(directory: Path) -> None:
    cases = json.loads((directory / "parity.json").read_text())["cases"]
    edit_json(directory / "parity.json", ok=False, cases=[*cases, cases[0] | {"kind": "recorded", "ok": False}])


def answer_alike(directory: Path) -> None:
    """Every answer of both arms holds the same values."""
    edit_json(directory / "parity.json", kinds={"y": "embedding"}, alike={"a": ["y"], "b": ["y"]})


def made_up(directory: Path) -> None:
    edit_json(directory / "environment.json", inputs={"kind": "random values, 0 or 1 for ids", "count": 16})


def fail_a_start(directory: Path) -> None:
    path = directory / "cold_starts.json"
    starts = json.loads(path.read_text())
    starts[1] |= {"ready_ns": None, "first_answer_ns": None, "error": "exited with status 1"}
    path.write_text(json.dumps(starts))


def sent_other_payloads(directory: Path) -> None:
    path = directory / "experiment.json"
    experiment = json.loads(path.read_text())
    experiment["arms"][1]["payload"] = "jpeg"
    path.write_text(json.dumps(experiment))


def reached_over_tls(directory: Path, *arms: int, insecure: bool = False) -> None:
    path = directory / "experiment.json"
    experiment = json.loads(path.read_text())
    for arm in arms:
        experiment["arms"][arm] |= {"target": "https://127.0.0.1:1", "access": {"insecure": insecure}}
    path.write_text(json.dumps(experiment))


FAULTS: list[tuple[str, str, Edit | None, Plan]] = [
    ("gpu_present", "informs", None, Plan(**SMALL)),
    ("run_finished", "invalidates", None, Plan(state="interrupted", cut_after=50, **SMALL)),
    ("parity", "invalidates", disagree, Plan(**SMALL)),
    ("parity_answered", "invalidates", refuse, Plan(**SMALL)),
    ("parity_answered", "invalidates", time_out, Plan(**SMALL)),
    ("parity", "invalidates", differ_from_the_recording, Plan(**SMALL)),
    ("answers_depend_on_inputs", "invalidates", answer_alike, Plan(**SMALL)),
    ("inputs_are_known", "warns", made_up, Plan(**SMALL)),
    ("same_payload", "invalidates", sent_other_payloads, Plan(**SMALL)),
    ("other_clients", "roughens", used_by_others, Plan(**SMALL)),
    ("certificates", "warns", lambda d: reached_over_tls(d, 0, 1, insecure=True), Plan(**SMALL)),
    ("same_encryption", "warns", lambda d: reached_over_tls(d, 1), Plan(**SMALL)),
    ("request_errors", "invalidates", None, Plan(failing_block=3, **SMALL)),
    ("answers_under_load", "invalidates", lambda d: answered(d, "single", wrong=2, fault="y is 0"), Plan(**SMALL)),
    ("blocks_complete", "invalidates", lambda d: edit_json(d / "blocks/0005.json", complete=False), Plan(**SMALL)),
    ("samples_complete", "invalidates", break_sample_file, Plan(**SMALL)),
    ("cold_starts_succeeded", "invalidates", fail_a_start, Plan(**SMALL)),
    ("enough_pairs", "warns", None, Plan(pairs=1)),
    ("generator_cpu", "invalidates", lambda d: edit_blocks(d, "single", generator_cpu_ns=10**12), Plan(**SMALL)),
    ("warm_up", "invalidates", None, Plan(a=SimulatedArm(slow_requests=10, slow_request_extra_ms=400.0), **SMALL)),
    ("connections_kept", "warns", lambda d: edit_blocks(d, "single", reconnects=20), Plan(**SMALL)),
    ("same_payload_bytes", "invalidates", lambda d: edit_samples(d, "single", bigger, "b"), Plan(**SMALL)),
    ("same_model", "invalidates", lambda d: edit_arm(d, 1, model="resnet50"), Plan(b_in_effect={}, **SMALL)),
    ("same_weights", "invalidates", lambda d: edit_arm(d, 1, weights="laion2b_s34b_b79k"), Plan(**SMALL)),
    ("same_precision", "invalidates", lambda d: edit_arm(d, 1, precision="tf32"), Plan(**SMALL)),
    ("same_device", "invalidates", lambda d: edit_arm(d, 1, device="cuda:0"), Plan(**SMALL)),
    ("same_threads", "invalidates", lambda d: edit_arm(d, 1, threads=1), Plan(**SMALL)),
    ("same_max_batch_size", "invalidates", lambda d: edit_arm(d, 1, max_batch_size=8), Plan(**SMALL)),
    ("settings_in_effect", "warns", None, Plan(b_settings={"max-queue-delay-us": "500"}, **SMALL)),
    ("machine_steady", "warns", None, Plan(drift=0.6, pairs=4, requests=80)),
    (
        "wall_clock",
        "informs",
        lambda d: edit_json(d / "blocks/0005.json", started_at="2026-03-02T14:00:00Z"),
        Plan(**SMALL),
    ),
    ("server_cpu", "informs", lambda d: edit_blocks(d, "single", server_cpu_ns=10**12), Plan(**SMALL)),
    (
        "half_second_stalls",
        "warns",
        lambda d: edit_samples(d, "single", lambda s: waited(s, [500.0]), "b"),
        Plan(**SMALL),
    ),
    ("batching_formed", "informs", None, Plan(b=SimulatedArm(max_batch=1), **SMALL)),
    ("sensitivity", "informs", None, Plan(block_noise=0.2, **SMALL)),
    ("trained_weights", "informs", None, Plan(**SMALL)),
    ("native_backend", "informs", None, Plan(**SMALL)),
]


def test_answers_that_were_not_compared_are_not_taken_as_right(tmp_path: Path) -> None:
    write_run(tmp_path, Plan(**SMALL))
    answered(tmp_path, "single", answers=0, items=0, relative_max=None, error="arm a does not answer again")
    judged = check(analyse(tmp_path), "answers_under_load")
    assert (judged.ok, judged.severity, judged.detail) == (None, "invalidates", "arm a does not answer again")
    (tmp_path / "answers.json").write_text("[]")
    result = analyse(tmp_path)
    assert check(result, "answers_under_load").detail == "no answers of PyTorch (native) and Triton were compared"
    assert not result.valid
    (tmp_path / "answers.json").unlink()
    older = analyse(tmp_path)
    assert older.valid
    assert "answers_under_load" not in {made.name for made in older.checks}


@pytest.mark.parametrize(("name", "severity", "edit", "plan"), FAULTS, ids=[f[0] for f in FAULTS])
def test_a_planted_fault_fails_its_check(
    tmp_path: Path, name: str, severity: str, edit: Edit | None, plan: Plan
) -> None:
    write_run(tmp_path, plan)
    if edit:
        edit(tmp_path)
    result = analyse(tmp_path)
    failed = check(result, name)
    assert failed.ok is False
    assert failed.severity == severity
    assert failed.remedy
    assert failed.detail
    assert (result.valid, result.rough) == (severity not in ("invalidates", "roughens"), severity == "roughens")


def test_the_faults_above_are_the_whole_registry() -> None:
    """send_lag, queue_delay and latency_breakdown have their own tests below, evidence has test_gpu_evidence, the open
    loop test_open_loop."""
    open_loop = {"generator_ceiling", "connections_free", "rate_sustained", "replay_on_time"}
    repetition = {"restarts", "noise_floor", "repeated_requests"}  # test_repetition
    elsewhere = (
        repetition | {"send_lag", "queue_delay", "latency_breakdown", "gpu_evidence", "negative_control"} | open_loop
    )
    fairness = {name for name, definition in CHECKS.items() if definition.before_load}  # test_fairness
    searches = {"searches_ended"}  # tests/unit/loadgen/checks/test_search_checks.py
    ceilings = {"engine_ceiling"}  # test_ceilings
    processors = {"cpu_steal", "other_processes"}  # test_taken_processors
    padding = {"padding_held_back"}  # test_checks_of_several_arms
    shadow = {"copies_kept", "copies_in_time", "enough_blocks"}  # tests/integration/loadgen/test_shadow.py
    handicap = {"handicap"}  # tests/integration/loadgen/test_handicap.py
    tokens = {name for name, definition in CHECKS.items() if definition.of is Kind.TOKENS}  # test_token_checks
    covered = (
        {fault[0] for fault in FAULTS}
        | elsewhere
        | fairness
        | searches
        | ceilings
        | processors
        | padding
        | shadow
        | handicap
        | tokens
        | {"analysed"}  # test_failing_steps
    )
    assert covered == set(CHECKS)


def test_a_sound_run_is_valid_and_fails_nothing_that_matters(tmp_path: Path) -> None:
    result = analyse(write_run(tmp_path))
    assert result.valid
    assert {c.name for c in result.checks if c.ok is not True and c.severity == "invalidates"} == set()
    assert {c.name for c in result.checks if c.ok is False} == {
        "gpu_present",
        "trained_weights",
        "native_backend",
        "sensitivity",
        "restarts",
    }


def slower(directory: Path, factor: Callable[[float], float]) -> None:
    """Interleave the workloads, as in a real run, and stretch the requests of each block by a factor of the block's
    place in the run, from 0 to 1."""
    blocks = [json.loads(path.read_text()) for path in (directory / "blocks").glob("*.json")]
    blocks.sort(key=lambda block: (block["round"], block["index"]))
    for place, block in enumerate(blocks):
        samples = np.load(directory / block["samples"])
        start, moment = samples["intended_ns"].min(), blocks[0]["window_start_ns"] + place * 60_000_000_000
        for name in ("intended_ns", "send_ns", "first_byte_ns", "end_ns"):
            samples[name] = moment + (samples[name] - start) * factor(place / len(blocks))
        np.save(directory / block["samples"], samples)


@pytest.mark.parametrize(
    ("factor", "ok"),
    [
        (lambda place: 1.0 + 0.0 * place, True),
        (lambda place: 1.0 + 0.4 * place, False),
        (lambda place: 1.3 if 0.4 < place < 0.6 else 1.0, False),
        (lambda place: 1.5 if round(place * 56) % 3 == 0 else 1.0, False),
    ],
    ids=["steady", "slower and slower", "slow in the middle", "slow now and then"],
)
def test_a_machine_that_changed_its_speed_is_said_beside_the_verdict(
    tmp_path: Path, factor: Callable[[float], float], ok: bool
) -> None:
    write_run(tmp_path, Plan(**SMALL))
    slower(tmp_path, factor)
    result = analyse(tmp_path)
    judged = check(result, "machine_steady")
    assert (judged.ok, judged.severity) == (ok, "warns")
    assert result.valid
    assert (
        any("speed" in caveat and "%" in caveat for caveat in result.verdict.caveats if "weights" not in caveat) != ok
    )


@pytest.mark.parametrize(("requests", "ok"), [(20, None), (120, False)])
def test_blocks_that_send_other_lengths_are_no_speed_of_the_machine(
    tmp_path: Path, requests: int, ok: bool | None
) -> None:
    one_at_a_time = [load for load in workloads(12, requests) if load.name in ("single", "concurrent(16)")]
    write_run(tmp_path, Plan(pairs=12, workloads=tuple(one_at_a_time), drift=0.6))
    environment = json.loads((tmp_path / "environment.json").read_bytes())
    edit_json(tmp_path / "environment.json", inputs={**environment["inputs"], "length_min": 6, "length_max": 261})
    assert check(analyse(tmp_path), "machine_steady").ok is ok


def test_send_lag_is_judged_with_enough_samples_and_only_suspected_with_few(tmp_path: Path) -> None:
    write_run(tmp_path / "few", Plan(pairs=2, requests=60))
    edit_samples(tmp_path / "few", "concurrent(16)", late)
    few = check(analyse(tmp_path / "few"), "send_lag", "concurrent(16)")
    assert (few.ok, few.severity) == (None, "warns")
    write_run(tmp_path / "many", Plan(pairs=2, requests=700))
    edit_samples(tmp_path / "many", "concurrent(16)", late)
    result = analyse(tmp_path / "many")
    assert check(result, "send_lag", "concurrent(16)").ok is False
    assert not result.valid


def test_every_process_of_the_load_generator_takes_cores(tmp_path: Path) -> None:
    """Two processes of half a core each beside a server of one core: two of two cores."""
    write_run(tmp_path, Plan(**SMALL))
    for path in (tmp_path / "blocks").glob("*.json"):
        block = json.loads(path.read_text())
        window = {name: block[name] for name in ("window_start_ns", "window_end_ns")}
        span_ns = window["window_end_ns"] - window["window_start_ns"]
        worker = {"host": "here", "pid": 1, "requests": 40, "cpu_ns": span_ns // 2, **window}
        workers = [{"index": index, **worker} for index in (0, 1)]
        edit_json(path, generator_cpu_ns=span_ns, server_cpu_ns=span_ns, workers=workers)
    judged = check(analyse(tmp_path), "server_cpu")
    assert (judged.ok, judged.detail) == (False, "server and load generator used up to 2.00 of 2 cores")


def test_a_queue_delay_under_serial_load_is_seen(tmp_path: Path) -> None:
    write_run(tmp_path, Plan(**SMALL))
    for path in (tmp_path / "blocks").glob("*.json"):
        block = json.loads(path.read_text())
        if block["workload"] == "single" and block["label"] == "b":
            block["stages"]["queue_ns"] = 5_000_000 * block["requests"]
            block["stages"]["compute_infer_ns"] -= 5_000_000 * block["requests"]
            path.write_text(json.dumps(block))
    result = analyse(tmp_path)
    assert check(result, "queue_delay", "single").ok is False


@pytest.mark.parametrize(
    ("batching", "line"),
    [
        ({}, None),
        ({"default_queue_policy": {"timeout_action": "REJECT", "default_timeout_microseconds": "0"}}, None),
        (
            {"default_queue_policy": {"default_timeout_microseconds": "500000", "max_queue_size": 9}},
            "default_queue_policy { default_timeout_microseconds: 500000 max_queue_size: 9 }",
        ),
        (
            {"default_queue_policy": {"allow_timeout_override": True}},
            "default_queue_policy { allow_timeout_override: true }",
        ),
        ({"priority_levels": "2"}, "priority_levels: 2"),
    ],
)
@pytest.mark.parametrize("workload", ["single", "concurrent(16)"])
def test_the_remedy_of_stalls_is_the_line_of_the_queue_policy(
    tmp_path: Path, workload: str, batching: dict[str, object], line: str | None
) -> None:
    fast = SimulatedArm(1.0, 0.5, 0.5)
    loads = tuple(load for load in workloads(4, 600) if load.name == workload)
    write_run(tmp_path, Plan(a=fast, b=replace(fast, stall_share=0.1), workloads=loads))
    path = tmp_path / "arms.json"
    arms = json.loads(path.read_text())
    arms[1]["model_config"]["dynamic_batching"] = batching
    path.write_text(json.dumps(arms))
    result = analyse(tmp_path)
    stalls, policy = check(result, "half_second_stalls", workload), check(result, "queue_policy")
    assert stalls.ok is False
    assert "requests to Triton" in stalls.detail
    assert "requests to A" not in stalls.detail
    assert policy.ok is (line is None)
    if line is None:
        assert "no queue policy" in stalls.detail
        assert "timer of 0.5 s" in stalls.remedy
    else:
        assert f"Remove {line} from" in stalls.remedy
        assert policy.remedy == stalls.remedy
        assert line in policy.detail


def test_requests_refused_after_half_a_second_stalled_too(tmp_path: Path) -> None:
    write_run(tmp_path, Plan(**SMALL))
    edit_samples(tmp_path, "single", lambda samples: waited(samples, [500.0, 510.0, 490.0], refused=1), "b")
    detail = check(analyse(tmp_path), "half_second_stalls", "single").detail
    assert detail.startswith(
        "12 of 104 requests to Triton (12 %) waited about 0.5 s, where the median of the others is 13."
    )
    assert "and 4 of them were refused as unavailable (503)" in detail


@pytest.mark.parametrize(
    ("label", "extra_ms", "ok"),
    [
        ("a", [500.0], False),
        ("b", [], True),
        ("b", [500.0, 160.0, 210.0, 290.0], True),  # a tail that falls
        ("b", [*np.linspace(1.0, 600.0, 26)], True),  # a tail that is even, up to the same end
        ("b", [*np.linspace(1.0, 1500.0, 26)], True),
        ("b", [700.0, 720.0, 900.0], True),
    ],
)
def test_only_a_cluster_of_half_a_second_is_a_stall(
    tmp_path: Path, label: str, extra_ms: list[float], ok: bool
) -> None:
    write_run(tmp_path, Plan(**SMALL))
    edit_samples(tmp_path, "single", lambda samples: waited(samples, extra_ms), label)
    judged = check(analyse(tmp_path), "half_second_stalls", "single")
    assert judged.ok is ok
    assert "Triton's" not in judged.detail


def test_two_stalls_may_be_chance_and_those_of_a_slow_server_are_not_told_apart(tmp_path: Path) -> None:
    write_run(tmp_path, Plan(pairs=2, requests=80))
    edit_samples(tmp_path, "single", lambda samples: waited(samples, [500.0]), "b")
    assert check(analyse(tmp_path), "half_second_stalls", "single").ok is True
    slow = SimulatedArm(overhead_ms=250.0)
    write_run(tmp_path / "slow", Plan(a=slow, b=slow, **SMALL))
    edit_samples(tmp_path / "slow", "single", lambda samples: waited(samples, [500.0]), "b")
    assert "half_second_stalls" not in {made.name for made in analyse(tmp_path / "slow").checks}


def test_a_request_that_is_in_no_stage_is_seen(tmp_path: Path) -> None:
    result = analyse(write_run(tmp_path, Plan(b=SimulatedArm(transport_ms=60.0, reports_http=False), **SMALL)))
    failed = check(result, "latency_breakdown", "single")
    assert failed.ok is False
    assert "of a request to Triton" in failed.detail
    assert "is unattributed" in failed.detail
    assert result.valid, "it informs"


def test_a_server_that_counts_other_requests_is_seen(tmp_path: Path) -> None:
    write_run(tmp_path, Plan(**SMALL))
    path = tmp_path / "blocks" / "0000.json"
    block = json.loads(path.read_text())
    block["stages"]["requests"] += 3
    path.write_text(json.dumps(block))
    failed = check(analyse(tmp_path), "latency_breakdown")
    assert failed.ok is False
    assert "counted" in failed.detail


def test_a_difference_that_was_asked_for_warns_instead(tmp_path: Path) -> None:
    plan = Plan(b_settings={"precision": "fp16"}, b_in_effect={"precision": "fp16"}, **SMALL)
    result = analyse(write_run(tmp_path, plan))
    precision = check(result, "same_precision")
    assert (precision.ok, precision.severity) == (False, "warns")
    assert result.valid
    assert any("compares settings" in caveat for caveat in result.verdict.caveats)


def test_a_failed_workload_leaves_the_other_workloads_their_verdict(tmp_path: Path) -> None:
    write_run(tmp_path, Plan(**SMALL))
    edit_blocks(tmp_path, "single", generator_cpu_ns=10**12)
    result = analyse(tmp_path)
    verdicts = {scenario: {c.verdict for c in result.comparisons if c.workload == scenario and c.ratios}
                for scenario in ("single", "concurrent(16)")}  # fmt: skip
    assert verdicts == {"single": {"invalid"}, "concurrent(16)": {"arm_better"}}
    assert not result.valid
    assert result.verdict.sentence.startswith("No verdict on 1 of 4 workloads")


def test_answers_that_are_all_alike_are_expected_of_the_null_engine_and_possible_for_labels(tmp_path: Path) -> None:
    write_run(tmp_path, Plan(**SMALL))
    answer_alike(tmp_path)
    for arm in range(2):
        edit_arm(tmp_path, arm, engine="null")
    result = analyse(tmp_path)
    assert result.valid
    assert "answers_depend_on_inputs" not in {made.name for made in result.checks}
    edit_arm(tmp_path, 1, engine="torch")
    edit_json(tmp_path / "parity.json", kinds={"y": "labels"})
    judged = check(analyse(tmp_path), "answers_depend_on_inputs")
    assert (judged.ok, judged.severity) == (False, "warns")
    assert judged.detail == "the answers of Triton do not depend on the inputs: all of them are alike"


@pytest.mark.parametrize(("limit", "named"), [(8, True), (32, False), (None, False)])
def test_a_request_that_an_arm_refuses_is_no_wrong_answer(tmp_path: Path, limit: int | None, named: bool) -> None:
    write_run(tmp_path, Plan(b_in_effect={} if limit is None else {"max_batch_size": limit}, **SMALL))
    refuse(tmp_path)
    result = analyse(tmp_path)
    assert [(c.name, c.arms) for c in result.checks if c.name.startswith("parity")] == [("parity_answered", ("b",))]
    [check] = [check for check in result.checks if check.name == "parity_answered"]
    assert "HTTP 400: at most 8 items" in check.detail
    assert ("--b-option max-batch-size=16" in check.remedy) == named
    assert validity(result.checks) == "INVALID: failed requests"


def test_failed_parity_leaves_no_verdict_at_all(tmp_path: Path) -> None:
    result = analyse(write_run(tmp_path, Plan(parity_cosine=0.91, **SMALL)))
    assert {c.verdict for c in result.comparisons} == {"invalid"}
    assert result.verdict.sentence.startswith("No verdict. The arms give different answers in 4 of 4 cases")


def test_without_its_data_no_check_is_ok(tmp_path: Path) -> None:
    """Two servers by URL that report nothing, on a machine that recorded nothing, in a run without samples."""
    write_run(tmp_path, Plan(pairs=2, cut_after=0, state="running"))
    for name in ("environment.json", "parity.json", "run.json", "cold_starts.json"):
        (tmp_path / name).unlink()
    arms = json.loads((tmp_path / "arms.json").read_text())
    for arm in arms:
        arm |= {"in_effect": {}, "model_config": None, "argv": None, "settings": {"threads": "2"}}
    (tmp_path / "arms.json").write_text(json.dumps(arms))
    result = analyse(tmp_path)
    assert not result.valid
    assert {c.name for c in result.checks if c.ok} == set()


def test_a_check_survives_the_round_trip(tmp_path: Path) -> None:
    for made in analyse(write_run(tmp_path, Plan(**SMALL))).checks:
        assert msgspec.json.decode(msgspec.json.encode(made), type=Check) == made


def test_the_document_lists_every_check_with_its_effect() -> None:
    """By effect, the gravest first; a failure shows the list that belongs into the document."""
    document = (Path(__file__).parents[4] / "docs" / "measurement.md").read_text()
    effects, gravest_first = {(d.severity, d.unknown) for d in CHECKS.values()}, "invalidates roughens warns informs"
    listed = ""
    for effect in sorted(effects, key=lambda effect: [gravest_first.index(word) for word in effect]):
        listed += "\n**Fails: {}. Not available: {}.**\n\n".format(*effect)
        listed += "".join(f"- `{d.name}`: {d.title}\n" for d in CHECKS.values() if (d.severity, d.unknown) == effect)
    assert listed in document, listed


@pytest.fixture
def own_registry() -> Iterator[None]:
    """What a test declares is forgotten after it."""
    before = dict(CHECKS)
    yield
    CHECKS.clear()
    CHECKS.update(before)


@pytest.mark.usefixtures("own_registry")
def test_a_new_check_is_one_function(tmp_path: Path) -> None:
    """Declared where it is computed, it is in the result, takes the verdict and stands in the report."""

    @declare(
        title="no block is short", failed="A block is short", severity="invalidates", remedy="Ask for longer blocks."
    )
    def toy_check(facts: Facts) -> Iterator[Judgement]:
        for load in facts.loads:
            shortest = min(block.duration_s for block in load.blocks)
            yield Judgement(shortest > 1e6, f"the shortest takes {shortest:.1f} s", shortest, 1e6, load.scope)

    result = analyse(write_run(tmp_path, Plan(pairs=2)))
    toys = [made for made in result.checks if made.name == "toy_check"]
    assert result.checks[-len(toys) :] == tuple(toys)
    assert [toy.scope for toy in toys] == [
        f"workload {workload.name}" for workload in result.experiment.workloads if workload.has_blocks
    ]
    assert not result.valid
    assert any("In single and 6 more workloads, the shortest takes" in reason for reason in result.verdict.failed)
    page = render_markdown(result_document(result))
    assert "A block is short" in page
    assert "Ask for longer blocks." in page


def test_two_checks_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two checks parity"):
        declare(title="", failed="", severity="informs", remedy="")(CHECKS["parity"].find)
