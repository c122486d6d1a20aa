"""The command: options, exit status, JSON, document; and the cases that it never sends to another machine."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from loadgen.cli.conformance import conformance
from loadgen.conformance.cases import CASES, select
from loadgen.conformance.records import CaseResult, CaseVerdict, ConformanceReport
from loadgen.conformance.runner import CaseRun, report_document
from loadgen.conformance.servers import DEFAULTS, LaunchedSession, RemoteSession
from loadgen.report.renderers.markdown import render_markdown

APP = typer.Typer()
APP.command()(conformance)


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(APP, list(arguments))
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def toy(sessions) -> str:
    return sessions().subject(DEFAULTS).url


def test_zero_when_nothing_deviates(toy: str, tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    code, out, _ = invoke(toy, "--model", "toy", "--only", "1a,15,28a", "--json", str(target))
    assert code == 0
    report = json.loads(target.read_bytes())
    verdicts = {row["number"]: row["verdict"] for row in report["results"]}
    assert report["schema"] == "abserve.conformance/2"
    assert verdicts["1a"] == verdicts["15a"] == "conforms"
    assert verdicts["15c"] == "not applicable"
    assert verdicts["28a"] == "skipped"
    assert "conforms: 3" in out


def test_one_and_a_clean_standard_output_when_something_deviates(sessions) -> None:
    url = sessions("500-for-bad-json").subject(DEFAULTS).url
    code, out, err = invoke(url, "--model", "toy", "--only", "1a", "--json", "-", "--fuzz", "20")
    assert code == 1
    numbers = {row["number"]: row["verdict"] for row in json.loads(out)["results"]}
    assert numbers["1a"] == "deviates"
    assert "16" in numbers
    assert "deviates: 2" in err or "deviates: 1" in err


def test_a_dead_remote_server_ends_the_run(sessions) -> None:
    with closing(sessions("die-on-deep-json")) as session:
        url = session.subject(DEFAULTS).url
        code, out, _ = invoke(url, "--model", "toy", "--only", "1a,2b,2c", "--json", "-")
    report = json.loads(out)
    assert code == 1
    assert [row["verdict"] for row in report["results"] if row["protocol"] == "http"] == [
        "conforms",
        "crashed",
        "skipped",
    ]
    assert "no longer listens" in report["stopped"]


def test_memory_is_not_observed_without_a_process(toy: str) -> None:
    _, out, _ = invoke(toy, "--model", "toy", "--only", "8c", "--json", "-")
    (row,) = json.loads(out)["results"]
    assert row["verdict"] == "conforms"
    assert "memory" in row["not_observed"][0]


def test_memory_is_observed_with_a_process(sessions) -> None:
    subject = sessions().subject(DEFAULTS)
    _, out, _ = invoke(subject.url, "--model", "toy", "--only", "8c", "--json", "-", "--pid", str(subject.pids()[0]))
    (row,) = json.loads(out)["results"]
    assert row["verdict"] == "conforms"
    assert row["not_observed"] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "either a URL or --launch"),
        (("http://127.0.0.1:1", "--launch", "native"), "either a URL or --launch"),
        (("--launch", "apache"), "native or triton"),
        (("http://127.0.0.1:1",), "is not live"),
        (("https://127.0.0.1:1",), "without TLS"),
        (("http://127.0.0.1:1/prefix",), "give a URL http://HOST:PORT"),
    ],
)
def test_usage_errors_are_explained(arguments: tuple[str, ...], words: str) -> None:
    code, _, err = invoke(*arguments)
    assert code == 2
    assert words in err


def test_an_unknown_model_is_a_usage_error(toy: str) -> None:
    code, _, err = invoke(toy, "--model", "no_such")
    assert code == 2
    assert "--model" in err


def test_nothing_destructive_is_sent_to_another_machine(sessions) -> None:
    session = sessions()
    chosen = [case for case in CASES if case.destructive]
    results = CaseRun(session, destructive=False).run(chosen, announce=lambda _: None)
    assert len(results) > 20
    assert all(result.verdict is CaseVerdict.SKIPPED for result in results)
    assert all("--i-own-this-server" in result.reason for result in results)


def test_markdown_lists_the_deviations_and_the_other_cases() -> None:
    row: dict[str, Any] = {"title": "t", "protocol": "http", "expected": "400", "got": "a|b"}
    results = (
        CaseResult(number="1a", verdict=CaseVerdict.DEVIATES, reason="no", **row),
        CaseResult(number="1b", verdict=CaseVerdict.CONFORMS, **row),
        CaseResult(number="2a", verdict=CaseVerdict.SKIPPED, reason="no option", **row),
    )
    created: dict[str, str] = {"created_at": "2026-01-02T00:00:00+00:00", "abserve_version": "1", "model": "m"}
    report = ConformanceReport(server="triton", server_title="Triton", results=results, **created)
    text = render_markdown(report_document(report))
    assert text.startswith("# Conformance of Triton\n\nModel m, 2026-01-02, abserve 1.")
    assert "| 1a t | http | 400 | a\\|b | **deviates: no** |" in text
    assert "Conforms: 1b." in text
    assert "- **skipped**: 2a: no option" in text


def test_markdown_is_written_or_the_error_says_why(toy: str, tmp_path: Path) -> None:
    arguments = (toy, "--model", "toy", "--only", "15a", "--markdown")
    assert invoke(*arguments, str(tmp_path / "report.md"))[0] == 0
    assert "Conforms: 15a." in (tmp_path / "report.md").read_text()
    code, _, err = invoke(*arguments, str(tmp_path / "no_such" / "report.md"))
    assert code == 2
    assert "give the path of a file in a folder that exists" in err


def test_a_remote_server_is_left_running(toy: str) -> None:
    session = RemoteSession(toy, "toy")
    CaseRun(session, destructive=True).run(select("1a"), announce=lambda _: None)
    assert not session.restart()
    session.close()
    assert session.subject(DEFAULTS).live()


def test_launched_servers_are_ended(sessions) -> None:
    session: LaunchedSession = sessions()
    subject = session.subject(DEFAULTS)
    session.close()
    assert not subject.live(0.2)
