"""The report of a container's start reads the same on the terminal, in Markdown and in HTML."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from loadgen.records.probes import ContainerStart
from loadgen.records.store import RunStore
from loadgen.report.contents import result_document
from loadgen.report.document import Table
from loadgen.report.renderers.html import render_html
from loadgen.report.renderers.markdown import render_markdown
from loadgen.report.renderers.terminal import print_document
from loadgen.report.sections.cold_start import container_starts
from loadgen.verdict.result import Result, analyse, encode_result, read_result
from tests.golden.synthetic_run import Plan, write_run

NATIVE = ContainerStart(
    label="a", repetition=0, service="native-cpu", image="abserve/servers:0.1.0 sha256:1", conditions="warm",
    started_ns=210_000_000, live_ns=10**9, ready_ns=5_430_000_000, first_answer_ns=5_512_000_000,
    milestones_ns={"process": 620_000_000, "door_open": 10**9, "imported": 3_710_000_000,
                   "weights_loaded": 4_050_000_000, "engine_ready": 5_400_000_000},
    batch_answers_ns={1: 82_000_000, 8: 366_000_000},
)  # fmt: skip
TRITON = ContainerStart(
    label="b", repetition=0, service="triton-cpu", image="abserve/servers:0.1.0 sha256:1", conditions="warm",
    caches="uncached", started_ns=200_000_000, milestones_ns={"process": 330_000_000},
    error="the server ended with exit status 1: no <model>",
)  # fmt: skip


@pytest.fixture
def result(tmp_path: Path) -> Result:
    """Stored as a run stores it, read back, through a result file."""
    folder = tmp_path / "run"
    store = RunStore(folder)
    store.write_all(ContainerStart, [NATIVE, TRITON])
    write_run(folder, Plan(pairs=2))
    (tmp_path / "result.json").write_bytes(encode_result(analyse(folder)))
    return read_result(tmp_path / "result.json")


def tables(result: Result) -> list[Table]:
    """That of A and that of B."""
    section = container_starts(result)
    assert section is not None
    return [block for block in section.blocks if isinstance(block, Table)]


def test_every_step_has_its_column(result: Result) -> None:
    table = tables(result)[0]
    assert dict(zip((column.title for column in table.columns), table.rows[0], strict=True)) == {
        "start": "1 cached", "container": "0.21 s", "first log line": "0.62 s", "imported": "3.71 s",
        "weights": "4.05 s", "graphs or engine": "5.40 s", "ready": "5.43 s", "first answer": "5.51 s",
        "batch 1": "82.0 ms", "batch 8": "366 ms",
    }  # fmt: skip


def test_what_a_server_did_not_reach_is_missing_and_said(result: Result) -> None:
    assert [tuple(row) for row in tables(result)[1].rows] == [
        ("1 uncached failed", "0.20 s", "0.33 s", "–", "–", "–", "–", "–")
    ]
    assert "1 uncached: the server ended with exit status 1: no \\<model>" in render_markdown(result_document(result))
    assert "1 uncached: the server ended with exit status 1: no &lt;model&gt;" in render_html(result_document(result))


def test_all_three_reports_show_the_same_figures(result: Result) -> None:
    stream = io.StringIO()
    print_document(result_document(result), Console(file=stream, width=140, color_system=None))
    for text in (stream.getvalue(), render_markdown(result_document(result)), render_html(result_document(result))):
        for part in (*(cell for table in tables(result) for cell in table.rows[0]), "native-cpu", "triton-cpu"):
            assert isinstance(part, str)
            assert part in text


def test_a_run_without_containers_says_nothing_of_them(tmp_path: Path) -> None:
    plain = analyse(write_run(tmp_path, Plan(pairs=2)))
    assert "of the containers" not in render_markdown(result_document(plain)) + render_html(result_document(plain))
