"""From a recording of a real H200 to what is ranked and what is shown."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from loadgen.findings.gpu.analysis import GpuFound
from loadgen.findings.gpu.decision import decide_together
from loadgen.findings.gpu.records import EvidenceFile, EvidenceRecord, InconclusiveCode
from loadgen.records.checks import Check
from loadgen.report.contents import result_document
from loadgen.report.files import published
from loadgen.report.renderers.terminal import print_document
from loadgen.report.sections.gpu import findings as finding_rows
from loadgen.report.sections.gpu import gpu_chart
from loadgen.verdict.result import Result, analyse, read_result
from tests.unit.loadgen.checks.gpu_run import CAPTURE, write_gpu_run

Show = Callable[[Result], str]


@pytest.fixture
def terminal() -> Show:
    def show(result: Result) -> str:
        stream = io.StringIO()
        print_document(result_document(result), Console(file=stream, width=200, color_system=None))
        return stream.getvalue()

    return show


def checks(result: Result, name: str) -> list[Check]:
    return [check for check in result.checks if check.name == name]


def findings(result: Result) -> dict[tuple[str, str | None, bool], str]:
    evidence = result.of(GpuFound).evidence
    assert evidence is not None
    return {(r.label, r.workload, r.control): r.finding.value for r in evidence.records}


def test_on_a_machine_with_four_gpus_all_of_that_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the arms' GPU was read, and the server of the control names none."""
    monkeypatch.setitem(CAPTURE["lines"][0], "device_count", 4)
    result = analyse(write_gpu_run(tmp_path))
    assert set(findings(result).values()) == {"GPU_VERIFIED", "CPU_FALLBACK"}
    (control,) = checks(result, "negative_control")
    assert control.ok, control.detail
    evidence = result.of(GpuFound).evidence
    assert evidence is not None
    assert {record.uuid for record in evidence.records} == {CAPTURE["uuid"]}


def test_an_arm_on_two_gpus_has_a_row_for_all_and_one_for_each(tmp_path: Path, terminal: Show) -> None:
    result = analyse(write_gpu_run(tmp_path))
    found = result.of(GpuFound)
    assert found.evidence is not None

    def on_two(record: EvidenceRecord) -> EvidenceRecord:
        health = msgspec.structs.replace(record.inputs.health, uuid="GPU-2")
        other = msgspec.structs.replace(record, inputs=msgspec.structs.replace(record.inputs, health=health))
        return decide_together([record, other])

    records = tuple(on_two(record) if record.label == "a" else record for record in found.evidence.records)
    told = msgspec.structs.replace(found, evidence=msgspec.structs.replace(found.evidence, records=records))
    changed = msgspec.structs.replace(result, studies={**result.studies, GpuFound.STUDY: told})
    rows = finding_rows(changed)
    assert [row.arm for row in rows[:4]] == ["A", f"A on {CAPTURE['uuid']}", "A on GPU-2", "B"]
    joules = [float(row.figures[3]) for row in rows[:3]]
    assert joules[0] == pytest.approx(joules[1] + joules[2], rel=0.01)
    assert len(rows) == len(finding_rows(result)) + 2 * sum(record.label == "a" for record in records)
    assert "On each of 2 GPUs: the GPU" in terminal(changed)


def test_two_proven_arms_are_ranked_as_gpu_servers(tmp_path: Path, terminal: Show) -> None:
    result = analyse(write_gpu_run(tmp_path))
    assert findings(result) == {
        ("a", "single", False): "GPU_VERIFIED",
        ("a", None, False): "GPU_VERIFIED",
        ("b", "single", False): "GPU_VERIFIED",
        ("b", None, False): "GPU_VERIFIED",
        ("a", "single", True): "CPU_FALLBACK",
    }
    (evidence,) = checks(result, "gpu_evidence")
    assert (evidence.ok, evidence.scope) == (True, "workload single")
    (present,) = checks(result, "gpu_present")
    assert present.ok
    (control,) = checks(result, "negative_control")
    assert control.ok, control.detail
    assert not any("CPU comparison" in caveat for caveat in result.verdict.caveats)
    text = terminal(result)
    assert "A all scenarios: GPU_VERIFIED" in text
    assert "J/image" in text


@pytest.mark.parametrize("b", ["gpu", "cpu"])
def test_an_arm_that_says_gpu_while_the_gpu_idles_is_not_ranked(tmp_path: Path, terminal: Show, b: str) -> None:
    result = analyse(write_gpu_run(tmp_path, b=b))
    ranked = b == "gpu"
    assert ("no verdict" in result.verdict.sentence.lower()) == (not ranked)
    assert all((c.verdict == "invalid") == (not ranked) for c in result.comparisons if c.ratio is not None)
    if not ranked:
        assert not result.valid
        assert findings(result)["b", "single", False] != "GPU_VERIFIED"
        assert "Triton is " in result.verdict.caveats[0]
        assert result.verdict.caveats[0][:30] in terminal(result)


