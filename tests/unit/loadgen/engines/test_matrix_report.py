"""The reports of an engine matrix: page, terminal, Markdown, CSV, Parquet, and remaking them."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from loadgen.base.documents import indented
from loadgen.cli.engines import exit_status
from loadgen.cli.report import report
from loadgen.engines import files
from loadgen.engines.analyse import analyse
from loadgen.engines.sections import matrix_document
from loadgen.engines.store import read_matrix
from loadgen.ranking.analyse import from_matrix
from loadgen.records.matrix import Configuration, Conversion, Matrix, MatrixPlan, Visit, Winner
from loadgen.records.run import RunState
from loadgen.records.store import StoredRunError
from loadgen.report.renderers.html import render_html
from loadgen.report.renderers.markdown import render_markdown
from loadgen.report.renderers.terminal import PlainConsole, print_document
from tests.report_page import Page, check_figures
from tests.unit.loadgen.engines.simulated_matrix import (
    BERT,
    DISTILBERT,
    ENVIRONMENT,
    FINISHED,
    ONNX,
    RESNET,
    TORCH,
    VIT,
    configuration,
    disturbed,
    matrix,
    per_item,
    plan,
    visits,
)

ENGINES = (
    ("torch", "eager", "fp32"), ("torch", "eager", "fp16"), ("torch", "traced", "fp32"), ("torch", "compile", "fp32"),
    ("onnxruntime", "session", "fp32"), ("onnxruntime", "session", "int8"), ("openvino", "compiled", "fp32"),
    ("openvino", "compiled", "bf16"), ("jax", "jit", "fp32"), ("onnxruntime-jax", "session", "fp32"),
)  # fmt: skip
CONVERSIONS = {
    "onnxruntime": [Conversion(step="export", seconds=12.5, file="model.onnx", file_bytes=10**8)],
    "jax": [Conversion(step="extract", seconds=2.0)],
}
SPEEDS = per_item({"onnxruntime": 1.4, "openvino": 1.7, "jax": 0.8, "onnxruntime-jax": 1.2})


def change(configuration: Configuration, number: int, fields: dict[str, Any]) -> dict[str, Any]:
    more: dict[str, Any] = {"energy_joules": 3.0 + number, "energy_items": 4} if configuration.engine == "torch" else {}
    if configuration.precision == "int8":
        more["cosine_min"] = 0.9
    if configuration.mode == "eager":
        more["kernels"] = ({"name": "aten::mm", "count": 10, "seconds": 0.1, "share": 0.6},)
    return fields | more


def large(rounds: int = 3) -> Matrix:
    """Four models, ten configurations, two numbers of threads."""
    asked = plan(
        *(
            configuration(engine, mode, model=model, threads=threads, precision=precision)
            for model in (RESNET, VIT, BERT, DISTILBERT)
            for threads in (1, 2)
            for engine, mode, precision in ENGINES
        ),
        rounds=rounds,
        batches=(1, 4, 8),
        refused=((configuration("jax", "jit", precision="int8"), "jax has no int8; leave int8 out of --precisions"),),
    )
    lengths: dict[str, tuple[int | None, ...]] = dict.fromkeys((RESNET, VIT), (None,))
    asked = msgspec.structs.replace(asked, lengths=lengths | dict.fromkeys((BERT, DISTILBERT), (64, 128, 256)))
    return matrix(asked, SPEEDS, change=change, conversions=CONVERSIONS)


@pytest.fixture(scope="module")
def analysed() -> Matrix:
    return large()


def test_every_figure_is_valid_plotly_with_known_colours_and_a_view_per_model_and_threads(analysed: Matrix) -> None:
    text = render_html(matrix_document(analysed))
    figures = Page(text).figures
    views = {name.removesuffix("-figure"): len(figure["views"]) for name, figure in figures.items()}
    assert views == {
        "engine-winners": 8,
        "engine-batches": 8,
        "engine-speedup": 8,
        "engine-lengths": 4,
        "engine-memory": 8,
        "engine-energy": 8,
    }
    check_figures(text)
    for figure in figures.values():
        shown = [place for view in figure["views"] for place in view["traces"]]
        assert shown == list(range(len(figure["data"])))


def test_a_view_has_a_line_per_configuration_and_hollow_markers_for_what_is_not_ranked(analysed: Matrix) -> None:
    figure = Page(render_html(matrix_document(analysed))).figures["engine-speedup-figure"]
    traces = {figure["data"][place]["name"]: figure["data"][place] for place in figure["views"][0]["traces"]}
    assert len(traces) == 9  # all but the baseline
    int8 = traces["onnxruntime/session int8"]
    assert all(symbol.endswith("-open") for symbol in int8["marker"]["symbol"])
    assert set(int8["customdata"]) == {"not ranked"}
    assert int8["x"] == [1, 4, 8]
    marks = {(trace["line"]["color"], trace["line"]["dash"], trace["marker"]["symbol"][0]) for trace in traces.values()}
    assert len(marks) == 9


def test_the_heat_map_names_the_winner_and_marks_the_uncertain_ones() -> None:
    two = [configuration("openvino", "compiled", precision=precision) for precision in ("fp32", "bf16")]
    equal = matrix(plan(*two, lengths=(64, 128)), per_item({}))
    sure = matrix(plan(TORCH, ONNX, lengths=(64, 128)), per_item({"onnxruntime": 2.0}))
    texts = []
    for analysed in (equal, sure):
        figure = Page(render_html(matrix_document(analysed))).figures["engine-winners-figure"]["data"][0]
        assert (figure["x"], figure["y"]) == (["1", "8"], ["64", "128"])
        texts.append([text for row in figure["text"] for text in row])
    assert all(text.startswith("openvino ?<br>compiled ") for text in texts[0])
    assert all(text.startswith("onnxruntime<br>session fp32<br>") for text in texts[1])


def test_the_page_says_everything_without_javascript(analysed: Matrix) -> None:
    text = Page(render_html(matrix_document(analysed))).text
    for part in (
        "COMPLETE", "4 models, 80 configurations, 480 cells in 3 rounds", "Example CPU", "1 combination refused",
        "Break-even of conversions", "PyTorch → ONNX → ONNX Runtime",
        "leave int8 out of --precisions", "aten::mm", "export 12.5 s", "95.4", "below the limit of 0.99",
        "abserve engines --models torchvision:resnet50", "a new process per configuration and round", "1.31.0",
    ):  # fmt: skip
        assert part in text, part


def test_only_a_certain_winner_is_called_the_fastest(analysed: Matrix) -> None:
    """Also if another configuration measured the highest throughput at more shapes, none of them certainly."""

    def said(winners: Sequence[Winner]) -> str:
        return render_markdown(matrix_document(msgspec.structs.replace(analysed, winners=tuple(winners)))).replace(
            "\\", ""
        )

    doubted = [msgspec.structs.replace(each_winner, certain=False) for each_winner in analysed.winners]
    assert "no certain winner; " in said(doubted)
    assert "is the fastest at" not in said(doubted)
    first = doubted[0]
    same = [
        each_winner
        for each_winner in doubted
        if (each_winner.model, each_winner.device, each_winner.threads) == (first.model, first.device, first.threads)
    ]
    other = next(
        cell.configuration
        for cell in analysed.cells
        if (asked := analysed.plan.configurations[cell.configuration]).model == first.model
        and asked.threads == first.threads
        and cell.configuration not in {winner.configuration for winner in same}
        and (cell.batch, cell.length) == (first.batch, first.length)
    )
    certain = msgspec.structs.replace(first, configuration=other, certain=True)
    text = said([certain, *doubted[1:]])
    name = analysed.plan.configurations[other].title
    assert f"{name} is the fastest at 1 of {len(same)} shapes" in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_terminal_is_short_and_nothing_is_cut(analysed: Matrix, width: int) -> None:
    out = io.StringIO()
    print_document(matrix_document(analysed), PlainConsole(file=out, width=width, markup=False, highlight=False))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in out.getvalue()
    assert len(lines) < 10_000 / width
    for part in ("COMPLETE", "highest", "Break-even", "no gain in"):
        assert part in out.getvalue(), part


def test_markdown_leaves_the_cells_of_a_large_matrix_to_the_csv(analysed: Matrix) -> None:
    text = render_markdown(matrix_document(analysed))
    assert "480 cells: see cells.csv" in text
    small = render_markdown(matrix_document(matrix(plan(TORCH, ONNX), SPEEDS)))
    assert "| onnxruntime/session fp32 | 8 |" in small
    assert ": COMPLETE" in small.splitlines()[0]


def test_an_interrupted_run_says_what_is_missing() -> None:
    asked = plan(TORCH, ONNX, rounds=3)
    some = visits(asked, SPEEDS)[:3]
    text = render_markdown(matrix_document(analyse(asked, ENVIRONMENT, some, RunState(state="interrupted", phase="x"))))
    assert "INCOMPLETE" in text.splitlines()[0]
    assert "6 measurements of cells are missing" in text
    assert "abserve engines \\-\\-resume" in text or "abserve engines --resume" in text
    for state in (None, FINISHED):
        empty = matrix_document(analyse(asked, ENVIRONMENT, [], state))
        assert "INCOMPLETE" in render_html(empty)
        assert "INCOMPLETE" in render_markdown(empty).splitlines()[0]


def test_failures_and_one_round_are_said() -> None:
    asked = plan(TORCH, ONNX, rounds=1)
    failed = Visit(round=0, configuration=1, started_at="2026-11-24T03:00:00Z", error="out of memory")
    kept = [visit for visit in visits(asked, SPEEDS) if visit.configuration == 0]
    text = render_markdown(matrix_document(analyse(asked, ENVIRONMENT, [*kept, failed], FINISHED)))
    for part in ("1 failure: see Failures", "round 0: out of memory", "One round shows no spread"):
        assert part in text, part


def test_names_from_outside_are_text(tmp_path: Path) -> None:
    """In Plotly's texts, in HTML and in CSV, where a spreadsheet must not take them for a formula."""
    name = "</script><img src=x onerror=alert(1)>"
    evil = [configuration(name, "=1+1"), configuration(model="@SUM(A1)")]
    analysed = matrix(plan(TORCH, *evil), SPEEDS)
    text = render_html(matrix_document(analysed))
    assert "<img src=x" not in text
    assert all("<img" not in json.dumps(figure) for figure in Page(text).figures.values())
    rows = list(csv.DictReader(io.StringIO(files.cells_csv(analysed))))
    assert {row["mode"] for row in rows} == {"eager", "'=1+1"}
    assert {row["model"] for row in rows} == {RESNET, "'@SUM(A1)"}


