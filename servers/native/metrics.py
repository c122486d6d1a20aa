"""The server's counters as Prometheus metrics, in seconds and items; made at each scrape, so requests pay nothing."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from prometheus_client import generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from servers.native.documents import parameters_in_effect
from servers.native.inference import InferenceService
from servers.native.statistics import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "abserve_native"


class Metrics(Collector):
    """`GET /metrics` of all models."""

    def __init__(self, services: Iterable[InferenceService]) -> None:
        self._services = tuple(services)

    def render(self) -> bytes:
        """The exposition text: each family once, with its samples of every model."""
        return generate_latest(self)

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        families: dict[str, Metric] = {}
        for service in self._services:
            _add_service(families, service)
        return families.values()


def _add_service(families: dict[str, Metric], service: InferenceService) -> None:
    counters = service.statistics.snapshot()
    labels = {"model": service.signature.name, "version": service.signature.version}

    def add(kind: str, name: str, help_text: str, value: float, **more: str) -> None:
        name = f"{PREFIX}_{name}"
        family = families.setdefault(name, Metric(name, help_text, kind))
        family.add_sample(f"{name}_total" if kind == "counter" else name, {**labels, **more}, value)

    def add_histogram(name: str, help_text: str, values: Histogram, unit: float) -> None:
        name = f"{PREFIX}_{name}"
        family = families.setdefault(name, HistogramMetricFamily(name, help_text, labels=tuple(labels)))
        bounds = [str(float(f"{bound / unit:.6g}")) for bound in values.bounds]
        buckets = list(zip([*bounds, "+Inf"], accumulate(values.counts), strict=True))
        assert isinstance(family, HistogramMetricFamily)
        family.add_metric(tuple(labels.values()), buckets, values.total / unit)

    add("counter", "requests_success", "Requests answered.", counters.success["count"])
    add("counter", "client_disconnects", "Requests whose client left before the answer.", counters.disconnects)
    add("counter", "items", "Items executed; a request of batch n counts n times.", counters.inference_count)
    add("counter", "executions", "Batches executed.", counters.compute_duration.count)
    for reason, count in counters.failures.items():
        add("counter", "requests_failure", "Requests not answered.", count, reason=reason)
    for stage, times in counters.stages.items():
        help_text = "Time that answered requests spent in each stage."
        add("counter", "stage_seconds", help_text, times["ns"] / 1e9, stage=stage)
    add("gauge", "pending_requests", "Requests waiting in the queue.", service.pending)
    add("gauge", "ready", "1 when inference requests are answered.", int(service.ready))
    add("gauge", "engine_info", "The engine's settings in effect.", 1, **parameters_in_effect(service))
    duration, queue, compute = counters.request_duration, counters.queue_duration, counters.compute_duration
    add_histogram("request_duration_seconds", "From the request's head to its answer.", duration, 1e9)
    add_histogram("queue_duration_seconds", "Waiting for the engine and for other requests to join.", queue, 1e9)
    add_histogram("compute_duration_seconds", "Execution of one batch, copies included.", compute, 1e9)
    add_histogram("executed_batch_size", "Items in one executed batch.", counters.batch_size, 1)
