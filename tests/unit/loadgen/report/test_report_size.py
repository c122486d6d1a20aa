"""A report is small enough to send, and the part of Plotly in it can draw every chart."""

from __future__ import annotations

import ast
import gzip
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import loadgen
import loadgen.report.document as doc
from loadgen.base.documents import kind_of
from loadgen.engines.sections import matrix_document
from loadgen.engines.store import stored_matrix
from loadgen.report.contents import result_document
from loadgen.report.renderers.html import PLOTLY, render_html
from loadgen.verdict.result import stored_result

MOST_BYTES = 1_500_000
RESULTS = Path(__file__).resolve().parents[4] / "docs/results"
TRACES = set(re.findall(r'moduleType:"trace",name:"(\w+)"', gzip.decompress(PLOTLY.read_bytes()).decode()))
OTHER_TYPES = {"date", "log", "category", "data", "rect", "line"}
"""Types of axes, error bars and shapes."""
LARGE = {
    "seven arms, five workloads": "2026-11-29-h200/table",
    "four models, 300 cells": "2026-11-24-engines-cpu/matrix",
    "heat map by length": "2026-11-22-h200-models/bert-base-lengths",
}


@pytest.mark.parametrize("folder", LARGE.values(), ids=LARGE.keys())
def test_the_report_of_a_large_run_is_small_and_can_be_drawn(folder: str) -> None:
    path = RESULTS / folder
    is_matrix = kind_of(path) == "engines"
    document = matrix_document(stored_matrix(path)) if is_matrix else result_document(stored_result(path))
    charts = [block for section in document.sections for block in section.blocks if isinstance(block, doc.Chart)]
    used = {trace["type"] for chart in charts for trace in chart.data}
    assert used <= TRACES
    assert {"scatter", "bar"} <= used
    assert len(render_html(document).encode()) <= MOST_BYTES


def types_in(source: str) -> Iterator[str]:
    """The text of every `"type": …` in a dict and `type=…` in a call."""
    for node in ast.walk(ast.parse(source)):
        pairs: list[tuple[ast.expr | None, ast.expr]] = []
        if isinstance(node, ast.Dict):
            pairs = [*zip(node.keys, node.values, strict=True)]
        elif isinstance(node, ast.keyword):
            pairs = [(ast.Constant(node.arg), node.value)]
        for key, value in pairs:
            if isinstance(key, ast.Constant) and key.value == "type" and isinstance(value, ast.Constant):
                yield str(value.value)


def test_every_trace_in_the_code_is_one_that_the_report_can_draw() -> None:
    modules = [path.read_text() for path in Path(loadgen.__file__).parent.rglob("*.py")]
    drawing = [text for text in modules if "doc.Figure" in text or "doc.Chart" in text]
    used = {name for text in drawing for name in types_in(text)}
    assert used - TRACES - OTHER_TYPES == set(), "choose another bundle, see loadgen/report/renderers/plotly/README.md"
    assert {"scatter", "bar", "heatmap"} <= used & TRACES
