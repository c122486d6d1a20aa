"""A server's Prometheus metrics: series, increases, and texts that cannot be parsed."""

from __future__ import annotations

from time import monotonic

import pytest

from loadgen.conformance.servers import (
    DISCONNECT_SERIES,
    ERROR_SERIES,
    MOST_METRICS_BYTES,
    MOST_METRICS_LINE,
    increases,
    parse_metrics,
)

TEXT = """# HELP http_requests_total Requests.
# TYPE http_requests_total counter
http_requests_total{route="/v2",status="200"} 3
http_requests_total{route="a \\"b\\" {c}",status="404"} 1 1395066363000
# TYPE nv_inference_request_failure counter
nv_inference_request_failure{model="m"} 0
client_disconnects_total 2.0
"""


def test_series_and_increases() -> None:
    before = parse_metrics(TEXT)
    after = parse_metrics(TEXT.replace('"m"} 0', '"m"} 1').replace("_total 2.0", "_total 7.0"))
    assert before is not None
    assert after is not None
    assert before['http_requests_total{route="a "b" {c}",status="404"}'] == 1, "a time is not a value"
    grown = increases(before, after)
    assert sorted(grown.values()) == [1, 5]
    assert [name for name in grown if ERROR_SERIES.search(name)] == ['nv_inference_request_failure_total{model="m"}']
    assert next(name for name in before if ERROR_SERIES.search(name)).endswith('status="404"}')
    assert [name for name in grown if DISCONNECT_SERIES.search(name)] == ["client_disconnects_total"]


@pytest.mark.parametrize(
    "text",
    [
        "<html>",
        "a b",
        'a{b="x", ="y"} 1\n',
        "# TYPE a\n",
        "a 1\n" * (MOST_METRICS_BYTES // 4 + 1),
        "a{" + 'b="",' * MOST_METRICS_LINE + "} 1",
        'a{b="' + '\\"' * 2**20 + '"} 1',
    ],
    ids=["html", "words", "no-name", "no-type", "large", "many-labels", "many-quotes"],
)
def test_other_texts_cannot_be_parsed(text: str) -> None:
    started = monotonic()
    assert parse_metrics(text) is None
    assert monotonic() - started < 5
