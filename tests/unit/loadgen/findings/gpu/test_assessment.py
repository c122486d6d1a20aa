"""The verdict on recordings of a scripted GPU: what must be verified, what must not, and the negative control."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from loadgen.checks.gpu import may_rank
from loadgen.findings.gpu.decision import decide
from loadgen.findings.gpu.records import EvidenceRecord, GpuFinding, InconclusiveCode
from tests.scripted_reader import Fault
from tests.unit.loadgen.findings.gpu.conftest import UUID

Run = Callable[..., EvidenceRecord]
S = 1_000_000_000
NAMES = {label: label.upper() if len(label) == 1 else label for label in ("a", "b", "c", "torch", "onnx", "tensorrt")}


def test_a_busy_gpu_with_the_servers_process_is_verified(run: Run, plan: Any) -> None:
    record = run(plan())
    assert (record.finding, record.code, record.activity, record.attributed) == ("GPU_VERIFIED", None, "active", True)
    gpu = record.inputs.gpu
    assert gpu is not None
    assert gpu.busy_s == pytest.approx(0.9 * 40, rel=0.02)
    assert gpu.coverage == pytest.approx(1.0, abs=0.001)
    assert gpu.energy_joules == pytest.approx(600 * 40, rel=0.03)
    assert gpu.idle_power_watts == pytest.approx(80, rel=0.01)
    assert gpu.energy_excess_joules == pytest.approx(520 * 40, rel=0.04)
    assert gpu.joules_per_item == pytest.approx(600 / 50, rel=0.03)
    assert record.notes == ("no CPU control run to compare the CPU's work with",)


def test_an_idle_gpu_under_load_is_never_verified(run: Run, plan: Any) -> None:
    record = run(plan(busy=0.0, watts=80.0))
    assert (record.finding, record.code, record.activity) == ("INCONCLUSIVE", InconclusiveCode.CONFLICT, "idle")


def test_negative_control(run: Run, plan: Any, cpu_info: Any) -> None:
    """The arm run deliberately on the CPU says no, and the same server lying about its placement is found out."""
    slow = plan(busy=0.0, watts=80.0, requests_per_s=5.0, server_cpu_s_per_request=0.4)
    control = run(slow, gpu_info=cpu_info, is_control=True)
    assert (control.finding, control.control, control.cpu_witness) == ("CPU_FALLBACK", True, True)
    liar = run(slow, control=control)
    assert (liar.finding, liar.inputs.placement.result, liar.cpu_witness) == ("CPU_FALLBACK", "gpu", True)
    fast = run(plan(), control=control)
    assert (fast.finding, fast.cpu_witness) == ("GPU_VERIFIED", False)
    assert not may_rank({"a": fast, "b": liar}, NAMES)[0]
    assert not may_rank({"a": fast, "b": control}, NAMES)[0]


def test_a_control_beside_other_work_on_the_gpu_still_says_no(run: Run, plan: Any, cpu_info: Any) -> None:
    record = run(plan(), gpu_info=cpu_info, is_control=True)
    assert record.finding == "CPU_FALLBACK"
    assert any("another process used it" in note for note in record.notes)


@pytest.mark.parametrize(
    ("fields", "changes", "code"),
    [
        ({"block_s": 2.0, "requests_per_s": 40.0}, {}, "short_window"),
        ({"requests_per_s": 2.0}, {}, "few_requests"),
        ({"errors": 30}, {}, "many_errors"),
        ({}, {"gaps": []}, "no_idle_gap"),
        ({"gap_s": 4.5}, {}, "no_idle_gap"),
        ({"drop": lambda line: line["type"] == "edge"}, {}, "nvml_unhealthy"),
        ({"drop": lambda line: line["type"] == "samples" and line["at_ns"] < 140 * S}, {}, "low_coverage"),
        ({"faults": [Fault(0, 2**62, "samples", "NOT_SUPPORTED")]}, {}, "low_coverage"),
        ({"faults": [Fault(120 * S, 124 * S, "*", "GPU_IS_LOST")]}, {}, "gpu_lost_midrun"),
        ({"faults": [Fault(0, 2**62, "*", "UNKNOWN")]}, {}, "no_nvml"),
        ({"pids": ()}, {}, "unattributed"),
        ({"pids": ()}, {"gpu_info": None}, "unknown_placement"),
        ({"busy": 0.03, "watts": 83.0}, {}, "low_duty"),
        ({"busy": 0.9, "watts": 81.0}, {}, "low_duty"),
        ({"busy": 0.02, "watts": 200.0}, {}, "low_duty"),
        ({"faults": [Fault(0, 2**62, call, "NOT_SUPPORTED") for call in ("energy", "power")]}, {}, "low_coverage"),
    ],
)
def test_inconclusive(run: Run, plan: Any, fields: dict[str, Any], changes: dict[str, Any], code: str) -> None:
    record = run(plan(**fields), **changes)
    assert (record.finding, record.code) == ("INCONCLUSIVE", code)
    assert record.sentence.endswith(".")


def test_a_few_answers_that_come_token_by_token_suffice(run: Run, plan: Any) -> None:
    few = plan(requests_per_s=0.2)
    streams = [msgspec.structs.replace(block, transport="completions") for block in few.block_records()]
    assert run(few).code == "few_requests"
    assert run(few, blocks=streams).finding == "GPU_VERIFIED"
    assert run(few, blocks=streams[:2]).code == "few_requests"


def test_work_of_another_process_is_named_and_attributes_nothing(run: Run, plan: Any, cpu_info: Any) -> None:
    """The attacker's case: "the GPU stayed idle" was printed with another process at 99 %."""
    busy = plan(busy=0.99, watts=600.0, idle_busy=0.99, idle_watts=600.0, pids=(4711, 99))
    control = run(busy, gpu_info=cpu_info, is_control=True)
    said = "ith nothing sent, the GPU was busy 99 % of the time (other processes on it: 99)"
    assert (control.finding, control.activity) == ("CPU_FALLBACK", None)
    assert f"w{said}" in control.notes
    for record in (run(busy), run(plan(idle_busy=0.99, idle_watts=90.0, pids=(4711, 99))), run(busy, control=control)):
        assert (record.finding, record.code, record.activity) == ("INCONCLUSIVE", "unattributed", None)
        assert record.sentence == f"W{said}, so its activity under load cannot be attributed to this server."
    unseen = run(plan(busy=0.99, watts=600.0, idle_busy=0.99, idle_watts=600.0, pids=()))
    assert unseen.sentence.startswith("With nothing sent, the GPU was busy 99 % of the time, so ")


