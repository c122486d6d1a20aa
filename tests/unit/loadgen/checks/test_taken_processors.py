"""What the hypervisor or another process took of the processors counts by its effect."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from loadgen.checks.registry import validity
from loadgen.cli.compare import EXIT_VALID, exit_status
from loadgen.metrics.comparisons import Comparison
from loadgen.report.contents import result_document
from loadgen.report.renderers.html import render_html
from loadgen.report.renderers.markdown import render_markdown
from loadgen.report.renderers.tables import render_junit
from loadgen.verdict.headline import MOST_WORDS, word_count
from loadgen.verdict.result import Result, analyse, encode_result, read_result
from tests.golden.synthetic_run import Plan, write_run
from tests.unit.loadgen.checks.test_checks import SMALL, check, edit_json


def take(directory: Path, field: str, blocks: int | None = None, **shares: float) -> None:
    """Take the stated shares of ten seconds of two cores from the arms' blocks of `single`, or from the first `blocks`
    of each."""
    left: dict[str, int | None] = dict.fromkeys(shares, blocks)
    for path in sorted((directory / "blocks").glob("*.json")):
        block = json.loads(path.read_text())
        if block["workload"] != "single":
            continue
        n = left[block["label"]]
        taken = shares[block["label"]] if n is None or n > 0 else 0.0
        left[block["label"]] = None if n is None else n - 1
        total_ns = 20_000_000_000
        machine: dict[str, Any] = {
            "total_ns": total_ns, "steal_ns": 0, "busy_ns": 40_000_000, "known_ns": 40_000_000,
            "others": ["PID 812 ffmpeg, 0.97 cores"], "runnable": 1, "waited_ns": None,
        }  # fmt: skip
        machine[field] += round(taken * total_ns)
        edit_json(path, machine=machine)


@pytest.mark.parametrize(
    ("taken", "ok", "severity", "words"),
    [
        (
            {"a": 0.0, "b": 0.02},
            True,
            "warns",
            "0 % of the CPU's time in the blocks of PyTorch (native) and 2.0 % in those of Triton went to ",
        ),
        (
            {"a": 0.06, "b": 0.05},
            False,
            "warns",
            "6.0 % of the CPU's time in the blocks of PyTorch (native) and 5.0 % in those of Triton went to ",
        ),
        ({"a": 0.3, "b": 0.3}, False, "roughens", "over 20 % in the median block"),
        ({"a": 0.0, "b": 0.1}, False, "roughens", "so the arms did not have the same machine"),
        ({"a": 0.0, "b": 0.4, "blocks": 1}, False, "warns", "(1 of"),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("field", ["steal_ns", "busy_ns"])
def test_processors_that_were_taken_away_count_by_their_effect(
    tmp_path: Path, field: str, strict: bool, taken: dict[str, Any], ok: bool, severity: str, words: str
) -> None:
    """The attacker's cases: 30 % of steal and a machine that was 100 % busy were VALID."""
    write_run(tmp_path, Plan(**SMALL))
    edit_json(tmp_path / "experiment.json", strict=strict)
    take(tmp_path, field=field, **taken)
    result = analyse(tmp_path)
    names = {"steal_ns": "cpu_steal", "busy_ns": "other_processes"}
    seen = check(result, names[field], "single")
    rough = severity == "roughens"
    assert (seen.ok, seen.severity) == (ok, "invalidates" if rough and strict else severity)
    assert words in seen.detail
    assert (result.valid, result.rough) == (not rough, rough and not strict)
    assert ("PID 812 ffmpeg, 0.97 cores" in seen.detail) == (field == "busy_ns" and not ok)
    single = {c.verdict for c in result.comparisons if c.workload == "single" and c.ratios}
    assert (single == {"invalid"}) == (rough and strict)
    assert {c.workload for c in result.comparisons if c.lost} == ({"single", "cold-start"} if result.rough else set())


def lost(result: Result) -> dict[str, Comparison]:
    return {c.metric: c for c in result.comparisons if c.workload == "single"}


