"""JUnit XML, as CI systems read it: a suite for each table whose rows have outcomes, a test case for each row.

The shape is that of the Apache Ant task's junitreport, which Jenkins, GitLab and GitHub's reporters take.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping

import loadgen.report.document as doc
from loadgen.documents import printable

_NOTHING = doc.Table(
    doc.names("name", "text"),
    [("run_finished", "the run stored nothing")],
    name="checks",
    outcomes=[doc.Outcome("failure", "failed")],
)


def render_junit(documents: Mapping[str, doc.Document | None]) -> str:
    """By the name of the run, empty where there is one. A run without a document stored nothing, which is a failure."""
    root = ET.Element("testsuites", name="abserve")
    for run, document in documents.items():
        tables = [_NOTHING] if document is None else doc.only(document, doc.JUNIT).tables
        for table in tables:
            if table.outcomes:
                prefix = f"abserve.{run}" if run else "abserve"
                _suite(root, f"{prefix}.{table.name}", table, None if document is None else document.started_at)
    for attribute in ("tests", "failures", "errors", "skipped"):
        root.set(attribute, str(sum(int(suite.get(attribute, "0")) for suite in root)))
    root.set("time", f"{sum(float(suite.get('time', '0')) for suite in root):.3f}")
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _suite(root: ET.Element, name: str, table: doc.Table, started_at: str | None) -> None:
    states = [outcome.state for outcome in table.outcomes]
    suite = ET.SubElement(
        root,
        "testsuite",
        name=clean(name),
        tests=str(len(states)),
        failures=str(states.count("failure")),
        errors="0",
        skipped=str(states.count("skipped")),
        time=f"{table.seconds:.3f}",
    )
    if started_at is not None:
        suite.set("timestamp", clean(started_at.removesuffix("Z")))
    seen: Counter[str] = Counter()
    for row, outcome in zip(table.rows, table.outcomes, strict=True):
        case, *rest = (clean(doc.text_of(cell)) for cell in row)
        seen[case] += 1  # a check may be made of each arm; readers take equal names for one case
        number = f" ({seen[case]})" if seen[case] > 1 else ""
        element = ET.SubElement(suite, "testcase", classname=clean(name), name=case + number, time="0.000")
        text = "; ".join(rest)
        if outcome.state == "failure":
            ET.SubElement(element, "failure", message=text, type=outcome.kind).text = text
        elif outcome.state == "skipped":
            ET.SubElement(element, "skipped", message=text)
        else:
            ET.SubElement(element, "system-out").text = text


def clean(text: str) -> str:
    """Printable, which is less than XML can hold: a server's message may hold anything."""
    return printable(text)
