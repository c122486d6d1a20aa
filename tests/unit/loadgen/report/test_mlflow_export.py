"""What is exported to MLflow, and that a failure is one sentence.

The stores themselves are tested where mlflow-skinny is installed: pip install 'abserve[mlflow]'.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from loadgen.cli import output
from loadgen.cli.report import report
from loadgen.findings.rate_search import RatesFound
from loadgen.report import mlflow
from loadgen.report.files import published
from loadgen.report.mlflow import OF_DATABASES, MlflowExportError, check_mlflow, export_matrix, export_result, key_of
from loadgen.verdict.result import read_result
from tests.synthetic_matrix import cell, configuration, matrix

RESULTS = Path(__file__).resolve().parents[4] / "docs/results"
RESNET = RESULTS / "2026-11-22-h200-models/resnet50"
INSTALLED = importlib.util.find_spec("mlflow") is not None
needs_mlflow = pytest.mark.skipif(not INSTALLED, reason="needs mlflow-skinny: pip install 'abserve[mlflow]'")
HAS_DATABASE = all(importlib.util.find_spec(name) is not None for name in OF_DATABASES)


def pretend(monkeypatch: pytest.MonkeyPatch, *installed: str) -> None:
    monkeypatch.setattr(mlflow, "find_spec", lambda name: object() if name in installed else None)


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    check_mlflow(None)
    with pytest.raises(MlflowExportError, match=r"needs MLflow; install it with: pip install 'abserve\[mlflow\]'"):
        check_mlflow("http://localhost:5000")
    pretend(monkeypatch, "mlflow")
    check_mlflow("http://localhost:5000")
    check_mlflow("runs")
    with pytest.raises(MlflowExportError, match="install it with: pip install sqlalchemy alembic cryptography"):
        check_mlflow("sqlite:///runs.db")
    pretend(monkeypatch, "mlflow", *OF_DATABASES)
    check_mlflow("sqlite:///runs.db")


@pytest.mark.parametrize("uri", ["ftp://x", "s3://bucket/x"])
def test_an_address_of_another_kind_is_refused(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "mlflow")
    with pytest.raises(MlflowExportError, match="give the address of a server"):
        check_mlflow(uri)


def test_a_password_is_refused_and_not_shown() -> None:
    with pytest.raises(MlflowExportError, match="MLFLOW_TRACKING_PASSWORD") as error:
        check_mlflow("http://me:secret@host:5000")
    assert "secret" not in str(error.value)


def test_compare_and_report_need_the_package_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch)
    with pytest.raises(typer.Exit) as ended:
        output.check_export("http://localhost:5000")
    assert ended.value.exit_code == 2
    app = typer.Typer()
    app.command()(report)
    result = CliRunner().invoke(app, [str(tmp_path), "--mlflow", "runs"])
    assert result.exit_code == 2
    assert "install it with" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_failed_export_is_a_warning_that_names_the_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> str:
        raise ConnectionError("the server is away")

    monkeypatch.setattr(mlflow, "_write", broken)
    result = read_result(RESNET / "result.json")
    output.hand_over(published(result), "http://host:5000", RESNET)
    said = " ".join(capsys.readouterr().err.split())
    assert "the export to MLflow at http://host:5000 failed (ConnectionError: the server is away)" in said
    assert f"abserve report {RESNET} --mlflow http://host:5000" in said
    with pytest.raises(MlflowExportError, match="with: abserve report 'my folder' --mlflow runs"):
        export_matrix(matrix([configuration()], [cell(0, 100)]), "runs", Path("my folder"))


def test_names_that_every_store_accepts() -> None:
    assert key_of("p99_ms.slo(p99≤10ms)") == "p99_ms.slo_p99_10ms"
    assert key_of("throughput_per_s.concurrent(16, length 128)") == "throughput_per_s.concurrent_16_ length 128"
    assert key_of("…") == "unnamed"


def written(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    def write(*given: Any) -> str:
        calls.append(given)
        return "run"

    monkeypatch.setattr(mlflow, "_write", write)
    return calls


def test_every_figure_of_a_comparison_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = written(monkeypatch)
    result = read_result(RESNET / "result.json")
    export_result(result, "runs", RESNET)
    ((_, command, _, params, _, overall, nested),) = calls
    assert command == "compare"
    assert params["machine.gpus"] == "NVIDIA H200"
    assert params["machine.cpu_count"] == 16
    ratios = {name: value for name, value, _ in overall}
    assert ratios["valid"] == 1.0
    first = result.comparisons[0]
    assert ratios[f"ratio.{first.metric}.{first.workload}.b_over_a"] == first.ratio
    assert [about["label"] for _, about, _ in nested] == ["a", "b"]
    for (_, _, metrics), label in zip(nested, "ab", strict=True):
        values = {name: value for name, value, _ in metrics}
        for summary in (s for s in result.summaries if s.label == label):
            assert values[f"throughput_per_s.{summary.workload}"] == summary.throughput_per_s
            assert values[f"p99_ms.{summary.workload}"] == summary.latency_ms("p99")
        assert values["joules_per_item.single"] > 0


def test_the_rates_of_searches_are_exported_by_their_round(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = written(monkeypatch)
    result = read_result(RESULTS / "2026-11-20-h200/cold-start/result.json")
    export_result(result, "runs", RESNET)
    for _, about, metrics in calls[0][-1]:
        found = {
            (f"slo_rate.{rate.workload}", rate.rate_per_s, rate.round)
            for rate in result.of(RatesFound).rates
            if rate.label == about["label"]
        }
        assert found
        assert found <= set(metrics)


def test_every_cell_of_a_matrix_is_exported_by_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = written(monkeypatch)
    both = [configuration(), configuration("jax", precision="bf16")]
    measured = matrix(both, [cell(0, 100), cell(0, 300, 8, cosine_min=0.99), cell(1, 7, excluded="wrong")])
    export_matrix(measured, "runs", Path("folder"))
    ((_, command, _, params, _, _, nested),) = calls
    assert (command, params["baseline"], params["settings.rounds"]) == ("engines", "torch/eager", 5)
    (_, _, torch), (_, jax_params, jax) = nested
    assert jax_params["engine"] == "jax"
    speeds = [(step, value) for name, value, step in torch if name == "items_per_second"]
    assert speeds == [(1, 100), (8, 300)]
    assert ("cosine_min", 0.99, 8) in torch
    assert [value for name, value, _ in jax if name == "ranked"] == [0.0]
    assert {"items_per_second.low", "items_per_second.high"} <= {name for name, _, _ in torch}


@needs_mlflow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["folder", "file", "sqlite"])
def test_a_real_store(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    if kind == "sqlite" and not HAS_DATABASE:
        pytest.skip(f"needs {' '.join(OF_DATABASES)}")
    monkeypatch.chdir(tmp_path)
    store = tmp_path / "store"
    uri = {"folder": str(store), "file": store.as_uri(), "sqlite": f"sqlite:///{tmp_path / 'runs.db'}"}[kind]
    folder = tmp_path / "run"
    folder.mkdir()
    measured = matrix([configuration()], [cell(0, 100), cell(0, 300, 8)])
    (folder / "matrix.json").write_bytes(msgspec.json.encode(measured))
    check_mlflow(uri)
    parent = export_matrix(measured, uri, folder)
    assert export_result(read_result(RESNET / "result.json"), uri, RESNET) != parent
    client = MlflowClient(tracking_uri=uri)
    run = client.get_run(parent)
    assert (run.info.status, run.data.params["machine.cpu_count"]) == ("FINISHED", "4")
    assert [file.path for file in client.list_artifacts(parent)] == ["matrix.json"]
    runs = client.search_runs([run.info.experiment_id])
    (child,) = [nested for nested in runs if nested.data.tags.get("mlflow.parentRunId") == parent]
    history = client.get_metric_history(child.info.run_id, "items_per_second")
    assert sorted((metric.step, metric.value) for metric in history) == [(1, 100.0), (8, 300.0)]
    assert len(runs) == 5
    assert not (tmp_path / "mlruns").exists()
