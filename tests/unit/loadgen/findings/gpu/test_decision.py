"""The whole truth table of the verdict, gates in their order, and properties that no reading may break."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadgen.findings.gpu.decision import decide, judge_activity, judge_witness
from loadgen.findings.gpu.records import (
    DEFAULT_THRESHOLDS,
    Attribution,
    EvidenceInputs,
    EvidenceRecord,
    Gpu,
    GpuFinding,
    Health,
    Load,
    Placement,
    PlacementResult,
    TimeSpan,
    Witness,
)

S = 1_000_000_000
GAP = (TimeSpan(start_ns=0, end_ns=5 * S),)
GPU = Gpu(
    busy_s=0.0, covered_s=40.0, coverage=1.0, gap_coverage=1.0, utilisation_low=0.0, utilisation_high=0.0,
    idle_utilisation_low=0.0, idle_utilisation_high=0.0, gap_utilisation_high=(0.0, 0.0), idle_utilisation_sigma=0.0,
    energy_joules=3200.0, energy_source="counter", idle_power_watts=80.0, idle_power_sigma_watts=1.0,
    energy_excess_joules=0.0, joules_per_item=None, excess_joules_per_item=None,
)  # fmt: skip
ACTIVITY = {
    "idle": {},
    "weak": {"utilisation_low": 0.03, "utilisation_high": 0.03, "energy_excess_joules": 100.0},
    "active": {"utilisation_low": 0.9, "utilisation_high": 0.9, "energy_excess_joules": 20000.0},
}
PLACEMENT: dict[str, tuple[PlacementResult, float | None]] = {
    "gpu": ("gpu", 0.0), "cpu": ("cpu", 1.0), "unknown": ("unknown", None), "partial 5 %": ("partial", 0.05),
    "partial 30 %": ("partial", 0.3), "partial ?": ("partial", None),
}  # fmt: skip
WITNESS = {True: (0.3, 5.0), False: (0.002, 5.0), None: (None, 5.0)}


def inputs(placement: str = "gpu", activity: str = "active", attributed: bool = True, witness: bool | None = False):
    result, share = PLACEMENT[placement]
    cpu_s, rate = WITNESS[witness]
    return EvidenceInputs(
        placement=Placement(result=result, cpu_share=share, reason="so it says", used_device_uuid="GPU-1"),
        health=Health(
            status="ok", uuid="GPU-1", driver_version="580", healthy_before=True, healthy_after=True,
            device_changed=False, gpu_lost=False,
        ),
        load=Load(
            windows=(TimeSpan(start_ns=6 * S, end_ns=46 * S),), gaps_before=GAP, gaps_after=GAP, window_s=40.0,
            completed=200, errors=0, items=200, server_cpu_s=1.0,
        ),
        gpu=msgspec.structs.replace(GPU, **ACTIVITY[activity]),
        attribution=Attribution(
            pid_resolved=attributed, exclusive=None, foreign_pids=(), gaps_idle=True, correlation=None, p_value=None,
            bins=0,
        ),
        witness=Witness(
            cpu_s_per_request=cpu_s, requests_per_s=rate, control_cpu_s_per_request=0.4, control_requests_per_s=4.0
        ),
    )  # fmt: skip


def expected(placement: str, activity: str, attributed: bool, witness: bool | None) -> str:
    """The rules of docs/gpu-proof.md, written again, from the outcomes' side."""
    if placement == "cpu" or (activity == "idle" and witness):
        return "CPU_FALLBACK"
    if placement in ("unknown", "partial ?"):
        return "unknown_placement"
    if placement == "partial 30 %" or activity == "idle" or witness:
        return "conflict"
    if activity == "weak":
        return "low_duty"
    return "GPU_VERIFIED" if attributed else "unattributed"


@pytest.mark.parametrize(
    ("placement", "activity", "attributed", "witness"),
    list(product(PLACEMENT, ACTIVITY, (True, False), (True, False, None))),
)
def test_truth_table(placement: str, activity: str, attributed: bool, witness: bool | None) -> None:
    decision = decide("a", None, inputs(placement, activity, attributed, witness), DEFAULT_THRESHOLDS)
    assert (decision.activity, decision.attributed, decision.cpu_witness) == (activity, attributed, witness)
    want = expected(placement, activity, attributed, witness)
    assert str(decision.code or decision.finding) == want
    assert (decision.code is None) == (want in ("CPU_FALLBACK", "GPU_VERIFIED"))
    if want == "GPU_VERIFIED" and placement.startswith("partial"):
        assert "partly on the CPU: so it says" in decision.notes


GATES: list[tuple[str, str, dict[str, Any]]] = [
    ("gpu_lost_midrun", "health", {"gpu_lost": True}),
    ("no_nvml", "health", {"status": "driver_mismatch"}),
    ("no_nvml", "health", {"status": None}),
    ("device_changed", "health", {"device_changed": True}),
    ("wrong_gpu", "health", {"uuid": "GPU-2"}),
    ("nvml_unhealthy", "health", {"healthy_before": False}),
    ("nvml_unhealthy", "health", {"healthy_after": None}),
    ("short_window", "load", {"window_s": 9.9}),
    ("few_requests", "load", {"completed": 99}),
    ("many_errors", "load", {"errors": 11}),
    ("no_idle_gap", "load", {"gaps_before": ()}),
    ("no_idle_gap", "load", {"gaps_after": ()}),
    ("low_coverage", "gpu", {"coverage": 0.89}),
    ("low_coverage", "gpu", {"gap_coverage": 0.89}),
    ("low_coverage", "gpu", {"energy_excess_joules": None}),
    ("low_coverage", "gpu", {"idle_utilisation_sigma": None}),
]


