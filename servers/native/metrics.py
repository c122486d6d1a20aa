"""The server's counters as Prometheus metrics, in seconds and items.

Written here and not by prometheus_client: that takes 2 ms per scrape, and clients that scrape without reading the
answers held the event loop for seconds. The text before a value never changes, so it is kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate, chain

from servers.native.documents import parameters_in_effect
from servers.native.inference import InferenceService
from servers.native.statistics import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "abserve_native"

Labels = tuple[tuple[str, str], ...]


def render(services: Iterable[InferenceService]) -> bytes:
    """The exposition text: each family once, with its samples of every model."""
    families: dict[str, list[str]] = {}
    for service in services:
        _add_service(families, service)
    return "".join(chain.from_iterable(families.values())).encode()


def _add_service(families: dict[str, list[str]], service: InferenceService) -> None:
    counters = service.statistics.snapshot()
    labels: Labels = (("model", service.signature.name), ("version", service.signature.version))

    def family(kind: str, name: str, help_text: str) -> list[str]:
        first = f"# HELP {PREFIX}_{name} {help_text}\n# TYPE {PREFIX}_{name} {kind}\n"
        return families.setdefault(name, [first])

    def add(kind: str, name: str, help_text: str, value: float, **more: str) -> None:
        family(kind, name, help_text).append(f"{_start(name, (*labels, *more.items()))}{value}\n")

    def add_histogram(name: str, help_text: str, values: Histogram, unit: float) -> None:
        lines = family("histogram", name, help_text)
        starts = _bucket_starts(name, labels, values.bounds, unit)
        lines += [f"{start}{count}\n" for start, count in zip(starts, accumulate(values.counts), strict=True)]
        lines.append(f"{_start(f'{name}_count', labels)}{values.count}\n")
        lines.append(f"{_start(f'{name}_sum', labels)}{values.total / unit}\n")

    add("counter", "requests_success_total", "Requests answered.", counters.request_duration.count)
    add("counter", "client_disconnects_total", "Requests whose client left before the answer.", counters.disconnects)
    add("counter", "items_total", "Items executed; a request of batch n counts n times.", counters.inference_count)
    help_text = "Items executed, with those that only fill a batch."
    add("counter", "executed_items_total", help_text, counters.executed_rows)
    add("counter", "executions_total", "Batches executed.", counters.compute_duration.count)
    for reason, count in counters.failures.items():
        add("counter", "requests_failure_total", "Requests not answered.", count, reason=reason)
    for stage, times in counters.stages.items():
        help_text = "Time that answered requests spent in each stage."
        add("counter", "stage_seconds_total", help_text, times["ns"] / 1e9, stage=stage)
    add(
        "gauge",
        "pending_requests",
        "Requests waiting for the engine or for their images.",
        counters.decoding + counters.queued,
    )
    add("gauge", "ready", "1 when inference requests are answered.", int(service.ready))
    parameters = parameters_in_effect(service)
    info = {"reference" if key == "model" else key: value for key, value in parameters.items()}
    add("gauge", "engine_info", "The engine's settings in effect.", 1, **info)
    duration, queue, compute = counters.request_duration, counters.queue_duration, counters.compute_duration
    add_histogram("request_duration_seconds", "From the request's head to its answer.", duration, 1e9)
    add_histogram("queue_duration_seconds", "Waiting for the engine and for other requests to join.", queue, 1e9)
    add_histogram("compute_duration_seconds", "Execution of one batch, copies included.", compute, 1e9)
    add_histogram("executed_batch_size", "Items in one executed batch.", counters.batch_size, 1)


@lru_cache(maxsize=1024)
def _start(name: str, labels: Labels) -> str:
    """A sample's line up to its value."""
    escaped = [(key, value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")) for key, value in labels]
    text = ",".join(f'{key}="{value}"' for key, value in sorted(escaped))
    return f"{PREFIX}_{name}{{{text}}} "


@lru_cache(maxsize=64)
def _bucket_starts(name: str, labels: Labels, bounds: tuple[int, ...], unit: float) -> tuple[str, ...]:
    """The lines of a histogram's buckets up to their values."""
    upper = [str(float(f"{bound / unit:.6g}")) for bound in bounds]
    return tuple(_start(f"{name}_bucket", (*labels, ("le", text))) for text in (*upper, "+Inf"))
