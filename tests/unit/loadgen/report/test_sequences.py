"""A run on sequences: its units, tokens beside sequences, and sentences that name a length."""

from __future__ import annotations

import io
import json
from itertools import product
from pathlib import Path

import pytest
from rich.console import Console

from loadgen.records.run import Workload
from loadgen.records.scenarios import Scenario
from loadgen.report.contents import result_document
from loadgen.report.document import Document, Table, text_of
from loadgen.report.renderers.markdown import render_markdown
from loadgen.report.renderers.tables import render_csv, render_junit
from loadgen.report.renderers.terminal import print_document
from loadgen.verdict.result import Result, analyse
from tests.golden.synthetic_run import Plan, write_run

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


def run(directory: Path, workloads: tuple[Workload, ...], inputs: dict[str, object]) -> Result:
    write_run(directory, Plan(pairs=4, workloads=workloads))
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


def test_sentences_name_the_length(result: Result) -> None:
    assert "length 32" in result.verdict.sentence or "length 128" in result.verdict.sentence
