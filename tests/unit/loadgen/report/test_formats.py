"""CSV and JUnit XML: what another program reads of a run."""

from __future__ import annotations

import csv
import io
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

import loadgen.report.document as doc
from loadgen.entry import build
from loadgen.report.contents import result_document
from loadgen.report.files import published, write_csv, write_junit
from loadgen.report.renderers.tables import render_junit
from loadgen.verdict.result import Result, analyse
from tests.golden.synthetic_run import Plan, write_run

ATTRIBUTES = {
    "testsuites": {"name", "tests", "failures", "errors", "skipped", "time"},
    "testsuite": {"name", "tests", "failures", "errors", "skipped", "time", "timestamp"},
    "testcase": {"classname", "name", "time"},
    "failure": {"message", "type"},
    "skipped": {"message"},
    "system-out": set(),
    "properties": set(),
    "property": {"name", "value"},
}
"""What the schema of Ant's junitreport and the readers of Jenkins and GitLab know; each is required here."""
CHILDREN = {
    "testsuites": {"testsuite"},
    "testsuite": {"properties", "testcase"},
    "properties": {"property"},
    "testcase": {"failure", "skipped", "system-out"},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    folder = tmp_path_factory.mktemp("runs")
    plans = {
        "valid": Plan(pairs=3, requests=60),
        "errors": Plan(pairs=3, requests=60, failing_block=3),
        "killed": Plan(pairs=3, requests=60, state="running", cut_after=20),
    }
    analysed = {}
    for name, plan in plans.items():
        path = write_run(folder / name, plan) / "experiment.json"
        document = msgspec.json.decode(path.read_bytes())
        document["settings"] = {"fail_if": ["b.p50 > 1", "b.p50 > 1e9", "single: b.p99 > 1"]}
        path.write_bytes(msgspec.json.encode(document))
        analysed[name] = analyse(path.parent)
    return analysed


def parsed(text: str, *, timestamp: bool = True) -> ET.Element:
    """The document, after a look at its shape: elements, attributes, and counts that add up."""
    root = ET.fromstring(text)
    for element in root.iter():
        assert set(element.attrib) == ATTRIBUTES[element.tag] - (set() if timestamp else {"timestamp"})
        assert {child.tag for child in element} <= CHILDREN.get(element.tag, set())
    for suite in root:
        cases = suite.findall("testcase")
        assert int(suite.attrib["tests"]) == len(cases) > 0
        assert int(suite.attrib["failures"]) == len(suite.findall("testcase/failure"))
        assert int(suite.attrib["skipped"]) == len(suite.findall("testcase/skipped"))
        assert len({(case.attrib["classname"], case.attrib["name"]) for case in cases}) == len(cases)
        assert all(len(case) == 1 for case in cases)
    for total in ("tests", "failures", "skipped"):
        assert int(root.attrib[total]) == sum(int(suite.attrib[total]) for suite in root)
    return root


def failures(root: ET.Element, suite: str) -> dict[str, str]:
    cases = root.findall(f"testsuite[@name='abserve.{suite}']/testcase")
    return {
        case.attrib["name"]: failed.attrib["message"] for case in cases if (failed := case.find("failure")) is not None
    }


def test_a_valid_run_fails_nowhere_but_in_its_thresholds(results: dict[str, Result]) -> None:
    root = parsed(render_junit({"": result_document(results["valid"])}))
    assert {told.attrib["value"] for told in root.iter("property")} == {f"VALID: {results['valid'].headline}"}
    assert failures(root, "checks") == {}
    assert failures(root, "comparisons") == {}
    failures_found = failures(root, "thresholds")
    assert set(failures_found) == {"fail if b.p50 > 1 [concurrent(16)]", "fail if single: b.p99 > 1 [single]"}
    assert "b.p99 could not be measured" in failures_found["fail if single: b.p99 > 1 [single]"]
    skipped = root.find("testsuite[@name='abserve.comparisons']/testcase[@name='p99 latency [single]']/skipped")
    assert skipped is not None
    assert "needs 662 samples" in skipped.attrib["message"]


def test_what_takes_a_verdict_away_is_a_failure(results: dict[str, Result]) -> None:
    root = parsed(render_junit({"": result_document(results["errors"])}))
    (broken,) = failures(root, "checks")
    assert broken.startswith("request_errors [workload ")
    assert failures(root, "comparisons")
    killed = parsed(render_junit({"": result_document(results["killed"])}))
    assert "killed" in failures(killed, "checks")["run_finished [plan]"]


def test_the_runs_of_a_matrix_are_suites_of_one_file_and_one_that_stored_nothing_fails(
    results: dict[str, Result], tmp_path: Path
) -> None:
    write_junit(tmp_path / "j.xml", {"http-fp32": results["valid"], "grpc-fp32": None})
    root = ET.parse(tmp_path / "j.xml").getroot()
    assert {suite.attrib["name"] for suite in root} >= {"abserve.http-fp32.checks", "abserve.grpc-fp32.checks"}
    assert root.find("testsuite[@name='abserve.grpc-fp32.checks']/testcase/failure") is not None


def test_what_xml_cannot_hold_is_replaced() -> None:
    table = doc.Table(doc.names("name", "text"), [("a", "a\x00b\x1b[31m\ud800 é <&>")], "t", outcomes=[("passed", "")])
    document = doc.Document("", {"": [doc.Section("", (table,))]})
    (shown,) = parsed(render_junit({"": document}), timestamp=False).iter("system-out")
    assert shown.text == "a�b�[31m� é <&>"


def test_csv_has_every_comparison_and_every_block_in_full_precision(results: dict[str, Result], tmp_path: Path) -> None:
    result = results["valid"]
    rows = list(csv.DictReader(io.StringIO(published(result).printable["csv"]())))
    assert [(row["scenario"], row["metric"]) for row in rows] == [(c.workload, c.metric) for c in result.comparisons]
    for row, comparison in zip(rows, result.comparisons, strict=True):
        assert (float(row["ratio"]) if row["ratio"] else None) == comparison.ratio
        assert (row["ci95_low"] == "") == (comparison.ci95 is None)
        assert (row["baseline"], row["arm"], row["verdict"]) == (
            comparison.baseline,
            comparison.arm,
            comparison.verdict,
        )
    blocks = list(csv.DictReader(io.StringIO(published(result).printable["csv-blocks"]())))
    assert [int(row["index"]) for row in blocks] == [block.index for block in result.blocks]
    assert [float(row["throughput_per_s"]) for row in blocks] == [block.throughput_per_s for block in result.blocks]
    write_csv(tmp_path / "r.csv", {"x": result, "y": None})
    assert (tmp_path / "r.csv").read_text().splitlines()[1].startswith("x,cold-start,")
    assert len((tmp_path / "r-blocks.csv").read_text().splitlines()) == 1 + len(result.blocks)


def test_report_prints_a_format_and_writes_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path, Plan(pairs=2, requests=40))
    before = sorted(run.iterdir())
    for name, start in (("csv", "run,scenario"), ("csv-blocks", "run,index"), ("junit", "<?xml"), ("json", "{")):
        done = CliRunner().invoke(build(), ["report", str(run), "--format", name])
        assert done.exit_code == 0
        assert done.output.startswith(start)
    assert sorted(run.iterdir()) == before
    done = CliRunner().invoke(build(), ["report", str(run), "--format", "pdf"])
    assert done.exit_code == 2
    assert "choose from csv, csv-blocks, json, junit, markdown" in done.output


def test_a_place_that_is_not_there_is_said_before_the_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = CliRunner().invoke(build(), ["compare", "--out", str(out), "--junit", str(tmp_path / "no" / "j.xml")])
    assert done.exit_code == 2
    assert "in a folder that exists" in " ".join(done.output.split())
    assert not out.exists()