NATIVE_BACKEND: dict[str, Any] = {
    "gpu_info": {"runtime": {"kind": "triton", "placement": {"result": "unknown"}, "used_device_uuid": None}},
    "model_config": {"backend": "onnxruntime", "instance_group": [{"kind": "KIND_GPU", "gpus": [0]}]},
}


def test_a_backend_that_reports_no_nodes_is_verified_by_its_process(run: Run, plan: Any) -> None:
    """Its process holds memory of the GPU, which works only under its load; the control run said no."""
    record = run(plan(), **NATIVE_BACKEND, control_idle=True)
    assert (record.finding, record.inputs.placement.result, record.inputs.attribution.foreign) == (
        "GPU_VERIFIED", "unreported", False,
    )  # fmt: skip
    assert record.inputs.attribution.memory_bytes == 2**29
    assert "512 MiB" in record.sentence
    assert any("not every node is shown to run on the GPU" in n and "2 ms of CPU time" in n for n in record.notes)
    assert record.inputs.gpu is not None
    assert record.inputs.gpu.joules_per_item is not None
    without_control = run(plan(), **NATIVE_BACKEND)
    assert without_control.finding == "GPU_VERIFIED"
    assert "no CPU control run to compare the CPU's work with" in without_control.notes


@pytest.mark.parametrize(
    ("fields", "changes", "code", "words"),
    [
        ({"pids": (4712,)}, {}, "unknown_placement", "none of the server's processes is on the GPU's process list"),
        ({"pids": ()}, {"processes_unknown": {"a": "nginx listens on port 80"}, "server_pids": ()},
         "unknown_placement", "the server's processes are unknown: nginx"),
        ({}, {"processes_unknown": {"b": "it runs elsewhere"}}, "unknown_placement", "may belong to no arm"),
        ({}, {"control_idle": False}, "unknown_placement", "the CPU control run was not recognised"),
        ({"busy": 0.0, "watts": 80.0}, {}, "unknown_placement", "the GPU did no more than with nothing sent"),
        ({"pids": (4711, 99)}, {}, "unattributed", "Another process used the GPU (99)"),
        ({"busy": 0.03, "watts": 83.0}, {}, "low_duty", "too little"),
        ({}, {"model_config": {"backend": "onnxruntime", "instance_group": [{"kind": "KIND_GPU"},
                                                                          {"kind": "KIND_CPU"}]}},
         "unknown_placement", "KIND_CPU, KIND_GPU"),
    ],
)  # fmt: skip
def test_each_part_of_the_proof_by_process_is_needed(
    run: Run, plan: Any, fields: dict[str, Any], changes: dict[str, Any], code: str, words: str
) -> None:
    record = run(plan(**fields), **{**NATIVE_BACKEND, **changes})
    assert (record.finding, record.code) == ("INCONCLUSIVE", code)
    assert words in record.sentence


