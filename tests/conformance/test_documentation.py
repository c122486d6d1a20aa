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
    """By theme, the cases of each expectation; those that differ in the protocol alone share an entry."""
    lines = []
    for theme in (*THEMES, LANGUAGE):
        lines += [f"### {theme.title}", "", theme.why, ""]
        by_expectation: dict[str, list[str]] = {}
        for title, of in groupby(theme.cases, lambda case: case.title.partition(" (")[0]):
            cases = list(of)
            expected = "; ".join(dict.fromkeys(escaped(case.describe()) for case in cases))
            entry = f"{', '.join(case.number for case in cases)} {escaped(title)}"
            by_expectation.setdefault(expected, []).append(entry)
        lines += [f"- **{expected}**: {'; '.join(entries)}" for expected, entries in by_expectation.items()]
        lines.append("")
    return "\n".join(lines)


def test_the_document_lists_the_cases(request: pytest.FixtureRequest) -> None:
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    listed, _, after = rest.partition(END)
    if request.config.getoption("update_snapshots"):
        DOCUMENT.write_text(f"{before}{BEGIN}{case_list()}{END}{after}", encoding="utf-8")
    else:
        assert listed == case_list()
