"""Experiment files: what overrides what, what is refused and how, and that the effective file says it all again."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadgen.commands.assembly import plan_experiment
from loadgen.entry import build
from loadgen.experiment.file import effective_settings, write_settings
from loadgen.experiment.options import setting_options
from loadgen.experiment.settings import ExperimentSettings

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
    assert experiment.a.settings == {"max-queue-delay-us": "0"}
    assert [cell.name for cell in experiment.cells][:2] == ["single", "batched(1)"]
    assert experiment.settings_sha256 == settings.sha256()
    assert experiment.settings == settings.content()


def test_the_command_line_overrides_the_environment_and_that_the_file_and_that_the_default(tmp_path: Path) -> None:
    file = written(tmp_path, "requests: 11\nconcurrency: 12\npairs: 13\n")
    variables = {"ABSERVE_COMPARE_CONCURRENCY": "22", "ABSERVE_COMPARE_PAIRS": "23"}
    status, effective = run(file, "--print-experiment", "--pairs", "33", **variables)
    assert status == 0
    for line in ("requests: 11", "concurrency: [22]", "pairs: 33", "seed: 0"):
        assert line in effective.splitlines()


def test_options_of_an_arm_are_merged_by_key(tmp_path: Path) -> None:
    file = written(tmp_path, "a: {options: {engine: torch, x: 1, y: true}}\nb: native\n")
    status, effective = run(file, "--print-experiment", "--a-option", "engine=null", "--b-option", "z=2")
    assert status == 0
    path = tmp_path / "effective.yaml"
    path.write_text(effective)
    settings = effective_settings(path, {})
    assert settings.a.options == {"engine": "null", "x": "1", "y": "true"}
    assert (settings.b.target, settings.b.options) == ("native", {"z": "2"})


def test_the_effective_file_asks_for_the_same_and_has_the_same_hash(tmp_path: Path) -> None:
    settings = effective_settings(EXAMPLE, {})
    path = tmp_path / "again.yaml"
    path.write_text(write_settings(settings))
    again = effective_settings(path, {})
    assert again == settings
    assert again.sha256() == settings.sha256()
    assert settings.sha256() in path.read_text()


def test_the_hash_is_of_what_is_asked_for_and_not_of_how_it_is_written(tmp_path: Path) -> None:
    one = effective_settings(Path(written(tmp_path, "a: native\nscenarios: single,batched\npairs: 4 # four\n")), {})
    other = effective_settings(Path(written(tmp_path, "pairs: 4\nscenarios:\n- single\n- batched\n")), {})
    third = effective_settings(Path(written(tmp_path, "pairs: 5\nscenarios: [single, batched]\n")), {})
    assert one.sha256() == other.sha256() != third.sha256()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("concurency: 3\n", "e.yaml: concurency: no such key; did you mean concurrency?"),
        ("a: {target: native, option: {}}\n", "e.yaml: a.option: no such key; did you mean options?"),
        ("zzz: 3\n", "e.yaml: zzz: no such key; there are a, b, model"),
        ("requests: 0\n", "e.yaml: requests: 0, must be greater than or equal to 1"),
        ("pairs: many\n", "e.yaml: pairs: many, must be a valid integer"),
        ("pairs: 3\npairs: 4\n", "e.yaml:2: pairs is given twice"),
        ("a: &x {target: native}\nb: *x\n", "e.yaml:2: aliases are not taken"),
        ("- a\n- b\n", "write keys with values"),
        ("a: [\n", "e.yaml:2"),
        ("model: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
        ("preset: fast\n", "there are quick, full"),
        ("[a, b]: 1\n", "e.yaml:1: a key must be text"),
        ("{a: b}: 1\n", "e.yaml:1: a key must be text"),
        ("requests: 1:30\n", "e.yaml:1: 1:30 is no number; put quotes around a text"),
        ("margin: " + ":".join(["59"] * 3000) + ".5\n", "is no number"),
        ("requests: 0x" + "f" * 50_000 + "\n", "is no number"),
        ("".join(f"k{number}: 1\n" for number in range(80_000)), "an experiment file has at most 65536"),
        ("".join(f"k{number}: 1\n" for number in range(5000)), "e.yaml:1000: an experiment file is not so large"),
        ("".join(f"k{number}: 1\n" for number in range(50)), "e.yaml: and 30 more"),
        ("a: " + "[" * 5000 + "\n", "nested more than 20 deep"),
        ("model: !!timestamp x\n", "e.yaml: a value in it cannot be read"),
        ("model: !!int ''\n", "e.yaml: a value in it cannot be read|is no number"),
        ("model: !!bool x\n", "e.yaml: a value in it cannot be read"),
        ('"\\e[31mrequests": 1\n', "requests: no such key; did you mean requests?"),
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


def test_a_file_that_is_not_there() -> None:
    status, output = run("no-such.yaml")
    assert status == 2
    assert "no-such.yaml: No such file" in output


def test_every_setting_has_an_option_with_help_and_each_name_once() -> None:
    options = setting_options()
    assert {option.path[0] for option in options} == set(ExperimentSettings.model_fields)
    assert len({option.flag for option in options}) == len(options)
    assert all(option.field.description for option in options)
    flags = {option.flag: option.variable for option in options}
    assert flags["--a"] == "ABSERVE_COMPARE_A"
    assert flags["--b-option"] == "ABSERVE_COMPARE_B_OPTIONS"
    assert flags["--a-grpc"] == "ABSERVE_COMPARE_A_GRPC"
    assert flags["--batch-sizes"] == "ABSERVE_COMPARE_BATCH_SIZES"
