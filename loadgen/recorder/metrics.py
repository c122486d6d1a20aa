"""A shadow's metrics for Prometheus while it runs, `abserve_shadow_…`."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from loadgen.recorder.shadow_run import ShadowRun


class ShadowMetrics(Collector):
    """The counts so far, the latencies of both arms, and the ratio with its interval after the last block."""

    def __init__(self, run: ShadowRun) -> None:
        self._run = run

    def collect(self) -> Iterable[Metric]:
        """All families; the ratio and its interval once they are known."""
        run, counts, record = self._run, self._run.counts, self._run.record
        for name, value, text in (
            ("requests", counts["requests"], "Requests to models, chosen or not."),
            ("chosen", counts["copied"] + counts["dropped"], "Requests to be copied."),
            ("dropped", counts["dropped"], "Of these, not copied: the candidate or the recorder was too slow."),
            ("failed", counts["failed"], "Copies without a whole answer."),
            ("pairs", record.pairs, "Requests that both servers answered."),
            ("compared", record.compared, "Pairs whose answers were compared."),
            ("different", record.wrong, "Pairs whose answers differ by more than rounding."),
        ):
            family = CounterMetricFamily(f"abserve_shadow_{name}", text)
            family.add_metric((), value)
            yield family
        for name, times, text in (
            ("latency", run.latencies, "From the last byte of a request to that of its good answer."),
            ("first_byte", run.first_bytes, "From the last byte of a request to the first of its good answer."),
        ):
            histogram = HistogramMetricFamily(f"abserve_shadow_{name}_seconds", text, labels=("arm",))
            for label, durations in times.items():
                histogram.add_metric((label,), durations.cumulative(), durations.total_s)
            yield histogram
        estimate = run.estimate
        low, high = estimate.ci95 or (None, None)
        for name, figure, text in (
            ("blocks", float(estimate.pairs), "Blocks of time that were compared."),
            ("ratio", estimate.ratio, "Latency of the candidate (b) over that of the primary (a)."),
            ("ratio_low", low, "Lower end of its 95 % interval, which stays valid after every block."),
            ("ratio_high", high, "Upper end of the interval."),
        ):
            gauge = GaugeMetricFamily(f"abserve_shadow_{name}", text)
            if figure is not None:
                gauge.add_metric((), figure)
            yield gauge
