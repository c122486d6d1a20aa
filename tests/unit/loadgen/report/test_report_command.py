"""`abserve report DIR` needs the stored records and nothing else."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from loadgen.cli.report import report
from loadgen.report.document import Cell
from loadgen.report.history import history_document, past_runs, stored
from loadgen.verdict.result import read_result
from tests.golden.synthetic_run import Plan, write_run

app = typer.Typer()
app.command()(report)
PACKED = gzip.compress(b'{"schema": 1}', mtime=0)


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


@pytest.mark.parametrize("left_out", [("samples",), ("samples", "blocks", "run.json")])
def test_where_the_samples_are_not_kept_the_result_stays_what_it_was(tmp_path: Path, left_out: tuple[str, ...]) -> None:
    """As in a published folder: analysed without its samples the run would be invalid, and overwritten as that."""
    write_run(tmp_path, Plan(pairs=2))
    run(str(tmp_path))
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    for name in left_out:
        path = tmp_path / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert run(str(tmp_path))[0] == 0
    for name in ("result.json", "report.html", "summary.md"):
        assert (tmp_path / name).read_bytes() == first[name], name


def test_a_compressed_result_is_reported_as_the_plain_one(tmp_path: Path) -> None:
    write_run(tmp_path / "run", Plan(pairs=2))
    run(str(tmp_path / "run"))
    published = tmp_path / "published"
    published.mkdir()
    (published / "result.json.gz").write_bytes(gzip.compress((tmp_path / "run/result.json").read_bytes()))
    assert run(str(published))[0] == 0
    for name in ("report.html", "summary.md"):
        assert (published / name).read_bytes() == (tmp_path / "run" / name).read_bytes(), name
    assert not (published / "result.json").exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", PACKED[:-4], PACKED[:10] + b"x" * 99, PACKED],
    ids=["empty", "not compressed", "cut off", "damaged", "no result"],
)
def test_a_broken_compressed_result_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "result.json.gz").write_bytes(content)
    status, output = run(str(tmp_path))
    assert (status, "is not a result of this version of abserve" in " ".join(output.split())) == (2, True)
    assert "Traceback" not in output


def test_several_runs_are_one_page_and_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    for number, name in enumerate(("monday", "tuesday <b>", "wednesday")):
        write_run(tmp_path / name, Plan(pairs=2, requests=40, seed=number + 1))
    write_run(tmp_path / "other" / "http-uint8", Plan(pairs=2, requests=40, preset="full"))
    (tmp_path / "other" / "http-uint8" / "report.html").touch()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "result.json").write_text("{")
    (tmp_path / "empty").mkdir()
    status, _ = run(str(tmp_path))
    assert (status, (tmp_path / "history.html").exists()) == (0, True)
    runs, faults = past_runs(tmp_path)
    assert {past.folder.name for past in runs} == {"monday", "tuesday <b>", "wednesday", "http-uint8"}
    assert set(faults) == {tmp_path / "broken", tmp_path / "empty"}
    document = stored(tmp_path).document
    (table,) = document.tables
    targets = {cell.target for row in table.rows for cell in row if isinstance(cell, Cell) and cell.target}
    assert targets == {"monday", "tuesday%20%3Cb%3E", "wednesday", "other/http-uint8/report.html"}
    trend, overlay = document.charts
    assert {view.label for view in trend.views} >= {"single", "concurrent(16)"}
    assert [len(trace["y"]) for trace in trend.data] == [4] * len(trend.data)
    assert [line["visible"] for line in overlay.data] == ["legendonly", "legendonly", True, True]
    page = (tmp_path / "history.html").read_text()
    assert 'class="filter"' in page
    assert "tuesday <b>" not in page


def test_a_directory_without_a_run_gets_one_sentence(tmp_path: Path) -> None:
    status, output = run(str(tmp_path))
    assert status == 2
    assert "holds no run" in output
    assert "Traceback" not in output
    assert list(tmp_path.iterdir()) == []


def test_the_loads_of_a_trend_stand_in_their_order(tmp_path: Path) -> None:
    """Not in one that changes from call to call; loads that were measured more often come first."""
    source = Path(__file__).resolve().parents[4] / "docs/results/2026-11-22-h200-models/resnet50/result.json.gz"
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        shutil.copy(source, tmp_path / name)
    runs, _ = past_runs(tmp_path)
    trend = history_document(runs, {}, tmp_path).charts[0]
    loads = list(dict.fromkeys(comparison.workload for comparison in runs[0].leading))
    assert len(loads) > 4
    assert [view.label for view in trend.views] == loads


def test_runs_that_choose_are_no_comparisons(tmp_path: Path) -> None:
    """Those of a comparison with --best that has not begun to compare."""
    write_run(tmp_path / "best/choices/1", Plan(pairs=2, requests=40))
    assert [run.folder.name for run in past_runs(tmp_path)[0]] == ["1"]
    (tmp_path / "best/best.json").touch()
    runs, faults = past_runs(tmp_path)
    assert (runs, faults) == ([], {tmp_path / "best": "it holds no run"})
    assert run(str(tmp_path / "best"))[0] == 2
