"""What --surface plans: its axes, its few first rounds, its time, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.experiment.options import effective_settings, write_settings
from loadgen.experiment.plan import GPU_REQUESTS, GPU_WINDOW_S, MOST_POINTS, PlanError, make_workloads
from loadgen.experiment.settings import ExperimentSettings
from loadgen.measure.planning import plan_experiment
from loadgen.records.run import Experiment


def settings_of(**settings: object) -> ExperimentSettings:
    return ExperimentSettings.model_validate({"surface": True, **settings})


def experiment_of(**settings: object) -> Experiment:
    return plan_experiment(settings_of(**settings)).runs[0][1]


def test_the_default_is_1_to_16_users_with_two_batch_sizes() -> None:
    experiment = experiment_of()
    assert {workload.scenario for workload in experiment.workloads} == {"surface"}
    assert [(load.concurrency, load.batch_size) for load in experiment.workloads] == [
        (users, size) for size in (1, 8) for users in (1, 2, 4, 8, 16)
    ]
    assert experiment.is_surface
    assert experiment.until_decided
    assert experiment.minutes == 5.0


def test_one_number_of_users_is_the_most_and_several_are_those() -> None:
    def users(**settings: object) -> list[int]:
        return [load.concurrency for load in experiment_of(batch_sizes=1, **settings).workloads]

    assert users(concurrency=24) == [1, 2, 4, 8, 16, 24]
    assert users(concurrency=8) == [1, 2, 4, 8]
    assert users(concurrency="3,9") == [3, 9]


def test_lengths_take_the_place_of_batch_sizes() -> None:
    text = {"model": "transformers:distilbert-base-uncased", "sequence_length": "32,128", "concurrency": 4}
    loads = experiment_of(**text).workloads
    assert {(load.sequence_length, load.batch_size) for load in loads} == {(32, 1), (128, 1)}
    several = experiment_of(**text, batch_sizes=4).workloads
    assert {load.batch_size for load in several} == {4}


def test_a_language_model_has_prompts_of_several_lengths() -> None:
    loads = experiment_of(model="language:demo", prompt_tokens="32,128", output_tokens=16, concurrency=4).workloads
    assert [(load.concurrency, load.prompt_tokens, load.output_tokens) for load in loads] == [
        (users, prompt, 16) for prompt in (32, 128) for users in (1, 2, 4)
    ]
    assert all(load.requests >= 3 * load.concurrency for load in loads)
    assert {load.prompt_tokens for load in experiment_of(model="language:demo").workloads} == {32}


def test_the_first_rounds_are_few_and_balanced_and_those_of_a_gpu_last_as_long_as_its_proof() -> None:
    assert {load.rounds for load in make_workloads(settings_of())} == {4}
    three = settings_of(a="native", b="triton", c="fastapi")
    assert {load.rounds for load in make_workloads(three)} == {6}
    for users in ("1,2", "1,2,4,8,16,32,64,128,256"):
        loads = make_workloads(settings_of(concurrency=users), gpu=True)
        assert GPU_WINDOW_S <= sum(load.rounds * load.seconds for load in loads) < 60.0 + GPU_WINDOW_S
        assert sum(load.rounds * load.requests for load in loads) >= GPU_REQUESTS


def test_the_settings_in_effect_ask_for_the_same_again(tmp_path: Path) -> None:
    language = {"model": "language:demo", "prompt_tokens": "32,64"}
    for settings in (settings_of(), settings_of(**language), settings_of(**language, preset="smoke")):
        file = tmp_path / "experiment.yaml"
        file.write_text(write_settings(settings))
        again = effective_settings(file, {})
        assert again.sha256() == settings.sha256()
        assert plan_experiment(again).runs[0][1].workloads == plan_experiment(settings).runs[0][1].workloads


def test_a_full_surface_has_no_ablations_unless_they_are_asked_for() -> None:
    full = experiment_of(preset="full")
    assert (full.explain, full.ceiling, full.minutes) == (False, False, 25.0)
    assert experiment_of(preset="full", explain=True).explain


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"scenarios": "single"}, "leave --scenarios out"),
        ({"until": "decided"}, "leave --until out"),
        ({"rates": 5}, "--rates has no place in it"),
        ({"slo_p99_ms": 50}, "--slo-p99-ms has no place in it"),
        ({"restarts": 3}, "give one of the two options"),
        ({"concurrency": 1}, "needs several numbers of users"),
        ({"batch_sizes": ()}, "needs --batch-sizes"),
        ({"sequence_length": "32,64", "batch_sizes": "1,8"}, "two axes"),
        ({"batch_sizes": list(range(1, MOST_POINTS))}, f"at most {MOST_POINTS} loads"),
        ({"surface": False, "scenarios": "surface"}, "asked for with --surface"),
        ({"surface": False, "model": "language:demo", "prompt_tokens": "32,64"}, "add --surface, or give one"),
        ({"prompt_tokens": "32"}, "is for language models"),
        ({"model": "language:demo", "batch_sizes": "2,4"}, "--batch-sizes has no effect on a language model"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(settings: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words.replace("(", r"\(")) as refusal:
        experiment_of(**settings)
    assert "\n" not in str(refusal.value)
