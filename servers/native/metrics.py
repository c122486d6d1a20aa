"""The server's counters as Prometheus metrics: seconds and items, on a registry of their own.

Families are built fresh from one snapshot at each scrape, so a scrape costs the hot path nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from servers.native.documents import parameters_in_effect
from servers.native.inference import InferenceService
from servers.native.statistics import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "abserve_native"
_LABELS = ("model", "version")


class ServiceCollector(Collector):
    """Reads one service's snapshot."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        """All families, from one snapshot."""
        service = self._service
        snapshot = service.statistics.snapshot()
        labels = (service.signature.name, service.signature.version)
        counters = (
            ("requests_success", "Requests answered.", snapshot.success["count"]),
            ("client_disconnects", "Requests whose client left before the answer.", snapshot.disconnects),
            ("items", "Items executed, a request of batch n counted n times.", snapshot.inference_count),
            ("executions", "Batches executed.", snapshot.execution_count),
        )
        for name, help_text, value in counters:
            yield _counter(name, help_text, labels, value)
        failures = CounterMetricFamily(
            f"{PREFIX}_requests_failure", "Requests not answered.", None, (*_LABELS, "reason")
        )
        for reason, count in snapshot.failures.items():
            failures.add_metric((*labels, reason), count)
        yield failures
        stages = CounterMetricFamily(
            f"{PREFIX}_stage_seconds", "Time that answered requests spent in each stage.", None, (*_LABELS, "stage")
        )
        for stage, times in snapshot.stages.items():
            stages.add_metric((*labels, stage), times["ns"] / 1e9)
        yield stages
        yield _gauge("pending_requests", "Requests waiting in the queue.", labels, service.pending)
        yield _gauge("ready", "1 when inference requests are answered.", labels, int(service.ready))
        histograms = (
            ("request_duration_seconds", "From the request's head to its answer.", snapshot.request_duration, 1e9),
            ("queue_duration_seconds", "Waiting for the engine and for others to join.", snapshot.queue_duration, 1e9),
            ("compute_duration_seconds", "Execution of one batch, copies included.", snapshot.compute_duration, 1e9),
            ("executed_batch_size", "Items in one executed batch.", snapshot.batch_size, 1),
        )
        for name, help_text, histogram, unit in histograms:
            yield _histogram(name, help_text, labels, histogram, unit)
        info = InfoMetricFamily(f"{PREFIX}_engine", "The engine's settings in effect.", None, _LABELS)
        info.add_metric(labels, parameters_in_effect(service))
        yield info


class Metrics:
    """`GET /metrics` of one service."""

    def __init__(self, service: InferenceService) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(ServiceCollector(service))

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self._registry)


def _counter(name: str, help_text: str, labels: tuple[str, str], value: float) -> CounterMetricFamily:
    family = CounterMetricFamily(f"{PREFIX}_{name}", help_text, None, _LABELS)
    family.add_metric(labels, value)
    return family


def _gauge(name: str, help_text: str, labels: tuple[str, str], value: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"{PREFIX}_{name}", help_text, None, _LABELS)
    family.add_metric(labels, value)
    return family


def _histogram(
    name: str, help_text: str, labels: tuple[str, str], histogram: Histogram, unit: float
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(f"{PREFIX}_{name}", help_text, None, None, _LABELS)
    family.add_metric(labels, list(_cumulated(histogram, unit)), histogram.total / unit)
    return family


def _cumulated(histogram: Histogram, unit: float) -> Iterator[tuple[str, float]]:
    total = 0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=False):
        total += count
        rounded = float(f"{bound / unit:.6g}")
        yield floatToGoString(rounded), total  # type: ignore[no-untyped-call]  # the client library has no types here
    yield "+Inf", total + histogram.counts[-1]
