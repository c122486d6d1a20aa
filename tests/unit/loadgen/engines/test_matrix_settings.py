"""`abserve engines`: what overrides what, what is refused, and its exit status; what it measures is in
test_matrix_run.py and tests/integration/loadgen/test_engines.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from loadgen.cli import engines as command
from loadgen.cli.engines import exit_status
from loadgen.entry import PanelledCommand
from loadgen.experiment.matrix import MatrixSettings
from loadgen.measure.machine import read_environment
from loadgen.records.matrix import CellResult, Configuration, ConfigurationResult, Matrix, MatrixPlan, Visit
from loadgen.report.document import Document
from loadgen.stats.estimates import Estimate

OFFERS = {
    "device": "cpu",
    "modes": {"good": {"cpu": ["eager"]}, "bad": {"cpu": ["eager"]}},
    "precisions": {"good": {"cpu": ["fp32"]}, "bad": {"cpu": ["fp32"]}},
    "gpu": {"status": "no_library"},
}
FAKE = Path(__file__).with_name("fake_worker.py")
OPTIONS = ["--engines", "good,bad", "--baseline", "none", "--batches", "1", "--seconds", "0.001", "--rounds", "1"]


def invoke(*arguments: str, **environment: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command("engines", cls=PanelledCommand)(command.engines)
    done = CliRunner().invoke(app, [*arguments], env=environment)
    return done.exit_code, done.output


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The command with the fake worker, and an analysis that only counts; returns a new folder."""
    offers = tmp_path / "offers.py"
    offers.write_text(
        "import json, runpy, sys\n"
        f"if sys.argv[1] == '--offers': print({json.dumps(json.dumps(OFFERS))})\n"
        "elif sys.argv[1] == '--check':\n"
        "    one = dict(reason=None, wrong=False, precision='fp32', mode='eager', device='cpu', threads=1,"
        " lengths=[None], too_long=None)\n"
        "    print(json.dumps([one for _ in json.load(sys.stdin)]))\n"
        f"else: runpy.run_path({str(FAKE)!r}, run_name='__main__')\n"
    )
    monkeypatch.setattr(command, "ENGINE_WORKER", (sys.executable, str(offers)))
    monkeypatch.setattr("loadgen.engines.analyse.analyse", matrix_of)
    monkeypatch.setattr("loadgen.engines.files.matrix_document", lambda _: Document("matrix", {}))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "out"


def matrix_of(plan: MatrixPlan, environment: Any, visits: tuple[Visit, ...], state: Any, judged: Any = None) -> Matrix:
    estimate = Estimate(value=1.0)
    return Matrix(
        state=state,
        environment=environment,
        plan=plan,
        configurations=tuple(
            ConfigurationResult(
                configuration=configuration,
                item="image",
                description={},
                load_seconds=None,
                conversions=(),
                errors=tuple(v.error for v in visits if v.configuration == place and v.error is not None),
            )
            for place, configuration in enumerate(plan.configurations)
        ),
        cells=tuple(
            CellResult(
                configuration=visit.configuration,
                batch=cell.batch,
                length=cell.length,
                rounds=1,
                latency_ns=estimate,
                p99_ns=None,
                call_ns=estimate,
                items_per_second=estimate,
                speedup=None,
                first_call_seconds=0.0,
                fault=cell.fault,
            )
            for visit in visits
            for cell in visit.cells
        ),
    )


def test_an_option_overrides_the_variable_and_that_the_file_and_that_the_default(fake: Path, tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    file.write_text("models: fine\nengines: [good]\nbaseline: none\nrounds: 2\nseconds: 0.001\nbatches: 1\nseed: 3\n")
    status, output = invoke(str(file), "--out", str(fake), "--rounds", "1", ABSERVE_ENGINES_SEED="4")
    assert status == 0, output
    plan = msgspec.json.decode((fake / "plan.json").read_bytes(), type=MatrixPlan)
    assert (plan.rounds, plan.seed, plan.batches, plan.min_cosine) == (1, 4, (1,), 0.99)
    assert plan.settings == MatrixSettings(**plan.settings).content()
    assert plan.sha256 == MatrixSettings(**plan.settings).sha256()
    assert "1/1" in output


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("rounds: 0\n", [], "rounds 0: must be greater than or equal to 1"),
        ("foo: 1\n", [], "unknown key foo; choose from models, engines"),
        ("rounds: 1\nrounds: 2\n", [], "m.yaml:2: rounds is given twice"),
        ("- a\n", [], "write keys with values, as in: models: torchvision:resnet50"),
        ("", ["--processes", "fersh"], "--processes: unknown value fersh; did you mean fresh?"),
        ("", ["--baseline", "eager"], "--baseline eager: give ENGINE/MODE, as in torch/eager, or none"),
        ("", ["--batches", "0"], "--batches 0: must be greater than or equal to 1"),
        ("", ["--engines", "goood"], "--engines: unknown value goood; did you mean good?"),
        ("", ["--json", "/no/such/folder/x.json"], "--json /no/such/folder/x.json: give the path"),
        ("", ["--resume", "."], "--resume .: . holds no engine matrix: plan.json is missing"),
    ],
)
def test_a_mistake_is_one_sentence_and_status_2(
    fake: Path, tmp_path: Path, text: str, options: list[str], message: str
) -> None:
    file = tmp_path / "m.yaml"
    file.write_text(text)
    status, output = invoke(str(file), *options)
    assert status == 2
    assert message in output
    said = [line for line in output.splitlines() if line.startswith("error: ") or not line.endswith(" …")]
    assert [line.startswith("error: ") for line in said] == [True]
    assert not fake.exists()


