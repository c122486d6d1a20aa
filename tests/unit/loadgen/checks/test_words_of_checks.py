"""What a check that has not passed is called, what an INVALID run is called, and where the remedy stands."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from rich.console import Console

from loadgen.checks.registry import CHECKS, Fault, reached, validity
from loadgen.cli.compare import last_words
from loadgen.records.checks import Check, Severity, State
from loadgen.report.contents import result_document
from loadgen.report.document import Document
from loadgen.report.renderers.html import render_html
from loadgen.report.renderers.markdown import render_markdown
from loadgen.report.renderers.tables import render_junit
from loadgen.report.renderers.terminal import print_document
from loadgen.verdict.result import Result, analyse
from tests.golden.synthetic_run import Plan, write_run
from tests.unit.loadgen.checks.test_taken_processors import take


def on_terminal(document: Document) -> str:
    stream = io.StringIO()
    print_document(document, Console(file=stream, width=100, color_system=None))
    return stream.getvalue()


def outcome(name: str, state: State = "failed", severity: Severity = "invalidates") -> Check:
    return Check(
        name=name,
        title="",
        state=state,
        severity=severity,
        scope="run",
        value=None,
        threshold=None,
        detail="",
        remedy="",
    )


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Other programs took a third of A's blocks."""
    folder = write_run(tmp_path_factory.mktemp("disturbed"), Plan(pairs=4, requests=60))
    take(folder, "busy_ns", a=0.33, b=0.0)
    return analyse(folder)


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_has_a_title_for_its_failure(name: str) -> None:
    definition = CHECKS[name]
    assert definition.failed[:1].isupper()
    assert definition.failed.lower() not in ("", definition.title.lower())
    if "invalidates" in (definition.severity, definition.unknown) and definition.unknown != "warns":
        assert definition.fault in get_args(Fault)


@pytest.mark.parametrize("render", [on_terminal, render_markdown, render_html, lambda page: render_junit({"": page})])
def test_a_failed_check_says_what_is_wrong(disturbed: Result, render: Callable[[Document], str]) -> None:
    text = " ".join(render(result_document(disturbed)).split())
    assert CHECKS["other_processes"].failed in text
    assert "PID 812 ffmpeg, 0.97 cores" in text


@pytest.mark.parametrize("render", [on_terminal, render_markdown, render_html])
def test_the_remedy_stands_under_the_headline(disturbed: Result, render: Callable[[Document], str]) -> None:
    text = " ".join(render(result_document(disturbed)).replace("│", " ").split())
    badge, headline = text.index("ROUGH: busy machine"), text.index("Rough: ")
    remedy = text.index("→ Stop the programs named and run again")
    assert badge < remedy
    assert headline < remedy < text.index("random:0"), "before the conditions"


@pytest.mark.parametrize(
    ("checks", "words"),
    [
        ([outcome("machine_idle", severity="warns")], "VALID"),
        ([outcome("parity")], "INVALID: wrong answers"),
        ([outcome("same_threads")], "INVALID: unfair configuration"),
        ([outcome("other_processes")], "INVALID: busy machine"),
        ([outcome("other_processes", severity="roughens")], "ROUGH: busy machine"),
        ([outcome("other_processes", severity="roughens"), outcome("parity")], "INVALID: wrong answers"),
        ([outcome("other_processes"), outcome("answers_under_load")], "INVALID: wrong answers"),
        ([outcome("send_lag")], "INVALID: overloaded load generator"),
        ([outcome("send_lag"), outcome("other_processes", severity="warns")], "INVALID: busy machine"),
        ([outcome("a check of an older version")], "INVALID"),
        ([outcome("run_finished"), outcome("other_processes")], "INVALID: incomplete run"),
    ],
)
def test_an_invalid_run_is_called_by_its_gravest_fault(checks: list[Check], words: str) -> None:
    assert validity(checks) == words
    assert validity(checks[::-1]) == words


def test_the_last_line_of_the_command_says_why_and_what_to_do(disturbed: Result) -> None:
    words = last_words(disturbed)
    assert "33 % of the CPU's time in the blocks of PyTorch (native)" in words
    assert words.endswith(CHECKS["other_processes"].remedy)


def test_after_an_interrupt_nothing_is_said_of_what_did_not_happen(tmp_path: Path) -> None:
    """Interrupted right at the start: no answers, no block, no cold start."""
    folder = write_run(tmp_path, Plan(pairs=4, requests=60, state="interrupted", cut_after=0))
    for name in ("parity.json", "cold_starts.json", "conditions.json"):
        (folder / name).unlink(missing_ok=True)
    result = analyse(folder)
    assert not result.valid
    assert len(result.verdict.failed) == 1
    assert "interrupted" in result.verdict.failed[0]
    document = result_document(result)
    for text in (on_terminal(document), render_markdown(document), render_html(document), render_junit({"": document})):
        assert CHECKS["run_finished"].failed in text
        for name in ("parity", "blocks_complete", "cold_starts_succeeded", "machine_idle"):
            definition = CHECKS[name]
            assert not any(title in text for title in (definition.title, definition.failed, definition.not_known))
    assert validity(result.checks) == "INVALID: incomplete run"


def test_what_happened_before_an_interrupt_is_shown(tmp_path: Path) -> None:
    result = analyse(write_run(tmp_path, Plan(pairs=4, requests=60, state="interrupted", parity_cosine=0.9)))
    assert "parity" in {check.name for check in reached(result.checks)}
    assert validity(result.checks) == "INVALID: wrong answers"


def test_smoke_says_what_it_cannot_decide(tmp_path: Path) -> None:
    result = analyse(write_run(tmp_path, Plan(pairs=2, requests=60, preset="smoke")))
    assert any("smoke run" in caveat and "2 rounds" in caveat for caveat in result.verdict.caveats)
    assert "smoke run" in on_terminal(result_document(result))
