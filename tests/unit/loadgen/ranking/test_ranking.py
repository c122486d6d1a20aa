"""Options are ranked only where they did the same work, and costs are what the definition says."""

from __future__ import annotations

import math
from datetime import date
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from loadgen.ranking.analyse import (
    RankInput,
    cost_per_million,
    from_matrix,
    join_machines,
    machine_of,
    rank,
)
from loadgen.ranking.prices import matches, prices_of
from loadgen.records.matrix import RefusedCombination
from loadgen.records.ranks import Price, PriceMatch, RankedGroup, RankedOption
from loadgen.stats.estimates import Estimate, pareto_front
from tests.synthetic_matrix import cell, configuration, environment, matrix

H200 = environment({"cpu_count": 16}, ["NVIDIA H200"])


def price(amount: float = 3.6, match: PriceMatch | None = None, **changes: Any) -> Price:
    usual: dict[str, Any] = {
        "machine": "m", "currency": "USD", "kind": "on-demand", "provider": "P", "source": "https://example.org",
        "date": date(2026, 11, 1),
    }  # fmt: skip
    return Price(price_per_hour=amount, match=match or PriceMatch(), **{**usual, **changes})


def read(name: str = "r", *args: Any, **changes: Any) -> RankInput:
    return from_matrix(name, matrix(*args, **changes))


def options(groups: tuple[RankedGroup, ...]) -> dict[str, RankedOption]:
    return {option.name: option for group in groups for option in group.options}


def test_the_highest_throughput_comes_first_at_its_best_batch() -> None:
    two = [configuration(), configuration("onnxruntime", mode="graph")]
    cells = [cell(0, 100, 1), cell(0, 300, 8), cell(0, 250, 16), cell(1, 200, 1), cell(1, 400, 8)]
    (group,) = rank([read("r", two, cells)], []).groups
    assert [(o.name, o.point.name, o.throughput_rank) for o in group.options] == [
        ("onnxruntime/graph CPU, 2 threads", "batch 8", 1),
        ("torch/eager CPU, 2 threads", "batch 8", 2),
    ]
    latency = group.options[0].point.latency_ms
    assert latency is not None
    assert latency.value == pytest.approx(20.0)
    assert latency.low == pytest.approx(20 / 1.05)
    assert [o.latency_rank for o in group.options] == [1, 2]
    assert [o.energy_rank for o in group.options] == [None, None]


@pytest.mark.parametrize(
    ("changes", "weights"),
    [
        ({"model": "torchvision:vit_b_16"}, "random weights (seed 0)"),
        ({"precision": "fp16"}, "random weights (seed 0)"),
        ({"precision": "tf32"}, "random weights (seed 0)"),
        ({}, "random weights (seed 1)"),
    ],
)
def test_different_work_is_never_in_one_table(changes: dict[str, Any], weights: str) -> None:
    first = read("a", [configuration()], [cell(0, 100)])
    second = read("b", [configuration(**changes)], [cell(0, 200)], weights=weights)
    ranking = rank([first, second], [])
    assert [len(group.options) for group in ranking.groups] == [1, 1]
    assert all(option.throughput_rank == 1 for group in ranking.groups for option in group.options)


def test_different_lengths_are_different_work() -> None:
    ranking = rank([read("a", [configuration()], [cell(0, 100, length=64), cell(0, 50, length=128)])], [])
    assert [(group.work.length, group.options[0].point.items_per_second.value) for group in ranking.groups] == [
        ("128", 50),
        ("64", 100),
    ]


def test_only_the_model_and_precision_asked_for_are_ranked() -> None:
    both = [configuration(), configuration(precision="bf16")]
    ranking = rank([read("a", both, [cell(0, 1), cell(1, 2)])], [], precision="bf16")
    assert [group.work.precision for group in ranking.groups] == ["bf16"]
    assert [omission.reason for omission in ranking.left_out] == ["--precision asks for bf16, and this is fp32"]
    assert rank([read("a", both, [cell(0, 1)])], [], model="x").groups == ()


def test_what_is_excluded_is_not_ranked_and_named() -> None:
    cells = [
        cell(0, 100, 1),
        cell(0, 900, 8, excluded="cosine 0.7 is below 0.999"),
        cell(0, 800, 16, fault="other answers"),
    ]
    refused = RefusedCombination(configuration=configuration("jax"), reason="jax is not installed")
    two = [configuration(), configuration("openvino")]
    ranking = rank([read("a", two, cells, refused=[refused], errors={1: ("openvino crashed",)})], [])
    ((option,),) = [group.options for group in ranking.groups]
    assert option.point.name == "batch 1"
    assert {omission.reason for omission in ranking.left_out} == {
        "cosine 0.7 is below 0.999", "other answers", "jax is not installed", "openvino crashed",
    }  # fmt: skip


