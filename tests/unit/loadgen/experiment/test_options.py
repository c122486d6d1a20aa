"""Experiment files: what overrides what, what is refused and how, and that the effective file says it all again."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from loadgen.base.documents import read_record
from loadgen.entry import build
from loadgen.experiment.matrix import MatrixSettings
from loadgen.experiment.options import effective_settings, setting_options, write_settings
from loadgen.experiment.settings import ArmSettings, ExperimentSettings, Settings
from loadgen.experiment.tuning import TuneSettings
from loadgen.measure.planning import plan_experiment
from loadgen.records.run import Experiment

EXAMPLE = Path(__file__).resolve().parents[4] / "docs" / "examples" / "experiment.yaml"


def run(*arguments: str, **environment: str) -> tuple[int, str]:
    done = CliRunner().invoke(build(), ["compare", *arguments], env=environment)
    return done.exit_code, done.output


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "e.yaml"
    path.write_text(text)
    return str(path)


def test_the_example_can_be_run() -> None:
    settings = effective_settings(EXAMPLE, {})
    ((_, experiment),) = plan_experiment(settings).runs
    assert experiment.baseline.settings == {"max-queue-delay-us": "0"}
    assert [workload.name for workload in experiment.workloads][:2] == ["single", "batched(1)"]
    assert experiment.settings_sha256 == settings.sha256()
    assert experiment.settings == settings.content()


def test_the_command_line_overrides_the_environment_and_that_the_file_and_that_the_default(tmp_path: Path) -> None:
    file = written(tmp_path, "requests: 11\nconcurrency: 12\nrounds: 13\n")
    variables = {"ABSERVE_COMPARE_CONCURRENCY": "22", "ABSERVE_COMPARE_ROUNDS": "23"}
    status, effective = run(file, "--print-experiment", "--rounds", "33", **variables)
    assert status == 0
    for line in ("requests: 11", "concurrency: [22]", "rounds: 33", "seed: 0"):
        assert line in effective.splitlines()


def test_options_of_an_arm_are_merged_by_key(tmp_path: Path) -> None:
    file = written(tmp_path, "a: {options: {engine: torch, x: 1, y: true}}\nb: native\n")
    status, effective = run(file, "--print-experiment", "--a-option", "engine=null", "--b-option", "z=2")
    assert status == 0
    path = tmp_path / "effective.yaml"
    path.write_text(effective)
    settings = effective_settings(path, {})
    assert settings.arms == {
        "a": ArmSettings(target="native", options={"engine": "null", "x": "1", "y": "true"}),
        "b": ArmSettings(target="native", options={"z": "2"}),
    }


def printed(tmp_path: Path, *arguments: str) -> ExperimentSettings:
    """What `--print-experiment` shows, read again."""
    status, effective = run(*arguments, "--print-experiment")
    assert status == 0, effective
    path = tmp_path / "printed.yaml"
    path.write_text(effective)
    return effective_settings(path, {})


def test_a_third_arm_is_one_more_letter(tmp_path: Path) -> None:
    settings = printed(tmp_path, "--c", "native", "--c-option", "x=1", "--h", "http://h:1", "--h-payload", "jpeg")
    assert {name: (arm.target, arm.options, arm.payload) for name, arm in settings.arms.items()} == {
        "a": ("native", {}, None),
        "b": ("triton", {}, None),
        "c": ("native", {"x": "1"}, None),
        "h": ("http://h:1", {}, "jpeg"),
    }
    ((_, experiment),) = plan_experiment(settings).runs
    assert (experiment.labels, experiment.baseline.label) == (("a", "b", "c", "h"), "a")


NAMED = "arms: {torch: native, onnx: triton, trt: {target: triton, options: {engine: tensorrt}}}\n"


def test_a_file_gives_arms_names_and_the_first_is_the_baseline(tmp_path: Path) -> None:
    ((_, experiment),) = plan_experiment(effective_settings(Path(written(tmp_path, NAMED)), {})).runs
    assert [(arm.label, arm.target, arm.settings) for arm in experiment.arms] == [
        ("torch", "native", {}),
        ("onnx", "triton", {}),
        ("trt", "triton", {"engine": "tensorrt"}),
    ]
    assert experiment.baseline.label == "torch"
    assert experiment.pairings == (("torch", "onnx"), ("torch", "trt"))
    assert experiment.pairings_of_others(experiment.workloads[0]) == (("onnx", "trt"),)


def test_the_first_arm_of_a_file_is_the_baseline_whatever_its_letter(tmp_path: Path) -> None:
    settings = printed(tmp_path, written(tmp_path, "arms: {b: native, a: triton}\nc: native\n"))
    assert list(settings.arms) == ["b", "a", "c"]


@pytest.mark.parametrize(
    "text",
    [
        EXAMPLE.read_text(),
        NAMED,
        "c: {target: native, options: {x: 1}}\n",
        "arms: {b: native, a: triton}\n",
        "b: {target: 'http://h:1', body: {ignore_eos: null, top_k: 1, stop: [a], user: '5'}}\n",
    ],
)
def test_settings_printed_and_read_again_are_the_same(tmp_path: Path, text: str) -> None:
    settings = effective_settings(Path(written(tmp_path, text)), {})
    path = tmp_path / "again.yaml"
    path.write_text(write_settings(settings))
    again = effective_settings(path, {})
    assert (again, list(again.arms)) == (settings, list(settings.arms))
    assert again.sha256() == settings.sha256()
    assert settings.sha256() in path.read_text()


def test_a_setting_is_stored_under_its_name_as_it_is() -> None:
    """Those that an experiment has under the same name and does not resolve."""
    asked = {
        "inputs": "random", "precision": "fp16", "preset": "full", "seed": 7, "threads": 3, "processes": 2,
        "gpu_control": False, "handicap_check": False, "restarts": 2, "model": "torchvision:resnet50",
    }  # fmt: skip
    ((_, experiment),) = plan_experiment(ExperimentSettings.model_validate(asked)).runs
    assert {name: getattr(experiment, name) for name in asked} == asked
    assert read_record(msgspec.json.encode(experiment), Experiment) == experiment


def test_an_option_goes_over_a_printed_file(tmp_path: Path) -> None:
    path = tmp_path / "first.yaml"
    path.write_text(run("--print-experiment", "--b-option", "x=1", "--b-option", "y=2", "--c", "native")[1])
    settings = printed(tmp_path, str(path), "--b-option", "x=3", "--c", "triton")
    assert settings.arms == {
        "a": ArmSettings(target="native"),
        "b": ArmSettings(target="triton", options={"x": "3", "y": "2"}),
        "c": ArmSettings(target="triton"),
    }


def test_half_an_arm_on_the_command_line_is_refused_by_its_option(tmp_path: Path) -> None:
    status, output = run("--c-option", "x=1", "--out", str(tmp_path / "run"))
    assert status == 2
    assert "--c: give native, triton, fastapi, litserve, vllm or the URL of a server" in " ".join(output.split())


def test_an_option_for_a_letter_beside_named_arms_is_refused_as_that(tmp_path: Path) -> None:
    status, output = run(written(tmp_path, NAMED), "--b-option", "x=1")
    assert status == 2
    assert "the arms torch, onnx, trt, b mix letters and names" in " ".join(output.split())


def test_the_hash_is_of_what_is_asked_for_and_not_of_how_it_is_written(tmp_path: Path) -> None:
    first = effective_settings(Path(written(tmp_path, "a: native\nscenarios: single,batched\nrounds: 4 # four\n")), {})
    other = effective_settings(Path(written(tmp_path, "rounds: 4\nscenarios:\n- single\n- batched\n")), {})
    third = effective_settings(Path(written(tmp_path, "rounds: 5\nscenarios: [single, batched]\n")), {})
    assert first.sha256() == other.sha256() != third.sha256()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("concurency: 3\n", "e.yaml: unknown key concurency; did you mean concurrency?"),
        ("a: {target: native, option: {}}\n", "e.yaml: arms.a: unknown key option; did you mean options?"),
        ("zzz: 3\n", "e.yaml: unknown key zzz; choose from arms, model"),
        ("arms: {torch: native, b: triton}\n", "the arms torch, b mix letters and names"),
        (
            "arms: {torch: native, onnx: triton}\nc: native\n",
            "the arms torch, onnx, c mix letters and names",
        ),
        ("arms: {torch: native}\n", "e.yaml: arms: a comparison has 2 to 8 arms, not 1"),
        (f"arms: {{{', '.join(f'arm{n}: native' for n in range(9))}}}\n", "arms: a comparison has 2 to 8 arms, not 9"),
        ("i: native\n", "e.yaml: unknown key i"),
        (
            "c: {options: {x: 1}}\n",
            "e.yaml: arms.c.target: give native, triton, fastapi, litserve, vllm or the URL of a server",
        ),
        (
            "arms: {torch: native, onnx: {payload: jpeg}}\n",
            "e.yaml: arms.onnx.target: give native, triton, fastapi, litserve, vllm or the URL",
        ),
        (
            "arms: {torch: native, onnx: {target: native, option: {}}}\n",
            "arms.onnx: unknown key option; did you mean options?",
        ),
        ("arms: {Torch: native, onnx: native}\n", "e.yaml: arms: Torch cannot name an arm"),
        ("arms: {y: native, z: native}\n", "y cannot name an arm; use one letter from a to h"),
        ("arms: {ratio: native, onnx: native}\n", "ratio cannot name an arm"),
        ("arms: {torch: native, and: native}\n", "and cannot name an arm"),
        ("arms: [native, triton]\n", "e.yaml: arms: must be a valid dictionary"),
        ("requests: 0\n", "e.yaml: requests 0: must be greater than or equal to 1"),
        ("rounds: many\n", "e.yaml: rounds many: must be a valid integer"),
        ("rounds: 3\nrounds: 4\n", "e.yaml:2: rounds is given twice"),
        ("a: &x {target: native}\nb: *x\n", "e.yaml:2: aliases are not supported"),
        ("- a\n- b\n", "write keys with values"),
        ("a: [\n", "e.yaml:2"),
        ("model: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
        ("preset: fulll\n", "e.yaml: preset: unknown value fulll; did you mean full?"),
        ("scenarios: [single, batchd]\n", "e.yaml: scenarios.1: unknown value batchd; did you mean batched?"),
        ("payload: png\n", "e.yaml: payload.0: unknown value png; choose from tensors, fp32, uint8, jpeg"),
        ("transport: []\n", "e.yaml: transport: give at least one value"),
        ("rates: [[50]]\n", "e.yaml: rates.0: must be a valid number"),
        ("scenarios: [{single: 1}]\n", "e.yaml: scenarios.0: unknown value {'single': 1}"),
        ("[a, b]: 1\n", "e.yaml:1: a key must be text"),
        ("{a: b}: 1\n", "e.yaml:1: a key must be text"),
        ("requests: 1:30\n", "e.yaml:1: 1:30 is not a number; put text in quotes"),
        ("margin: " + ":".join(["59"] * 3000) + ".5\n", "is not a number"),
        ("requests: 0x" + "f" * 50_000 + "\n", "is not a number"),
        ("".join(f"k{number}: 1\n" for number in range(80_000)), "an experiment file has at most 65536"),
        (
            "".join(f"k{number}: 1\n" for number in range(5000)),
            "e.yaml:1000: a file has at most 2000 values",
        ),
        ("".join(f"k{number}: 1\n" for number in range(50)), "e.yaml: and 30 more"),
        ("a: " + "[" * 5000 + "\n", "nested at most 20 deep"),
        ("model: !!timestamp x\n", "e.yaml: a value cannot be read"),
        ("model: !!int ''\n", "e.yaml: a value cannot be read|is not a number"),
        ("model: !!bool x\n", "e.yaml: a value cannot be read"),
        ('"\\e[31mrequests": 1\n', "requests; did you mean requests?"),
    ],
)
def test_what_cannot_be_is_refused_with_the_place(tmp_path: Path, text: str, said: str) -> None:
    status, output = run(written(tmp_path, text), "--out", str(tmp_path / "run"))
    assert status == 2
    shown = " ".join(output.split())
    assert any(words in shown for words in said.split("|"))
    assert shown.isprintable()
    assert len(shown) < 8000
    assert not (tmp_path / "run").exists()


def test_a_wrong_option_names_the_option_and_not_the_file(tmp_path: Path) -> None:
    status, output = run(written(tmp_path, "seed: 1\n"), "--batch-sizes", "1,x")
    assert status == 2
    assert "--batch-sizes" in output
    assert "e.yaml" not in output


@pytest.mark.parametrize("value", ["5", "{a: b}", "[[a]]"])
def test_conditions_of_a_file_that_are_not_text_are_refused_also_beside_the_option(tmp_path: Path, value: str) -> None:
    status, output = run(written(tmp_path, f"fail_if: {value}\n"), "--fail-if", "b.p99 > 1.05 * a.p99")
    assert status == 2
    assert "must be a valid string" in output


def test_every_setting_has_an_option_with_help_and_each_name_once() -> None:
    options = setting_options()
    assert {option.path[0] for option in options} == set(ExperimentSettings.model_fields)
    assert len({option.flag for option in options}) == len(options)
    assert all(option.field.description for option in options)
    flags = {option.flag: option.variable for option in options}
    assert flags["--a"] == "ABSERVE_COMPARE_A"
    assert flags["--b-option"] == "ABSERVE_COMPARE_B_OPTIONS"
    assert flags["--a-grpc"] == "ABSERVE_COMPARE_A_GRPC"
    assert flags["--h-payload"] == "ABSERVE_COMPARE_H_PAYLOAD"
    assert flags["--batch-sizes"] == "ABSERVE_COMPARE_BATCH_SIZES"


@pytest.mark.parametrize("kind", [ExperimentSettings, TuneSettings, MatrixSettings])
def test_every_number_has_a_limit(kind: type[Settings]) -> None:
    """A billion rounds were planned one by one, until the memory was full."""
    numbers = [
        name for name, field in kind.model_fields.items() if re.search(r"\b(int|float)\b", str(field.annotation))
    ]
    assert len(numbers) > 3
    for name in {*numbers} - {"seed"}:
        with pytest.raises(ValidationError):
            kind.model_validate({name: 10**9})
