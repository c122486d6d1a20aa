"""A check is one function: it is in the result, takes the verdict, and every report shows it with its remedy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from loadgen.checks.registry import CHECKS, Judgement, check
from loadgen.metrics.facts import Facts
from loadgen.report.contents import result_document
from loadgen.report.renderers.markdown import render_markdown
from loadgen.report.renderers.tables import render_junit
from loadgen.verdict.result import analyse
from tests.golden.synthetic_run import Plan, write_run


@pytest.fixture
def full_moon() -> Iterator[None]:
    @check(
        title="the moon is not full", failed="The moon is full", severity="invalidates", remedy="Wait for two weeks."
    )
    def moon(facts: Facts) -> Iterator[Judgement]:
        yield Judgement(False, f"full over {len(facts.blocks)} blocks", value=1.0, threshold=0.9)

    yield
    del CHECKS["moon"]


def test_a_declared_check_is_in_the_result_and_in_every_report(full_moon: None, tmp_path: Path) -> None:
    result = analyse(write_run(tmp_path, Plan(pairs=2, requests=40)))
    (moon_check,) = (made for made in result.checks if made.name == "moon")
    assert (moon_check.state, moon_check.value, moon_check.threshold, moon_check.remedy) == (
        "failed",
        1.0,
        0.9,
        "Wait for two weeks.",
    )
    assert not result.valid
    assert {comparison.verdict for comparison in result.comparisons} == {"invalid"}
    document = result_document(result)
    page = render_markdown(document)
    assert f"full over {len(result.blocks)} blocks" in page
    assert "Wait for two weeks." in page
    assert "The moon is full" in render_junit({"": document})


def test_without_it_the_same_run_is_valid(tmp_path: Path) -> None:
    assert analyse(write_run(tmp_path, Plan(pairs=2, requests=40))).valid
    assert "moon" not in CHECKS
