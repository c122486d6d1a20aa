"""A fault of the analysis costs no measurement: the records stay, and a sentence says how to repeat the analysis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import loadgen.cli.compare as command
from loadgen.cli.engines import _report
from loadgen.engines.store import MatrixStore
from loadgen.entry import build
from loadgen.experiment.plan import Combination
from loadgen.records.run import RunState
from loadgen.records.store import read_run
from tests.golden.synthetic_run import Plan, write_run
from tests.synthetic_matrix import cell, configuration, matrix

FAULTS = [KeyError("x"), StopIteration(), RuntimeError("a\nb"), RecursionError(), ZeroDivisionError("division by zero")]


def ended(*_: Any, **__: Any) -> RunState:
    return RunState(state="finished", phase="finished")


def fail_in(monkeypatch: pytest.MonkeyPatch, place: str, fault: Exception) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise fault

    monkeypatch.setattr(place, fail)


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        *(("loadgen.verdict.result.analyse", fault) for fault in FAULTS),
        ("loadgen.report.published.Published.write", FAULTS[0]),
        ("loadgen.report.files.result_document", FAULTS[1]),
        ("loadgen.report.renderers.terminal.print_document", FAULTS[2]),
        ("loadgen.report.files.append_job_summary", FAULTS[3]),
    ],
)
def test_a_finished_run_is_kept(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    place: str,
    fault: Exception,
) -> None:
    folder = write_run(tmp_path / "a run", Plan(pairs=2, requests=20, batches=(8,)))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    monkeypatch.setattr("loadgen.measure.runner.run_experiment", ended)
    with monkeypatch.context() as broken:
        fail_in(broken, place, fault)
        status, _ = command.run_and_report(read_run(folder).experiment, folder)
    said = capsys.readouterr().err.splitlines()
    assert status == command.EXIT_INVALID
    (sentence,) = [line for line in said if line.startswith("error: the analysis failed")]
    assert type(fault).__name__ in sentence
    assert f"analyse it again with: abserve report '{folder}'" in sentence
    assert {path: path.read_bytes() for path in before} == before
    assert CliRunner().invoke(build(), ["report", str(folder)]).exit_code == 0


def test_the_other_runs_of_a_matrix_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "run", Plan(pairs=2, requests=20, batches=(8,)))
    experiment = read_run(folder).experiment
    ran = []

    def run(_: Any, out: Path, *__: Any) -> RunState:
        ran.append(out)
        write_run(out, Plan(pairs=2, requests=20, batches=(8,)))
        return ended()

    monkeypatch.setattr("loadgen.measure.runner.run_experiment", run)
    fail_in(monkeypatch, "loadgen.verdict.result.analyse", KeyError("x"))
    runs = [(Combination(transport, "uint8"), experiment) for transport in ("http", "grpc")]
    status, results = command._run_matrix(runs, tmp_path / "out")
    assert len(ran) == 2
    assert status == command.EXIT_INVALID
    assert list(results.values()) == [None, None]


def test_one_format_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "run", Plan(pairs=2, requests=20, batches=(8,)))
    from loadgen.verdict.result import analyse

    fail_in(monkeypatch, "loadgen.report.files.render_junit", KeyError("x"))
    status = command._write_formats({"": analyse(folder)}, tmp_path / "j.xml", tmp_path / "c.csv", 0)
    assert status == command.EXIT_INVALID
    assert (tmp_path / "c.csv").exists()


def test_a_finished_matrix_of_engines_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = matrix([configuration()], [cell(0, 10.0)])
    store = MatrixStore(tmp_path)
    store.write(found.plan)
    store.write(found.environment)
    fail_in(monkeypatch, "loadgen.engines.store.analyse", StopIteration())
    assert found.state is not None
    assert _report(tmp_path, found.state, None, None) == 1
    assert f"analyse it again with: abserve report {tmp_path}" in capsys.readouterr().err