def test_a_cpu_that_worked_as_in_the_control_run_is_no_gpu(run: Run, plan: Any, cpu_info: Any) -> None:
    slow = plan(requests_per_s=5.0, server_cpu_s_per_request=0.4)
    control = run(plan(busy=0.0, watts=80.0, requests_per_s=5.0, server_cpu_s_per_request=0.4), gpu_info=cpu_info,
                  is_control=True)  # fmt: skip
    assert run(slow, **NATIVE_BACKEND, control=control).code == "conflict"


def test_an_instance_kind_of_the_cpu_is_believed(run: Run, plan: Any) -> None:
    config = {"backend": "onnxruntime", "instance_group": [{"kind": "KIND_CPU"}]}
    record = run(plan(), **{**NATIVE_BACKEND, "model_config": config})
    assert record.finding == "CPU_FALLBACK"


def test_energy_is_charged_only_to_the_arm_whose_work_it_was(run: Run, plan: Any, cpu_info: Any) -> None:
    """Seen: 17.6 J/image for an arm on the CPU beside a GPU that another process held at 99 %."""
    foreign = {"pids": (4711, 99)}
    steady = {"busy": 0.99, "watts": 600.0, "idle_busy": 0.99, "idle_watts": 600.0}
    for record, reason in (
        (run(plan(**foreign, **steady), gpu_info=cpu_info), "the arm ran on the CPU"),
        (run(plan(), gpu_info=cpu_info), "the arm ran on the CPU"),
        (run(plan(**foreign)), "another process used the GPU"),
        (run(plan(**steady)), "the GPU was busy with nothing sent"),
        (run(plan(pids=())), "the GPU's work cannot be attributed to this arm"),
        (run(plan(busy=0.0, watts=80.0)), "the GPU did no more than with nothing sent"),
    ):
        assert record.no_energy is not None
        assert record.no_energy.startswith(reason)
        gpu = record.inputs.gpu
        assert gpu is not None
        assert (gpu.joules_per_item, gpu.excess_joules_per_item) == (None, None)
        assert gpu.energy_joules is not None, "the reading itself is kept"
    mine = run(plan())
    assert mine.no_energy is None
    assert mine.inputs.gpu is not None
    assert mine.inputs.gpu.joules_per_item == pytest.approx(12, rel=0.03)


def test_another_process_beside_the_arm_makes_its_work_nobodys(run: Run, plan: Any) -> None:
    """It may work only while the arm does, so idle gaps prove nothing; and PIDs of the host are not another process."""
    record = run(plan(pids=(4711, 99)))
    assert (record.finding, record.code, record.attributed) == ("INCONCLUSIVE", "unattributed", False)
    assert record.sentence == "Another process used the GPU (99), so its work cannot be attributed to any arm."
    other_arm = run(plan(pids=(4711, 4712)))
    assert (other_arm.finding, other_arm.inputs.attribution.foreign) == ("GPU_VERIFIED", False)
    hosts = run(plan(pids=(99,), blocks=12, pause_s=6.0))
    assert (hosts.finding, hosts.inputs.attribution.foreign) == ("GPU_VERIFIED", None)


