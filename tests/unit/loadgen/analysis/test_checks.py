"""Every check can fail, is never ok without its data, and takes the verdict from what it covers and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from loadgen.analysis.analysis import analyse
from loadgen.analysis.checks.fairness.definitions import FAIRNESS_DEFINITIONS
from loadgen.analysis.checks.outcome import DEFINITIONS, Check, CheckName
from loadgen.analysis.result import Result
from tests.golden.synthetic_run import Plan, SimulatedArm, write_run

SMALL = {"pairs": 4, "requests": 80}
Edit = Callable[[Path], None]


def check(result: Result, name: str, cell: str | None = None) -> Check:
    found = [c for c in result.checks if c.name == name and (cell is None or c.scope == f"cell {cell}")]
    return min(found, key=lambda c: (c.ok is not False, c.ok is not None))


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_arm(directory: Path, label: int, **in_effect: object) -> None:
    path = directory / "arms.json"
    arms = json.loads(path.read_text())
    arms[label]["in_effect"] |= in_effect
    path.write_text(json.dumps(arms))


def edit_blocks(directory: Path, cell: str, **changes: object) -> None:
    for path in (directory / "blocks").glob("*.json"):
        if json.loads(path.read_text())["cell"] == cell:
            edit_json(path, **changes)


def edit_samples(directory: Path, cell: str, change: Callable[[np.ndarray], object], label: str = "ab") -> None:
    for path in (directory / "blocks").glob("*.json"):
        block = json.loads(path.read_text())
        if block["cell"] == cell and block["label"] in label:
            samples = np.load(directory / block["samples"])
            change(samples)
            np.save(directory / block["samples"], samples)


def bigger(samples: np.ndarray) -> None:
    samples["request_bytes"] *= 2


def hollow(samples: np.ndarray) -> None:
    """Three of four, so that the empty ones are the usual ones."""
    samples["response_bytes"][np.arange(len(samples)) % 4 > 0] = 180


def late(samples: np.ndarray) -> None:
    samples["intended_ns"] -= np.where(np.arange(len(samples)) % 20 == 0, 50_000_000, 0)


def break_sample_file(directory: Path) -> None:
    path = directory / "samples" / "0003.npy"
    path.write_bytes(path.read_bytes()[:-80])


def disagree(directory: Path) -> None:
    path = directory / "parity.json"
    parity = json.loads(path.read_text())
    parity["ok"] = parity["cases"][1]["ok"] = False
    parity["cases"][1]["cosine_min"] = 0.93
    path.write_text(json.dumps(parity))


def fail_a_start(directory: Path) -> None:
    path = directory / "cold_starts.json"
    starts = json.loads(path.read_text())
    starts[1] |= {"ready_ns": None, "first_answer_ns": None, "error": "exited with status 1"}
    path.write_text(json.dumps(starts))


def sent_other_payloads(directory: Path) -> None:
    path = directory / "experiment.json"
    experiment = json.loads(path.read_text())
    experiment["b"]["payload"] = "jpeg"
    path.write_text(json.dumps(experiment))


FAULTS: list[tuple[str, str, Edit | None, Plan]] = [
    ("gpu_present", "informs", None, Plan(**SMALL)),
    ("run_finished", "invalidates", None, Plan(state="interrupted", cut_after=50, **SMALL)),
    ("parity", "invalidates", disagree, Plan(**SMALL)),
    ("same_payload", "invalidates", sent_other_payloads, Plan(**SMALL)),
    ("request_errors", "invalidates", None, Plan(failing_block=3, **SMALL)),
    ("whole_answers", "invalidates", lambda d: edit_samples(d, "single", hollow, "b"), Plan(**SMALL)),
    ("blocks_complete", "invalidates", lambda d: edit_json(d / "blocks/0005.json", complete=False), Plan(**SMALL)),
    ("samples_complete", "invalidates", break_sample_file, Plan(**SMALL)),
    ("cold_starts_succeeded", "invalidates", fail_a_start, Plan(**SMALL)),
    ("enough_pairs", "warns", None, Plan(pairs=1)),
    ("generator_cpu", "invalidates", lambda d: edit_blocks(d, "single", generator_cpu_ns=10**12), Plan(**SMALL)),
    ("warm_up", "invalidates", None, Plan(a=SimulatedArm(first_request_extra_ms=400.0), **SMALL)),
    ("same_payload_bytes", "invalidates", lambda d: edit_samples(d, "single", bigger, "b"), Plan(**SMALL)),
    ("same_model", "invalidates", lambda d: edit_arm(d, 1, model="resnet50"), Plan(b_in_effect={}, **SMALL)),
    ("same_weights", "invalidates", lambda d: edit_arm(d, 1, weights="laion2b_s34b_b79k"), Plan(**SMALL)),
    ("same_precision", "invalidates", lambda d: edit_arm(d, 1, precision="tf32"), Plan(**SMALL)),
    ("same_device", "invalidates", lambda d: edit_arm(d, 1, device="cuda:0"), Plan(**SMALL)),
    ("same_threads", "invalidates", lambda d: edit_arm(d, 1, threads=1), Plan(**SMALL)),
    ("same_max_batch_size", "invalidates", lambda d: edit_arm(d, 1, max_batch_size=8), Plan(**SMALL)),
    ("settings_in_effect", "warns", None, Plan(b_settings={"max-queue-delay-us": "500"}, **SMALL)),
    ("machine_steady", "warns", None, Plan(drift=0.6, **SMALL)),
    (
        "wall_clock",
        "informs",
        lambda d: edit_json(d / "blocks/0005.json", started_at="2026-03-02T14:00:00Z"),
        Plan(**SMALL),
    ),
    ("server_cpu", "informs", lambda d: edit_blocks(d, "single", server_cpu_ns=10**12), Plan(**SMALL)),
    ("batching_formed", "informs", None, Plan(b=SimulatedArm(max_batch=1), **SMALL)),
    ("sensitivity", "informs", None, Plan(block_noise=0.2, **SMALL)),
    ("trained_weights", "informs", None, Plan(**SMALL)),
    ("native_backend", "informs", None, Plan(**SMALL)),
]


def test_answers_of_somebody_elses_server_may_differ_in_size(tmp_path: Path) -> None:
    write_run(tmp_path, Plan(**SMALL))
    edit_samples(tmp_path, "single", hollow, "b")
    path = tmp_path / "arms.json"
    arms = json.loads(path.read_text())
    arms[1]["launched"] = False
    path.write_text(json.dumps(arms))
    result = analyse(tmp_path)
    told = check(result, "whole_answers")
    assert (told.ok, told.severity) == (False, "warns")
    assert "answers of B are less than 50 % of its largest" in told.detail
    assert result.valid


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
    assert result.valid == (severity != "invalidates")


def test_the_faults_above_are_the_whole_registry() -> None:
    """send_lag, queue_delay and stage_account have their own tests below, evidence has test_gpu_evidence, the open loop
    test_open_loop."""
    open_loop = {"generator_ceiling", "connections_free", "rate_sustained"}
    repetition = {"restarts", "noise_floor", "repeated_requests"}  # test_repetition
    elsewhere = (
        repetition | {"send_lag", "queue_delay", "stage_account", "gpu_evidence", "negative_control"} | open_loop
    )
    fairness = {name.value for name in FAIRNESS_DEFINITIONS}  # test_fairness
    searches = {"searches_ended"}  # tests/unit/loadgen/search/test_search_checks.py
    ceilings = {"engine_ceiling"}  # test_ceilings
    covered = {fault[0] for fault in FAULTS} | elsewhere | fairness | searches | ceilings
    assert covered == {name.value for name in CheckName} == {name.value for name in DEFINITIONS}


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


def test_a_queue_delay_under_serial_load_is_seen(tmp_path: Path) -> None:
    write_run(tmp_path, Plan(**SMALL))
    for path in (tmp_path / "blocks").glob("*.json"):
        block = json.loads(path.read_text())
        if block["cell"] == "single" and block["label"] == "b":
            block["stages"]["queue_ns"] = 10_000_000 * block["requests"]
            path.write_text(json.dumps(block))
    result = analyse(tmp_path)
    assert check(result, "queue_delay", "single").ok is False
    assert check(result, "stage_account", "single").ok is False  # 10 ms more than the client saw


def test_a_request_that_is_in_no_stage_is_seen(tmp_path: Path) -> None:
    result = analyse(write_run(tmp_path, Plan(b=SimulatedArm(transport_ms=60.0, reports_http=False), **SMALL)))
    failed = check(result, "stage_account", "single")
    assert failed.ok is False
    assert "of a request to B" in failed.detail
    assert "is in no stage" in failed.detail
    assert result.valid, "it informs"


def test_a_server_that_counts_other_requests_is_seen(tmp_path: Path) -> None:
    write_run(tmp_path, Plan(**SMALL))
    path = tmp_path / "blocks" / "0000.json"
    block = json.loads(path.read_text())
    block["stages"]["requests"] += 3
    path.write_text(json.dumps(block))
    failed = check(analyse(tmp_path), "stage_account")
    assert failed.ok is False
    assert "counted" in failed.detail


def test_a_difference_that_was_asked_for_warns_instead(tmp_path: Path) -> None:
    plan = Plan(b_settings={"precision": "fp16"}, b_in_effect={"precision": "fp16"}, **SMALL)
    result = analyse(write_run(tmp_path, plan))
    precision = check(result, "same_precision")
    assert (precision.ok, precision.severity) == (False, "warns")
    assert result.valid
    assert any("not servers alone" in caveat for caveat in result.verdict.caveats)


def test_a_failed_cell_leaves_the_other_cells_their_verdict(tmp_path: Path) -> None:
    write_run(tmp_path, Plan(**SMALL))
    edit_blocks(tmp_path, "single", generator_cpu_ns=10**12)
    result = analyse(tmp_path)
    verdicts = {scenario: {c.verdict for c in result.comparisons if c.scenario == scenario and c.ratios}
                for scenario in ("single", "concurrent(16)")}  # fmt: skip
    assert verdicts == {"single": {"invalid"}, "concurrent(16)": {"b_faster"}}
    assert not result.valid
    assert result.verdict.headline.startswith("No verdict on 1 of 8 scenarios")


def test_failed_parity_leaves_no_verdict_at_all(tmp_path: Path) -> None:
    result = analyse(write_run(tmp_path, Plan(parity_cosine=0.91, **SMALL)))
    assert {c.verdict for c in result.comparisons} == {"invalid"}
    assert result.verdict.headline.startswith(
        "No verdict: “both arms give the same answers” failed: 4 of 4 cases disagree"
    )


def test_without_its_data_no_check_is_ok(tmp_path: Path) -> None:
    """Two servers by URL that tell nothing, on a machine that recorded nothing, in a run without samples."""
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
    for one in analyse(write_run(tmp_path, Plan(**SMALL))).checks:
        assert msgspec.json.decode(msgspec.json.encode(one), type=Check) == one


def test_the_document_lists_every_check_with_its_effect() -> None:
    document = (Path(__file__).parents[4] / "docs" / "measurement.md").read_text()
    for name, definition in DEFINITIONS.items():
        assert f"| `{name.value}` | {definition.title} | {definition.severity} | {definition.unknown} |" in document
