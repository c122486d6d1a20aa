"""The documentation lists the cases as they are in the code; `pytest tests/conformance --snapshot-update` renews it."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

from loadgen.conformance.cases import THEMES
from loadgen.conformance.cases.language import LANGUAGE

DOCUMENT = Path(__file__).parents[2] / "docs" / "conformance.md"
BEGIN, END = "<!-- cases -->\n", "<!-- end cases -->"


def escaped(text: str) -> str:
    return " ".join(text.split()).replace("<", "&lt;").replace("](", "\\](")


def case_list() -> str:
    """One line per title; the cases of it that differ in the protocol alone share the line."""
    lines = []
    for theme in (*THEMES, LANGUAGE):
        lines += [f"### {theme.title}", "", theme.why, ""]
        for title, of in groupby(theme.cases, lambda case: case.title.partition(" (")[0]):
            cases = list(of)
            expected = "; ".join(dict.fromkeys(escaped(case.describe()) for case in cases))
            lines.append(f"- {', '.join(case.number for case in cases)} {escaped(title)} → {expected}")
        lines.append("")
    return "\n".join(lines)


def test_the_document_lists_the_cases(request: pytest.FixtureRequest) -> None:
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    listed, _, after = rest.partition(END)
    if request.config.getoption("update_snapshots"):
        DOCUMENT.write_text(f"{before}{BEGIN}{case_list()}{END}{after}", encoding="utf-8")
    else:
        assert listed == case_list()
