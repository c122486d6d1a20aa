"""Every comparison on CPUs shows the CPU time per request of each arm, beside the ratios."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import loadgen.report.document as doc
from loadgen.report.sections.comparisons import comparisons
from loadgen.verdict.result import Result, analyse
from tests.golden.synthetic_run import Plan, workloads, write_run

LOADS = tuple(workload for workload in workloads(2, 60) if workload.name in ("single", "concurrent(16)"))


def cpu_table(result: Result) -> doc.Table | None:
    section = comparisons(result)
    assert section is not None
    tables = [block for block in section.blocks if isinstance(block, doc.Table) and block.title.startswith("CPU time")]
    return tables[0] if tables else None


def run(directory: Path, cpu_ms: dict[str, float | None], device: str = "cpu") -> Result:
    """Every request of an arm takes that much CPU time, those of the cool-down too."""
    write_run(directory, Plan(workloads=LOADS, b_in_effect={"device": device}))
    for path in (directory / "blocks").glob("*.json"):
        block = json.loads(path.read_text())
        each = cpu_ms[block["label"]]
        sent = block["requests"] + block["cool_down"]
        block["server_cpu_ns"] = None if each is None else int(each * 1e6 * sent)
        path.write_text(json.dumps(block))
    return analyse(directory)


def test_it_is_the_mean_over_all_requests_of_the_blocks(tmp_path: Path) -> None:
    result = run(tmp_path, {"a": 110.0, "b": 158.0})
    assert [summary.server_cpu_ms for summary in result.summaries] == pytest.approx([110.0, 158.0] * 2)
    table = cpu_table(result)
    assert table is not None
    assert [column.title for column in table.columns] == ["scenario", "A, ms", "B, ms"]
    assert table.rows == [("single", "110", "158"), ("concurrent(16)", "110", "158")]
    assert table.on == doc.READ


def test_an_arm_whose_cpu_time_is_unknown_has_a_dash(tmp_path: Path) -> None:
    table = cpu_table(run(tmp_path / "one", {"a": 110.0, "b": None}))
    assert table is not None
    assert table.rows[0] == ("single", "110", "–")
    assert cpu_table(run(tmp_path / "none", {"a": None, "b": None})) is None


def test_on_a_gpu_it_is_among_the_measurements_only(tmp_path: Path) -> None:
    result = run(tmp_path, {"a": 110.0, "b": 158.0}, device="cuda:0")
    assert cpu_table(result) is None
    assert result.summaries[1].server_cpu_ms == pytest.approx(158.0)
