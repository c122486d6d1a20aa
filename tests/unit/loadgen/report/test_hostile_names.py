"""Stored records whose names would mark up a report: every format shows them as text."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from loadgen.conformance.records import CaseResult, CaseVerdict, ConformanceReport
from loadgen.conformance.runner import report_document
from loadgen.report.charts import label_text
from loadgen.report.document import Document, Section, Table, names
from loadgen.report.renderers.markdown import escape, fenced, render_markdown
from loadgen.report.renderers.tables import render_csv
from loadgen.report.renderers.terminal import make_console, print_document
from loadgen.verdict.result import analyse
from tests.golden.synthetic_run import Plan, write_run
from tests.hostile_names import HOSTILE, check_reports


def spoilt(value: object, words: tuple[str, ...]) -> object:
    """With the hostile name in place of these texts and of all that begin with one of them."""
    if isinstance(value, dict):
        return {key: spoilt(child, words) for key, child in value.items()}
    if isinstance(value, list):
        return [spoilt(part, words) for part in value]
    return HOSTILE if isinstance(value, str) and value.startswith(words) else value


def test_records_that_somebody_has_tampered_with(tmp_path: Path) -> None:
    out = write_run(tmp_path, Plan(pairs=2, requests=20, batches=(8,)))
    names = {
        "arms.json": ("native torch", "abserve-native", "torch", "http", "0.1.0", "eager", "random"),
        "environment.json": ("Simulated", "Debian", "0.1.0", "abserve ", "0123"),
        "experiment.json": ("random:0",),
    }
    for name, words in names.items():
        path = out / name
        path.write_text(json.dumps(spoilt(json.loads(path.read_bytes()), words)))
    for path in (out / "blocks").glob("*.json"):
        path.write_text(json.dumps(json.loads(path.read_bytes()) | {"note": HOSTILE}))
    check_reports(out, analyse(out))
    assert "VALID" in (out / "summary.md").read_text()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("# VALID", "\\# VALID"),
        ("a\n\n# VALID", "a # VALID"),
        ("1. one", "1\\. one"),
        ("- one", "\\- one"),
        ("---", "\\---"),
        ("> one", "\\> one"),
        ("<b>[x](y)", "\\<b>\\[x](y)"),
        ("&lt;script> R&D", "\\&lt;script> R&D"),
        ("2.99 -3 % +1", "2.99 -3 % +1"),
        ("a|b\x1b[1m", "a\\|b\N{REPLACEMENT CHARACTER}\\[1m"),
    ],
)
def test_markdown(text: str, shown: str) -> None:
    assert escape(text) == shown


def test_a_fence_is_longer_than_what_would_end_it() -> None:
    assert fenced("a\n````\n# VALID") == "`````\na\n````\n# VALID\n`````"


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@x", " =1", "\t=1", "\n=1", "\N{FULLWIDTH EQUALS SIGN}1"])
def test_a_formula_is_text_in_csv(text: str) -> None:
    table = Table(names("reason"), [[text]], name="reasons")
    document = Document("", {"": [Section("", (table,))]})
    assert render_csv({"": document}, "reasons").splitlines()[1].rpartition(",")[2].lstrip('"').startswith("'")


def test_a_chart_takes_no_html() -> None:
    assert label_text("<a href='x'>&lt;") == "&lt;a href='x'>&amp;lt;"


def test_the_terminal_takes_neither_markup_nor_control_characters() -> None:
    written = io.StringIO()
    console = make_console(written)
    console.print(f"a {HOSTILE}", soft_wrap=True)
    report = ConformanceReport(
        created_at="2026", abserve_version="1", server=HOSTILE, server_title=HOSTILE, model="m", stopped=HOSTILE,
        results=(CaseResult(
            number="1", title=HOSTILE, protocol="http", expected=HOSTILE, got=HOSTILE, verdict=CaseVerdict.DEVIATES,
            reason=HOSTILE, not_observed=(), seconds=0.0,
        ),),
    )  # fmt: skip
    print_document(report_document(report), console)
    text = written.getvalue()
    assert {character for character in text if not character.isprintable()} == {"\n"}
    assert "[bold red]:bomb:" in text
    assert "\n<script" not in render_markdown(report_document(report))