def test_machines_are_told_apart_by_what_they_are() -> None:
    machines = [
        environment(),
        environment({"cpu_count": 8}),
        environment({"cpu_model": "AMD EPYC"}),
        environment({"architecture": "aarch64"}),
        environment(gpus=["NVIDIA H200"]),
        environment(gpus=["NVIDIA H200"] * 2),
        environment(gpus=["NVIDIA L4"]),
    ]
    joined = join_machines([RankInput(f"r{n}", machine, (), ()) for n, machine in enumerate(machines)])
    assert len({machine.id for machine in joined}) == len({machine.name for machine in joined}) == len(machines)
    assert [machine.name for machine in joined][:3] == ["4 cores (1)", "8 cores", "4 cores (2)"]
    assert joined[5].name == "2 × H200, 4 cores"


def test_two_results_of_one_machine_join_and_differences_are_named() -> None:
    again = environment({"cpu_count": 16, "kernel": "6.2"}, ["NVIDIA H200"], uuid="GPU-9")
    (joined,) = join_machines([RankInput("a", H200, (), ()), RankInput("b", again, (), ())])
    assert joined.results == ("a", "b")
    assert joined.notes == (
        "the results have different kernels: 6.1, 6.2",
        "the results come from 2 machines of this kind, told apart by their GPUs",
    )
    (same,) = join_machines([RankInput("a", H200, (), ()), RankInput("b", H200, (), ())])
    assert same.notes == ()


def test_cost_per_million_items() -> None:
    cost = cost_per_million(3.6, Estimate(value=1000.0, low=500.0, high=2000.0))
    assert (cost.value, cost.low, cost.high) == pytest.approx((1.0, 0.5, 2.0))
    assert cost_per_million(3.6, Estimate(value=1000.0)).low is None
    assert cost_per_million(3.6, Estimate(value=10.0, low=-1.0, high=20.0)).high is None


@given(st.floats(1e-3, 1e4), st.floats(1e-2, 1e7), st.floats(0.0, 0.9))
def test_the_interval_of_a_cost_holds_its_value(amount: float, rate: float, spread: float) -> None:
    cost = cost_per_million(amount, Estimate(value=rate, low=rate * (1 - spread), high=rate * (1 + spread)))
    assert cost.low is not None
    assert cost.high is not None
    assert cost.low <= cost.value <= cost.high
    assert math.isclose(cost.value * rate * 3600 / 1e6, amount, rel_tol=1e-9)


POINTS = st.lists(st.tuples(st.integers(0, 8).map(float), st.integers(0, 8).map(float)), max_size=30)


@given(POINTS)
def test_the_front_is_what_nothing_beats(points: list[tuple[float, float]]) -> None:
    def beaten(point: tuple[float, float]) -> bool:
        return any(o[0] <= point[0] and o[1] <= point[1] and o != point for o in points)

    assert pareto_front(points) == {place for place, point in enumerate(points) if not beaten(point)}


def test_costs_of_two_machines_and_the_front() -> None:
    gpu = configuration(device="cuda:0", threads=None, mode="graph")
    reads = [
        read("cpu", [configuration()], [cell(0, 50, 1), cell(0, 100, 8)]),
        read("gpu", [gpu], [cell(0, 1000, 1), cell(0, 20_000, 32)], machine=H200),
    ]
    prices = [price(0.36), price(7.2, PriceMatch(gpu="h200", gpu_count=1)), price(9.0, PriceMatch(gpu="H200"))]
    ranking = rank(reads, prices)
    by_name = options(ranking.groups)
    cpu, gpu_option = by_name["torch/eager CPU, 2 threads"], by_name["torch/graph"]
    assert (cpu.costs[0].full.value, gpu_option.costs[0].full.value) == pytest.approx((1.0, 0.1))
    assert gpu_option.costs[0].price.price_per_hour == 7.2
    assert [cpu.costs[0].rank, gpu_option.costs[0].rank] == [2, 1]
    assert gpu_option.costs[0].full.low == pytest.approx(0.1 / 1.05)
    # batch 1 of the GPU has the lowest latency, batch 32 costs least; both of the CPU are beaten by the first.
    assert (gpu_option.costs[0].front, cpu.costs[0].front) == ((0, 1), ())


def test_currencies_are_never_mixed() -> None:
    reads = [
        read("cpu", [configuration()], [cell(0, 100)]),
        read("gpu", [configuration(device="cuda:0", threads=None)], [cell(0, 1000)], machine=H200),
    ]
    ranking = rank(reads, [price(1.0, currency="EUR"), price(900.0, PriceMatch(gpu="H200"))])
    costs = [cost for option in options(ranking.groups).values() for cost in option.costs]
    assert [(cost.price.currency, cost.rank) for cost in costs] == [("USD", 1), ("EUR", 1)]
    assert all(cost.front == (0,) for cost in costs)


