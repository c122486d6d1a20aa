"""What is planned: arms, workloads with their sizes, searches, and how long they take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loadgen.base.headers import without_secrets
from loadgen.entry import build
from loadgen.experiment.options import parse_fields, parse_options
from loadgen.experiment.plan import (
    PRESETS,
    PlanError,
    ignored_settings,
    make_arm,
    make_arms,
    make_workloads,
    minutes_of,
    sized,
)
from loadgen.experiment.schedule import schedule
from loadgen.experiment.settings import ArmSettings, ExperimentSettings
from loadgen.findings.gpu.records import DEFAULT_THRESHOLDS
from loadgen.measure.progress import Forecast
from loadgen.records.run import ArmRequest, Experiment, Workload
from loadgen.stats.percentiles import late_allowed


def workloads_of(*, gpu: bool = False, **settings: object) -> tuple[Workload, ...]:
    return make_workloads(ExperimentSettings.model_validate(settings), gpu=gpu)


def test_quick_has_every_scenario_once() -> None:
    workloads = workloads_of()
    names = [workload.name for workload in workloads]
    assert names == ["cold-start", "single", "batched(8)", "batched(32)", "concurrent(16)"]
    assert all(workload.rounds >= (3 if workload.scenario == "cold-start" else 4) for workload in workloads)


def test_smoke_has_every_scenario_in_a_minute() -> None:
    workloads = workloads_of(preset="smoke")
    assert [workload.name for workload in workloads] == ["cold-start", "single", "batched(8)", "concurrent(16)"]
    assert {workload.scenario: workload.rounds for workload in workloads}["cold-start"] == 1
    settings = ExperimentSettings.model_validate({"preset": "smoke"})
    assert minutes_of(settings) == 1.0
    assert settings.content()["batch_sizes"] == [8]
    assert ExperimentSettings.model_validate({"preset": "smoke", "batch_sizes": 4}).batch_sizes == (4,)


def test_a_block_lasts_for_several_requests_of_the_slower_arm() -> None:
    """As measured on two cores, a batch of 32 takes 1.47 s: too long for a block of 0.6 s."""
    workloads = workloads_of(scenarios="single,batched", batch_sizes=32, rates=5)
    single, batched, open_loop = sized(workloads, {"single": 0.067, "batched(32)": 1.47, "poisson(5/s)": 3.0})
    assert single.seconds == workloads[0].seconds
    assert batched.seconds == pytest.approx(3 * 1.47)
    assert open_loop == workloads[2]
    assert sized(workloads, {"batched(32)": 60.0})[1].seconds == batched.max_seconds


def test_every_number_of_users_is_a_workload() -> None:
    workloads = workloads_of(scenarios="concurrent", concurrency="64,1,16,16")
    assert [workload.name for workload in workloads] == ["concurrent(1)", "concurrent(16)", "concurrent(64)"]
    assert ExperimentSettings.model_validate({"concurrency": 8}).concurrency == (8,)
    with pytest.raises(ValueError, match="concurrency"):
        workloads_of(scenarios="concurrent", concurrency=0)


@pytest.mark.parametrize("preset", ["quick", "full"])
@pytest.mark.parametrize("pairs", [None, 1, 3])
def test_with_a_gpu_every_arm_and_workload_gets_enough_load_for_a_finding(preset: str, pairs: int | None) -> None:
    for workload in workloads_of(gpu=True, preset=preset, scenarios="single,batched,concurrent", rounds=pairs):
        assert workload.rounds * workload.seconds > DEFAULT_THRESHOLDS.min_window_s
        assert workload.rounds * workload.requests > DEFAULT_THRESHOLDS.min_requests
        assert workload.max_seconds >= 2 * workload.seconds


def test_full_has_more_of_everything() -> None:
    quick, full = PRESETS["quick"], PRESETS["full"]
    assert full.minutes > quick.minutes
    assert full.cold_starts > quick.cold_starts
    assert full.seconds > quick.seconds


def test_arm_options() -> None:
    options = parse_options("--b-option", ["added-delay-ms=20", "--engine=onnxruntime"])
    arm = make_arm("b", ArmSettings(target="triton", options=options))
    assert arm.settings == {"added-delay-ms": "20", "engine": "onnxruntime"}
    assert make_arm("a", ArmSettings(target="http://h:1")).target == "http://h:1"
    for target, refused, words in [
        ("native", ["nonsense"], "KEY=VALUE"),
        ("tritton", [], "did you mean triton"),
        ("http://h:1", ["x=1"], "does not start that server"),
    ]:
        with pytest.raises(PlanError, match=words):
            make_arm("a", ArmSettings(target=target, options=parse_options("--a-option", refused)))


def test_fields_of_a_request_are_json_or_text_and_a_dash_leaves_one_out() -> None:
    given = ["n=1", 'stop=["a"]', "user=bob =2", "seed=null", "-ignore_eos", "x="]
    fields = {"n": 1, "stop": ["a"], "user": "bob =2", "seed": None, "ignore_eos": None, "x": ""}
    assert parse_fields("--b-body", given) == fields
    assert make_arm("b", ArmSettings(target="http://h:1", body=fields)).body == fields
    for wrong in ("ignore_eos", "-ignore_eos=1", "=1", "-"):
        with pytest.raises(PlanError, match="KEY=VALUE"):
            parse_fields("--b-body", [wrong])
    with pytest.raises(ValueError, match="abserve makes the prompts"):
        ArmSettings(target="http://h:1", body={"messages": []})


def test_a_header_is_written_in_either_form_and_its_value_is_never_shown() -> None:
    assert parse_options("--b-header", ["Authorization: Bearer a=b", "X=c: d"]) == {
        "Authorization": "Bearer a=b", "X": "c: d",
    }  # fmt: skip
    given = ["--b-header", "Authorization: Bearer secret==", "--a-header=X: secret", "--b-header", "A: $KEY"]
    assert without_secrets(given) == ["--b-header", "Authorization:…", "--a-header=X:…", "--b-header", "A: $KEY"]


def test_options_of_triton_go_to_every_arm_triton_that_does_not_set_its_own() -> None:
    arms = {
        "a": {"target": "native"},
        "b": {"target": "triton"},
        "c": {"target": "triton", "options": {"backend": "tensorrt", "triton_repository": "/other"}},
    }
    shared = {"tritonserver": "/opt/t", "backend": "onnxruntime", "triton_repository": "/mine"}
    a, b, c = make_arms(ExperimentSettings.model_validate({"arms": arms, **shared}))
    assert a.settings == {}
    assert b.settings == {"tritonserver": "/opt/t", "backend": "onnxruntime", "triton-repository": "/mine"}
    assert c.settings == {"tritonserver": "/opt/t", "backend": "tensorrt", "triton_repository": "/other"}
    assert [arm.own_repository for arm in (a, b, c)] == [False, True, True]
    with pytest.raises(PlanError, match="--backend has no effect, because no arm is triton"):
        make_arms(ExperimentSettings.model_validate({"arms": {"a": "native", "b": "native"}, "backend": "tensorrt"}))


@pytest.mark.parametrize(
    ("arms", "more", "noted", "refused"),
    [
        (("native", "http://h:1"), {}, True, None),
        (("http://h:1", "http://h:2"), {}, True, None),
        (("triton", "http://h:2"), {}, False, None),
        (("native", "fastapi"), {}, False, "--tritonserver has no effect"),
        (("native", "http://h:1"), {"backend": "tensorrt"}, True, "--backend has no effect"),
    ],
)
def test_a_tritonserver_beside_urls_is_ignored_with_a_note(
    arms: tuple[str, str], more: dict[str, str], noted: bool, refused: str | None
) -> None:
    named = {"arms": dict(zip("ab", arms, strict=True)), "model": "m", "tritonserver": "/opt/t", **more}
    settings = ExperimentSettings.model_validate(named)
    if refused is not None:
        with pytest.raises(PlanError, match=refused):
            make_arms(settings)
    else:
        made = make_arms(settings)
        assert [arm.settings.get("tritonserver") for arm in made] == [
            "/opt/t" if target == "triton" else None for target in arms
        ]
    assert len(ignored_settings(settings)) == noted


def test_the_note_stands_before_anything_else(tmp_path: Path) -> None:
    urls = ["--a", "http://127.0.0.1:1", "--b", "http://127.0.0.1:1", "--tritonserver", str(tmp_path)]
    done = CliRunner().invoke(build(), ["compare", *urls, "--model", "m", "--print-experiment"])
    assert done.exit_code == 0
    note = f"note: --tritonserver {tmp_path} is ignored: no arm is triton, and a server at a URL runs already"
    assert note in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--seed", "-3"], "--seed"),  # the generator's random numbers take none below 0
        (["--rates", "5", "--open-seconds", "inf"], "--open-seconds inf: must be a finite number"),
        (["--until", "decided", "--time-limit", "inf"], "--time-limit inf: must be a finite number"),
        (["--rates", "20,20.000001"], "two workloads would both be called poisson(20/s)"),
        (["--b-body", "top_k=1"], "--b-body is for language models"),
        (["--slo-p99-ms", "50,50.0000001"], "two workloads would both be called slo(p99≤50ms)"),
    ],
)
def test_what_would_fail_in_the_middle_of_a_run_is_refused_before_it(
    tmp_path: Path, options: list[str], words: str
) -> None:
    given = ["--a", "native", "--b", "native", *options, "--out", str(tmp_path / "x")]
    done = CliRunner().invoke(build(), ["compare", *given], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert words in done.output
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("labels", ["ab", "abc"])
def test_the_forecast_learns(labels: str) -> None:
    workloads = workloads_of(scenarios="single,cold-start", rounds=2)
    experiment = Experiment(
        arms=tuple(ArmRequest(label=label, target="native") for label in labels),
        model="m",
        weights="random:0",
        payload="fp32",
        transport="http",
        workloads=workloads,
        preset="quick",
        seed=0,
        equivalence_margin=0.05,
        threads=0,
    )
    blocks = schedule(experiment)
    forecast = Forecast(experiment, blocks)
    assert forecast.remaining_s() == 300
    forecast.before_load_s = 0.0
    for block in blocks:
        forecast.block_took(block, 3.0)
    starts = 4 * len(labels)  # one more, with empty caches
    assert forecast.remaining_s() == pytest.approx(10 * starts)
    for _ in range(starts):
        forecast.start_took(4.0)
    assert forecast.remaining_s() == 0


@pytest.mark.parametrize(("option", "scenario"), [("batch_sizes", "batched"), ("concurrency", "concurrent")])
def test_an_empty_list_is_no_scenario_without_workloads(option: str, scenario: str) -> None:
    nothing: dict[str, Any] = {option: ()}
    with pytest.raises(PlanError, match=f"the scenario {scenario} needs --{option.replace('_', '-')}"):
        workloads_of(scenarios=f"single,{scenario}", **nothing)
    assert workloads_of(scenarios="single", **nothing)


def searches_of(**settings: object) -> tuple[Workload, ...]:
    planned = make_workloads(ExperimentSettings.model_validate({"scenarios": "single", **settings}))
    return tuple(workload for workload in planned if workload.is_search)


def test_a_search_for_every_bound() -> None:
    searches = searches_of(slo_p99_ms=(100.0, 50.0, 100.0), connections=32)
    assert [workload.name for workload in searches] == ["slo(p99≤50ms)", "slo(p99≤100ms)"]
    assert all(
        workload.arrivals == "poisson" and workload.concurrency == 32 and not workload.has_blocks
        for workload in searches
    )
    assert late_allowed(searches[0].requests) == 2


def test_a_trial_is_much_longer_than_its_bound() -> None:
    (workload,) = searches_of(slo_p99_ms=4000.0)
    assert (workload.seconds, workload.max_seconds) == (80.0, 160.0)


def test_more_queries_take_longer() -> None:
    (few,) = searches_of(slo_p99_ms=10.0)
    (many,) = searches_of(slo_p99_ms=10.0, slo_queries=4590)
    assert many.requests / many.max_seconds == pytest.approx(few.requests / few.max_seconds)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"scenarios": "slo"}, "needs --slo-p99-ms"),
        ({"slo_p99_ms": -1.0}, "greater than 0"),
        ({"slo_p99_ms": 50.0, "slo_queries": 100}, "greater than or equal to 459"),
    ],
)
def test_what_cannot_be_searched_is_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(Exception, match=words):
        searches_of(**settings)
