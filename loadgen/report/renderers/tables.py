"""The named tables of documents for other programs: CSV for spreadsheets and scripts, JUnit XML for CI systems.

CSV has full precision, and an empty field for what was not measured. Its column `run` names the combination of a
matrix, and is empty for a single run. JUnit has a suite per table whose rows have outcomes and a test case per row, in
the shape of the Apache Ant task junitreport, which Jenkins, GitLab and GitHub read.
"""

from __future__ import annotations

import csv
import io
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping

import loadgen.report.document as doc
from loadgen.base.documents import printable

_FORMULA = ("=", "+", "-", "@", "\N{FULLWIDTH EQUALS SIGN}", "\N{FULLWIDTH PLUS SIGN}")


def csv_names(document: doc.Document) -> list[str]:
    """The names of the tables."""
    return list(dict.fromkeys(table.name for table in doc.only(document, doc.CSV).tables if table.name))


def render_csv(documents: Mapping[str, doc.Document], name: str) -> str:
    """The table of this name in every document, by the name of the run."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for run, document in documents.items():
        for table in doc.only(document, doc.CSV).tables:
            if table.name == name:
                if not out.tell():
                    writer.writerow(["run", *(column.title for column in table.columns)])
                writer.writerows([field(run), *map(field, row)] for row in table.rows)
    return out.getvalue()


def field(value: doc.Value) -> object:
    """Printable text that a spreadsheet does not take for a formula."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str | doc.Cell | doc.Strip):
        return value
    text = printable(" ".join(doc.text_of(value).split()))
    return f"'{text}" if text.startswith(_FORMULA) else text


_NOTHING = doc.Table(
    doc.names("name", "text"),
    [("run_finished", "the run stored nothing")],
    name="checks",
    outcomes=[("failure", "failed")],
)


def render_junit(documents: Mapping[str, doc.Document | None]) -> str:
    """The documents by the names of their runs; the only run of a command has an empty name. A run without a document
    stored nothing, which is a failure."""
    root = ET.Element("testsuites", name="abserve")
    states: Counter[str] = Counter()
    seconds = 0.0
    for run, document in documents.items():
        tables = (_NOTHING,) if document is None else doc.only(document, doc.JUNIT).tables
        for table in tables:
            if table.outcomes:
                states.update(state for state, _ in table.outcomes)
                seconds += table.seconds
                suite = _suite(root, f"abserve.{run}.{table.name}" if run else f"abserve.{table.name}", table)
                if document is not None and document.started_at is not None:
                    suite.set("timestamp", printable(document.started_at.removesuffix("Z")))
                if document is not None and (headline := _headline(document)):
                    told = ET.Element("properties")
                    ET.SubElement(told, "property", name="headline", value=printable(headline))
                    suite.insert(0, told)
    root.attrib |= _totals(states, seconds)
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _headline(document: doc.Document) -> str:
    """ "VALID: Triton handles …"; empty without a verdict."""
    blocks = (block for section in document.sections for block in section.blocks)
    return next((f"{block.badge}: {block.headline}" for block in blocks if isinstance(block, doc.Panel)), "")


def _totals(states: Counter[str], seconds: float) -> dict[str, str]:
    return {
        "tests": str(states.total()),
        "failures": str(states["failure"]),
        "errors": "0",
        "skipped": str(states["skipped"]),
        "time": f"{seconds:.3f}",
    }


def _suite(root: ET.Element, name: str, table: doc.Table) -> ET.Element:
    """Texts are made printable, which is less than XML can hold: a server's message may hold anything."""
    suite = ET.SubElement(
        root,
        "testsuite",
        {"name": printable(name)} | _totals(Counter(state for state, _ in table.outcomes), table.seconds),
    )
    seen: Counter[str] = Counter()
    for row, (state, kind) in zip(table.rows, table.outcomes, strict=True):
        case, *rest = (printable(doc.text_of(cell)) for cell in row)
        seen[case] += 1  # a check may be made per arm, and readers take equal names for one case
        number = f" ({seen[case]})" if seen[case] > 1 else ""
        element = ET.SubElement(suite, "testcase", classname=printable(name), name=case + number, time="0.000")
        text = "; ".join(rest)
        if state == "failure":
            ET.SubElement(element, "failure", message=text, type=kind).text = text
        elif state == "skipped":
            ET.SubElement(element, "skipped", message=text)
        else:
            if kind:
                properties = ET.SubElement(element, "properties")
                ET.SubElement(properties, "property", name="standing", value=kind)
            ET.SubElement(element, "system-out").text = text
    return suite
