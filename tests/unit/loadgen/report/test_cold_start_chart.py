"""The bars of a cold start add up to its first answer, also where a moment is not known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadgen.findings.cold_start import ColdStartsFound
from loadgen.records.probes import ServerStart
from loadgen.report.document import Chart, Items, Table
from loadgen.report.sections.cold_start import cold_starts
from loadgen.verdict.result import Result, analyse
from tests.golden.synthetic_run import Plan, write_run


@pytest.fixture
def result(tmp_path: Path) -> Result:
    return analyse(write_run(tmp_path, Plan(pairs=2)))


def seconds(result: Result, *starts: ServerStart) -> list[list[float]]:
    """Of each phase, one number per start."""
    finding = ColdStartsFound(starts=starts)
    section = cold_starts(msgspec.structs.replace(result, studies={**result.studies, ColdStartsFound.STUDY: finding}))
    assert section is not None
    (chart,) = section.blocks
    assert isinstance(chart, Chart)
    return [trace["x"] for trace in chart.data]


def test_a_moment_that_is_not_known_has_no_bar(result: Result) -> None:
    whole = ServerStart(label="a", repetition=0, live_ns=10**9, ready_ns=3 * 10**9, first_answer_ns=4 * 10**9)
    failed = ServerStart(label="b", repetition=0, live_ns=None, ready_ns=2 * 10**9, first_answer_ns=None, error="no")
    assert seconds(result, failed, whole) == [[1.0, 0.0], [2.0, 2.0], [1.0, 0.0]]


def test_a_first_start_has_a_column_beside_the_median_of_the_later_ones(result: Result) -> None:
    moments: dict[str, Any] = {"live_ns": 1, "first_answer_ns": 8 * 10**9}
    first = ServerStart(
        label="a", repetition=0, ready_ns=7 * 10**9, caches="uncached", filled=("choices",), command_ns=2 * 10**9,
        stages_s={"choose": 4.0, "import": 1.5, "else": 0.5}, **moments,
    )  # fmt: skip
    later = [
        ServerStart(label="a", repetition=place, ready_ns=ready * 10**9, stages_s={"import": 1.0}, **moments)
        for place, ready in enumerate((3, 2, 5))
    ]
    plain = ServerStart(label="a", repetition=0, ready_ns=10**9, plain=True, **moments)
    finding = ColdStartsFound(starts=(*later, plain, first))
    section = cold_starts(msgspec.structs.replace(result, studies={**result.studies, ColdStartsFound.STUDY: finding}))
    assert section is not None
    chart, table, warm = section.blocks
    assert isinstance(chart, Chart)
    assert isinstance(table, Table)
    assert isinstance(warm, Items)
    assert len(chart.data[0]["y"]) == 4
    assert [column.title for column in table.columns] == ["stage", "A first start", "A later starts"]
    assert {row[0]: row[1:] for row in table.rows} == {
        "command": ("2.00 s", "–"),
        "import": ("1.50 s", "1.00 s"),
        "choose": ("4.00 s", "–"),
        "rest": ("1.00 s", "2.00 s"),
        "ready": ("7.00 s", "3.00 s"),
        "first answer": ("8.00 s", "8.00 s"),
        "else": ("0.50 s", "–"),
    }
    assert "choices" in warm.items[0].text


def test_without_a_start_that_got_ready_there_is_no_chart(result: Result) -> None:
    died = ServerStart(label="a", repetition=0, live_ns=10**9, ready_ns=None, first_answer_ns=None, error="no")
    finding = ColdStartsFound(starts=(died,))
    assert cold_starts(msgspec.structs.replace(result, studies={ColdStartsFound.STUDY: finding})) is None
