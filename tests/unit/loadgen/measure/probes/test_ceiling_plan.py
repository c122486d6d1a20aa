"""Which engines are measured alone: the settings in effect, the sizes that the workloads need, and who has no
ceiling."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from loadgen.entry import build
from loadgen.experiment.plan import PlanError
from loadgen.experiment.settings import ExperimentSettings
from loadgen.findings.ceiling import (
    DIFFERENT_LENGTHS,
    MAX_SIZES,
    Ceiling,
    EngineRun,
    plan_ceilings,
    sizes_to_measure,
    wants_ceilings,
)
from loadgen.measure.planning import plan_experiment
from loadgen.measure.probes.ceiling import command_of, contradiction
from loadgen.records.run import ArmRecord, ArmRequest, Experiment, Label, Workload

EFFECT: dict[str, object] = {
    "engine": "torch", "precision": "fp16", "mode": "graph", "device": "cuda:0", "weights": "random weights (seed 0)",
    "max_batch_size": 64,
}  # fmt: skip


def workload(scenario: str, batch_size: int = 1, concurrency: int = 1, **more: Any) -> Workload:
    fields: dict[str, Any] = {"requests": 5, "seconds": 1.0, "max_seconds": 9.0, "rounds": 2}
    return Workload(
        scenario=scenario,  # type: ignore[arg-type]
        batch_size=batch_size,
        concurrency=concurrency,
        **(fields | more),
    )


def make_experiment(**changes: Any) -> Experiment:
    """Two embedded servers, one request of one image at a time; `a` and `b` take the place of an arm."""
    settings = ExperimentSettings.model_validate({"scenarios": "single", "ceiling": True})
    ((_, experiment),) = plan_experiment(settings).runs
    arms = tuple(changes.pop(arm.label, arm) for arm in experiment.arms)
    return msgspec.structs.replace(experiment, **{"arms": arms, "workloads": (workload("single"),), **changes})


def test_what_tritons_own_backend_executes_is_not_measured_alone() -> None:
    for arms, effect in (
        ({}, {"backend": "onnxruntime", "engine": "onnxruntime"}),
        ({"b": ArmRequest(label="b", target="triton", settings={"triton-repository": "/mine"})}, {}),
    ):
        experiment = make_experiment(**arms)
        _, (ceiling,) = plan_ceilings(experiment, [arm("a"), arm("b", **effect)])
        assert ceiling.reason == "Triton's own backend executes it, which cannot be measured outside a server"


def arm(label: Label = "a", **effect: object) -> ArmRecord:
    return ArmRecord(
        label=label, title="", target="native", url="", server_name=None, server_version=None, launched=True,
        argv=None, settings={}, in_effect=EFFECT | effect, model_config=None, gpu_info=None, artefact=None,
    )  # fmt: skip


def only(experiment: Experiment, *records: ArmRecord) -> EngineRun:
    (run,), missing = plan_ceilings(experiment, records)
    assert missing == []
    return run


def without(record: ArmRecord, experiment: Experiment | None = None) -> str:
    runs, (missing,) = plan_ceilings(experiment or make_experiment(), [record])
    assert runs == []
    assert missing.reason is not None
    return missing.reason


def test_a_request_at_a_time_needs_its_own_size_alone() -> None:
    workloads = [
        workload("single"),
        workload("batched", 8),
        workload("batched", 32),
        workload("concurrent", 4, 1),
        workload("cold-start"),
    ]
    assert sizes_to_measure(workloads, 64) == (1, 4, 8, 32)


def test_merged_load_needs_powers_of_two_up_to_the_largest_batch_that_it_can_make() -> None:
    assert sizes_to_measure([workload("single"), workload("concurrent", 1, 12)], 64) == (1, 2, 4, 8, 12)
    assert sizes_to_measure([workload("concurrent", 1, 100)], 48) == (1, 2, 4, 8, 16, 32, 48)
    rated = workload("open", 2, 256, arrivals="poisson", rate_per_s=50.0)
    assert sizes_to_measure([rated], 16) == (1, 2, 4, 8, 16)


def test_of_too_many_sizes_the_smallest_powers_are_left_out_and_no_workload_is() -> None:
    sizes = sizes_to_measure([workload("batched", 3), workload("batched", 5), workload("concurrent", 1, 512)], 512)
    assert len(sizes) == MAX_SIZES
    assert sizes == (1, 3, 5, 32, 64, 128, 256, 512)
    many = [workload("batched", size) for size in range(1, 13)]
    assert sizes_to_measure(many, 64) == tuple(range(1, 13))


def test_requests_beyond_the_largest_batch_and_searches_need_none() -> None:
    search = workload("slo", 1, 64, latency_bound_ms=50.0)
    assert sizes_to_measure([workload("batched", 64), workload("single"), search], 32) == (1,)


def test_the_command_names_the_settings_in_effect() -> None:
    a = ArmRequest(label="a", target="native", settings={"precision": "fp32", "weights": "random:3", "artefacts": "x"})
    run = only(make_experiment(a=a, payload="uint8"), arm())
    assert command_of(run) == (
        "engine", "--engine=torch", "--precision=fp16", "--mode=graph", "--device=cuda:0", "--payload=uint8",
        "--model=open_clip:ViT-B-32", "--weights=random:3", "--threads=0", "--max-batch-size=64", "--artefacts=x",
        "--batches=1", "--seconds=0.5",
    )  # fmt: skip


def test_every_option_is_one_of_abserve_engine() -> None:
    a = ArmRequest(label="a", target="native", settings={"artefacts": "x", "spinning": "off"})
    command = command_of(only(make_experiment(a=a), arm(threads="2", device="cpu")))
    assert {"--threads=2", "--spinning=off"} <= set(command)
    known = CliRunner().invoke(build(), ["engine", "--help"], env={"COLUMNS": "300"}).output
    options = [part.split("=")[0] for part in (*command[1:], "--sequence-length=1")]
    assert len(options) == 12
    assert [option for option in options if option not in known] == []


@pytest.mark.parametrize(
    ("payload", "executed"),
    [("fp32", []), ("tensors", []), ("uint8", ["--payload=uint8"]), ("jpeg", ["--payload=uint8"])],
)
def test_a_jpeg_executes_bytes_and_own_tensors_need_no_name(payload: str, executed: list[str]) -> None:
    experiment = make_experiment(payload=payload, model="openclip_vit_b32_jpeg")
    options = only(experiment, arm()).options
    assert [option for option in options if option.startswith("--payload")] == executed
    assert "--model=openclip_vit_b32" in options


def test_arms_with_the_same_settings_are_measured_once() -> None:
    assert only(make_experiment(), arm("a"), arm("b")).labels == ("a", "b")
    for changed in ({"mode": "eager"}, {"max_batch_size": 32}, {"threads": "2"}):
        runs, _ = plan_ceilings(make_experiment(), [arm("a"), arm("b", **changed)])
        assert [run.labels for run in runs] == [("a",), ("b",)], changed


def test_who_has_no_ceiling() -> None:
    assert without(arm(engine="null")) == "the null engine executes no model"
    assert without(arm(device="cuda:0,cuda:1")) == (
        "its engines are on cuda:0,cuda:1, and abserve engine measures one device"
    )
    assert "does not report its engine" in without(arm(engine=None))
    assert "does not report" in without(arm(max_batch_size=None))
    remote = make_experiment(a=ArmRequest(label="a", target="http://127.0.0.1:8000"))
    assert "did not start its server" in without(arm(), remote)
    beyond = make_experiment(workloads=(workload("batched", 128),))
    assert without(arm(), beyond) == "every request exceeds its largest batch, 64"


def test_sequences_are_measured_at_the_lengths_that_the_workloads_have() -> None:
    swept = make_experiment(workloads=tuple(workload("single", sequence_length=length) for length in (32, 128)))
    for experiment, lengths, option in (
        (make_experiment(), (), None),
        (make_experiment(), (128, 128), "--sequence-length=128"),
        (swept, (32, 128), "--sequence-length=32,128"),
    ):
        ((run,), _) = plan_ceilings(experiment, [arm()], lengths)
        assert [part for part in command_of(run) if "length" in part] == ([] if option is None else [option])
    assert plan_ceilings(make_experiment(), [arm()], (20, 58)) == (
        [],
        [Ceiling(labels=("a",), reason=DIFFERENT_LENGTHS)],
    )


def test_another_engine_than_the_servers_is_no_ceiling() -> None:
    run = only(make_experiment(), arm(mode="auto"))
    engine = {"kind": "torch", "precision": "fp16", "mode": "graph", "device": "cuda:0", "weights": EFFECT["weights"]}
    assert contradiction(run, engine) is None, "a mode that the server leaves open may be any"
    reason = contradiction(run, {**engine, "precision": "fp32", "device": "cpu"})
    assert reason is not None
    assert "precision fp32 instead of fp16, device cpu instead of cuda:0" in reason


def plan(**changes: object) -> Experiment:
    ((_, experiment),) = plan_experiment(ExperimentSettings.model_validate(changes)).runs
    return experiment


def test_full_measures_ceilings_and_quick_does_not_unless_told() -> None:
    assert [plan(preset=preset).ceiling for preset in ("quick", "full")] == [False, True]
    assert plan(ceiling=True).ceiling
    assert not plan(preset="full", ceiling=False).ceiling
    assert not plan(preset="full", a="http://127.0.0.1:1", b="http://127.0.0.1:2").ceiling
    assert plan(ceiling=True, b="http://127.0.0.1:2").ceiling, "one arm is embedded"
    assert wants_ceilings(plan(ceiling=True))
    assert not wants_ceilings(plan(preset="full", scenarios="cold-start"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"a": "http://127.0.0.1:1", "b": "http://127.0.0.1:2"}, "servers that abserve starts"),
        ({"deployment": "compose"}, "servers that abserve starts"),
        ({"scenarios": "cold-start"}, "add a scenario of load"),
    ],
)
def test_a_ceiling_that_cannot_be_had_is_refused_at_the_start(changes: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plan(ceiling=True, **changes)
