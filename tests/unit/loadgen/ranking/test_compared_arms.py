"""Arms of published comparisons as options: each number is that of the result."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import msgspec
import pytest

from loadgen.findings.gpu.analysis import GpuFound
from loadgen.findings.rate_search import RatesFound
from loadgen.ranking.analyse import from_result, rank
from loadgen.ranking.prices import EXAMPLES, read_prices
from loadgen.records.ranks import Price, PriceMatch
from loadgen.stats.ratios import geometric_mean, interval_of_mean
from loadgen.verdict.result import Result, read_result

RESULTS = Path(__file__).resolve().parents[4] / "docs/results"
RESNET = RESULTS / "2026-11-22-h200-models/resnet50/result.json"


@pytest.fixture(scope="module")
def resnet() -> Result:
    return read_result(RESNET)


def test_an_arm_is_ranked_at_its_fastest_workload(resnet: Result) -> None:
    (group,) = rank([from_result("r", resnet)], read_prices(EXAMPLES)).groups
    assert (group.work.model, group.work.precision, group.work.payload) == ("torchvision:resnet50", "fp16", "uint8")
    assert (group.work.transport, group.work.weights) == ("http", "random weights (seed 0)")
    best = {s.label: s for s in sorted(resnet.summaries, key=lambda s: s.throughput_per_s or 0.0)}
    evidence = resnet.of(GpuFound).evidence
    assert evidence is not None
    for option, label in zip(group.options, ("a", "b"), strict=True):
        summary = best[label]
        assert option.point.name == summary.workload
        speed, latency = option.point.items_per_second, option.point.latency_ms
        assert (speed.value, (speed.low, speed.high)) == (summary.throughput_per_s, summary.intervals["throughput"])
        assert latency is not None
        assert latency.value == summary.latency_ms("p99")
        ((gpu,),) = [[r.inputs.gpu for r in evidence.records if (r.label, r.workload) == (label, summary.workload)]]
        joules = option.point.joules_per_item
        assert gpu is not None
        assert joules is not None
        assert joules.value == gpu.joules_per_item
        (cost,) = option.costs
        assert cost.full.value == pytest.approx(3.99 / speed.value / 3600 * 1e6)
        assert cost.slo is None


def test_a_rate_search_gives_the_cost_at_the_rate_that_held() -> None:
    result = read_result(RESULTS / "2026-11-20-h200/cold-start/result.json")
    slo = [w for w in result.experiment.workloads if w.scenario == "slo"]
    price = Price(
        machine="m", match=PriceMatch(gpu="H200", gpu_count=4), price_per_hour=36.0, currency="USD", kind="on-demand",
        provider="P", source="https://example.org", date=date(2026, 11, 1),
    )  # fmt: skip
    (group,) = rank([from_result("r", result)], [price]).groups
    for option in group.options:
        label = "a" if option.name.startswith("native") else "b"
        points = {point.name: point for point in option.points}
        for workload in slo:
            rates = [
                r.rate_per_s
                for r in result.of(RatesFound).rates
                if (r.workload, r.label) == (workload.name, label) and r.rate_per_s
            ]
            rate = points[workload.name].items_per_second
            assert rate.value == pytest.approx(geometric_mean(rates))
            assert (rate.low, rate.high) == interval_of_mean([rates])
            latency = points[workload.name].latency_ms
            assert latency is not None
            assert latency.value <= (workload.latency_bound_ms or 0.0)
        assert option.slo is not None
        assert option.points[option.slo].kind == "slo"
        assert option.best == option.slo  # the only other workload sends one request at a time
        slo_rate, (cost,) = option.points[option.slo].items_per_second, option.costs
        assert cost.slo is not None
        assert cost.slo.value == pytest.approx(10_000 / slo_rate.value)
        assert cost.full.value == pytest.approx(10_000 / option.point.items_per_second.value)
        assert None not in (slo_rate.low, slo_rate.high, cost.slo.low, cost.slo.high)


def test_an_invalid_comparison_is_not_ranked() -> None:
    result = read_result(RESULTS / "2026-11-20-h200/grpc-fp32/result.json")
    ranking = rank([from_result("r", result)], [])
    assert ranking.groups == ()
    (left,) = ranking.left_out
    assert "it is INVALID: In batched(64), Arm A is INCONCLUSIVE (low_duty)" in left.reason


def test_an_invalid_scenario_is_not_ranked(resnet: Result) -> None:
    comparisons = tuple(
        msgspec.structs.replace(comparison, verdict="invalid")
        if comparison.workload == "concurrent(64)"
        else comparison
        for comparison in resnet.comparisons
    )
    read = from_result("r", msgspec.structs.replace(resnet, comparisons=comparisons))
    assert all("concurrent(64)" not in {p.name for p in candidate.points} for candidate in read.candidates)
    assert {omission.reason for omission in read.left_out} == {"a check that covers it failed"}


def test_a_server_on_another_machine_is_not_ranked(resnet: Result) -> None:
    a, b = resnet.arms
    away = msgspec.structs.replace(b, launched=False, url="http://gpu-box:8000")
    read = from_result("r", msgspec.structs.replace(resnet, arms=(a, away)))
    assert [candidate.name for candidate in read.candidates] == ["native torch fp16 (graph)"]
    assert "this server ran on another one" in read.left_out[0].reason
    here = msgspec.structs.replace(b, launched=False, url="http://127.0.0.1:8000")
    assert len(from_result("r", msgspec.structs.replace(resnet, arms=(a, here))).candidates) == 2


def test_arms_of_different_precisions_are_in_different_tables(resnet: Result) -> None:
    a, b = resnet.arms
    other = msgspec.structs.replace(b, in_effect={**b.in_effect, "precision": "fp32"})
    ranking = rank([from_result("r", msgspec.structs.replace(resnet, arms=(a, other)))], [])
    assert [group.work.precision for group in ranking.groups] == ["fp16", "fp32"]
    silent = {name: value for name, value in b.in_effect.items() if name != "precision"}
    unknown = msgspec.structs.replace(b, in_effect=silent)
    ranking = rank([from_result("r", msgspec.structs.replace(resnet, arms=(a, unknown)))], [])
    assert [group.work.precision for group in ranking.groups] == ["fp16", "not reported"]


def test_lengths_of_sequences_are_kept_apart() -> None:
    result = read_result(RESULTS / "2026-11-22-h200-models/bert-base-lengths/result.json")
    ranking = rank([from_result("r", result)], [])
    lengths = {str(length) for length in result.experiment.lengths}
    assert lengths <= {group.work.length for group in ranking.groups}
    for group in ranking.groups:
        if group.work.length in lengths:
            names = {point.name for option in group.options for point in option.points}
            assert all(f"length {group.work.length}" in name for name in names)


def test_every_published_result_can_be_read() -> None:
    paths = sorted(RESULTS.glob("**/result.json*"))
    assert len(paths) > 20
    for path in paths:
        result = read_result(path)
        read = from_result(str(path), result)
        assert read.candidates or read.left_out
        assert not result.valid or read.candidates or result.environment is None


def test_arms_of_one_server_are_told_apart_and_miss_nothing_that_was_not_planned_for_them() -> None:
    """A comparison of every server at its best, whose arms each have some of the loads."""
    table = read_result(RESULTS / "2026-11-29-h200/table/result.json")
    read = from_result("r", table)
    names = [candidate.name for candidate in read.candidates]
    assert len({*names}) == len(names) == len(table.arms)
    assert "Triton 2.70, python backend, torch fp16 (auto): Triton with engine torch and 4 instances" in names
    assert "native torch fp16 (graph)" in names
    assert read.left_out == ()
