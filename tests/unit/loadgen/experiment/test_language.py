"""Comparisons of language models: protocols, lengths, limits, refused settings. Other models are planned as before."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.experiment.language import (
    check_kind,
    choose_protocol,
    fitted,
    protocol_in_words,
    token_workloads,
    with_rates,
)
from loadgen.experiment.plan import PlanError, make_arms
from loadgen.experiment.schedule import block_seconds
from loadgen.experiment.settings import ExperimentSettings, read_limits
from loadgen.measure.planning import plan_experiment
from loadgen.records.payloads import implied_payload, served_name
from loadgen.records.run import Experiment, TokenLimits, Workload
from loadgen.records.targets import Kind


def settings_of(**settings: object) -> ExperimentSettings:
    return ExperimentSettings.model_validate({"model": "language:demo", **settings})


def experiment_of(**settings: object) -> Experiment:
    return plan_experiment(settings_of(**settings)).runs[0][1]


def test_the_default_has_one_four_and_sixteen_users() -> None:
    workloads = token_workloads(settings_of())
    assert [workload.name for workload in workloads] == ["single", "concurrent(4)", "concurrent(16)"]
    assert {(workload.prompt_tokens, workload.output_tokens) for workload in workloads} == {(32, 64)}


def test_a_gpu_gets_longer_answers_and_more_users() -> None:
    workloads = {workload.name: workload for workload in token_workloads(settings_of(), gpu=True)}
    assert [*workloads] == ["single", "concurrent(4)", "concurrent(16)", "concurrent(64)"]
    assert (workloads["single"].prompt_tokens, workloads["single"].output_tokens) == (128, 128)
    assert (workloads["concurrent(64)"].prompt_tokens, workloads["concurrent(64)"].output_tokens) == (256, 256)
    assert [load.name for load in token_workloads(settings_of(scenarios="concurrent", concurrency=2), gpu=True)] == [
        "concurrent(2)"
    ]


def test_every_scenario_has_its_lengths() -> None:
    asked = settings_of(scenarios="single,long-prompt,long-answer,shared-prefix", prompt_tokens=100, output_tokens=10)
    lengths = {load.name: (load.prompt_tokens, load.output_tokens) for load in token_workloads(asked)}
    assert lengths == {
        "single": (100, 10), "long-prompt": (2048, 10), "long-answer": (100, 1024), "shared-prefix": (100, 10),
    }  # fmt: skip
    assert token_workloads(asked)[-1].shared_prefix == 75


def test_a_smoke_run_has_few_users_and_short_answers() -> None:
    workloads = token_workloads(settings_of(preset="smoke"))
    assert [(load.name, load.output_tokens) for load in workloads] == [("single", 32), ("concurrent(4)", 32)]
    assert [load.concurrency for load in token_workloads(settings_of(preset="smoke", concurrency=16))] == [1, 16]


def test_a_block_lasts_as_long_as_its_arm_needs() -> None:
    """Three answers of each user, and never shorter than planned: the fast arm does not wait for the slow one."""
    load = token_workloads(settings_of(scenarios="concurrent", concurrency=16))[0]
    assert load.requests == 48
    [longer], left_out = fitted([load], {load.name: {"a": 0.5, "b": 15.0}}, None)
    assert longer.seconds == load.seconds
    assert longer.max_seconds == 60.0
    assert not left_out
    assert block_seconds(longer, 15.0) > 45.0 > 3.0 > block_seconds(longer, 0.5)


def test_a_slow_arm_gets_fewer_rounds_and_then_fewer_scenarios() -> None:
    workloads = token_workloads(settings_of())
    took = {
        "single": {"a": 0.1, "b": 1.0},
        "concurrent(4)": {"a": 0.2, "b": 4.0},
        "concurrent(16)": {"a": 0.5, "b": 15.0},
    }
    plenty, none = fitted(workloads, took, 600.0)
    assert {load.rounds for load in plenty} == {4}
    fewer, still_none = fitted(workloads, took, 180.0)
    assert ({load.rounds for load in fewer}, none, still_none) == ({2}, (), ())
    least, left_out = fitted(workloads, took, 60.0)
    assert ([load.name for load in least], left_out) == (["single", "concurrent(4)"], ("concurrent(16)",))
    assert [load.name for load in fitted(workloads, took, 0.0)[0]] == ["single"]
    restarted, _ = fitted(workloads, took, 60.0, restarts=4)
    assert {load.rounds for load in restarted} == {4}


def test_fewer_rounds_on_a_gpu_are_longer() -> None:
    """All blocks of an arm together last long enough for the proof of the GPU."""
    workloads = token_workloads(settings_of(scenarios="concurrent", concurrency=16), gpu=True)
    [fewer], _ = fitted(workloads, {"concurrent(16)": {"a": 0.5, "b": 20.0}}, 150.0, gpu=True)
    assert fewer.rounds < workloads[0].rounds
    assert fewer.seconds * fewer.rounds == pytest.approx(workloads[0].seconds * workloads[0].rounds)
    assert fewer.requests == workloads[0].requests  # else a slow arm would need that many times as long


@pytest.mark.parametrize("seconds", [130.0, 150.0, 180.0, 300.0])
def test_longer_blocks_keep_to_the_time(seconds: float) -> None:
    """The blocks of the fast scenario last longer for the proof; the rounds of the slow one make room for them."""
    workloads = token_workloads(settings_of(scenarios="single,concurrent", concurrency=16), gpu=True)
    took = {"single": {"a": 0.1, "b": 0.1}, "concurrent(16)": {"a": 0.5, "b": 6.0}}
    fewer, left_out = fitted(workloads, took, seconds, gpu=True)
    assert not left_out
    assert sum(load.rounds * sum(block_seconds(load, s) for s in took[load.name].values()) for load in fewer) < seconds


def test_a_scenario_whose_proof_would_take_too_long_is_left_out() -> None:
    workloads = token_workloads(settings_of(scenarios="single,concurrent", concurrency=16), gpu=True)
    took = {"single": {"a": 0.1, "b": 0.1}, "concurrent(16)": {"a": 0.5, "b": 0.5}}
    assert [load.name for load in fitted(workloads, took, 60.0, gpu=True)[0]] == ["single", "concurrent(16)"]
    assert len(fitted(workloads, took, 40.0, gpu=True)[1]) == 1


def test_rates_of_open_loops_follow_from_the_slowest_arm() -> None:
    workloads = token_workloads(settings_of(scenarios="concurrent,open", limits="ttft=200ms"))
    assert [workload.name for workload in workloads[2:]] == ["poisson(50%)", "poisson(80%)"]
    assert all(workload.rate_per_s is None for workload in workloads[2:])
    rated = with_rates(workloads, {"concurrent(4)": 1.0, "concurrent(16)": 2.0})
    assert [workload.rate_per_s for workload in rated] == [None, None, 4.0, 6.4]
    assert [workload.name for workload in rated] == [workload.name for workload in workloads]
    assert {workload.limits for workload in rated} == {TokenLimits(ttft_ms=200.0)}
    given = token_workloads(settings_of(scenarios="open", rates="2,5"))
    assert [workload.name for workload in given] == ["poisson(2/s)", "poisson(5/s)"]


def test_a_trace_is_an_open_loop_with_lengths_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    lengths = [(100, 9), (40, 90), (8, 8)]
    path.write_text("".join(
        f'{{"timestamp": {500 * place}, "input_length": {prompt}, "output_length": {answer}}}\n'
        for place, (prompt, answer) in enumerate(lengths)
    ))  # fmt: skip
    *_, replay = token_workloads(settings_of(traffic=str(path)))
    assert (replay.name, replay.is_open, replay.rate_per_s) == ("trace(calls)", True, 2.0)
    assert (replay.prompt_tokens, replay.output_tokens, replay.seconds) == (40, 90, 5.0)
    *_, fast = token_workloads(settings_of(traffic=str(path), speed="2"))
    assert (fast.name, fast.rate_per_s) == ("trace(calls, 2×)", 4.0)
    with pytest.raises(PlanError, match="nowhere"):
        token_workloads(settings_of(traffic="nowhere"))


def test_goodput_is_searched_within_the_limits() -> None:
    [search] = token_workloads(settings_of(scenarios="goodput", preset="smoke", limits="ttft=200ms"))
    assert (search.name, search.requests, search.is_search) == ("goodput(ttft=200ms)", 44, True)
    with pytest.raises(PlanError, match="the scenario goodput needs --limits"):
        token_workloads(settings_of(scenarios="goodput"))


def test_limits_over_recorded_prompts_search_the_highest_speed(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    path.write_text("".join(
        f'{{"timestamp": {500 * number}, "text_input": "Why?", "output_length": {4 + number % 9}}}\n'
        for number in range(50)
    ))  # fmt: skip
    given = {"traffic": str(path), "limits": "ttft=200ms"}
    *replays, search = token_workloads(settings_of(preset="smoke", speed="2,1", scenarios="traffic", **given))
    assert [(load.name, load.is_search) for load in replays] == [("traffic", False), ("traffic(2×)", False)]
    assert (search.name, search.is_search, search.requests) == ("goodput(ttft=200ms, traffic)", True, 44)
    assert (search.traffic, search.rate_per_s, search.speed, search.output_tokens) == (str(path), 2.0, 1.0, 12)
    with pytest.raises(PlanError, match="has 50 requests"):
        token_workloads(settings_of(**given))


def test_limits_are_written_one_way() -> None:
    assert read_limits(" gap=1s, ttft=200 ms,tpot=12.5ms") == {"ttft": 200.0, "tpot": 12.5, "gap": 1000.0}
    assert settings_of(limits={"tpot": "50ms", "ttft": "0.2s"}).limits == "ttft=200ms,tpot=50ms"


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ("", "give at least one limit"),
        ("ttft=200", "is no limit"),
        ("p95=5ms", "is no limit"),
        ("ttft=1s,ttft=2s", "given twice"),
        ("gap=0ms", "above 0"),
        ("gap=4000s", "at most an hour"),
    ],
)
def test_limits_that_are_none(limits: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_limits(limits)


@pytest.mark.parametrize(
    ("arms", "transport", "own"),
    [
        ({"a": "native", "b": "fastapi"}, "completions", {}),
        ({"a": "native", "b": "triton", "c": "fastapi"}, "generate_stream", {}),
        ({"a": "native", "b": "vllm"}, "completions", {}),
        ({"a": "triton", "b": "vllm"}, "generate_stream", {"b": "completions"}),
        ({"a": "native", "b": "http://127.0.0.1:1"}, "completions", {}),
        ({"a": "native", "b": {"target": "native", "transport": "generate_stream"}}, "generate_stream", {}),
        (
            {
                "a": {"target": "native", "transport": "completions"},
                "b": {"target": "native", "transport": "generate_stream"},
            },
            "completions",
            {"b": "generate_stream"},
        ),
    ],
)  # fmt: skip
def test_all_arms_get_one_protocol_if_they_have_one_in_common(
    arms: dict[str, object], transport: str, own: dict[str, str]
) -> None:
    settings = settings_of(arms=arms)
    chosen, with_own = choose_protocol(settings, make_arms(settings))
    assert chosen == transport
    assert {arm.label: arm.transport for arm in with_own if arm.transport is not None} == own
    words = protocol_in_words(plan_experiment(settings).runs[0][1])
    assert ("each gets its own" in words) == bool(own)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"payload": "fp32"}, "token ids"),
        ({"batch_sizes": 16}, "--batch-sizes has no effect on a language model"),
        ({"inputs": "random"}, "--prompt-tokens"),
        ({"handicap_check": True}, "--handicap-check has no effect"),
        ({"scenarios": "single,batched"}, "the scenario batched is not for language models"),
        ({"transport": "grpc"}, "completions, generate_stream, text, chat"),
        ({"transport": "completions,generate_stream"}, "give one of them"),
        ({"transport": "completions"}, "triton speaks generate_stream only"),
        ({"arms": {"a": "native", "b": "litserve"}}, "litserve serves no language models"),
        ({"model": "open_clip:ViT-B-32", "limits": "ttft=1s"}, "--limits is for language models"),
        ({"model": "open_clip:ViT-B-32", "limits": "ttft=1s", "traffic": "folder"}, "of recorded tensors give p99"),
        ({"model": "open_clip:ViT-B-32", "scenarios": "long-prompt"}, "long-prompt is for language models"),
        ({"model": "open_clip:ViT-B-32", "arms": {"a": "native", "b": "vllm"}}, "vllm serves language models only"),
    ],
)
def test_what_has_no_effect_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_experiment(settings_of(**settings))


def test_the_experiment_says_that_it_is_about_tokens() -> None:
    experiment = experiment_of(limits="tpot=50ms", price=2.5)
    assert experiment.kind is Kind.TOKENS
    assert (experiment.payload, experiment.transport, experiment.price) == ("tokens", "generate_stream", 2.5)
    assert not experiment.handicap_check
    assert [experiment_of(preset=preset).explain for preset in ("quick", "full")] == [False, True]
    assert (served_name("language:demo", "tokens"), implied_payload("language:demo")) == ("demo", "tokens")
    assert served_name("language:/models/My-Model/", "tokens") == "my_model"


def test_other_models_are_planned_as_before() -> None:
    """The hash of the default settings, as it was before there were language models."""
    settings = ExperimentSettings.model_validate({})
    check_kind(settings, make_arms(settings))
    assert settings.sha256() == "f6eefc9f68824fa66e43b6f512cb19282467dd2e817b58bab30d78201c814fa3"
    experiment = plan_experiment(settings).runs[0][1]
    assert experiment.kind is Kind.TENSORS
    assert experiment.handicap_check
    assert all(isinstance(w, Workload) and w.output_tokens is None for w in experiment.workloads)