def test_a_process_between_the_blocks_is_not_foreign(run: Run, plan: Any) -> None:
    """A server that is started again in the middle of a run may have short-lived processes."""

    def born(at_s: int) -> Callable[[dict[str, Any]], bool]:
        def change(line: dict[str, Any]) -> bool:
            if line["type"] == "edge" and line["at_ns"] == at_s * S:
                line["devices"][0]["processes"].append({"pid": 99, "used_bytes": 1})
            return False

        return change

    spread = plan(block_s=10.0, pause_s=20.0)  # blocks at 110–120, 140–150, 170–180 and 200–210 s
    for at_s, foreign in ((130, False), (160, False), (180, True), (150, True)):
        spread.drop = born(at_s)
        assert run(spread).inputs.attribution.foreign is foreign, at_s


def test_a_process_that_ends_before_the_first_gap_is_not_foreign(run: Run, plan: Any) -> None:
    """A server at its defaults is compared with an arm until then, and the sampler reads every 10 s by itself."""

    def read(at_s: float) -> Any:
        given = plan()
        edge = {
            "type": "edge", "at_ns": int(at_s * S), "label": "periodic", "status": "ok",
            "devices": [{"uuid": UUID, "processes": [{"pid": pid, "used_bytes": 1} for pid in (4711, 99)]}],
        }  # fmt: skip
        record = given.record
        given.record = lambda: sorted([*record(), edge], key=lambda line: line.get("at_ns", 0))
        return run(given)

    assert read(99.5).finding == "GPU_VERIFIED"
    assert read(104.0).code == "unattributed"


def test_no_readings_at_all(run: Run, plan: Any, tmp_path: Path) -> None:
    from loadgen.findings.gpu.analysis import assess
    from loadgen.findings.gpu.records import read_readings

    blocks = plan().block_records()
    record = assess(
        read_readings(tmp_path, []), label="a", workload=None, blocks=blocks, gaps=[], ended_before=np.zeros_like,
        gpu_info=None, model_config=None,
    )  # fmt: skip
    assert (record.finding, record.code) == ("INCONCLUSIVE", "no_nvml")


def test_the_wrong_gpu(run: Run, plan: Any, gpu_info: Any) -> None:
    other = {"runtime": gpu_info["runtime"] | {"used_device_uuid": "GPU-other"}}
    assert run(plan(), gpu_info=other).code == "wrong_gpu"


def test_power_stands_in_for_an_energy_counter(run: Run, plan: Any) -> None:
    record = run(plan(faults=[Fault(0, 2**62, "energy", "NOT_SUPPORTED")]))
    assert record.finding == "GPU_VERIFIED"
    gpu = record.inputs.gpu
    assert gpu is not None
    assert gpu.energy_source == "power"
    assert gpu.energy_joules == pytest.approx(600 * 40, rel=0.05)
    assert any("no energy counter" in note for note in record.notes)


def test_all_processes_ours_and_idle_gaps_attribute(run: Run, plan: Any) -> None:
    """The server's own PID is not known, say because it runs in a child: still nobody else is there."""
    record = run(plan(pids=(4712,)))
    assert record.inputs.attribution.pid_resolved is False
    assert (record.inputs.attribution.exclusive, record.finding) == (True, "GPU_VERIFIED")
    strangers = run(plan(pids=(4712, 99)))
    assert (strangers.code, strangers.inputs.attribution.foreign_pids) == ("unattributed", (99,))


def test_moving_with_the_requests_attributes(run: Run, plan: Any) -> None:
    """PIDs hidden, more than 100 s of load and gaps: the on and off of the blocks suffices."""
    record = run(plan(pids=(), blocks=12, pause_s=6.0))
    assert record.inputs.attribution.bins > 100
    assert record.inputs.attribution.correlation == pytest.approx(1.0, abs=0.1)
    assert (record.finding, record.attributed) == ("GPU_VERIFIED", True)


