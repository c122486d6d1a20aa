"""Which ablations a comparison of language models gets: what the arms have unlike, and what an option takes away."""

from __future__ import annotations

from typing import Any

import pytest

from loadgen.experiment.language import token_workloads
from loadgen.experiment.settings import ExperimentSettings
from loadgen.findings.causes import Ablation, Untested
from loadgen.measure.probes.causes_plan import plan_ablations
from loadgen.records.run import ArmRecord, ArmRequest, Experiment, Label
from loadgen.records.targets import TokenTransport

ARMS = {"a": "native", "b": "triton"}
IN_EFFECT: dict[str, dict[str, object]] = {
    "native": {"engine": "slots", "device": "cpu", "fronts": "1", "prefill_chunk": "32"},
    "triton": {"engine": "slots", "device": "cpu"},
    "fastapi": {"engine": "generate", "device": "cpu"},
    "vllm": {"engine": "vllm", "device": "cpu", "fronts": "1", "prefill_chunk": "2048", "eager": "False"},
}
"""As these servers report them, by default."""
Given = dict[str, Any]


def experiment_of(
    scenarios: str = "single,concurrent", transport: TokenTransport = "completions", **arms: Given
) -> Experiment:
    asked = ExperimentSettings.model_validate({"arms": ARMS, "model": "language:demo", "scenarios": scenarios})
    return Experiment(
        arms=tuple(ArmRequest(**{"label": label, "target": "native", **arm}) for label, arm in arms.items()),
        workloads=token_workloads(asked), transport=transport, model="language:demo", weights="random:0",
        payload="tokens", preset="full", seed=0, equivalence_margin=0.05, threads=2,
    )  # fmt: skip


def record_of(request: ArmRequest, **changes: object) -> ArmRecord:
    in_effect = IN_EFFECT.get(request.target, {}) | changes
    return ArmRecord(
        label=request.label, title="t", target=request.target, url="http://127.0.0.1:1", server_name=None,
        server_version=None, launched=True, argv=None, settings=request.settings, in_effect=in_effect,
        model_config=None, gpu_info=None, artefact=None,
    )  # fmt: skip


def planned(experiment: Experiment, **changes: Given) -> tuple[list[Ablation], list[Untested]]:
    """`changes`: settings in effect by label."""
    arms: dict[Label, ArmRecord] = {arm.label: record_of(arm, **changes.get(arm.label, {})) for arm in experiment.arms}
    return plan_ablations(experiment, arms, {})


def names(ablations: list[Ablation]) -> list[tuple[str, str]]:
    return [(ablation.cause, ablation.label) for ablation in ablations]


def test_of_one_engine_behind_two_servers_the_server_is_exchanged_and_the_front_end_removed() -> None:
    settings = {"device": "cpu", "queue-size": "8", "precision": "fp32"}
    experiment = experiment_of(transport="generate_stream", a={}, b={"target": "triton", "settings": settings})
    done, untested = planned(experiment)
    assert names(done) == [("server", "b"), ("front_ends", "a")]
    assert {(entry.cause, entry.label): entry.moot for entry in untested} == {
        ("server", "a"): True,
        ("front_ends", "b"): True,
    }
    request = done[0].without.request(experiment.arm("b"))
    assert request.target == "native"
    assert request.settings == {"device": "cpu", "precision": "fp32", "engine": "slots"}
    assert done[0].without.experiment(experiment, request).transport_of(request) == "generate_stream"
    assert done[1].without.settings == {"fronts": "0"}


def test_generate_behind_fastapi_is_exchanged_for_the_baselines_engine_and_both_get_the_shorter_protocol() -> None:
    done, _ = planned(experiment_of(a={}, b={"target": "fastapi"}))
    assert names(done) == [("protocol", "a"), ("protocol", "b"), ("engine", "b"), ("front_ends", "a")]
    assert {ablation.without.transport for ablation in done[:2]} == {"generate_stream"}
    assert (done[2].without.target, done[2].without.settings) == ("native", {"engine": "slots"})
    other = planned(experiment_of(a={"settings": {"engine": "jax"}}, b={"target": "fastapi"}), a={"engine": "jax"})[0]
    assert next(ablation for ablation in other if ablation.cause == "engine").without.settings == {"engine": "jax"}
    alone = planned(experiment_of(a={"target": "fastapi"}, b={"target": "vllm"}))[0]
    assert next(ablation for ablation in alone if ablation.cause == "engine").without.settings == {"engine": "slots"}