def change(given_inputs: EvidenceInputs, part: str, fields: dict[str, Any]) -> EvidenceInputs:
    return msgspec.structs.replace(
        given_inputs, **{part: msgspec.structs.replace(getattr(given_inputs, part), **fields)}
    )


@pytest.mark.parametrize(("code", "part", "fields"), GATES)
def test_each_gate_closes_by_itself(code: str, part: str, fields: dict[str, Any]) -> None:
    decision = decide("a", None, change(inputs(), part, fields), DEFAULT_THRESHOLDS)
    assert (decision.finding, decision.code) == ("INCONCLUSIVE", code)


def test_gates_are_open_at_their_thresholds() -> None:
    at = change(inputs(), "load", {"window_s": 30.0, "completed": 100, "errors": 5})
    at = change(at, "gpu", {"coverage": 0.9, "gap_coverage": 0.9})
    assert decide("a", None, at, DEFAULT_THRESHOLDS).finding == "GPU_VERIFIED"


@pytest.mark.parametrize(("code", "part", "fields"), GATES)
def test_no_gate_takes_back_a_placement_on_the_cpu(code: str, part: str, fields: dict[str, Any]) -> None:
    assert decide("a", None, change(inputs("cpu"), part, fields), DEFAULT_THRESHOLDS).finding == "CPU_FALLBACK"


def test_noise_of_the_idle_gpu_raises_the_bar() -> None:
    calm = msgspec.structs.replace(GPU, **ACTIVITY["active"])
    assert judge_activity(calm, 40.0, DEFAULT_THRESHOLDS) == "active"
    for noise in ({"idle_utilisation_sigma": 0.31}, {"idle_power_sigma_watts": 170.0}):
        assert judge_activity(msgspec.structs.replace(calm, **noise), 40.0, DEFAULT_THRESHOLDS) == "weak"


def test_the_witness_needs_both() -> None:
    def witness(cpu: float, rate: float) -> Witness:
        return Witness(
            cpu_s_per_request=cpu, requests_per_s=rate, control_cpu_s_per_request=0.4, control_requests_per_s=4.0
        )

    assert judge_witness(witness(0.2, 8.0), DEFAULT_THRESHOLDS) is True
    assert judge_witness(witness(0.19, 8.0), DEFAULT_THRESHOLDS) is False
    assert judge_witness(witness(0.2, 8.1), DEFAULT_THRESHOLDS) is False


ratio = st.floats(0.0, 1.0)


@given(low=ratio, high=ratio, idle=ratio, excess=st.floats(-1e4, 1e5), more=ratio, energy=st.floats(0, 1e5))
def test_more_work_never_turns_an_active_gpu_idle(
    low: float, high: float, idle: float, excess: float, more: float, energy: float
) -> None:
    low, high = sorted((low, high))
    gpu = msgspec.structs.replace(
        GPU, utilisation_low=low, utilisation_high=high, idle_utilisation_low=idle, idle_utilisation_high=idle,
        energy_excess_joules=excess,
    )  # fmt: skip
    heavier = msgspec.structs.replace(
        gpu, utilisation_low=min(1.0, low + more), utilisation_high=min(1.0, high + more),
        energy_excess_joules=excess + energy,
    )  # fmt: skip
    before, after = (judge_activity(g, 40.0, DEFAULT_THRESHOLDS) for g in (gpu, heavier))
    if before == "active":
        assert after == "active"


Run = Callable[..., EvidenceRecord]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lost=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 30)), max_size=6),
    kinds=st.sets(st.sampled_from(["reading", "samples", "edge"]), min_size=1),
    busy=st.floats(0.02, 1.0),
    watts=st.floats(79.0, 82.0) | st.floats(60.0, 700.0),  # 80 W: energy says nothing, utilisation must
)
def test_lost_readings_never_make_a_working_gpu_look_idle(
    run: Run, plan: Any, lost: list[tuple[int, int]], kinds: set[str], busy: float, watts: float
) -> None:
    """Whatever is missing, however long: more than one point of utilisation is never called idle."""

    def drop(line: dict[str, Any]) -> bool:
        second = line.get("at_ns", 0) / S - 100
        return line["type"] in kinds and any(start <= second < start + length for start, length in lost)

    record = run(plan(busy=busy, watts=watts, drop=drop), control=CPU_CONTROL)
    assert record.activity != "idle"
    assert record.finding != "CPU_FALLBACK"


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lost=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 30)), max_size=6))
def test_lost_readings_never_make_an_idle_gpu_look_verified(run: Run, plan: Any, lost: list[tuple[int, int]]) -> None:
    def drop(line: dict[str, Any]) -> bool:
        second = line.get("at_ns", 0) / S - 100
        return line["type"] in ("reading", "samples") and any(a <= second < a + length for a, length in lost)

    assert run(plan(busy=0.0, watts=80.0, drop=drop)).finding != "GPU_VERIFIED"


CPU_CONTROL = EvidenceRecord(
    label="a", workload="single", control=True, finding=GpuFinding.CPU_FALLBACK, code=None, sentence="", notes=(),
    activity="idle", attributed=None, cpu_witness=True, thresholds=DEFAULT_THRESHOLDS,
    inputs=change(inputs("cpu"), "witness", {"cpu_s_per_request": 0.002, "requests_per_s": 50.0}),
)  # fmt: skip
