"""The settings of a tuning: limits, contradictions, and the comparisons that follow from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from loadgen.experiment.plan import PlanError
from loadgen.experiment.settings import ArmSettings, read_limits
from loadgen.experiment.tuning import LIMITED, TuneSettings, check_tuning, final_settings, screening_settings
from loadgen.measure.planning import plan_experiment
from tests.recording import write_traffic

ARMS = {"anchor": ArmSettings(target="native"), "triton-0": ArmSettings(target="triton")}


def made(**content: object) -> TuneSettings:
    return TuneSettings.model_validate(content)


def test_limits_are_milliseconds_of_metrics() -> None:
    assert read_limits("p99=50ms, ttft = 0.2 s", (*LIMITED,)) == {"p99": 50.0, "ttft": 200.0}
    assert made(limit={"p99": "1.5s"}).limits == {"latency_p99": 1500.0}
    assert made(limit="gap=9ms", model="language:demo").limits == {"worst_gap_p99": 9.0}


@pytest.mark.parametrize("text", ["", "p99", "p98=5ms", "p99=5", "p99=0ms", "p99=2ms,p99=3ms", "p99=nanms", "p99=1e9s"])
def test_a_limit_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"limit|above 0"):
        read_limits(text, (*LIMITED,))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"rate": 5, "concurrency": 4}, "two loads"),
        ({"traffic": "folder", "concurrency": 4}, "--traffic and --concurrency are two loads"),
        ({"traffic": "folder", "goal": "throughput"}, "use --goal latency"),
        ({"rate": 5, "goal": "throughput"}, "use --goal latency"),
        ({"rate": 5, "goal": "cost", "price": 1}, "use --goal latency"),
        ({"goal": "cost"}, "needs --price"),
        ({"goal": "energy"}, "needs an NVIDIA GPU"),
        ({"limit": "ttft=5ms"}, "is for language models"),
        ({"sequence_length": "8,16"}, "one load"),
    ],
)
def test_contradictions_are_refused_with_a_remedy(content: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        check_tuning(made(**content), gpu=False)


def test_a_rate_makes_latency_the_goal() -> None:
    assert made().aim == "throughput"
    assert made(rate=5.0).aim == "latency"


def test_values_of_a_file_are_what_the_command_line_has() -> None:
    settings = made(tune={"max-batch-size": [8, 16]}, fix={"fronts": 4, "native.warm": True})
    assert settings.tune == {"max-batch-size": "8,16"}
    assert settings.fix == {"fronts": "4", "native.warm": "true"}


def test_a_screening_has_one_load_and_few_rounds() -> None:
    (run,) = plan_experiment(screening_settings(made(model="torchvision:resnet50", concurrency=7), ARMS)).runs
    (workload,) = run[1].workloads
    assert (workload.name, workload.rounds) == ("concurrent(7)", 4)
    assert not run[1].handicap_check
    assert not run[1].gpu_control
    assert run[1].minutes is None


def test_an_open_loop_of_a_screening_is_short() -> None:
    (run,) = plan_experiment(screening_settings(made(rate=200.0), ARMS)).runs
    (workload,) = run[1].workloads
    assert workload.rate_per_s == 200.0
    assert workload.seconds <= 1.5
    (slow,) = plan_experiment(screening_settings(made(rate=2.0), ARMS)).runs
    assert slow[1].workloads[0].seconds == 5.0


def test_recorded_traffic_is_the_load_of_a_screening(tmp_path: Path) -> None:
    folder = write_traffic(tmp_path / "traffic", ((at / 10, np.ones((1, 3))) for at in range(99)))
    settings = made(model="torchvision:resnet50", traffic=str(folder))
    assert settings.aim == "latency"
    (run,) = plan_experiment(screening_settings(settings, ARMS)).runs
    (workload,) = run[1].workloads
    assert (workload.name, workload.traffic, workload.rounds) == ("traffic", str(folder), 4)


def test_prompts_are_the_load_of_a_screening(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    path.write_text("".join(f'{{"timestamp": {n}, "input_length": 9, "output_length": 7}}\n' for n in range(20)))
    settings = made(model="language:demo", traffic=str(path))
    check_tuning(settings, gpu=False)
    (run,) = plan_experiment(screening_settings(settings, ARMS)).runs
    assert [(load.name, load.output_tokens) for load in run[1].workloads] == [("trace(calls)", 7)]


def test_the_final_has_the_time_that_is_left() -> None:
    (run,) = plan_experiment(final_settings(made(price=3.0, goal="cost"), ARMS, 6.27)).runs
    assert run[1].minutes == pytest.approx(6.2)
    assert run[1].gpu_control
    assert not run[1].handicap_check


def test_a_language_model_has_its_tokens() -> None:
    settings = made(model="language:demo", prompt_tokens=8, output_tokens=9, concurrency=3, price=2.0, goal="cost")
    (run,) = plan_experiment(final_settings(settings, ARMS, 5.0)).runs
    (workload,) = run[1].workloads
    assert (workload.prompt_tokens, workload.output_tokens, workload.concurrency) == (8, 9, 3)
    assert run[1].price == 2.0
