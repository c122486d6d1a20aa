"""A server's Prometheus metrics as plain numbers, and which of them have grown between two readings."""

from __future__ import annotations

import re

from prometheus_client.parser import text_string_to_metric_families

MOST_BYTES = 2**22
MOST_LINE_BYTES = 2**13
"""The parser takes time that grows with the square of a line."""

Samples = dict[str, float]
"""Series, such as `requests_total{status="200"}` → value."""

_ERROR_STATUS = re.compile(r'(?:status|code|http_status|status_code)="?[45]')
_FAILURES = re.compile(r"requests?_failure")
_LEFT = re.compile(r"disconnect|client_left|clients_left|abandon|aborted|client_gone", re.IGNORECASE)


def parse_metrics(text: str) -> Samples | None:
    """None for a text that is no Prometheus exposition, or too large for one."""
    if len(text) > MOST_BYTES or max(map(len, text.splitlines()), default=0) > MOST_LINE_BYTES:
        return None
    try:
        families = list(text_string_to_metric_families(text))
    except (ValueError, IndexError):  # the second for a label without a name
        return None
    return {_series(sample.name, sample.labels): sample.value for family in families for sample in family.samples}


def _series(name: str, labels: dict[str, str]) -> str:
    shown = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return f"{name}{{{shown}}}" if labels else name


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
