"""Prometheus text read into plain numbers, and what has grown between two readings."""

from __future__ import annotations

import re

Samples = dict[str, float]
"""Series (name and labels as they were printed) → value."""

_ERROR_STATUS = re.compile(r'(?:status|code|http_status|status_code)="?[45]')
_FAILURES = re.compile(r"requests?_failure")
_LEFT = re.compile(r"disconnect|client_left|clients_left|abandon|aborted|client_gone", re.IGNORECASE)


def parse_metrics(text: str) -> Samples:
    """Comments and lines that are no samples are left out."""
    samples = {}
    for line in text.splitlines():
        series, _, value = line.rpartition(" ")
        if not series or line.startswith("#"):
            continue
        try:
            samples[series] = float(value)
        except ValueError:
            continue
    return samples


def growth(before: Samples, after: Samples) -> Samples:
    """What is larger than it was."""
    return {
        series: value - before.get(series, 0.0) for series, value in after.items() if value > before.get(series, 0.0)
    }


def is_error_series(series: str) -> bool:
    """Whether it counts answers of 4xx or 5xx, or failed requests."""
    return bool(_ERROR_STATUS.search(series)) or bool(_FAILURES.search(series))


def counts_departures(series: str) -> bool:
    """Whether it counts clients that left."""
    return bool(_LEFT.search(series))
