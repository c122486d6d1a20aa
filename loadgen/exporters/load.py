"""The load generator's own metrics for Prometheus, `abserve_load_…`: users, requests, failures, latency, send lag.

They show what a test of the locustfile is doing. In distributed runs the workers count and the master answers scrapes;
a worker's counts travel with Locust's own reports, every 3 s. Send lag is how much later than due a timer of the
generator's loop fires: so much later would a request have left that was due then.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from time import perf_counter
from typing import Any

import gevent
from gevent.pywsgi import WSGIServer
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from loadgen.exporters.counts import DurationCounts

LAG_EVERY_S = 0.05
REPORT_KEY = "abserve"
RUNNING_STATES = frozenset({"spawning", "running", "cleanup"})

logger = logging.getLogger("abserve")


class LoadCounts:
    """What one process has seen; on a master, the sum of its workers."""

    def __init__(self) -> None:
        self.latency: dict[str, DurationCounts] = {}
        self.failures: dict[str, int] = {}
        self.response_bytes: dict[str, int] = {}
        self.lag = DurationCounts()

    def on_request(
        self, name: str, response_time: float | None, response_length: int | None, exception: object, **_: object
    ) -> None:
        """Locust's `request` event. Failures have no latency that means anything and are only counted."""
        if exception is not None:
            self.failures[name] = self.failures.get(name, 0) + 1
            return
        if name not in self.latency:
            self.latency[name] = DurationCounts()
        self.latency[name].add((response_time or 0.0) / 1000)
        self.response_bytes[name] = self.response_bytes.get(name, 0) + (response_length or 0)

    def take(self) -> dict[str, Any]:
        """What was counted since the last `take`, as plain data for the master."""
        taken = {
            "latency": {name: counts.take() for name, counts in self.latency.items()},
            "failures": self.failures,
            "response_bytes": self.response_bytes,
            "lag": self.lag.take(),
        }
        self.failures, self.response_bytes = {}, {}
        return taken

    def merge(self, taken: Mapping[str, Any]) -> None:
        """Add a worker's."""
        for name, counts in taken["latency"].items():
            self.latency.setdefault(name, DurationCounts()).merge(counts)
        for name, count in taken["failures"].items():
            self.failures[name] = self.failures.get(name, 0) + count
        for name, count in taken["response_bytes"].items():
            self.response_bytes[name] = self.response_bytes.get(name, 0) + count
        self.lag.merge(taken["lag"])


class LoadCollector(Collector):
    """Families built fresh at each scrape."""

    def __init__(self, environment: Any, counts: LoadCounts) -> None:
        self._environment = environment
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        """All families; those of workers only on a master."""
        yield from self._state()
        counts = self._counts
        latency = HistogramMetricFamily(
            "abserve_load_latency_seconds", "From sending a request to its last byte, good answers.", labels=("name",)
        )
        requests = CounterMetricFamily("abserve_load_requests", "Requests finished, good or not.", labels=("name",))
        failures = CounterMetricFamily("abserve_load_failures", "Requests without a good answer.", labels=("name",))
        received = CounterMetricFamily("abserve_load_response_bytes", "Bytes of good answers.", labels=("name",))
        for name in sorted({*counts.latency, *counts.failures}):
            good = counts.latency.get(name, DurationCounts())
            failed = counts.failures.get(name, 0)
            latency.add_metric((name,), list(good.cumulated()), good.total_s)
            requests.add_metric((name,), sum(good.counts) + failed)
            failures.add_metric((name,), failed)
            received.add_metric((name,), counts.response_bytes.get(name, 0))
        yield from (latency, requests, failures, received)
        lag = HistogramMetricFamily(
            "abserve_load_send_lag_seconds", "How much later than due a timer of the generator fires."
        )
        lag.add_metric((), list(counts.lag.cumulated()), counts.lag.total_s)
        yield lag

    def _state(self) -> Iterator[Metric]:
        runner = self._environment.runner
        yield GaugeMetricFamily("abserve_load_users", "Users now.", value=runner.user_count)
        running = GaugeMetricFamily("abserve_load_running", "1 while a test runs.", labels=("host", "scenario"))
        scenario = ", ".join(user_class.__name__ for user_class in self._environment.user_classes)
        running.add_metric((self._environment.host or "", scenario), float(runner.state in RUNNING_STATES))
        yield running
        clients = getattr(runner, "clients", None)
        cpu = GaugeMetricFamily("abserve_load_cpu_ratio", "Of one core, by process.", labels=("process",))
        if clients is None:
            cpu.add_metric(("local",), runner.current_cpu_usage / 100)
        else:
            workers = GaugeMetricFamily("abserve_load_workers", "Workers by state.", labels=("state",))
            for state in ("ready", "spawning", "running", "missing"):
                workers.add_metric((state,), len(getattr(clients, state)))
            yield workers
            for client in clients.values():
                cpu.add_metric((client.id,), client.cpu_usage / 100)
        yield cpu


def export_load(environment: Any, port: int, host: str) -> None:
    """Count in this process; answer scrapes at `port` unless it is 0 or this is a worker, which reports to its master.

    Called once the runner exists. Raises `OSError` where the port cannot be had.
    """
    counts = LoadCounts()
    kind = type(environment.runner).__name__
    if kind == "MasterRunner":
        environment.events.worker_report.add_listener(lambda data, **_: _merge(counts, data))
    else:
        environment.events.request.add_listener(counts.on_request)
        gevent.spawn(_watch_lag, counts)
    if kind == "WorkerRunner":
        environment.events.report_to_master.add_listener(lambda data, **_: data.update({REPORT_KEY: counts.take()}))
        return
    if port:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(LoadCollector(environment, counts))
        server = WSGIServer((host, port), make_wsgi_app(registry), log=None)
        server.start()
        logger.info(f"metrics at http://{host}:{port}/metrics")


def _merge(counts: LoadCounts, data: Mapping[str, Any]) -> None:
    taken = data.get(REPORT_KEY)
    if taken is not None:
        counts.merge(taken)


def _watch_lag(counts: LoadCounts) -> None:
    while True:
        due = perf_counter() + LAG_EVERY_S
        gevent.sleep(LAG_EVERY_S)
        counts.lag.add(max(0.0, perf_counter() - due))
