"""The server's counters as Prometheus metrics: seconds and items, on a registry of their own.

Families are built fresh from one snapshot a model at each scrape, so a scrape costs the hot path nothing.
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
    """Reads the services' snapshots: one sample a model in each family."""

    def __init__(self, services: Iterable[InferenceService]) -> None:
        self._services = tuple(services)

    def collect(self) -> Iterable[Metric]:
        """All families, from one snapshot of each model."""
        families: dict[str, Metric] = {}
        for service in self._services:
            _add_service(families, service)
        return families.values()


def _add_service(families: dict[str, Metric], service: InferenceService) -> None:
    snapshot = service.statistics.snapshot()
    labels = (service.signature.name, service.signature.version)

    def counter(name: str, help_text: str, value: float, *more: tuple[str, str]) -> None:
        names = (*_LABELS, *(label for label, _ in more))
        family = families.setdefault(name, CounterMetricFamily(f"{PREFIX}_{name}", help_text, None, names))
        assert isinstance(family, CounterMetricFamily)
        family.add_metric((*labels, *(value for _, value in more)), value)

    def gauge(name: str, help_text: str, value: float) -> None:
        family = families.setdefault(name, GaugeMetricFamily(f"{PREFIX}_{name}", help_text, None, _LABELS))
        assert isinstance(family, GaugeMetricFamily)
        family.add_metric(labels, value)

    def histogram(name: str, help_text: str, values: Histogram, unit: float) -> None:
        family = families.setdefault(name, HistogramMetricFamily(f"{PREFIX}_{name}", help_text, None, None, _LABELS))
        assert isinstance(family, HistogramMetricFamily)
        family.add_metric(labels, list(_cumulated(values, unit)), values.total / unit)

    counter("requests_success", "Requests answered.", snapshot.success["count"])
    counter("client_disconnects", "Requests whose client left before the answer.", snapshot.disconnects)
    counter("items", "Items executed, a request of batch n counted n times.", snapshot.inference_count)
    counter("executions", "Batches executed.", snapshot.execution_count)
    for reason, count in snapshot.failures.items():
        counter("requests_failure", "Requests not answered.", count, ("reason", reason))
    for stage, times in snapshot.stages.items():
        help_text = "Time that answered requests spent in each stage."
        counter("stage_seconds", help_text, times["ns"] / 1e9, ("stage", stage))
    gauge("pending_requests", "Requests waiting in the queue.", service.pending)
    gauge("ready", "1 when inference requests are answered.", int(service.ready))
    histogram("request_duration_seconds", "From the request's head to its answer.", snapshot.request_duration, 1e9)
    histogram("queue_duration_seconds", "Waiting for the engine and for others to join.", snapshot.queue_duration, 1e9)
    histogram("compute_duration_seconds", "Execution of one batch, copies included.", snapshot.compute_duration, 1e9)
    histogram("executed_batch_size", "Items in one executed batch.", snapshot.batch_size, 1)
    info = families.setdefault(
        "engine", InfoMetricFamily(f"{PREFIX}_engine", "The engine's settings in effect.", None, _LABELS)
    )
    assert isinstance(info, InfoMetricFamily)
    info.add_metric(labels, parameters_in_effect(service))


class Metrics:
    """`GET /metrics` of all services."""

    def __init__(self, services: Iterable[InferenceService]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(ServiceCollector(services))

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self._registry)


def _cumulated(histogram: Histogram, unit: float) -> Iterator[tuple[str, float]]:
    total = 0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=False):
        total += count
        rounded = float(f"{bound / unit:.6g}")
        yield floatToGoString(rounded), total  # type: ignore[no-untyped-call]  # the client library has no types here
    yield "+Inf", total + histogram.counts[-1]
