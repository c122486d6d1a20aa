"""Cases 10 to 13: what an HTTP parser meets before any handler: framing, headers, slow and vanishing clients."""

from __future__ import annotations

import statistics
from time import perf_counter, sleep

from loadgen.conformance.case import Case
from loadgen.conformance.metrics import counts_departures, growth, is_error_series
from loadgen.conformance.model import json_body
from loadgen.conformance.probes import raw_requests
from loadgen.conformance.records import MIB, Expectation, Fact, Observation
from loadgen.conformance.settings import SHORT_READS
from loadgen.conformance.subject import Subject
from loadgen.conformance.wire import RawConnection, request_head

HEADER_BYTES, HEADER_COUNT = 8 * MIB, 20_000
SLOW_CLIENTS = 20
PROBES = 40
SLACK_SECONDS = 5.0
UNTOLD_SECONDS = 60.0
"""How long a server may wait for a slow client when nobody has told it."""
DEPARTURES = 5


def _head(subject: Subject, *lines: bytes) -> bytes:
    start = f"POST {subject.model.path} HTTP/1.1\r\nHost: {subject.authority}\r\n".encode()
    return start + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


def _both_lengths(subject: Subject) -> list[bytes]:
    body = json_body({}).content
    length = b"Content-Length: %d" % len(body)
    chunked = b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
    return [
        _head(subject, length, b"Transfer-Encoding: chunked") + chunked,
        _head(subject, b"Transfer-Encoding: chunked", length) + chunked,
    ]


def _bad_lengths(subject: Subject) -> list[bytes]:
    values = (b"abc", b"-5", b"1e3", b"18446744073709551616")
    bad = [_head(subject, b"Content-Length: " + value) for value in values]
    return [*bad, _head(subject, b"Content-Length: 2", b"Content-Length: 3") + b"{} "]


def _bad_chunks(subject: Subject) -> list[bytes]:
    head = _head(subject, b"Transfer-Encoding: chunked")
    return [head + b"zz\r\n{}\r\n0\r\n\r\n", head + b"ffffffffffffffffff\r\n{}", head + b"-2\r\n{}\r\n0\r\n\r\n"]


def _bad_starts(subject: Subject) -> list[bytes]:
    host = f"\r\nHost: {subject.authority}\r\n\r\n".encode()
    return [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET /v2/health/live HTTP/9.9" + host,
        b"GET" + host,
        b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nbad header line\r\n\r\n",
    ]


def _long_header(subject: Subject) -> list[bytes]:
    get = f"GET /v2/health/live HTTP/1.1\r\nHost: {subject.authority}\r\n".encode()
    return [get + b"X-Long: " + b"a" * HEADER_BYTES + b"\r\n\r\n"]


def _many_headers(subject: Subject) -> list[bytes]:
    get = f"GET /v2/health/live HTTP/1.1\r\nHost: {subject.authority}\r\n".encode()
    return [get + b"".join(b"X-%d: a\r\n" % index for index in range(HEADER_COUNT)) + b"\r\n"]


def _slow(subject: Subject, start: bytes) -> Observation:
    """So many clients send one byte a second; others ask for health meanwhile."""
    before = _latency_s(subject, PROBES)
    clients = [subject.connect() for _ in range(SLOW_CLIENTS)]
    try:
        begun = perf_counter()
        for client in clients:
            client.send(start)
        limit = (subject.read_timeout_s or UNTOLD_SECONDS) + SLACK_SECONDS
        during: list[float] = []
        open_clients = list(clients)
        while open_clients and perf_counter() - begun < limit:
            second = perf_counter() + 1.0
            during.append(_latency_s(subject, 5))
            open_clients = [client for client in open_clients if client.send(b"x") and not _gone(client)]
            sleep(max(0.0, second - perf_counter()))
    finally:
        for client in clients:
            client.close()
    seconds = perf_counter() - begun
    closed = SLOW_CLIENTS - len(open_clients)
    worst = max(during, default=0.0)
    return Observation(
        facts=(
            Fact(
                "closed at the deadline",
                not open_clients,
                f"{closed} of {SLOW_CLIENTS} after {seconds:.0f} s",
            ),
            Fact(
                "other clients' latency",
                worst < 3 * before + 0.1,
                f"{before * 1e3:.1f} ms alone, {worst * 1e3:.1f} ms meanwhile",
            ),
        )
    )


