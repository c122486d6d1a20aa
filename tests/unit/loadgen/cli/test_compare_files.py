"""A file that `abserve compare` cannot write costs neither the other files nor the rest of a matrix."""

from __future__ import annotations

from pathlib import Path

import pytest

import loadgen.cli.compare as compare
import loadgen.report.files
from loadgen.experiment.plan import Combination
from loadgen.records.run import Experiment
from tests.unit.loadgen.checks.test_fairness import EXPERIMENT


def test_the_csv_is_written_although_the_junit_file_cannot_be(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    junit, csv = tmp_path / "there is none" / "junit.xml", tmp_path / "found.csv"
    assert compare._write_formats({}, junit, csv, compare.EXIT_VALID) == compare.EXIT_INVALID
    assert csv.exists()
    assert f"cannot write {junit}: No such file" in capfd.readouterr().err


def test_a_matrix_goes_on_without_its_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def run(_: Experiment, out: Path, __: str | None) -> tuple[int, None]:
        ran.append(out.name)
        return compare.EXIT_VALID, None

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compare, "run_and_report", run)
    monkeypatch.setattr(loadgen.report.files, "write_index", full)
    combinations = (Combination("http", "fp32"), Combination("grpc", "fp32"))
    status, results = compare._run_matrix([(one, EXPERIMENT) for one in combinations], tmp_path)
    assert ran == [one.folder for one in combinations]
    assert (status, list(results)) == (compare.EXIT_INVALID, ran)
    told = capfd.readouterr()
    assert "no index: No space left on device" in told.err
    assert "index:" not in told.out
