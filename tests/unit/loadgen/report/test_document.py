"""A new table costs one function: it appears in every format, escaped there, and nowhere if it says nothing."""

from __future__ import annotations

import csv
import io
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from rich.console import Console

import loadgen.report.document as doc
from loadgen.experiment.plan import Combination
from loadgen.report import contents
from loadgen.report.contents import result_document
from loadgen.report.files import published, write_index
from loadgen.report.renderers.html import render_html
from loadgen.report.renderers.markdown import render_markdown
from loadgen.report.renderers.tables import render_csv
from loadgen.report.renderers.terminal import print_document
from loadgen.verdict.result import Result, analyse
from tests.golden.synthetic_run import Plan, write_run


def birds(result: Result) -> doc.Section | None:
    """A study that nobody has made."""
    seen = str(len(result.blocks))
    table = doc.Table(
        (*doc.names("bird"), *doc.numbers("seen")),
        [("heron", seen)],
        name="birds",
        outcomes=[("passed", "")],
    )
    return doc.section("Birds", table)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return analyse(write_run(tmp_path_factory.mktemp("run"), Plan(pairs=2, requests=40)))


def printed(document: doc.Document, width: int = 100) -> str:
    stream = io.StringIO()
    print_document(document, Console(file=stream, width=width, color_system=None))
    return stream.getvalue()


def test_a_table_that_one_function_makes_is_in_every_format(result: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "CONTENTS", (*contents.CONTENTS, ("Zoo", (birds,))))
    document = result_document(result)
    seen = len(result.blocks)
    assert ["heron", str(seen)] in [line.split() for line in printed(document).split("Birds")[1].splitlines()]
    assert f"| heron | {seen} |" in render_markdown(document)
    page = render_html(document)
    assert f'<td class="name lead" data-label="bird">heron</td><td class="number" data-label="seen">{seen}</td>' in page
    assert page.index('<h2 id="zoo">') < page.index("<h3>Birds</h3>")
    known = {name: render() for name, render in published(result).printable.items() if name != "json"}
    assert list(csv.DictReader(io.StringIO(known["csv-birds"]))) == [{"run": "", "bird": "heron", "seen": str(seen)}]
    case = ET.fromstring(known["junit"]).find("testsuite[@name='abserve.birds']/testcase[@name='heron']/system-out")
    assert case is not None
    assert case.text == str(seen)


def test_what_says_nothing_is_left_out() -> None:
    empty = doc.Table(doc.names("a"), [], title="gone", caption="gone")
    assert doc.section("gone", empty, doc.Text(""), doc.Items([]), doc.Fold("gone", (empty,)), None) is None
    kept = doc.section("kept", empty, doc.Text("said"))
    assert kept is not None
    assert kept.blocks == (doc.Text("said"),)


def test_each_format_gets_its_own_blocks_and_columns() -> None:
    table = doc.Table(
        (*doc.names("a"), doc.Column("b", on=doc.MARKDOWN), doc.Column("nowhere filled")),
        [("1", "2", "")],
    )
    section = doc.section("s", table, doc.Text("on a page", on=doc.PAGES), doc.Fold("f", (doc.Text("folded"),)))
    assert section is not None
    document = doc.Document("d", {"": [section]})
    assert [text in printed(document) for text in ("on a page", "folded", "nowhere")] == [False] * 3
    text, page = render_markdown(document), render_html(document)
    assert "| a | b |" in text
    assert "on a page" in text
    assert "<summary>f</summary>" in page
    assert '<th scope="col" class="name">a</th></tr>' in page


def test_csv_has_every_column_also_without_a_value_and_its_headings_without_a_row() -> None:
    for rows, lines in (([("1", None)], ["run,a,b", ",1,"]), ([], ["run,a,b"])):
        section = doc.section("s", doc.Table(doc.names("a", "b"), rows, name="t", on=doc.CSV))
        assert section is not None
        document = doc.Document("d", {"": [section]})
        assert render_csv({"": document}, "t").splitlines() == lines


def test_rows_that_belong_together_say_so_once(tmp_path: Path) -> None:
    table = doc.Table(doc.names("a", "b"), [("x", "1"), ("x", "2"), ("y", "3")], grouped=True)
    document = doc.Document("d", {"": [doc.Section("s", (table,))]})
    assert printed(document).count("x") == 1
    assert render_markdown(document).count("x") == 2, "each row stands alone"
    assert render_html(document).count('<tr class="again">') == 1


def test_the_index_of_a_matrix_has_a_section_a_run_with_links_to_its_reports(result: Result, tmp_path: Path) -> None:
    write_index(tmp_path, {Combination("http", "fp32"): result, Combination("grpc", "jpeg"): None})
    page, summary = ((tmp_path / name).read_text() for name in ("index.html", "summary.md"))
    assert summary.startswith("# Transports and payloads\n")
    assert summary.count("| single | throughput, images/s |") == 1
    assert "## jpeg over grpc: INVALID\n\nThis run stored nothing." in summary
    assert "[report](http-fp32/report.html)" in summary
    assert 'href="http-fp32/report.html"' in page
    assert "<h3>fp32 over http: VALID</h3>" in page