def test_the_csv_has_a_row_per_cell_in_full_precision(analysed: Matrix) -> None:
    rows = list(csv.DictReader(io.StringIO(files.cells_csv(analysed))))
    assert len(rows) == len(analysed.cells)
    for row, cell in zip(rows, analysed.cells, strict=True):
        asked = analysed.plan.configurations[cell.configuration]
        assert (row["model"], row["engine"], int(row["threads"])) == (asked.model, asked.engine, asked.threads)
        assert row["length"] == ("" if cell.length is None else str(cell.length))
        assert (
            float(row["latency_ms"]) == cell.latency_ns.value / 1e6
            or float(row["latency_ms"]) == cell.latency_ns.value * 1e-6
        )
        assert row["speedup"] == ("" if cell.speedup is None else str(cell.speedup.value))
        assert row["ranked"] == str(cell.excluded is None).lower()


def test_parquet_has_the_same_table_with_types(analysed: Matrix, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    (tmp_path / "cells.parquet").write_bytes(files.cells_parquet(analysed))
    table = parquet.read_table(tmp_path / "cells.parquet")
    assert table.num_rows == len(analysed.cells)
    assert table.column_names == [name for name, *_ in files.COLUMNS]
    assert table["length"].to_pylist() == [cell.length for cell in analysed.cells]
    assert table["ranked"].to_pylist() == [cell.excluded is None for cell in analysed.cells]
    assert str(table.schema.field("latency_ms").type) == "double"
    assert str(table.schema.field("process_device_bytes").type) == "int64"  # though nothing was measured


def test_without_pyarrow_everything_else_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "has_parquet", lambda: False)
    paths = files.published(matrix(plan(TORCH, ONNX), SPEEDS)).write(tmp_path)
    assert [path.name for path in paths] == ["report.html", "summary.md", "matrix.json", "cells.csv"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in paths)


