"""The counters' arithmetic: requests, items and executions are different things."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any, cast

from prometheus_client.parser import text_string_to_metric_families

from servers.native.errors import FAILURE_REASONS, QueueFullError, failure_reason
from servers.native.inference import InferenceService
from servers.native.metrics import render
from servers.native.statistics import DURATION_BOUNDS_NS, Histogram, RequestTimes, Statistics


def test_each_request_is_charged_its_batch_and_the_batch_appears_once():
    statistics = Statistics(8)
    statistics.record_execution(5, [100, 300], 10, 1000, 20)
    statistics.record_execution(5, [50], 10, 2000, 20)
    model: Any = statistics.snapshot().as_model_stats("m", "1")
    assert (model["inference_count"], model["execution_count"]) == (10, 2)
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
    statistics.record_failure(failure_reason(QueueFullError("full")), start_ns)
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
    statistics.record_execution(1, [1], 1, 1, 1)
    assert before.inference_count == 0
    assert sum(before.batch_size.counts) == 0


def test_bounds_are_inclusive_and_neighbours_close():
    histogram = Histogram((10, 20))
    for value in (0, 10, 11, 20, 21):
        histogram.add(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.total == 62
    assert all(1 < b / a < 1.22 for a, b in pairwise(DURATION_BOUNDS_NS))
    assert DURATION_BOUNDS_NS[0] < 50_000
    assert DURATION_BOUNDS_NS[-1] > 30e9


class Service:
    """As much of a service as the metrics read."""

    def __init__(self) -> None:
        self.statistics = Statistics(8)
        self.description = None
        self.pending = 3
        self.ready = False

        class Signature:
            name, version = "m", "1"

        self.signature = Signature


def test_metrics_are_in_seconds_and_cumulative():
    service = Service()
    service.statistics.record_execution(2, [2_000_000_000], 0, 500_000_000, 0)
    text, samples = render([cast(InferenceService, service)]).decode(), {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[(sample.name, sample.labels.get("le") or sample.labels.get("stage"))] = sample.value
    assert samples[("abserve_native_queue_duration_seconds_sum", None)] == 2
    assert samples[("abserve_native_stage_seconds_total", "compute")] == 0.5
    assert samples[("abserve_native_executed_batch_size_bucket", "1.0")] == 0
    assert samples[("abserve_native_executed_batch_size_bucket", "2.0")] == 1
    assert samples[("abserve_native_executed_batch_size_bucket", "+Inf")] == 1
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
