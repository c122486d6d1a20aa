"""A server's own statistics of a block: the growth of its counters."""

from __future__ import annotations

from loadgen.measure.arms import requests_seen, stage_totals
from loadgen.records.run import StageTotals


def statistics(requests: int, **extra: object) -> dict:
    def duration(each_ns: int) -> dict:
        return {"count": requests, "ns": requests * each_ns}

    stages = ("queue", 10), ("compute_input", 20), ("compute_infer", 30), ("compute_output", 40)
    return {
        "inference_count": requests * 4,
        "execution_count": requests // 2,
        "inference_stats": {"success": duration(100), "fail": {"count": 1, "ns": 5}}
        | {name: duration(ns) for name, ns in stages},
        "batch_stats": [
            {"batch_size": 1, "compute_infer": {"count": 3, "ns": 9}},
            {"batch_size": 8, "compute_infer": {"count": requests // 2, "ns": 9}},
        ],
        **extra,
    }


def differences(before: dict, after: dict) -> StageTotals:
    totals = stage_totals(before, after)
    assert totals is not None
    return totals


def test_a_block_is_the_difference_of_two_snapshots() -> None:
    totals = differences(statistics(10), statistics(30))
    assert (totals.requests, totals.items, totals.executions) == (20, 80, 10)
    assert (totals.queue_ns, totals.compute_input_ns) == (200, 400)
    assert (totals.compute_infer_ns, totals.compute_output_ns) == (600, 800)
    assert totals.batches == {8: 10}
    assert (totals.receive_ns, totals.decode_ns, totals.encode_ns) == (None, None, None)


def test_the_native_servers_own_stages_are_taken_where_they_are() -> None:
    def own_stages(n: int) -> dict:
        return {name: {"count": n, "ns": n * 7} for name in ("receive", "decode", "queue", "compute", "encode")}

    totals = differences(statistics(0, abserve_stages=own_stages(0)), statistics(5, abserve_stages=own_stages(5)))
    assert (totals.receive_ns, totals.decode_ns, totals.encode_ns) == (35, 35, 35)


def test_missing_counters_are_no_crash() -> None:
    assert differences({}, {"inference_count": 3}).items == 3
    assert differences({}, {"batch_stats": [None, "x", {"batch_size": 2, "compute_infer": {"count": 3}}]}).batches == {
        2: 3
    }
    assert requests_seen(statistics(10)) == 11


def test_what_a_server_does_not_report_is_unknown_and_not_zero() -> None:
    totals = differences({}, {"inference_count": 3})
    assert (totals.requests, totals.executions, totals.queue_ns, totals.compute_infer_ns) == (None, None, None, None)


def test_counters_that_ran_backwards_are_kept_as_such() -> None:
    assert differences(statistics(30), statistics(10)).queue_ns == -200


def test_executions_that_no_request_owns_are_steps_of_an_engine() -> None:
    """A step generates a token for each of many requests; only their time together says what the engine takes."""

    def generating(steps: int) -> dict:
        return {
            "execution_count": steps,
            "inference_stats": {"success": {"count": 2, "ns": 5}, "compute_infer": {"count": 0, "ns": 0}},
            "batch_stats": [
                {"batch_size": rows, "compute_infer": {"count": steps, "ns": 7 * steps}} for rows in (1, 2)
            ],
            "abserve_stages": {"receive": {"count": 2, "ns": 5}},
        }

    totals = differences(generating(10), generating(30))
    assert (totals.executions, totals.step_ns, totals.batches) == (20, 280, {1: 20, 2: 20})
    assert differences(statistics(10), statistics(30)).step_ns is None