def test_a_matrix_is_read_as_it_was_written(analysed: Matrix, tmp_path: Path) -> None:
    path = tmp_path / "matrix.json"
    path.write_bytes(indented(analysed))
    assert read_matrix(path) == analysed


@pytest.mark.parametrize(
    "content", [None, b"{", b"[]", b'{"schema": "abserve.engines/9"}'], ids=["missing", "cut", "list", "schema"]
)
def test_an_unreadable_matrix_is_one_sentence(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "matrix.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StoredRunError, match=r"matrix\.json is not an engine matrix of this version of abserve"):
        read_matrix(path)


def write_run(directory: Path, asked: MatrixPlan, visits: list[Visit]) -> None:
    (directory / "visits").mkdir()
    records: dict[str, Any] = {"plan.json": asked, "environment.json": ENVIRONMENT, "run.json": FINISHED}
    records |= {f"visits/{place:04d}.json": visit for place, visit in enumerate(visits)}
    for name, record in records.items():
        (directory / name).write_bytes(msgspec.json.encode(record))


def run(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(report)
    outcome = CliRunner().invoke(app, list(arguments))
    return outcome.exit_code, outcome.output


def test_the_report_command_remakes_everything_from_the_visits(tmp_path: Path) -> None:
    asked = plan(TORCH, ONNX)
    write_run(tmp_path, asked, visits(asked, SPEEDS))
    (tmp_path / "matrix.json").write_bytes(indented(analyse(asked, ENVIRONMENT, [], None)))  # an older one
    status, output = run(str(tmp_path))
    assert status == 0
    assert " COMPLETE" in output
    assert str(tmp_path / "report.html") in output
    assert ("pip install 'abserve[parquet]'" in output) != files.has_parquet()
    assert read_matrix(tmp_path / "matrix.json") == analyse(asked, ENVIRONMENT, visits(asked, SPEEDS), FINISHED)


@pytest.mark.parametrize("compressed", [False, True])
def test_a_published_folder_needs_its_matrix_alone(tmp_path: Path, analysed: Matrix, compressed: bool) -> None:
    content = indented(analysed)
    path = tmp_path / ("matrix.json.gz" if compressed else "matrix.json")
    path.write_bytes(gzip.compress(content) if compressed else content)
    assert run(str(tmp_path))[0] == 0
    assert read_matrix(tmp_path / "matrix.json") == analysed
    assert (tmp_path / "summary.md").exists()


@pytest.mark.parametrize(("name", "begins"), [("csv", "model,engine"), ("json", "{"), ("markdown", "# ")])
def test_a_format_is_printed_and_nothing_is_written(tmp_path: Path, name: str, begins: str) -> None:
    (tmp_path / "matrix.json").write_bytes(indented(matrix(plan(TORCH, ONNX), SPEEDS)))
    status, output = run(str(tmp_path), "--format", name)
    assert (status, output.startswith(begins)) == (0, True)
    assert [path.name for path in tmp_path.iterdir()] == ["matrix.json"]


@pytest.mark.parametrize("broken", ["environment.json", "visits/0000.json", "plan.json"])
def test_a_broken_folder_is_one_sentence(tmp_path: Path, broken: str) -> None:
    asked = plan(TORCH, ONNX)
    write_run(tmp_path, asked, visits(asked, SPEEDS))
    (tmp_path / broken).write_text("{")
    status, output = run(str(tmp_path))
    assert status == 2
    assert broken.rpartition("/")[2] in output
    assert "Traceback" not in output


def test_a_plan_without_an_environment_names_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode(plan(TORCH)))
    status, output = run(str(tmp_path))
    assert status == 2
    assert "environment.json is missing" in " ".join(output.split())


@pytest.mark.parametrize(
    ("shares", "rough"), [((0.0, 0.0), False), ((0.04, 0.04), False), ((0.5, 0.5), True), ((0.0, 0.3), True)]
)
def test_what_others_took_of_the_cpu_is_told_and_takes_the_certainty(shares: tuple[float, float], rough: bool) -> None:
    """By the checks of a comparison; `rank` leaves such a matrix out."""
    asked = plan(TORCH, ONNX, batches=(4,))
    made = disturbed(visits(asked, SPEEDS), shares)
    analysed = analyse(asked, ENVIRONMENT, made, FINISHED)
    others = next(check for check in analysed.checks if check.name == "other_processes")
    assert (others.ok, exit_status(analysed)) == (max(shares) < 0.03, 0)
    strict = msgspec.structs.replace(asked, settings={**asked.settings, "strict": True})
    assert exit_status(analyse(strict, ENVIRONMENT, made, FINISHED)) == rough
    text = render_markdown(matrix_document(analysed))
    assert ("ROUGH: busy machine" if rough else "COMPLETE") in text.splitlines()[0]
    assert ("ffmpeg" in text) == (max(shares) > 0.03)
    assert [winner.certain for winner in analysed.winners] == [not rough]
    ranked = from_matrix("m", analysed)
    assert bool(ranked.candidates) == (not rough)
    assert any("ROUGH" in left.reason for left in ranked.left_out) == rough


def test_engines_of_different_scopes_need_not_have_the_same_machine() -> None:
    asked = plan(TORCH, configuration(model=VIT), batches=(4,))
    analysed = analyse(asked, ENVIRONMENT, disturbed(visits(asked, SPEEDS), (0.0, 0.15)), FINISHED)
    assert [check.severity for check in analysed.checks if not check.ok] == ["warns"]


def test_visits_of_earlier_versions_have_no_checks() -> None:
    assert matrix(plan(TORCH, ONNX), SPEEDS).checks == ()