def _gone(client: RawConnection) -> bool:
    return client.closed_within(0.001)


def _latency_s(subject: Subject, count: int) -> float:
    """A high quantile of a few health requests, the largest of so few."""
    samples = []
    for _ in range(count):
        started = perf_counter()
        subject.http("GET", "/v2/health/live", deadline_s=5.0)
        samples.append(perf_counter() - started)
    return statistics.quantiles(samples, n=20)[-1]


def _slow_header(subject: Subject) -> Observation:
    return _slow(subject, f"POST {subject.model.path} HTTP/1.1\r\nHost: {subject.authority}\r\nX-Slow: ".encode())


def _slow_body(subject: Subject) -> Observation:
    headers = {"Content-Type": "application/json"}
    return _slow(subject, request_head("POST", subject.model.path, subject.authority, headers, 1_000_000))


def _leave(subject: Subject) -> Observation:
    """Clients that vanish in the middle of their body are no failed requests."""
    statistics_before = subject.statistics()
    metrics_before = subject.metrics()
    request = subject.infer_bytes(subject.model.binary())
    for index in range(DEPARTURES):
        with subject.connect() as connection:
            connection.send(request[: len(request) * 2 // 3])
            sleep(0.05)
            connection.close(abruptly=index % 2 == 0)
    sleep(0.5)
    failed = subject.statistics()["fail"] - statistics_before["fail"]
    facts = [Fact("failures in the statistics", failed == 0, f"{failed} more")]
    metrics_after = subject.metrics()
    if metrics_before is None or metrics_after is None:
        return Observation(facts=(*facts, Fact("an own counter", None, "no metrics could be read")))
    grown = growth(metrics_before, metrics_after)
    errors = [series for series in grown if is_error_series(series)]
    counted = sum(value for series, value in grown.items() if counts_departures(series))
    facts.append(Fact("4xx, 5xx and failures in the metrics", not errors, ", ".join(errors) or "unchanged"))
    facts.append(Fact("an own counter", counted >= DEPARTURES, f"{counted:.0f} of {DEPARTURES} departures counted"))
    return Observation(facts=tuple(facts))


_BAD_FRAMING = Expectation(statuses=("400",))
_HEADERS = Expectation(statuses=("431", "400"))

CASES = (
    Case(
        number="10a",
        title="Content-Length and Transfer-Encoding together",
        probe=raw_requests(_both_lengths),
        expected=_BAD_FRAMING,
    ),
    Case(
        number="10b",
        title="Content-Length abc, −5, 1e3, 2^64, two that differ",
        probe=raw_requests(_bad_lengths),
        expected=Expectation(statuses=("400", "413")),
    ),
    Case(
        number="10c",
        title="chunk sizes that are none",
        probe=raw_requests(_bad_chunks),
        expected=Expectation(statuses=("400", "413")),
    ),
    Case(
        number="10d",
        title="no HTTP at all, unknown version, broken request and header lines",
        probe=raw_requests(_bad_starts),
        expected=Expectation(statuses=("400", "505")),
    ),
    Case(
        number="11a",
        title=f"one header of {HEADER_BYTES // MIB} MiB",
        probe=raw_requests(_long_header),
        expected=_HEADERS,
        destructive=True,
    ),
    Case(
        number="11b",
        title=f"{HEADER_COUNT:,} headers",
        probe=raw_requests(_many_headers),
        expected=_HEADERS,
        destructive=True,
    ),
    Case(
        number="12a",
        title=f"header at 1 B/s from {SLOW_CLIENTS} clients",
        probe=_slow_header,
        expected=Expectation(note="closed at a deadline, other clients unmoved"),
        setting=SHORT_READS,
        destructive=True,
    ),
    Case(
        number="12b",
        title=f"body at 1 B/s from {SLOW_CLIENTS} clients",
        probe=_slow_body,
        expected=Expectation(note="closed at a deadline, other clients unmoved"),
        setting=SHORT_READS,
        destructive=True,
    ),
    Case(
        number="13",
        title="client leaves mid-body",
        probe=_leave,
        expected=Expectation(note="an own counter, no 4xx or 5xx counted"),
        destructive=True,
    ),
)