def test_arms_with_another_engine_get_that_of_the_baseline() -> None:
    experiment = experiment_of(a={}, b={"settings": {"engine": "continuous"}})
    done, _ = planned(experiment, b={"engine": "continuous", "prefill_chunk": "512"})
    assert names(done) == [("engine", "b")]
    assert done[0].changed == "continuous → slots"
    assert done[0].without.target is None


def test_what_all_arms_have_alike_is_not_tested() -> None:
    assert planned(experiment_of(a={}, b={})) == ([], [])
    assert names(planned(experiment_of(a={}, b={"settings": {"fronts": "0"}}), b={"fronts": "0"})[0]) == [
        ("front_ends", "a")
    ]


def test_arms_with_unlike_protocols_get_the_shorter_one() -> None:
    done, untested = planned(experiment_of(a={}, b={"transport": "generate_stream"}))
    assert [(ablation.label, ablation.changed) for ablation in done] == [("a", "completions → generate_stream")]
    assert [entry.moot for entry in untested] == [True]
    text = planned(experiment_of(transport="text", a={}, b={"target": "vllm"}))[0]
    assert {(made.label, made.without.transport) for made in text if made.cause == "protocol"} == {
        ("a", "generate_stream"),
        ("b", "completions"),
    }


def test_vllm_keeps_its_engine_which_is_said() -> None:
    done, untested = planned(experiment_of(a={}, b={"target": "vllm"}), b={"fronts": "2"})
    assert names(done) == [("protocol", "a"), ("front_ends", "a"), ("front_ends", "b")]
    assert done[-1].without.settings == {"fronts": "1"}
    barred = {(entry.cause, entry.label) for entry in untested if not entry.moot}
    assert barred == {("protocol", "b"), ("engine", "b")}


@pytest.mark.parametrize(
    ("scenarios", "pieces"), [("single", []), ("single,long-prompt", [("prompt_pieces", "a"), ("prompt_pieces", "b")])]
)
def test_prompts_are_read_whole_where_an_arm_reads_them_in_its_own_pieces(
    scenarios: str, pieces: list[tuple[str, str]]
) -> None:
    experiment = experiment_of(scenarios, a={}, b={"settings": {"prefill-chunk": "64"}})
    done, _ = planned(experiment, b={"prefill_chunk": "64"})
    assert names(done) == pieces
    assert [made.without.settings for made in done] == [{"prefill-chunk": "2048"}] * len(pieces)


def test_cuda_graphs_are_left_out_where_not_all_have_them_alike() -> None:
    gpu = {"device": "cuda:0"}
    experiment = experiment_of(a={}, b={"target": "vllm"})
    done, _ = planned(experiment, a=gpu, b={"device": "cuda"})
    assert [(made.label, made.without.settings) for made in done if made.cause == "graphs"] == [
        ("a", {"no-graphs": "true"}),
        ("b", {"no-graphs": "true"}),
    ]
    fast, _ = planned(experiment_of(a={}, b={"target": "fastapi"}), a=gpu, b=gpu)
    assert [made.label for made in fast if made.cause == "graphs"] == ["a"]
    alike, _ = planned(experiment_of(transport="generate_stream", a={}, b={"target": "triton"}), a=gpu, b=gpu)
    assert "graphs" not in {made.cause for made in alike}


def test_a_server_at_a_url_keeps_what_it_has() -> None:
    url = "http://127.0.0.1:8000"
    done, untested = planned(experiment_of(a={}, b={"target": url}))
    assert names(done) == [("protocol", "a"), ("front_ends", "a")]
    reasons = {entry.cause: entry.reason for entry in untested if entry.label == "b"}
    assert reasons.keys() == {"protocol", "engine", "front_ends"}
    assert url in reasons["protocol"]
    assert "did not start that server" in reasons["engine"]
    done, untested = planned(experiment_of(a={"target": url}, b={"target": "http://127.0.0.1:8001"}))
    assert done == []
    assert {(entry.cause, entry.label) for entry in untested} == {("engine", "a"), ("engine", "b")}
