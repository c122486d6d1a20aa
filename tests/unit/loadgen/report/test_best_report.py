"""The two tables of every server at its best, and what else a report says of such a run: made from stored records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

import loadgen.report.document as doc
from abserve.run import Run
from loadgen.findings.best import BestFound, BestRecord, Tried, TriedConfiguration, TriedServer
from loadgen.metrics.comparisons import leading_comparisons
from loadgen.records.run import Workload
from loadgen.report.contents import result_document
from loadgen.report.renderers.markdown import render_markdown
from loadgen.report.sections.best import at_best, one_configuration, tried
from loadgen.stats.estimates import Estimate
from loadgen.verdict.result import Result, analyse, encode_result, read_result
from tests.golden.synthetic_run import Plan, SimulatedArm, write_run

COMMON: dict[str, Any] = {"batch_size": 1, "requests": 120, "rounds": 8, "seconds": 1.0, "max_seconds": 30.0}
LOADS = (
    Workload(scenario="single", concurrency=1, arms=("a", "c"), beside=("b",), **COMMON),
    Workload(scenario="concurrent", concurrency=16, arms=("a", "b"), **COMMON),
)
"""b and c are one server: c is its best for one user, b for sixteen and over both."""
PLAN = Plan(
    a=SimulatedArm(6.0, 9.0, 1.0), b=SimulatedArm(14.0, 2.0, 1.0), others=(SimulatedArm(4.0, 7.0, 1.0),),
    workloads=LOADS,
)  # fmt: skip


def record(*problems: str) -> BestRecord:
    named = [
        TriedConfiguration(name="b-0", settings={}),
        TriedConfiguration(name="b-1", settings={"instances": "1"}, arm="c"),
        TriedConfiguration(name="b-2", settings={"instances": "4"}, arm="b"),
    ]
    gains = {"b-0": (1.0, 1.0), "b-1": (1.2, 0.5), "b-2": (0.9, 2.0)}
    measured = [
        Tried(configuration=name, workload=load.name, value=10.0 * gain, gain=Estimate(gain, gain * 0.9, gain * 1.1))
        for name, of_loads in gains.items()
        for load, gain in zip(LOADS, of_loads, strict=True)
    ]
    alone = TriedConfiguration(name="a-0", arm="a")
    best = {load.name: "a-0" for load in LOADS}
    return BestRecord(
        servers=(
            TriedServer(server="a", target="native", configurations=(alone,), compromise="a-0", best=best),
            TriedServer(
                server="b", target="triton", configurations=tuple(named), tried=tuple(measured), compromise="b-2",
                defaults={"instances": "2"}, best={"single": "b-1", "concurrent(16)": "b-2"},
            ),
        ),
        problems=problems,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write_run(tmp_path_factory.mktemp("best"), PLAN)
    experiment = json.loads((run / "experiment.json").read_text())
    for arm, server in zip(experiment["arms"], "abb", strict=True):
        arm["server"] = server
    experiment["settings"] = {"fail_if": ["single: b.throughput < a.throughput", "ratio.throughput < 1.2"]}
    (run / "experiment.json").write_text(json.dumps(experiment))
    (run / BestRecord.FILE).write_bytes(msgspec.json.encode(record()))
    return run


@pytest.fixture(scope="module")
def result(folder: Path) -> Result:
    return analyse(folder)


def rows(section: doc.Section | None, table: int = 0) -> list[list[str]]:
    assert section is not None
    tables = [block for block in section.blocks if isinstance(block, doc.Table)]
    return [[str(getattr(cell, "text", cell)) for cell in row] for row in tables[table].rows]


def test_each_load_compares_what_was_chosen_for_it_and_misses_no_block(result: Result) -> None:
    assert result.valid, result.verdict.failed
    assert [(c.workload, *c.pairing) for c in leading_comparisons(result.comparisons)] == [
        ("single", "a", "c"), ("concurrent(16)", "a", "b"),
    ]  # fmt: skip
    assert {(s.workload, s.label) for s in result.summaries} == {
        ("single", "a"), ("single", "b"), ("single", "c"), ("concurrent(16)", "a"), ("concurrent(16)", "b"),
    }  # fmt: skip


def test_stalls_are_looked_for_in_the_arms_that_a_load_has(result: Result) -> None:
    """Without blocks of an arm that another load has, none was found."""
    assert [check.state for check in result.checks if check.name == "half_second_stalls"] == ["passed", "passed"]


def test_the_headline_and_the_thresholds_are_about_servers(result: Result) -> None:
    assert result.headline.startswith("Each server at its best: Triton handles ")
    assert "It is ahead at both loads" in result.headline
    assert {(t.condition, t.state) for t in result.thresholds} == {
        ("single: b.throughput < a.throughput", "kept"), ("ratio.throughput < 1.2", "kept"),
    }  # fmt: skip


def test_both_tables_have_the_figures_of_the_comparison(result: Result) -> None:
    found = result.of(BestFound)
    assert {(f.workload, f.server): f.arm for f in found.at_best} == {
        ("single", "a"): "a", ("single", "b"): "c", ("concurrent(16)", "a"): "a", ("concurrent(16)", "b"): "b",
    }  # fmt: skip
    losses = {f.workload: f.loss for f in found.compromises if f.server == "b"}
    assert losses["concurrent(16)"] == Estimate(1.0, 1.0, 1.0)
    one_user = losses["single"]
    assert one_user is not None
    assert one_user.value == pytest.approx((14.0 + 2.0 + 1.0) / (4.0 + 7.0 + 1.0), rel=0.05)
    assert found.mean_loss == {"a": 1.0, "b": pytest.approx(one_user.value**0.5)}
    assert {ranking.workload: ranking.order for ranking in found.rankings} == {
        "single": ("a", "b"), "concurrent(16)": ("b", "a"),
    }  # fmt: skip
    first = rows(at_best(result))
    assert [(row[0], row[1], row[4], row[5] == "first") for row in first] == [
        ("single", "A (native)", "as asked for", False),
        ("single", "B (Triton)", "instances=1", True),
        ("concurrent(16)", "A (native)", "as asked for", False),
        ("concurrent(16)", "B (Triton)", "instances=4", True),
    ]
    assert [row[1:3] for row in rows(one_configuration(result))][3:] == [
        ["instances=4", "single"], ["instances=4", "concurrent(16)"], ["instances=4", "all loads"],
    ]  # fmt: skip


def test_what_was_tried_has_every_configuration_with_its_loss(result: Result) -> None:
    brief, every = rows(tried(result)), rows(tried(result), 1)
    assert [(row[1], row[2]) for row in brief[1:]] == [
        ("instances=2 (as asked for)", "55 %"), ("instances=1", "100 %"), ("instances=4", "15 %"),
    ]  # fmt: skip
    assert ["B (Triton)", "instances=1", "concurrent(16)", "5.00", "0.50× (0.45–0.55)", "300 %"] in every


def test_problems_are_said_and_the_stored_result_has_both_tables(folder: Path, tmp_path: Path, result: Result) -> None:
    stored = tmp_path / "result.json"
    stored.write_bytes(encode_result(result))
    assert read_result(stored).of(BestFound) == result.of(BestFound)
    (folder / BestRecord.FILE).write_bytes(msgspec.json.encode(record("The rounds that choose do not count.")))
    again = analyse(folder)
    assert "The rounds that choose do not count." in render_markdown(result_document(again))
    assert Run(folder).best == again.of(BestFound)