def test_a_price_in_two_currencies_gives_two_costs() -> None:
    ranking = rank([read("cpu", [configuration()], [cell(0, 100)])], [price(1.0), price(2.0, currency="EUR")])
    (option,) = options(ranking.groups).values()
    assert [(cost.price.currency, cost.price.price_per_hour) for cost in option.costs] == [("EUR", 2.0), ("USD", 1.0)]


@pytest.mark.parametrize(("kind", "amount"), [("on-demand", 3.0), ("spot", 1.0), ("reserved", 2.0)])
def test_the_kind_of_price_is_the_one_asked_for(kind: Any, amount: float) -> None:
    prices = [price(3.0), price(1.0, kind="spot"), price(2.0, kind="reserved")]
    ranking = rank([read("cpu", [configuration()], [cell(0, 100)])], prices, kind)
    ((cost,),) = [option.costs for option in options(ranking.groups).values()]
    assert cost.price.price_per_hour == amount
    assert len(ranking.machines[0].prices) == 3


def test_a_machine_without_a_price_has_no_cost() -> None:
    ranking = rank([read("cpu", [configuration()], [cell(0, 100)])], [price(1.0, PriceMatch(gpu="H200"))])
    ((option,),) = [group.options for group in ranking.groups]
    assert option.costs == ()


@pytest.mark.parametrize(
    ("match", "gpus", "outcome"),
    [
        (PriceMatch(), [], True),
        (PriceMatch(), ["NVIDIA L4"], False),
        (PriceMatch(gpu="l4"), ["NVIDIA L4"], True),
        (PriceMatch(gpu="L4"), [], False),
        (PriceMatch(gpu="L4", gpu_count=1), ["NVIDIA L4"] * 2, False),
        (PriceMatch(gpu="L4", gpu_count=2), ["NVIDIA L4"] * 2, True),
        (PriceMatch(gpu="L4"), ["NVIDIA L4", "NVIDIA H200"], False),
        (PriceMatch(cpu="xeon"), [], True),
        (PriceMatch(cpu="EPYC"), [], False),
        (PriceMatch(cpu_count_min=4, cpu_count_max=4), [], True),
        (PriceMatch(cpu_count_min=5), [], False),
        (PriceMatch(cpu_count_max=3), [], False),
    ],
)
def test_a_price_matches_the_machine(match: PriceMatch, gpus: list[str], outcome: bool) -> None:
    machine = machine_of(environment(gpus=gpus))
    assert matches(price(match=match), machine) is outcome
    assert bool(prices_of(machine, [price(match=match)])) is outcome


def test_a_result_that_knows_nothing_of_its_machine_matches_no_count() -> None:
    machine = machine_of(environment({"cpu_count": None, "cpu_model": None}))
    assert machine.name == "unknown CPU"
    assert not matches(price(match=PriceMatch(cpu_count_max=8)), machine)
    assert not matches(price(match=PriceMatch(cpu="Xeon")), machine)


def test_the_best_point_is_the_one_with_the_highest_throughput_whatever_its_kind() -> None:
    (candidate,) = read("r", [configuration()], [cell(0, 100)]).candidates
    for kind in ("closed", "open", "slo"):
        faster = replace(candidate.points[0], name="x", kind=kind, items_per_second=Estimate(value=500.0))
        given = RankInput("r", environment(), (replace(candidate, points=(*candidate.points, faster)),), ())
        ((option,),) = [group.options for group in rank([given], []).groups]
        assert option.point.name == "x"
        assert (option.slo is not None) == (kind == "slo")


def test_an_option_that_could_only_be_timed_with_copies_says_so() -> None:
    gpu = [configuration(device="cuda:0", threads=None), configuration("onnxruntime", mode="session", device="cuda:0")]
    copied = cell(1, 100)
    cells = [cell(0, 200), replace(copied, call_ns=copied.latency_ns)]
    option = options(rank([read("r", gpu, cells, H200)], []).groups)
    assert [name.endswith("(with copies)") for name in option] == [False, True]


def test_a_matrix_that_did_not_finish_says_so_and_payloads_are_kept_apart() -> None:
    whole = matrix([configuration()], [cell(0, 100)])
    bytes_ = replace(whole, plan=replace(whole.plan, settings={**whole.plan.settings, "payload": "uint8"}), state=None)
    ranking = rank([from_matrix("a", whole), from_matrix("b", bytes_)], [])
    assert sorted(str(group.work.payload) for group in ranking.groups) == ["None", "uint8"]
    assert [omission.result for omission in ranking.left_out if "did not finish" in omission.reason] == ["b"]
