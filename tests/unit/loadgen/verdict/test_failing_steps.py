"""A step of the analysis or of the report that fails costs itself only, takes no verdict silently, and is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import loadgen.report.contents as contents
import loadgen.verdict.result as analysis
from loadgen.checks.registry import CHECKS
from loadgen.findings.registry import probes
from loadgen.metrics.registry import METRICS
from loadgen.metrics.summaries import figure_of
from loadgen.records.checks import Check
from loadgen.records.store import StoredRun, read_run
from loadgen.records.targets import Kind
from loadgen.report.document import Text
from loadgen.report.files import published
from loadgen.verdict.result import Result, analyse_run
from tests.golden.synthetic_run import Plan, write_run
from tests.language_runs import LanguagePlan, write_language_run

pytestmark = pytest.mark.usefixtures("as_users_have_it")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> StoredRun:
    return read_run(write_run(tmp_path_factory.mktemp("run"), Plan(pairs=4, requests=60, batches=(8,))))


@pytest.fixture(scope="module")
def result(run: StoredRun) -> Result:
    return analyse_run(run)


def fail(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("a fault")


def named(result: Result) -> list[Check]:
    """The checks that say that something failed."""
    return [check for check in result.checks if check.detail.endswith("ZeroDivisionError: a fault")]


@pytest.mark.parametrize("probe", [probe for probe in probes() if probe.finding], ids=lambda p: p.finding.STUDY)
def test_a_finding(monkeypatch: pytest.MonkeyPatch, run: StoredRun, result: Result, probe: Any) -> None:
    broken = [replace(each, analyse=fail) if each.finding is probe.finding else each for each in probes()]
    monkeypatch.setattr(analysis, "probes", lambda: broken)
    without = analyse_run(run)
    warning, *needed = named(without)
    assert (warning.name, warning.state, warning.value) == ("analysed", "failed", probe.finding.STUDY)
    assert warning.severity == "warns"
    assert {check.state for check in needed} <= {"unknown"}
    assert without.studies.keys() == result.studies.keys() - {probe.finding.STUDY}
    assert [c.ratio for c in without.comparisons if c.workload != "cold-start"] == [
        c.ratio for c in result.comparisons if c.workload != "cold-start"
    ]


@pytest.mark.parametrize("name", CHECKS)
def test_a_check(monkeypatch: pytest.MonkeyPatch, run: StoredRun, result: Result, name: str) -> None:
    """One that may take the verdict away takes it."""
    definition = CHECKS[name]
    if definition.of is Kind.TOKENS:
        pytest.skip("a check of language models")
    monkeypatch.setitem(CHECKS, name, replace(definition, find=fail))
    without = analyse_run(run)
    (check,) = named(without)
    takes = not {"invalidates", "roughens"}.isdisjoint((definition.severity, definition.unknown))
    assert (check.name, check.state, check.severity) == (name, "unknown", "invalidates" if takes else "warns")
    assert without.valid == (result.valid and not takes)
    assert any(comparison.winner for comparison in without.comparisons) == (not takes)
    assert len(without.comparisons) == len(result.comparisons)


@pytest.mark.parametrize("step", ["compare_all", "reach_verdict"])
def test_what_every_winner_needs(monkeypatch: pytest.MonkeyPatch, run: StoredRun, step: str) -> None:
    monkeypatch.setattr(analysis, step, fail)
    without = analyse_run(run)
    assert [(check.name, check.severity) for check in named(without)] == [("analysed", "invalidates")]
    assert not without.valid
    assert "a fault" in without.verdict.sentence + without.headline


def test_a_metric(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(METRICS, "tpot", replace(METRICS["tpot"], of_requests=None, of_block=fail))
    result = analyse_run(read_run(write_language_run(tmp_path, LanguagePlan(users=(4,), pairs=3, answers=3))))
    by_metric = {comparison.metric: comparison for comparison in result.comparisons}
    assert by_metric["tpot"].ratio is None
    assert "could not be computed: ZeroDivisionError" in (by_metric["tpot"].reason or "")
    assert by_metric["ttft"].ratio is not None
    assert all(block.complete and figure_of(block, METRICS["ttft"]) for block in result.blocks)


def test_a_section(monkeypatch: pytest.MonkeyPatch, result: Result) -> None:
    """Each in turn, those of the probes too."""
    whole = contents.result_document(result)
    for place, (title, makers) in enumerate(contents.CONTENTS):
        broken = [[*c] for c in contents.CONTENTS]
        broken[place][1] = [maker and fail for maker in makers]
        with monkeypatch.context() as patched:
            patched.setattr(contents, "CONTENTS", broken)
            document = contents.result_document(result)
        texts = [
            block.text
            for section in document.chapters[title]
            for block in section.blocks
            if isinstance(block, Text) and "ZeroDivisionError: a fault" in block.text
        ]
        assert len(texts) == sum(maker is not None for maker in makers)
        others = {name: sections for name, sections in whole.chapters.items() if name != title}
        assert {name: sections for name, sections in document.chapters.items() if name != title} == others


@pytest.mark.parametrize("renderer", ["render_html", "render_markdown", "encode_result"])
def test_a_format(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, result: Result, renderer: str) -> None:
    names = {"render_html": "report.html", "render_markdown": "summary.md", "encode_result": "result.json"}
    module = "files" if renderer == "encode_result" else "published"
    monkeypatch.setattr(f"loadgen.report.{module}.{renderer}", fail)
    with pytest.raises(ZeroDivisionError):
        published(result).write(tmp_path)
    written = {path.name for path in tmp_path.iterdir()}
    assert set(names.values()) - written == {names[renderer]}


def test_in_these_tests_faults_are_raised(monkeypatch: pytest.MonkeyPatch, run: StoredRun) -> None:
    monkeypatch.setattr("loadgen.metrics.barrier.RAISES", True)
    monkeypatch.setitem(CHECKS, "parity", replace(CHECKS["parity"], find=fail))
    with pytest.raises(ZeroDivisionError):
        analyse_run(run)