def test_a_file_that_does_not_exist_is_named(fake: Path) -> None:
    status, output = invoke("none.yaml")
    assert (status, output) == (2, "error: none.yaml: No such file or directory; give the path of a matrix file\n")


def test_a_configuration_that_fails_is_status_1(fake: Path) -> None:
    status, output = invoke("--models", "dies", *OPTIONS, "--out", str(fake))
    assert status == 1
    assert "! the process was killed by SIGKILL" in output
    assert "report: " in output


def test_a_folder_is_never_overwritten_and_goes_on_with_its_own_plan_alone(fake: Path) -> None:
    first = ["--models", "dies", *OPTIONS]
    invoke(*first, "--out", str(fake))
    status, output = invoke(*first, "--out", str(fake))
    assert (status, "already holds a matrix; give another folder, or continue it with --resume" in output) == (2, True)
    status, output = invoke(*first, "--out", str(fake), "--resume", str(fake))
    assert (status, "are two folders" in output) == (2, True)
    status, output = invoke(*first, "--resume", str(fake), "--min-top1", "0.5")
    assert (status, "it was begun with min_top1 0.99 instead of 0.5" in output) == (2, True)
    for again in ([], first):
        status, output = invoke(*again, "--resume", str(fake))
        assert status == 1
        assert "2/2" in output  # the failed visit again
        assert "1/2" not in output


def test_another_machine_does_not_continue_a_matrix(fake: Path) -> None:
    invoke("--models", "fine", *OPTIONS, "--out", str(fake))
    here = read_environment({"status": "no_library"}, {})
    other = msgspec.structs.replace(here, host={**here.host, "cpu_model": "another CPU"})
    (fake / "environment.json").write_bytes(msgspec.json.encode(other))
    status, output = invoke("--resume", str(fake))
    assert status == 2
    assert "it was begun on another machine or with other versions (cpu_model another CPU instead of" in output


def test_json_leaves_standard_output_to_itself(fake: Path) -> None:
    app = typer.Typer()
    app.command("engines", cls=PanelledCommand)(command.engines)
    done = CliRunner().invoke(app, ["--models", "fine", *OPTIONS, "--out", str(fake), "--json", "-"])
    assert done.exit_code == 0
    assert msgspec.json.decode(done.stdout.encode(), type=Matrix).plan.rounds == 1


@pytest.mark.parametrize(
    ("engine", "fault", "errors", "status"),
    [
        ("torch", None, (), 0),
        ("torch", "wrong", (), 1),
        ("null", "computes no model", (), 0),
        ("torch", None, ("x",), 1),
    ],
)
def test_the_exit_status(engine: str, fault: str | None, errors: tuple[str, ...], status: int) -> None:
    configuration = Configuration(model="m", engine=engine, precision="fp32", mode="eager", device="cpu")
    visit = Visit(round=0, configuration=0, started_at="")
    plan = MatrixPlan(
        settings={}, sha256="", seed=0, rounds=1, configurations=(configuration,), refused=(), batches=(1,), lengths={},
        baseline="none", min_cosine=0.0, min_top1=0.0,
    )  # fmt: skip
    cell = {"batch": 1, "length": None, "first_call_ns": 1, "calls_ns": [1], "fault": fault}
    visits = msgspec.convert(
        [
            {**msgspec.to_builtins(visit), "cells": [cell]},
            *({**msgspec.to_builtins(visit), "error": e} for e in errors),
        ],
        tuple[Visit, ...],
    )
    matrix = matrix_of(plan, read_environment({}, {}), visits, None)
    assert exit_status(matrix) == status
    assert exit_status(msgspec.structs.replace(matrix, cells=())) == 1


def test_an_interrupted_matrix_is_reported_and_says_how_it_goes_on(fake: Path, tmp_path: Path) -> None:
    (tmp_path / ".artefacts").mkdir()
    (tmp_path / ".artefacts" / "interrupt").touch()  # the first worker sends SIGTERM here
    status, output = invoke("--models", "interrupts", *OPTIONS, "--out", str(fake))
    assert status == 130
    assert "report: " in output
    assert f"abserve engines --resume {fake}" in output
    assert not list((fake / "visits").iterdir())
    status, output = invoke("--resume", str(fake))
    assert status == 0
    assert "2/2" in output
