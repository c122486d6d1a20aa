"""The server's counters as Prometheus metrics: seconds and items.

They are written from one snapshot a model at each scrape, so the hot path pays nothing for them, and a scrape, which
holds the event loop, little: all that does not change between two of them is kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate, chain

from prometheus_client.utils import floatToGoString

from servers.native.documents import parameters_in_effect
from servers.native.inference import InferenceService
from servers.native.statistics import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "abserve_native"

Labels = tuple[tuple[str, str], ...]


class Metrics:
    """`GET /metrics` of all services."""

    def __init__(self, services: Iterable[InferenceService]) -> None:
        self._services = tuple(services)

    def render(self) -> bytes:
        """The exposition text: each family once, with its samples of every model."""
        families: dict[str, list[str]] = {}
        for service in self._services:
            _add_service(families, service)
        return "".join(chain.from_iterable(families.values())).encode()


def _add_service(families: dict[str, list[str]], service: InferenceService) -> None:
    snapshot = service.statistics.snapshot()
    labels: Labels = (("model", service.signature.name), ("version", service.signature.version))

    def family(name: str, kind: str, help_text: str) -> list[str]:
        first = f"# HELP {PREFIX}_{name} {help_text}\n# TYPE {PREFIX}_{name} {kind}\n"
        return families.setdefault(name, [first])

    def sample(name: str, kind: str, help_text: str, value: float, *more: tuple[str, str]) -> None:
        family(name, kind, help_text).append(f"{_start(name, (*labels, *more))}{value}\n")

    def histogram(name: str, help_text: str, values: Histogram, unit: float) -> None:
        samples = family(name, "histogram", help_text)
        starts = _bucket_starts(name, labels, values.bounds, unit)
        samples += [f"{start}{count}\n" for start, count in zip(starts, accumulate(values.counts), strict=True)]
        samples.append(f"{_start(f'{name}_count', labels)}{values.count}\n")
        samples.append(f"{_start(f'{name}_sum', labels)}{values.total / unit}\n")

    sample("requests_success_total", "counter", "Requests answered.", snapshot.success["count"])
    sample("client_disconnects_total", "counter", "Requests whose client left before the answer.", snapshot.disconnects)
    help_text = "Items executed, a request of batch n counted n times."
    sample("items_total", "counter", help_text, snapshot.inference_count)
    sample("executions_total", "counter", "Batches executed.", snapshot.execution_count)
    for reason, count in snapshot.failures.items():
        sample("requests_failure_total", "counter", "Requests not answered.", count, ("reason", reason))
    for stage, times in snapshot.stages.items():
        help_text = "Time that answered requests spent in each stage."
        sample("stage_seconds_total", "counter", help_text, times["ns"] / 1e9, ("stage", stage))
    sample("pending_requests", "gauge", "Requests waiting in the queue.", service.pending)
    sample("ready", "gauge", "1 when inference requests are answered.", int(service.ready))
    histogram("request_duration_seconds", "From the request's head to its answer.", snapshot.request_duration, 1e9)
    histogram("queue_duration_seconds", "Waiting for the engine and for others to join.", snapshot.queue_duration, 1e9)
    histogram("compute_duration_seconds", "Execution of one batch, copies included.", snapshot.compute_duration, 1e9)
    histogram("executed_batch_size", "Items in one executed batch.", snapshot.batch_size, 1)
    sample("engine_info", "gauge", "The engine's settings in effect.", 1, *parameters_in_effect(service).items())


@lru_cache(maxsize=1024)
def _start(name: str, labels: Labels) -> str:
    """A sample's line up to its value."""
    text = ",".join(f'{label}="{_escaped(value)}"' for label, value in sorted(labels))
    return f"{PREFIX}_{name}{{{text}}} "


@lru_cache(maxsize=64)
def _bucket_starts(name: str, labels: Labels, bounds: tuple[int, ...], unit: float) -> tuple[str, ...]:
    """The same of a histogram's buckets."""
    upper = [floatToGoString(float(f"{bound / unit:.6g}")) for bound in bounds]  # type: ignore[no-untyped-call]
    return tuple(_start(f"{name}_bucket", (*labels, ("le", text))) for text in (*upper, "+Inf"))


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