def test_activity_that_ignores_the_requests_is_not_attributed(run: Run, plan: Any) -> None:
    """Somebody else's work all through the load, while this arm's requests come and go."""
    some = plan(pids=(), blocks=12, pause_s=0.0)
    ends = some.completions_ns()
    in_bursts = ends[(ends // (7 * S)) % 3 == 0]
    record = run(some, ended_before=partial(np.searchsorted, in_bursts))
    assert record.inputs.attribution.correlation is not None
    assert record.inputs.attribution.correlation < 0.6
    assert record.code == "unattributed"


def test_the_stored_record_gives_the_same_decision(run: Run, plan: Any, cpu_info: Any) -> None:
    for record in (run(plan()), run(plan(busy=0.0, watts=80.0)), run(plan(), gpu_info=cpu_info)):
        again = msgspec.json.decode(msgspec.json.encode(record), type=EvidenceRecord)
        assert again == record
        assert decide(again.label, again.workload, again.inputs, again.thresholds) == record


def test_ranking_needs_both_verified_on_one_gpu(run: Run, plan: Any) -> None:
    verified = run(plan())
    assert may_rank({"a": verified, "b": verified}, NAMES) == (True, f"Both arms are GPU_VERIFIED on {verified.uuid}.")
    weak = run(plan(block_s=2.0, requests_per_s=40.0))
    assert may_rank({"a": verified, "b": weak}, NAMES) == (
        False, "B is INCONCLUSIVE (short_window): 8.0 s of load, 10 s are needed.",
    )  # fmt: skip
    assert may_rank({"a": None, "b": verified}, NAMES) == (False, "Nothing shows where A ran.")
    health = msgspec.structs.replace(verified.inputs.health, uuid="GPU-other")
    elsewhere = msgspec.structs.replace(verified, inputs=msgspec.structs.replace(verified.inputs, health=health))
    allowed, reason = may_rank({"a": verified, "b": elsewhere}, NAMES)
    assert not allowed
    assert "different GPUs" in reason
    assert may_rank({"a": verified, "b": verified, "c": verified}, NAMES) == (
        True, f"All arms are GPU_VERIFIED on {verified.uuid}.",
    )  # fmt: skip
    assert may_rank({"a": verified, "b": verified, "c": weak}, NAMES)[1].startswith("C is INCONCLUSIVE")
    assert may_rank({"torch": verified, "onnx": verified, "tensorrt": elsewhere}, NAMES) == (
        False,
        f"The arms ran on different GPUs: torch on {verified.uuid}, onnx on {verified.uuid}, tensorrt on GPU-other.",
    )


def test_an_energy_counter_that_falls_is_another_driver(run: Run, plan: Any) -> None:
    def fall(line: dict[str, Any]) -> bool:
        if line["type"] == "reading" and line["at_ns"] > 130 * S:
            line["energy_joules"] -= 1e5
        return False

    assert run(plan(drop=fall)).code == "device_changed"


def test_findings_are_three() -> None:
    assert {str(f) for f in GpuFinding} == {"GPU_VERIFIED", "CPU_FALLBACK", "INCONCLUSIVE"}


def test_interleaved_arms_are_judged_by_their_own_blocks(run: Run, plan: Any) -> None:
    """A works on the GPU, B claims to and does not: its blocks lie in A's pauses, a second away."""
    a = plan(block_s=8.0, blocks=6, pause_s=10.0)
    blocks_b = [
        msgspec.structs.replace(
            block, label="b", window_start_ns=block.window_end_ns + S, window_end_ns=block.window_end_ns + 9 * S
        )
        for block in a.block_records()[:-1]
    ]
    verified = run(a)
    idle = run(a, label="b", blocks=blocks_b)
    assert (verified.finding, verified.inputs.load.window_s) == ("GPU_VERIFIED", 48.0)
    assert (idle.finding, idle.activity, idle.inputs.load.window_s) == ("INCONCLUSIVE", "idle", 40.0)
    assert not may_rank({"a": verified, "b": idle}, NAMES)[0]
