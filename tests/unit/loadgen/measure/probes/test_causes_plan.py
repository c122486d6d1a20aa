"""Which ablations a run gets, from what was asked for, what is in effect and what was measured."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from loadgen.experiment.plan import make_workloads
from loadgen.experiment.settings import ExperimentSettings
from loadgen.findings.causes import Ablation, Untested
from loadgen.measure.probes.causes_plan import fit_into, plan_ablations, rounds_of, workloads_worth_explaining
from loadgen.metrics.summaries import BlockSummary
from loadgen.records.probes import Variant
from loadgen.records.run import ArmRecord, ArmRequest, Experiment, Label

WORKLOADS = make_workloads(
    ExperimentSettings.model_validate({"scenarios": "single,batched,concurrent", "batch_sizes": "4,32"})
)
BYTES: dict[Label, float] = dict.fromkeys("abc", 602_112.0)


def experiment(
    a: dict[str, Any] | None = None, b: dict[str, Any] | None = None, *others: dict[str, Any], **changes: Any
) -> Experiment:
    return Experiment(
        arms=(
            ArmRequest(**{"label": "a", "target": "native", **(a or {})}),
            ArmRequest(**{"label": "b", "target": "triton", **(b or {})}),
            *(ArmRequest(**{"label": "c", "target": "native", **other}) for other in others),
        ),
        **{
            "model": "m", "weights": "random:0", "payload": "fp32", "transport": "http", "workloads": WORKLOADS,
            "preset": "full", "seed": 0, "equivalence_margin": 0.05, "threads": 2, **changes,
        },
    )  # fmt: skip


def arms(**in_effect: object) -> dict[Label, ArmRecord]:
    told = {"engine": "torch", "max_queue_delay_us": 2000, "dynamic_batching": True, **in_effect}
    return {
        label: ArmRecord(
            label=label, title="t", target="native", url="http://127.0.0.1:1", server_name=None, server_version=None,
            launched=True, argv=None, settings={}, in_effect=told, model_config=None, gpu_info=None, artefact=None,
        )
        for label in "abc"
    }  # fmt: skip


Planned = tuple[list[tuple[str, str]], dict[tuple[str, str], Untested]]


def planned(run: Experiment, records: dict[Label, ArmRecord] | None = None) -> Planned:
    plan, untested = plan_ablations(run, records or arms(), BYTES)
    assert [entry.number for entry in plan] == list(range(len(plan)))
    return [(entry.cause, entry.label) for entry in plan], {(entry.cause, entry.label): entry for entry in untested}


BOTH = [(cause, label) for cause in ("queue_delay", "transfer", "compute") for label in ("a", "b")]


def test_the_engine_that_computes_nothing_gets_no_setting_of_another_engine() -> None:
    settings = {"engine": "onnxruntime", "spinning": "off", "threads": "2"}
    asked = experiment({"settings": settings})
    plan, _ = plan_ablations(asked, arms(), BYTES)
    compute = next(entry for entry in plan if (entry.cause, entry.label) == ("compute", "a"))
    assert compute.without.request(asked.arm("a")).settings == {
        "engine": "null",
        "threads": "2",
    }


def test_the_engine_that_computes_nothing_has_the_same_front_ends() -> None:
    plan, _ = plan_ablations(experiment(), arms(fronts="8"), BYTES)
    compute = next(entry for entry in plan if (entry.cause, entry.label) == ("compute", "a"))
    assert compute.without.request(experiment().arm("a")).settings == {"engine": "null", "fronts": "8"}


def test_a_plain_server_has_neither_shared_memory_nor_another_engine() -> None:
    done, untested = planned(experiment({"target": "fastapi"}))
    assert [cause for cause, label in done if label == "a"] == ["queue_delay"]
    assert {cause for cause, label in untested if label == "a"} == {"transfer", "compute"}


def test_every_cause_of_both_arms() -> None:
    done, untested = planned(experiment())
    assert done == BOTH
    assert untested == {}


@pytest.mark.parametrize(
    ("changes", "records", "cause", "words"),
    [
        ({}, arms(max_queue_delay_us=0), "queue_delay", "0 already"),
        ({}, arms(max_queue_delay_us=None, dynamic_batching=False), "queue_delay", "no dynamic batcher"),
        ({"transport": "shm"}, arms(), "transfer", "shared memory already"),
        ({}, arms(engine="null"), "compute", "its engine, null"),
    ],
)
def test_what_is_not_there_needs_no_workload(
    changes: dict[str, Any], records: dict[Label, ArmRecord], cause: str, words: str
) -> None:
    done, untested = planned(experiment(**changes), records)
    assert done == [entry for entry in BOTH if entry[0] != cause]
    assert all(entry.moot and words in entry.reason for entry in untested.values())
    assert set(untested) == {(cause, "a"), (cause, "b")}


def test_an_ensemble_whose_steps_are_unknown_may_have_a_delay_so_it_is_taken_away() -> None:
    done, _ = planned(experiment(), arms(max_queue_delay_us=None, dynamic_batching=None))
    assert ("queue_delay", "b") in done


def test_the_settings_of_a_server_that_is_not_ours_stay_as_they_are() -> None:
    done, untested = planned(experiment(b={"target": "http://127.0.0.1:8000"}))
    assert done == [("queue_delay", "a"), ("transfer", "a"), ("transfer", "b"), ("compute", "a")]
    assert not any(entry.moot for entry in untested.values())
    assert "did not start" in untested["compute", "b"].reason
    far = planned(experiment(b={"target": "http://192.0.2.1:8000"}))[1]
    assert "cannot share" in far["transfer", "b"].reason


def test_a_native_backend_cannot_leave_its_engine_out_and_your_repository_stays_as_it_is() -> None:
    done, untested = planned(experiment(), arms(backend="onnxruntime"))
    assert done == [entry for entry in BOTH if entry[0] != "compute"]
    assert "cannot leave it out" in untested["compute", "b"].reason
    settings = {"target": "triton", "settings": {"triton-repository": "/mine"}}
    done, untested = planned(experiment(b=settings))
    assert done == [("queue_delay", "a"), ("transfer", "a"), ("transfer", "b"), ("compute", "a")]
    assert "your own repository" in untested["compute", "b"].reason


def test_containers_are_not_touched() -> None:
    done, untested = planned(experiment(deployment="compose"))
    assert done == []
    assert len(untested) == 6


def test_different_payloads_are_made_alike_first_and_the_transfer_goes_on_from_there() -> None:
    run = experiment(b={"payload": "uint8"})
    plan, _ = plan_ablations(run, arms(), {"a": 602_112.0, "b": 150_528.0})
    first = plan[0]
    assert (first.cause, first.label, first.without.payload) == ("payload", "a", "uint8")
    transfers = [entry for entry in plan if entry.cause == "transfer"]
    assert {(entry.label, entry.as_is.payload, entry.without.payload) for entry in transfers} == {
        ("a", "uint8", "uint8"),
        ("b", "uint8", "uint8"),
    }
    assert {entry.as_is.payload for entry in plan if entry.label == "a" and entry.cause != "transfer"} == {"fp32"}


def test_jpeg_files_are_decoded_beforehand_on_both_arms() -> None:
    plan, _ = plan_ablations(experiment(payload="jpeg"), arms(), BYTES)
    assert [(entry.cause, entry.label, entry.without.payload) for entry in plan[:2]] == [
        ("payload", "a", "uint8"),
        ("payload", "b", "uint8"),
    ]
    assert {entry.as_is.payload for entry in plan if entry.cause == "transfer"} == {"uint8"}
    assert {entry.as_is.payload for entry in plan if entry.cause != "transfer"} == {"jpeg"}


def test_the_arm_that_was_sent_more_gets_what_the_other_was_sent() -> None:
    plan, _ = plan_ablations(experiment(b={"payload": "jpeg"}), arms(), {"a": 20_000.0, "b": 90_000.0})
    assert (plan[0].label, plan[0].without.payload) == ("b", "fp32")


def test_every_cause_of_three_arms() -> None:
    done, untested = planned(experiment({}, {}, {"target": "http://127.0.0.1:8000"}))
    assert done == [("queue_delay", "a"), ("queue_delay", "b"), ("transfer", "a"), ("transfer", "b"), ("transfer", "c"),
                    ("compute", "a"), ("compute", "b")]  # fmt: skip
    assert set(untested) == {("queue_delay", "c"), ("compute", "c")}
    assert all("it is at http://127.0.0.1:8000" in entry.reason for entry in untested.values())


def test_of_three_payloads_all_become_the_smallest() -> None:
    run = experiment({}, {"payload": "uint8"}, {"payload": "jpeg"})
    plan, _ = plan_ablations(run, arms(), {"a": 602_112.0, "b": 150_528.0, "c": 20_000.0})
    payloads = [entry for entry in plan if entry.cause == "payload"]
    assert [(entry.label, entry.as_is.payload, entry.without.payload) for entry in payloads] == [
        ("a", "fp32", "jpeg"),
        ("b", "uint8", "jpeg"),
    ]
    assert "the smallest payload" in payloads[0].changed
    assert {entry.as_is.payload for entry in plan if entry.cause == "transfer"} == {"jpeg"}


def test_an_arm_that_is_sent_the_smallest_payload_keeps_it() -> None:
    plan, _ = plan_ablations(
        experiment({}, {"payload": "uint8"}, {"payload": "uint8"}), arms(), {"a": 9.0, "b": 3.0, "c": 3.0}
    )
    assert [(entry.label, entry.without.payload) for entry in plan if entry.cause == "payload"] == [("a", "uint8")]


def test_a_variant_changes_its_options_however_they_are_spelt() -> None:
    variant = Variant(payload="fp32", transport="http", settings={"max-queue-delay-us": "0", "device": ""})
    asked = {"max_queue_delay_us": "10000", "--device": "cuda:0", "engine": "torch"}
    run = experiment({}, {"settings": asked}, {})
    request = variant.request(run.arm("b"))
    varied = variant.experiment(run, request)
    assert varied.arms == (run.baseline, request, run.arm("c"))
    assert request.settings == {"engine": "torch", "max-queue-delay-us": "0"}


def block(workload: str, label: Label, pair: int, mean_ms: float) -> BlockSummary:
    empty: dict[str, Any] = dict.fromkeys(BlockSummary.__struct_fields__)
    return BlockSummary(
        **{
            **empty, "index": 0, "workload": workload, "round": pair, "label": label, "position": 0, "start_s": 0.0,
            "duration_s": 1.0, "complete": True, "requests": 10, "errors": 0, "items": 10, "restart": 0,
            "samples": 20, "figures": {"latency_mean": mean_ms},
        }
    )  # fmt: skip


def blocks(workload: str, *means_ms: float, noise: float = 0.01) -> list[BlockSummary]:
    return [
        block(workload, label, pair, mean * (1 + noise * (-1) ** (pair + (label == "b"))))
        for pair in range(6)
        for label, mean in zip("abc", means_ms, strict=False)
    ]  # fmt: skip


def test_only_workloads_that_differ_beyond_noise_and_margin_are_explained() -> None:
    run = experiment()
    measured = [
        *blocks("single", 10.0, 20.0),
        *blocks("batched(4)", 10.0, 10.2, noise=0.0001),  # real, and within ±5 %
        *blocks("batched(32)", 10.0, 12.0, noise=0.4),  # within the noise
        *blocks("concurrent(16)", 30.0, 20.0),
    ]
    assert [workload.name for workload in workloads_worth_explaining(run, measured)] == ["concurrent(16)", "single"]
    assert workloads_worth_explaining(run, []) == []


def test_a_workload_is_worth_it_where_any_arm_differs_from_the_baseline() -> None:
    """What the other arms differ by among themselves is explained by no workload: each is held to the baseline."""
    measured = [
        *blocks("single", 10.0, 10.0, 20.0),
        *blocks("batched(4)", 10.0, 10.3, 9.7, noise=0.0001),  # B and C differ by 6 %, neither from A by more than 5 %
        *blocks("batched(32)", 10.0, 10.0, 10.0),
    ]
    assert [workload.name for workload in workloads_worth_explaining(experiment({}, {}, {}), measured)] == ["single"]


def test_the_budget_holds_the_most_loaded_workload_then_the_lightest() -> None:
    run = experiment()
    measured = [entry for workload in WORKLOADS for entry in blocks(workload.name, 10.0, 20.0)]
    workloads = workloads_worth_explaining(run, measured)
    assert [workload.name for workload in workloads] == ["concurrent(16)", "single", "batched(32)", "batched(4)"]
    plan, _ = plan_ablations(run, arms(), BYTES)
    seconds = {workload.name: 2.0 for workload in workloads}
    a_workload = 2 * rounds_of(workloads[0]) * len(plan) * 2.5
    chosen, left = fit_into(len(plan) * 15.0 + 2 * a_workload, plan, workloads, seconds)
    assert [workload.name for workload in chosen] == ["concurrent(16)", "single"]
    assert [workload.name for workload in left] == ["batched(32)", "batched(4)"]
    assert [workload.name for workload in fit_into(1.0, plan, workloads, seconds)[0]] == ["concurrent(16)"]


def test_a_record_keeps_its_folder() -> None:
    plan, _ = plan_ablations(experiment(), arms(), BYTES)
    assert plan[1].folder == "causes/01-queue_delay-b"
    assert msgspec.json.decode(msgspec.json.encode(plan[1]), type=Ablation) == plan[1]
