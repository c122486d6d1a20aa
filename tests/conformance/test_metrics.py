"""What conformance reads of a server's Prometheus metrics."""

from __future__ import annotations

from time import monotonic

import pytest

from loadgen.conformance.metrics import (
    MOST_BYTES,
    MOST_LINE_BYTES,
    counts_departures,
    growth,
    is_error_series,
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


def test_series_and_what_has_grown() -> None:
    before = parse_metrics(TEXT)
    after = parse_metrics(TEXT.replace('"m"} 0', '"m"} 1').replace("_total 2.0", "_total 7.0"))
    assert before is not None
    assert after is not None
    assert before['http_requests_total{route="a "b" {c}",status="404"}'] == 1, "a time is not a value"
    grown = growth(before, after)
    assert sorted(grown.values()) == [1, 5]
    assert [name for name in grown if is_error_series(name)] == ['nv_inference_request_failure_total{model="m"}']
    assert next(name for name in before if is_error_series(name)).endswith('status="404"}')
    assert [name for name in grown if counts_departures(name)] == ["client_disconnects_total"]


@pytest.mark.parametrize(
    "text",
    [
        "<html>",
        "a b",
        'a{b="x", ="y"} 1\n',
        "# TYPE a\n",
        "a 1\n" * (MOST_BYTES // 4 + 1),
        "a{" + 'b="",' * MOST_LINE_BYTES + "} 1",
        'a{b="' + '\\"' * 2**20 + '"} 1',
    ],
    ids=["html", "words", "no-name", "no-type", "large", "many-labels", "many-quotes"],
)
def test_what_is_no_exposition_cannot_be_read(text: str) -> None:
    started = monotonic()
    assert parse_metrics(text) is None
    assert monotonic() - started < 5
