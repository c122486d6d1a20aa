"""`abserve rank` on files: what is printed, written and refused."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner, Result

import abserve
from loadgen.base.documents import indented
from loadgen.cli.rank import rank
from loadgen.records.matrix import Matrix
from loadgen.records.store import read_run
from tests.synthetic_matrix import cell, configuration, environment, matrix
from tests.synthetic_tuning import tuning, write_final

RESULTS = Path(__file__).resolve().parents[4] / "docs/results"
RESNET = RESULTS / "2026-11-22-h200-models/resnet50"
PRICES = """prices:
  - {machine: four cores, match: {cpu: xeon}, price_per_hour: 0.36, currency: USD, kind: on-demand, provider: P,
     source: "https://example.org", date: 2026-11-01}
  - {machine: H200 box, match: {gpu: H200}, price_per_hour: 7.2, currency: EUR, kind: on-demand, provider: P,
     source: "https://example.org", date: 2026-11-01}
"""


@pytest.fixture(autouse=True)
def _no_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.setenv("COLUMNS", "80")


def run(*arguments: object) -> Result:
    app = typer.Typer()
    app.command()(rank)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def write(folder: Path, analysed: Matrix) -> Path:
    folder.mkdir(parents=True)
    (folder / "matrix.json").write_bytes(msgspec.json.encode(analysed))
    return folder


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    """A CPU machine with two engines, and an H200."""
    cpu = [configuration(), configuration("onnxruntime", mode="all")]
    gpu = [configuration(device="cuda:0", threads=None, mode="graph")]
    cells = [cell(0, 50), cell(0, 100, 8), cell(1, 200, 8), cell(1, 900, 16, excluded="cosine 0.5 is below 0.999")]
    return [
        write(tmp_path / "cpu", matrix(cpu, cells)),
        write(tmp_path / "gpu", matrix(gpu, [cell(0, 20_000, 32)], environment({"cpu_count": 16}, ["NVIDIA H200"]))),
    ]


@pytest.fixture
def prices(tmp_path: Path) -> Path:
    path = tmp_path / "prices.yaml"
    path.write_text(PRICES)
    return path


def test_matrices_of_two_machines(two: list[Path], prices: Path) -> None:
    result = run(*two, "--prices", prices)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 80
    assert "3 options on 2 machines." in result.output
    assert "torchvision:resnet50 in fp32, engine alone" in result.output
    assert "Cost per million images in EUR, on-demand" in result.output
    assert "Cost per million images in USD, on-demand" in result.output
    assert "cosine 0.5 is below 0.999" in " ".join(result.output.split())
    assert "dated examples" not in result.output
    order = [result.output.index(name) for name in ("torch/graph", "onnxruntime/all", "torch/eager")]
    assert order == sorted(order)


def test_json_holds_everything(two: list[Path], prices: Path) -> None:
    document = json.loads(run(*two, "--prices", prices, "--json").stdout)
    assert (document["schema"], document["kind"], document["example_prices"]) == ("abserve.rank/1", "on-demand", False)
    ((group,), machines) = (document["groups"], document["machines"])
    assert [machine["name"] for machine in machines] == ["4 cores", "H200, 16 cores"]
    costs = {option["name"]: option["costs"][0]["full"]["value"] for option in group["options"]}
    assert costs["torch/graph"] == pytest.approx(0.1)
    assert costs["torch/eager CPU, 2 threads"] == pytest.approx(1.0)
    from loadgen.records.ranks import RankResult

    assert msgspec.json.decode(json.dumps(document), type=RankResult).groups[0].work.precision == "fp32"


def test_csv_is_unrounded(two: list[Path], prices: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(run(*two, "--prices", prices, "--format", "csv").stdout)))
    assert [row["option"] for row in rows] == [
        "torch/graph", "onnxruntime/all CPU, 2 threads", "torch/eager CPU, 2 threads",
    ]  # fmt: skip
    assert float(rows[0]["cost_per_million"]) == pytest.approx(0.1, abs=1e-12)
    points = list(csv.DictReader(io.StringIO(run(*two, "--prices", prices, "--format", "csv-points").stdout)))
    assert [(row["option"][:11], row["point"]) for row in points] == [
        ("torch/graph", "batch 32"), ("onnxruntime", "batch 8"), ("torch/eager", "batch 1"), ("torch/eager", "batch 8"),
    ]  # fmt: skip
    assert {row["on_front"] for row in points} == {"true", "false"}


def test_a_folder_of_results_and_reports(tmp_path: Path, two: list[Path]) -> None:
    out = tmp_path / "ranked"
    shutil.copytree(RESNET, tmp_path / "compared")
    result = run(tmp_path, "--out", out)
    assert result.exit_code == 0, result.output
    assert "The prices are dated examples, not offers" in result.output
    assert {path.name for path in out.iterdir()} == {
        "report.html", "summary.md", "rank.json", "options.csv", "points.csv",
    }  # fmt: skip
    page = (out / "report.html").read_text()
    assert "Pareto front" in page
    assert "torchvision:resnet50 in fp16, served over http as uint8" in page
    assert "## torchvision:resnet50 in fp32, engine alone" in (out / "summary.md").read_text()


def test_a_result_in_a_folder_that_cannot_be_read_is_left_out(two: list[Path], tmp_path: Path) -> None:
    """One that the user named ends the command."""
    broken = write(two[0].parent / "broken", matrix([configuration()], [cell(0, 50)])) / "matrix.json"
    broken.write_bytes(broken.read_bytes()[:100])
    done = run(two[0].parent, "--json")
    assert done.exit_code == 0, done.output
    ranking = json.loads(done.stdout)
    assert len(ranking["groups"][0]["options"]) >= 1
    (left,) = [each for each in ranking["left_out"] if each["result"].endswith("broken")]
    assert "matrix.json" in left["reason"]
    assert run(broken).exit_code == 2


def test_the_same_result_given_twice_counts_once(two: list[Path]) -> None:
    document = json.loads(run(two[0], two[0] / "matrix.json", "--json").stdout)
    assert [len(group["options"]) for group in document["groups"]] == [2]
    assert document["machines"][0]["results"] == [str(two[0])]


def test_of_a_tuning_only_the_final_is_ranked(tmp_path: Path) -> None:
    """Its screenings chose, and the best of many looks better than it is."""
    folder = tmp_path / "tuning"
    folder.mkdir()
    (folder / "tuning.json").write_bytes(indented(tuning()))
    screening = write_final(folder / "01-screening")
    experiment = screening / "experiment.json"
    experiment.write_text(experiment.read_text().replace('"screening":false', '"screening":true'))
    assert read_run(screening).experiment.screening
    write_final(folder / "final-2")  # it was interrupted
    write_final(folder / "final")
    document = json.loads(run(tmp_path, "--json").stdout)
    results = {Path(option["result"]).name for group in document["groups"] for option in group["options"]}
    assert results == {"final"}
    alone = run(screening)
    assert alone.exit_code == 1
    assert "screening of `abserve tune`" in " ".join(alone.output.split())
    assert abserve.load(folder).folder == folder / "final"
    assert abserve.Run(folder).runs == {}
    assert abserve.Run(folder).result == abserve.load(folder).result
    shutil.rmtree(folder / "final")
    assert run(folder).exit_code == 2
    with pytest.raises(abserve.AbserveError, match="final"):
        abserve.load(folder)


def test_a_machine_without_a_price_says_how_to_add_one(two: list[Path], tmp_path: Path) -> None:
    empty = tmp_path / "empty.yaml"
    empty.write_text("prices: []\n")
    text = " ".join(run(*two, "--prices", empty).output.split())
    assert "No on-demand price for H200, 16 cores; 4 cores: add an entry with machine, match" in text
    text = " ".join(run(two[1], "--spot").output.split())
    assert "No spot price (there is on-demand and reserved) for H200, 16 cores" in text


def test_nothing_to_rank(two: list[Path]) -> None:
    result = run(two[0], "--model", "other")
    assert result.exit_code == 1
    assert "Nothing can be ranked" in result.output
    assert "--model asks for other, and this is torchvision:resnet50" in " ".join(result.output.split())


def test_the_summary_of_a_ci_step(two: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    assert run(two[0]).exit_code == 0
    assert "# Engines and machines, ranked" in summary.read_text()
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "none" / "summary.md"))
    result = run(two[0])
    assert result.exit_code == 0
    assert "no job summary" in result.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ("{}", "is neither an engine matrix nor a comparison"),
        ('{"schema": "abserve.engines/1"}', "is not an engine matrix of this version of abserve"),
        ('{"schema": "abserve.engines/9"}', "is not an engine matrix of this version of abserve"),
        ('{"schema": "abserve.result/3"}', "is not a result of this version of abserve"),
        ("\x00\xff", "cannot be read"),
    ],
)
def test_a_corrupt_file_is_named(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "matrix.json"
    path.write_text(content, encoding="latin-1")
    result = run(path)
    assert result.exit_code == 2
    assert message in result.stderr
    assert str(path) in result.stderr
    assert result.stderr.count("\n") == 1


def test_cells_that_name_no_configuration_do_not_crash(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", matrix([configuration()], [cell(7, 100)]))
    result = run(folder)
    assert result.exit_code == 1
    assert "no cell was measured" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such"], "no-such does not exist; give a folder"),
        (["{empty}"], "holds no result"),
        (["{cpu}", "--spot", "--reserved"], "give --spot or --reserved, not both"),
        (["{cpu}", "--json", "--format", "csv"], "give --json or --format, not both"),
        (["{cpu}", "--format", "xml"], "--format"),
        (["{cpu}", "--prices", "no.yaml"], "no.yaml: No such file or directory; give the path of a price file"),
        (["{cpu}", "--out", "{cpu}/matrix.json"], "this is a file; give a folder"),
    ],
)
def test_wrong_options(arguments: list[str], message: str, two: list[Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    places: dict[str, Any] = {"empty": tmp_path / "empty", "cpu": two[0]}
    result = run(*(argument.format(**places) for argument in arguments))
    assert result.exit_code == 2
    assert message in result.stderr


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\x1b[31m|x"
    folder = write(tmp_path / "m", matrix([configuration(engine=evil), configuration()], [cell(0, 1), cell(1, 2)]))
    out = tmp_path / "out"
    result = run(folder, "--out", out)
    assert result.exit_code == 0
    assert "\x1b[31m" not in result.output
    assert "<script>alert" not in (out / "report.html").read_text()
    assert re.search(r"(?<!\\)<script>", (out / "summary.md").read_text()) is None
