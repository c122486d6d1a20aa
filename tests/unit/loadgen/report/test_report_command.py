"""`abserve report DIR` needs the stored records and nothing else."""

from __future__ import annotations

from pathlib import Path

import typer
from synthetic_run import Plan, write_run
from typer.testing import CliRunner

from loadgen.analysis.result import read_result
from loadgen.commands.report import report

app = typer.Typer()
app.command()(report)


def run(*arguments: str) -> tuple[int, str]:
    outcome = CliRunner().invoke(app, list(arguments))
    return outcome.exit_code, outcome.output


def test_it_rebuilds_everything(tmp_path: Path) -> None:
    write_run(tmp_path, Plan(pairs=2))
    status, output = run(str(tmp_path))
    assert status == 0
    assert "VALID" in output
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert {"result.json", "report.html", "summary.md"} <= set(first)
    assert str(tmp_path / "report.html") in output
    assert run(str(tmp_path))[0] == 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == first


def test_it_reports_a_killed_run(tmp_path: Path) -> None:
    write_run(tmp_path, Plan(pairs=4, state="running", cut_after=50))
    status, output = run(str(tmp_path))
    assert status == 0
    assert "INVALID" in output
    assert not read_result(tmp_path / "result.json").valid


def test_a_directory_without_a_run_gets_one_sentence(tmp_path: Path) -> None:
    status, output = run(str(tmp_path))
    assert status == 1
    assert "holds no run" in output
    assert "Traceback" not in output
    assert list(tmp_path.iterdir()) == []
