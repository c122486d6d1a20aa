"""The load generator's own metrics for Prometheus, `abserve_load_…`: users, requests, failures, latency, send lag.

They show the locustfile's current test. In distributed runs the workers count and the master answers scrapes; a
worker's counts travel with Locust's own reports, every 3 s. Send lag is how much later than due a timer of the
generator's loop fires: a request due at that moment would have been sent equally late.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from time import perf_counter
from typing import Any

import gevent
from gevent.pywsgi import WSGIServer
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from loadgen.stats.durations import DurationCounts

LAG_EVERY_S = 0.05
REPORT_KEY = "abserve"
RUNNING_STATES = frozenset({"spawning", "running", "cleanup"})

logger = logging.getLogger("abserve")


class LoadMetrics(Collector):
    """The counts of one process, or on a master the sum of its workers', by the name of the request."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self.latency: defaultdict[str, DurationCounts] = defaultdict(DurationCounts)
        self.failures: Counter[str] = Counter()
        self.response_bytes: Counter[str] = Counter()
        self.lag = DurationCounts()

    def on_request(
        self, name: str, response_time: float | None, response_length: int | None, exception: object, **_: object
    ) -> None:
        """Locust's `request` event. Failures are only counted: their latency means nothing."""
        if exception is not None:
            self.failures[name] += 1
            return
        self.latency[name].add((response_time or 0.0) / 1000)
        self.response_bytes[name] += response_length or 0

    def take(self) -> dict[str, Any]:
        taken = {
            "latency": {name: counts.take() for name, counts in self.latency.items()},
            "failures": dict(self.failures),
            "response_bytes": dict(self.response_bytes),
            "lag": self.lag.take(),
        }
        self.failures.clear()
        self.response_bytes.clear()
        return taken

    def merge(self, taken: Mapping[str, Any]) -> None:
        for name, counts in taken["latency"].items():
            self.latency[name].merge(counts)
        self.failures.update(taken["failures"])
        self.response_bytes.update(taken["response_bytes"])
        self.lag.merge(taken["lag"])

    def collect(self) -> Iterable[Metric]:
        """All metric families, at each scrape; the workers' only on a master."""
        yield from self._state()
        latency = HistogramMetricFamily(
            "abserve_load_latency_seconds",
            "From when a request was due (in a closed loop: sent) to its last byte, good answers.",
            labels=("name",),
        )
        requests = CounterMetricFamily("abserve_load_requests", "Finished requests, good or failed.", labels=("name",))
        failures = CounterMetricFamily("abserve_load_failures", "Requests without a good answer.", labels=("name",))
        received = CounterMetricFamily("abserve_load_response_bytes", "Bytes of good answers.", labels=("name",))
        for name in sorted({*self.latency, *self.failures}):
            good = self.latency[name]
            failed = self.failures[name]
            latency.add_metric((name,), good.cumulative(), good.total_s)
            requests.add_metric((name,), good.counts.total() + failed)
            failures.add_metric((name,), failed)
            received.add_metric((name,), self.response_bytes[name])
        yield from (latency, requests, failures, received)
        lag = HistogramMetricFamily(
            "abserve_load_send_lag_seconds", "How much later than due a timer of the generator fires."
        )
        lag.add_metric((), self.lag.cumulative(), self.lag.total_s)
        yield lag

    def _state(self) -> Iterator[Metric]:
        runner = self._environment.runner
        yield GaugeMetricFamily("abserve_load_users", "Current users.", value=runner.user_count)
        running = GaugeMetricFamily("abserve_load_running", "1 while a test runs.", labels=("host", "scenario"))
        scenario = ", ".join(user_class.__name__ for user_class in self._environment.user_classes)
        running.add_metric((self._environment.host or "", scenario), float(runner.state in RUNNING_STATES))
        yield running
        clients = getattr(runner, "clients", None)
        cpu = GaugeMetricFamily("abserve_load_cpu_ratio", "Share of one core, by process.", labels=("process",))
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
    """Count in this process; answer scrapes at `port`, unless it is 0 or this is a worker, which reports to its master.
    Call it once the runner exists. Raises `OSError` when the port cannot be used."""
    metrics = LoadMetrics(environment)
    kind = type(environment.runner).__name__
    if kind == "MasterRunner":
        environment.events.worker_report.add_listener(
            lambda data, **_: metrics.merge(data[REPORT_KEY]) if REPORT_KEY in data else None
        )
    else:
        environment.events.request.add_listener(metrics.on_request)
        gevent.spawn(_watch_lag, metrics.lag)
    if kind == "WorkerRunner":
        environment.events.report_to_master.add_listener(lambda data, **_: data.update({REPORT_KEY: metrics.take()}))
    elif port:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(metrics)
        WSGIServer((host, port), make_wsgi_app(registry), log=None).start()
        logger.info(f"metrics at http://{host}:{port}/metrics")


def _watch_lag(lag: DurationCounts) -> None:
    while True:
        due = perf_counter() + LAG_EVERY_S
        gevent.sleep(LAG_EVERY_S)
        lag.add(max(0.0, perf_counter() - due))