def test_the_interval_of_a_rough_workload_includes_what_either_arm_may_have_lost(tmp_path: Path) -> None:
    """B serves 1.19 times as much: shown where a tenth of A's time may be the others', not where half may."""
    write_run(tmp_path, Plan(**SMALL))
    alone = lost(analyse(tmp_path))
    take(tmp_path, field="busy_ns", a=0.1, b=0.0)
    little = lost(analyse(tmp_path))
    take(tmp_path, field="busy_ns", a=0.5, b=0.5)
    much = lost(analyse(tmp_path))
    before, one, both = (found["throughput"] for found in (alone, little, much))
    assert before.ci95 is not None
    assert one.ci95 == pytest.approx((before.ci95[0] * 0.9, before.ci95[1]), rel=0.01), "A alone may be faster"
    assert both.ci95 == pytest.approx((before.ci95[0] / 2.0, before.ci95[1] * 2.0), rel=0.01)
    assert [found.verdict for found in (before, one, both)] == ["arm_better", "arm_better", "inconclusive"]
    assert both.lost == pytest.approx((0.5, 0.5), rel=0.01)
    assert both.ratio == before.ratio
    median = much["latency_p50"].ci95
    assert median is not None
    assert alone["latency_p50"].ci95 is not None
    assert median[0] == pytest.approx(alone["latency_p50"].ci95[0] / 3.0, rel=0.02), "half of them lose twice as much"
    assert (much["latency_p90"].ci95, much["latency_p90"].verdict) == (None, "inconclusive")


def test_a_rough_run_is_called_so_everywhere(tmp_path: Path) -> None:
    write_run(tmp_path, Plan(**SMALL))
    take(tmp_path, field="busy_ns", a=0.1, b=0.0)
    result = analyse(tmp_path)
    assert validity(result.checks) == "ROUGH: busy machine"
    assert exit_status(result) == EXIT_VALID
    assert result.headline.startswith("Rough: ")
    assert word_count(result.headline) <= MOST_WORDS
    assert result.verdict.failed == ()
    assert "PID 812 ffmpeg, 0.97 cores" in result.verdict.caveats[0]
    document = result_document(result)
    for render in (render_html, render_markdown):
        assert "ROUGH: busy machine" in render(document)
    junit = ET.fromstring(render_junit({"": document}))
    assert junit.get("failures") == "0"
    case = junit.find(".//testcase[@name='other_processes [workload single]']")
    assert case is not None
    assert case.find("properties/property[@value='rough']") is not None
    assert read_back(tmp_path, result) == result


def read_back(folder: Path, result: Result) -> Result:
    (folder / "result.json").write_bytes(encode_result(result))
    return read_result(folder / "result.json")


@pytest.mark.parametrize(
    ("condition", "state"),
    [
        (
            "single: ratio.throughput > 1.02",
            "broken",
        ),  # B serves 1.19 times as much, 1.04 times if A lost a tenth to the others
        ("single: ratio.throughput > 1.1", "kept"),
        ("single: b.throughput > 1.1 * a.throughput", "kept"),
        ("single: ratio.throughput.low > 1.02", "broken"),
        ("single: ratio.throughput != 1", "broken"),
        ("single: a.throughput < 1", "kept"),
        ("single: a.p90 > 0.001", "kept"),
        ("single: ratio.p90 < 5", "kept"),
        ("single: ratio.p99 < 5", "not_measurable"),
        ("single: b.p50 > 0.001", "broken"),
    ],
)
def test_a_rough_run_breaks_a_threshold_only_whatever_the_others_took(
    tmp_path: Path, condition: str, state: str
) -> None:
    write_run(tmp_path, Plan(**SMALL))
    take(tmp_path, field="busy_ns", a=0.1, b=0.0)
    edit_json(tmp_path / "experiment.json", settings={"fail_if": [condition]})
    assert [outcome.state for outcome in analyse(tmp_path).thresholds] == [state]