@pytest.mark.parametrize("c", ["gpu", "cpu"])
def test_three_arms_are_ranked_only_where_each_of_them_is_proven(tmp_path: Path, c: str) -> None:
    result = analyse(write_gpu_run(tmp_path, "gpu", "gpu", c))
    (evidence,) = checks(result, "gpu_evidence")
    (present,) = checks(result, "gpu_present")
    if c == "gpu":
        assert (evidence.ok, evidence.value) == (True, "GPU_VERIFIED, GPU_VERIFIED and GPU_VERIFIED")
        assert present.detail == f"All arms are GPU_VERIFIED on {CAPTURE['uuid']}"
    else:
        assert evidence.ok is False
        assert evidence.detail.startswith("native (C) is ")
        assert result.verdict.caveats[0].startswith("GPU use is not verified: native (C) is ")
        assert {comparison.verdict for comparison in result.comparisons} == {"invalid"}, "also A beside B"


def test_a_control_beside_a_busy_gpu_is_warned_of(tmp_path: Path) -> None:
    path = write_gpu_run(tmp_path) / "evidence.json"
    evidence = msgspec.json.decode(path.read_bytes(), type=EvidenceFile)
    records = [msgspec.structs.replace(r, activity="active") if r.control else r for r in evidence.records]
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(evidence, records=tuple(records))))
    result = analyse(tmp_path)
    (control,) = checks(result, "negative_control")
    assert (control.ok, control.severity) == (False, "warns")
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(evidence, records=evidence.records[:-1])))
    (control,) = checks(analyse(tmp_path), "negative_control")
    assert (control.ok, control.severity) == (None, "informs")


def test_one_arm_on_the_cpu_is_said_plainly_and_not_ranked(tmp_path: Path) -> None:
    result = analyse(write_gpu_run(tmp_path, b="cpu", b_says="cpu"))
    assert not result.valid
    assert result.verdict.caveats[0].startswith("PyTorch (native) ran on a GPU and Triton ran on the CPU")
    assert all(c.verdict == "invalid" for c in result.comparisons)


def test_a_servers_word_without_evidence_is_not_enough(tmp_path: Path) -> None:
    result = analyse(write_gpu_run(tmp_path, evidence=False))
    assert not result.valid
    (evidence,) = checks(result, "gpu_evidence")
    assert (evidence.ok, evidence.severity, evidence.scope) == (None, "invalidates", "run")
    assert "nothing was recorded to verify it" in result.verdict.caveats[0]


def test_the_reports_show_the_findings_and_what_the_gpu_did(tmp_path: Path) -> None:
    result = analyse(write_gpu_run(tmp_path))
    published(result).write(tmp_path)
    assert read_result(tmp_path / "result.json") == result == analyse(tmp_path), "a stored run can be reported again"
    page, summary = (tmp_path / "report.html").read_text(), (tmp_path / "summary.md").read_text()
    for text in (page, summary):
        assert "GPU verification" in text
    assert "GPU\\_VERIFIED" in summary
    assert 'id="gpu-figure"' in page
    assert [(row.arm, row.scenario, row.words, row.repeats) for row in finding_rows(result)] == [
        ("A", "all scenarios", "GPU_VERIFIED", False),
        ("B", "all scenarios", "GPU_VERIFIED", False),
        ("A", "single", "GPU_VERIFIED", True),
        ("B", "single", "GPU_VERIFIED", True),
        ("A", "single, CPU control run", "CPU_FALLBACK", False),
    ]
    shown = page.split("<h3>GPU verification</h3>")[1].split("</section>")[0]
    first, folded = shown.split("<details>")
    assert (first.count("GPU_VERIFIED"), folded.count("GPU_VERIFIED")) == (2, 2)
    assert "CPU_FALLBACK" in first
    (series,) = result.of(GpuFound).series
    assert series.uuid == CAPTURE["uuid"]
    load = [share for at_s, share in series.utilisation if 5 < at_s < 25]
    assert min(load) > 0.5
    assert max(watts for _, watts in series.power_watts) > 300
    chart = gpu_chart(result)
    assert chart is not None
    assert {trace["name"] for trace in chart.data} >= {"utilisation", "power"}
    blocks = [shape for shape in chart.layout["shapes"] if shape["fillcolor"] in ("--arm-0", "--arm-1")]
    assert len(blocks) == len(result.blocks) == 2
    assert [shape for shape in chart.layout["shapes"] if shape["fillcolor"] == "--muted"]


@pytest.mark.parametrize("scenario", ["single", "surface"])
def test_the_short_loads_of_a_surface_are_proven_together(tmp_path: Path, scenario: str) -> None:
    """Where each load alone is too short for a finding, that of the whole run counts."""
    write_gpu_run(tmp_path)
    stored = tmp_path / EvidenceFile.FILE
    evidence = msgspec.json.decode(stored.read_bytes())
    for record in evidence["records"]:
        if record["workload"] is not None and not record["control"]:
            record |= {"finding": "INCONCLUSIVE", "code": InconclusiveCode.SHORT_WINDOW, "sentence": "0.8 s of load."}
    stored.write_bytes(msgspec.json.encode(evidence))
    if scenario == "surface":
        for path in tmp_path.rglob("*.json"):
            text = re.sub(r'"scenario":\s*"single"', '"scenario":"surface"', path.read_text())
            path.write_text(re.sub(r'"workload":\s*"single"', '"workload":"surface(1, batch 1)"', text))
    (judged,) = checks(analyse(tmp_path), "gpu_evidence")
    assert judged.ok == (scenario == "surface"), judged.detail
