"""Planted launches: overlaps, gaps, marks, and what is lost."""

from __future__ import annotations

from collections import Counter

import pytest

from servers.engines.interface import EngineError
from servers.measuring.profile import KernelLaunch, ProfileTotals, span_ns, split, summarised

MARK = "at::cuda::(anonymous namespace)::spin_kernel(long)"


def totals_of(*launches: tuple[str, int, int]) -> ProfileTotals:
    totals = ProfileTotals()
    totals.add([KernelLaunch(*launch) for launch in launches], 0)
    return totals


def test_gaps_are_no_ones_time() -> None:
    totals = totals_of(("gemm", 0, 100), ("gelu", 150, 200), ("gemm", 300, 400))
    assert (totals.counts, totals.busy_ns) == ({"gemm": 2, "gelu": 1}, {"gemm": 200.0, "gelu": 50.0})


def test_overlapping_time_is_divided_and_counted_once() -> None:
    busy_ns = totals_of(("a", 0, 100), ("b", 50, 150), ("c", 60, 80)).busy_ns
    assert sum(busy_ns.values()) == pytest.approx(150)  # the length of the union
    assert busy_ns["c"] == pytest.approx(20 / 3)
    assert busy_ns["a"] == pytest.approx(50 + 30 / 2 + 20 / 3)


def test_kernels_that_touch_or_take_no_time() -> None:
    totals = totals_of(("a", 0, 100), ("b", 100, 200), ("a", 150, 150))
    assert (totals.counts, totals.busy_ns) == ({"a": 2, "b": 1}, {"a": 100.0, "b": 100.0})


def test_the_span_reaches_to_the_last_end_of_all() -> None:
    assert span_ns([KernelLaunch("long", 10, 500), KernelLaunch("short", 20, 30)]) == 490


def test_executions_lie_between_marks() -> None:
    launches = [
        *(KernelLaunch(MARK, at, at + 2) for at in (10, 20, 50, 100)),
        KernelLaunch("before", 0, 5),
        KernelLaunch("gemm", 25, 30),
        KernelLaunch("gemm", 60, 70),
        KernelLaunch("gelu", 70, 80),
        KernelLaunch("after", 110, 120),
    ]
    names = [[launch.name for launch in group] for group in split(launches, 2)]
    assert names == [["gemm"], ["gemm", "gelu"]]


def test_a_lost_execution_and_an_empty_profile_are_no_profile() -> None:
    launches = [KernelLaunch(MARK, at, at + 2) for at in (10, 20, 50, 100)] + [KernelLaunch("gemm", 25, 30)]
    with pytest.raises(EngineError, match="1 of 2 executions"):
        split(launches, 2)
    with pytest.raises(EngineError, match="1 of 9 executions"):
        split(launches, 9)
    with pytest.raises(EngineError, match="reports no kernel"):
        split([], 2)


def test_the_record_adds_up() -> None:
    counts = Counter(gemm_a=40, gemm_b=20, strange=20)
    totals = ProfileTotals(counts, {"gemm_a": 60000.0, "gemm_b": 10000.0, "strange": 10000.0}, 100_000)
    record = summarised(totals, 8, measured_us=4.0, on_device=True)
    assert (record["span_us"], record["idle_us"], record["launches"]) == (5.0, 1.0, 4.0)
    assert {category["name"]: category["us"] for category in record["categories"] if category["us"]} == {
        "matrix products": 3.5,
        "other": 0.5,
        "idle between kernels": 1.0,
    }
    assert sum(category["share"] for category in record["categories"]) == pytest.approx(1)
    assert [(kernel["name"], kernel["count"], kernel["us"], kernel["share"]) for kernel in record["kernels"]] == [
        ("gemm_a", 2.0, 3.0, 0.6),
        ("gemm_b", 1.0, 0.5, 0.1),
        ("strange", 1.0, 0.5, 0.1),
    ]
