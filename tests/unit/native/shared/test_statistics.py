"""The counters' arithmetic: requests, items and executions are different things."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any, cast

from prometheus_client.parser import text_string_to_metric_families

from servers.native.front.documents import render
from servers.native.front.inference import InferenceService
from servers.native.shared.errors import FAILURE_REASONS, RefusedError, failure_reason
from servers.native.shared.statistics import DURATION_BOUNDS_NS, RequestTimes, Statistics, row_width


def test_each_request_is_charged_its_batch_and_the_batch_appears_once():
    statistics = Statistics(8)
    statistics.record_execution(5, 8, [(100, 1), (300, 1)], 10, 1000, 20)
    statistics.record_execution(5, 8, [(50, 1)], 10, 2000, 20)
    model: Any = statistics.snapshot().as_model_stats("m", "1")
    assert (model["inference_count"], model["execution_count"]) == (10, 2)
    assert statistics.snapshot().executed_rows == 16  # with those that only fill a batch
    assert model["inference_stats"]["queue"] == {"count": 3, "ns": 450}
    assert model["inference_stats"]["compute_infer"] == {"count": 3, "ns": 4000}
    assert model["abserve_stages"]["compute"] == {"count": 3, "ns": 2 * 1030 + 2030}
    assert model["batch_stats"] == [
        {
            "batch_size": 5,
            "compute_input": {"count": 2, "ns": 20},
            "compute_infer": {"count": 2, "ns": 3000},
            "compute_output": {"count": 2, "ns": 40},
        }
    ]


def test_success_failure_and_disconnect_are_kept_apart():
    statistics = Statistics(8)
    start_ns = time.perf_counter_ns() - 1_000_000
    statistics.record_success(RequestTimes(start_ns, 1, 2, 3))
    statistics.record_failure(failure_reason(RefusedError("queue_full", "full")), RequestTimes(start_ns))
    statistics.record_disconnect()
    snapshot = statistics.snapshot()
    model: Any = snapshot.as_model_stats("m", "1")
    success, fail = model["inference_stats"]["success"], model["inference_stats"]["fail"]
    assert success["count"] == fail["count"] == snapshot.disconnects == 1
    assert success["ns"] >= 1_000_000
    assert snapshot.failures["queue_full"] == sum(snapshot.failures.values()) == 1
    assert set(snapshot.failures) == set(FAILURE_REASONS)
    assert [snapshot.stages[stage]["ns"] for stage in ("receive", "decode", "encode")] == [1, 2, 3]


def test_a_snapshot_does_not_move():
    statistics = Statistics(8)
    before = statistics.snapshot()
    statistics.record_execution(1, 1, [(1, 1)], 1, 1, 1)
    assert before.inference_count == 0
    assert sum(before.batch_size.counts) == 0


def test_bounds_are_inclusive_and_neighbours_close():
    statistics = Statistics(1)
    first, second = DURATION_BOUNDS_NS[:2]
    values = (0, first, first + 1, second, second + 1, DURATION_BOUNDS_NS[-1] + 1)
    statistics.record_execution(1, 1, [(value, 1) for value in values], 1, 1, 1)
    histogram = statistics.snapshot().queue_duration
    assert [*histogram.counts[:3], histogram.counts[-1]] == [2, 2, 1, 1]
    assert (histogram.count, histogram.total) == (6, sum(values))
    assert all(1 < b / a < 1.22 for a, b in pairwise(DURATION_BOUNDS_NS))
    assert DURATION_BOUNDS_NS[0] < 50_000
    assert DURATION_BOUNDS_NS[-1] > 30e9


def shared_rows(count: int) -> list[memoryview]:
    return [memoryview(bytearray(8 * row_width(8))).cast("q") for _ in range(count)]


def test_every_process_reads_the_sum_of_what_all_have_counted():
    rows = shared_rows(3)
    engine, *front_ends = [Statistics(8, rows, number) for number in range(3)]
    engine.record_execution(3, 4, [(10, 1), (20, 1)], 1, 2, 3)
    for count, front_end in enumerate(front_ends, start=1):
        for _ in range(count):
            front_end.record_success(RequestTimes(time.perf_counter_ns(), 5, 6, 7))
        front_end.record_failure("queue_full", RequestTimes(time.perf_counter_ns()))
        front_end.set_decoding(count)
    for process in (engine, *front_ends):
        counters = process.snapshot()
        assert (counters.inference_count, counters.executed_rows, counters.decoding) == (3, 4, 3)
        assert (counters.request_duration.count, counters.receive_ns) == (3, 15)
        assert counters.failures["queue_full"] == 2
        assert counters.batches[3][0] == 1
    assert [row[row_width(8) :].tolist() for row in rows] == [[], [], []]


def test_the_last_inference_is_the_latest_of_all_rows_and_not_their_sum(monkeypatch):
    rows = shared_rows(2)
    for process, seconds in enumerate((200, 100)):
        monkeypatch.setattr(time, "time_ns", lambda seconds=seconds: seconds * 10**9)
        Statistics(8, rows, process).record_execution(1, 1, [(1, 1)], 1, 1, 1)
    assert Statistics(8, rows).snapshot().last_inference_ms == 200_000


def test_a_successor_goes_on_in_the_row_of_its_predecessor_and_nothing_of_it_waits():
    rows = shared_rows(2)
    other, dead = Statistics(8, rows, 0), Statistics(8, rows, 1)
    other.set_decoding(1)
    dead.record_disconnect()
    dead.set_decoding(7)
    successor = Statistics(8, rows, 1)
    successor.set_decoding(0)
    successor.record_disconnect()
    assert (successor.snapshot().disconnects, successor.snapshot().decoding) == (2, 1)


class Service:
    """As much of a service as the metrics read."""

    generates = False

    def __init__(self) -> None:
        self.statistics = Statistics(8)
        self.description = None
        self.ready = False

        class Signature:
            name, version = "m", "1"

        self.signature = Signature


def test_metrics_are_in_seconds_and_cumulative():
    service = Service()
    service.statistics.set_queued(1)
    service.statistics.set_decoding(2)
    service.statistics.record_execution(2, 4, [(2_000_000_000, 1)], 0, 500_000_000, 0)
    text, samples = render([cast(InferenceService, service)]).decode(), {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[(sample.name, sample.labels.get("le") or sample.labels.get("stage"))] = sample.value
    assert samples[("abserve_native_queue_duration_seconds_sum", None)] == 2
    assert samples[("abserve_native_stage_seconds_total", "compute")] == 0.5
    assert samples[("abserve_native_executed_batch_size_bucket", "1.0")] == 0
    assert samples[("abserve_native_executed_batch_size_bucket", "2.0")] == 1
    assert samples[("abserve_native_executed_batch_size_bucket", "+Inf")] == 1
    assert samples[("abserve_native_executed_items_total", None)] == 4
    assert samples[("abserve_native_pending_requests", None)] == 3
    assert samples[("abserve_native_ready", None)] == 0


def test_a_family_is_written_once_for_all_models_and_labels_are_escaped():
    first, second = Service(), Service()
    name = 'a"b\\c\nd'
    second.signature = type("Signature", (), {"name": name, "version": "1"})  # type: ignore[assignment]
    text = render([first, second]).decode()  # type: ignore[list-item]
    assert text.count("# TYPE abserve_native_items_total counter") == 1
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert [sample.labels["model"] for sample in families["abserve_native_items"].samples] == ["m", name]
