"""A run on sequences: its units, and throughput and latency over length and batch."""

from __future__ import annotations

import io
import json
from itertools import product
from pathlib import Path

import pytest
from rich.console import Console

from loadgen.records.run import Scenario, Workload
from loadgen.report.contents import result_document
from loadgen.report.document import Chart, Document, Table, text_of
from loadgen.report.renderers.markdown import render_markdown
from loadgen.report.renderers.tables import render_csv, render_junit
from loadgen.report.renderers.terminal import print_document
from loadgen.verdict.result import Result, analyse
from tests.golden.synthetic_run import Plan, SimulatedArm, write_run

LENGTHS, SIZES, USERS = (32, 128), (1, 8), (4, 16)
INPUTS = {"kind": "token ids", "item": "sequence", "count": 4, "length_sum": 320, "length_min": 32, "length_max": 128,
          "length_median": 32, "sha256": ""}  # fmt: skip


def workload(scenario: Scenario, size: int, length: int | None) -> Workload:
    batch, users = (1, size) if scenario == "concurrent" else (size, 1)
    return Workload(
        scenario=scenario, batch_size=batch, concurrency=users, requests=40, seconds=0.0, max_seconds=9.0, rounds=4,
        sequence_length=length,
    )  # fmt: skip


CROSSED = (
    *(workload("batched", size, length) for size, length in product(SIZES, LENGTHS)),
    *(workload("concurrent", users, length) for users, length in product(USERS, LENGTHS)),
)


def run(directory: Path, workloads: tuple[Workload, ...], inputs: dict[str, object], arms: int = 0) -> Result:
    write_run(directory, Plan(pairs=4, workloads=workloads, others=(SimulatedArm(),) * arms))
    path = directory / "environment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"inputs": inputs}))
    return analyse(directory)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(tmp_path_factory.mktemp("run"), CROSSED, INPUTS)


def blocks_of(document: Document, section: str) -> list[object]:
    return [block for shown in document.sections if shown.title == section for block in shown.blocks]


@pytest.mark.parametrize(
    ("inputs", "unit"),
    [
        (INPUTS, "sequences"),
        ({"kind": "given", "item": "molecule", "count": 3}, "molecules"),
        ({"kind": "synthetic", "count": 16}, "items"),
        ({"kind": "photographs", "count": 18}, "images"),
        ({}, "images"),
    ],
)
def test_every_format_counts_in_what_was_sent(tmp_path: Path, inputs: dict[str, object], unit: str) -> None:
    result = run(tmp_path, (workload("batched", 1, None), workload("batched", 4, None)), inputs)
    document = result_document(result)
    stream = io.StringIO()
    print_document(document, Console(file=stream, width=200))
    texts = [
        stream.getvalue(),
        render_markdown(document),
        render_junit({"run": document}),
        render_csv({"run": document}, "comparisons"),
    ]
    texts.append("".join(str(block.layout) + str(block.data) for block in blocks_of(document, "Batch sizes")))  # type: ignore[attr-defined]
    assert all(f"{unit}/s" in text for text in (texts[0], texts[1], texts[-1]))
    if unit != "images":  # the case of parity that is named so is stored in the run
        assert not any("image" in text.replace("single images", "") for text in texts)


def test_tokens_stand_beside_sequences_where_lengths_are_known(tmp_path: Path, result: Result) -> None:
    def rows(found: Result) -> list[dict[str, str]]:
        (table,) = [
            table_block
            for table_block in blocks_of(result_document(found), "Measurements")
            if isinstance(table_block, Table)
        ]
        titles = [column.title for column in table.columns]
        return [dict(zip(titles, map(text_of, row), strict=True)) for row in table.rows]

    def number(text: str) -> float:
        return float(text.replace(",", ""))

    for row in rows(result):
        length = int(row["scenario"].removesuffix(")").rpartition(" ")[2])
        assert number(row["tokens/s"]) == pytest.approx(length * number(row["sequences/s"]), rel=0.02)
    mixed = rows(run(tmp_path / "mixed", (workload("batched", 4, None),), INPUTS))
    assert number(mixed[0]["tokens/s"]) == pytest.approx(80 * number(mixed[0]["sequences/s"]), rel=0.02)
    assert not any(row["tokens/s"] for row in rows(run(tmp_path / "images", (workload("batched", 4, None),), {})))


def test_each_scenario_has_a_table_a_chart_over_both_and_a_map_of_ratios(result: Result) -> None:
    blocks = blocks_of(result_document(result), "Sequence lengths")
    tables = [block for block in blocks if isinstance(block, Table)]
    charts = {block.name: block for block in blocks if isinstance(block, Chart)}
    assert [[column.title for column in table.columns] for table in tables] == [
        ["batch", "length 32", "length 128"], ["users", "length 32", "length 128"],
    ]  # fmt: skip
    assert [[row[0] for row in table.rows] for table in tables] == [["1", "8"], ["4", "16"]]
    assert set(charts) == {"lengths-batched", "length-ratios-batched", "lengths-concurrent", "length-ratios-concurrent"}
    lines = charts["lengths-batched"]
    assert [view.label for view in lines.views] == ["batch 1", "batch 8", "length 32", "length 128"]
    assert [lines.data[trace]["x"] for trace in lines.views[1].traces] == [[32.0, 128.0]] * 4, "two arms, two panels"
    assert [lines.data[trace]["x"] for trace in lines.views[2].traces] == [[1.0, 8.0]] * 4
    (heat,) = charts["length-ratios-concurrent"].data
    ratios = {
        comparison.scenario: comparison.ratio for comparison in result.comparisons if comparison.metric == "throughput"
    }
    assert [[2**value for value in row] for row in heat["z"]] == [
        [pytest.approx(ratios[f"concurrent({users}, length {length})"], rel=1e-4) for length in LENGTHS]
        for users in USERS
    ]
    for row, texts in zip(tables[1].rows, heat["text"], strict=True):
        assert list(row[1:]) == texts
        assert all(text.startswith("B ") for text in texts)


def test_several_arms_have_a_table_and_a_view_each(tmp_path: Path) -> None:
    blocks = blocks_of(result_document(run(tmp_path, CROSSED[:4], INPUTS, arms=1)), "Sequence lengths")
    assert len([block for block in blocks if isinstance(block, Table)]) == 2
    (heat,) = [block for block in blocks if isinstance(block, Chart) and block.name == "length-ratios-batched"]
    assert [view.label for view in heat.views] == ["B against A", "C against A"]


def test_one_length_needs_no_section(tmp_path: Path) -> None:
    of_32 = tuple(load for load in CROSSED if load.sequence_length == 32)
    document = result_document(run(tmp_path, of_32, INPUTS))
    assert blocks_of(document, "Sequence lengths") == []
    assert blocks_of(document, "Batch sizes")


def test_sentences_name_the_length(result: Result) -> None:
    assert "length 32" in result.verdict.sentence or "length 128" in result.verdict.sentence
