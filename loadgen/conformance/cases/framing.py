"""Cases 7 to 13: what a server meets before any inference: limits, compression, chunks, headers, slow clients."""

from __future__ import annotations

import gzip
import statistics
import zlib
from collections.abc import Iterator, Mapping
from time import perf_counter, sleep
from typing import Any

from loadgen.conformance.case import Case, Raw, Section, infers, probes
from loadgen.conformance.grpc_calls import infer_message
from loadgen.conformance.metrics import counts_departures, growth, is_error_series
from loadgen.conformance.model import HEADER, Body, InferenceRequest
from loadgen.conformance.records import MIB, Answer, Door, Fact, MemoryBound, NotApplicableError, Observation, expect
from loadgen.conformance.settings import SHORT_READS, SMALL_BODIES
from loadgen.conformance.subject import Subject
from loadgen.conformance.wire import request_head

BOMB_BYTES = 512 * MIB
MALFORMED_COUNT = 100
CHUNK_LIMIT = 65_536
MANY_CHUNKS, MANY_CHUNK_REQUESTS = 1_000_000, 100
WARM_UP_REQUESTS = 3
HEADER_BYTES, HEADER_COUNT = 8 * MIB, 20_000
EMPTY_LINES = 1000
SLOW_CLIENTS = 20
LATENCY_SAMPLES = 40
SLACK_SECONDS = 5.0
UNTOLD_SECONDS = 60.0
"""How long a server may wait for a slow client when nothing has told it."""
DEPARTURES = 5


def with_blanks(body: Body, blanks: int) -> tuple[dict[str, str], bytes, bytes]:
    """Headers and both parts of a body whose JSON gets so many blanks between them, before its last brace."""
    length = int(body.headers[HEADER])
    return {**body.headers, HEADER: str(length + blanks)}, body.content[: length - 1], body.content[length - 1 :]


@probes
def at_limit(subject: Subject, _: Door, extra: int, *, chunked: bool = False) -> Observation:
    """A valid request, its JSON filled up with blanks to the body limit and so many bytes."""
    if subject.max_body_bytes is None:
        raise NotApplicableError("the body limit is not known; give it with --max-body-bytes")
    body = subject.model.binary()
    missing = subject.max_body_bytes + extra - len(body.content)
    if missing < 0:
        raise NotApplicableError("one item is larger than the body limit")
    headers, first, last = with_blanks(body, missing)
    content = first + b" " * missing + last
    if not chunked:
        return Observation((subject.infer(Body(headers, content)),))
    head = _chunked_head(subject, headers)
    return Observation((subject.raw((head, b"%x\r\n" % len(content) + content + b"\r\n0\r\n\r\n")),))


def chunks(subject: Subject, count: int) -> Iterator[bytes]:
    """A valid request in `count` chunks, nearly all of them one blank of its JSON."""
    blanks = count - 2
    headers, first, last = with_blanks(subject.model.binary(), blanks)
    yield _chunked_head(subject, headers) + b"%x\r\n" % len(first) + first + b"\r\n"
    block = b"1\r\n \r\n" * 8192
    for _ in range(blanks // 8192):
        yield block
    yield b"1\r\n \r\n" * (blanks % 8192) + b"%x\r\n" % len(last) + last + b"\r\n0\r\n\r\n"


def _chunked_head(subject: Subject, headers: Mapping[str, str]) -> bytes:
    chunked = {**headers, "Transfer-Encoding": "chunked"}
    return request_head("POST", subject.model.path, subject.authority, chunked, None)


def _grpc_over_limit(subject: Subject, _: Door) -> Observation:
    """The limit holds for the decoded message, which a parameter fills up."""
    if subject.max_body_bytes is None:
        raise NotApplicableError("the body limit is not known; give it with --max-body-bytes")
    message = infer_message(subject.model.request())
    message.parameters["padding"].string_param = "x" * subject.max_body_bytes
    return Observation((subject.call().infer(message),))


def _gzipped(request: InferenceRequest) -> Body:
    body = request.body()
    return Body({**body.headers, "Content-Encoding": "gzip"}, gzip.compress(body.content, 1))


def gzip_of_blanks(size: int) -> bytes:
    """`size` blanks in one gzip stream, without ever holding them."""
    compressor = zlib.compressobj(1, zlib.DEFLATED, 31)
    block = b" " * MIB
    return b"".join([*(compressor.compress(block) for _ in range(size // MIB)), compressor.flush()])


def _bomb(subject: Subject, _: Door) -> Observation:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    return Observation((subject.infer(Body(headers, gzip_of_blanks(BOMB_BYTES)), deadline_s=60.0),))


def _malformed_gzip(subject: Subject, _: Door) -> Observation:
    whole = gzip.compress(subject.model.binary().content, 1)
    answers: list[Answer] = []
    for index in range(MALFORMED_COUNT):
        broken = bytearray(whole[: len(whole) - 1 - index * 37 % (len(whole) // 2)])
        broken[index % 20] ^= 0xA5
        headers = {"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"}
        answers.append(subject.infer(Body(headers, bytes(broken))))
    return Observation(tuple(answers))


def _many_chunks(subject: Subject, _: Door) -> Observation:
    return Observation((subject.raw(chunks(subject, CHUNK_LIMIT + 1)),))


def _warm_chunks(subject: Subject) -> None:
    """What a first request allocates for good is no growth."""
    for _ in range(WARM_UP_REQUESTS):
        subject.raw(chunks(subject, CHUNK_LIMIT + 1))


def _a_million_chunks(subject: Subject, _: Door) -> Observation:
    answers = []
    for _request in range(MANY_CHUNK_REQUESTS):
        answers.append(subject.raw(chunks(subject, MANY_CHUNKS)))
        if answers[-1].status == "refused" or (not answers[-1].came and subject.failure() is not None):
            break
    return Observation(tuple(answers))


@probes
def slowly(subject: Subject, _: Door, start: bytes) -> Observation:
    """After this, 20 clients send one byte per second, while others ask for health."""
    before = _latency_s(subject, LATENCY_SAMPLES)
    clients = [subject.connect() for _ in range(SLOW_CLIENTS)]
    data = Raw(start).written(subject)
    try:
        begun = perf_counter()
        for client in clients:
            client.send(data)
        limit = (subject.read_timeout_s or UNTOLD_SECONDS) + SLACK_SECONDS
        worst, waiting = 0.0, list(clients)
        while waiting and perf_counter() - begun < limit:
            second = perf_counter() + 1.0
            worst = max(worst, _latency_s(subject, 5))
            waiting = [client for client in waiting if client.send(b"x") and not client.closed_within(0.001)]
            sleep(max(0.0, second - perf_counter()))
    finally:
        for client in clients:
            client.close()
    closed = f"{SLOW_CLIENTS - len(waiting)} of {SLOW_CLIENTS} after {perf_counter() - begun:.0f} s"
    latency = f"{before * 1e3:.1f} ms alone, {worst * 1e3:.1f} ms meanwhile"
    return Observation(
        facts=(
            Fact("closed at the deadline", not waiting, closed),
            Fact("other clients' latency", worst < 3 * before + 0.1, latency),
        )
    )


def _latency_s(subject: Subject, count: int) -> float:
    """A high quantile of a few health requests, the largest of so few."""
    samples = []
    for _ in range(count):
        started = perf_counter()
        subject.http("GET", "/v2/health/live", deadline_s=5.0)
        samples.append(perf_counter() - started)
    return statistics.quantiles(samples, n=20)[-1]


def _leave(subject: Subject, _: Door) -> Observation:
    """Clients that vanish in the middle of their body are no failed requests."""
    statistics_before = subject.statistics()
    before = subject.metrics()
    request = subject.infer_bytes(subject.model.binary())
    for index in range(DEPARTURES):
        with subject.connect() as connection:
            connection.send(request[: len(request) * 2 // 3])
            sleep(0.05)
            connection.close(abruptly=index % 2 == 0)
    sleep(0.5)
    failed = subject.statistics()["fail"] - statistics_before["fail"]
    facts = [Fact("failures in the statistics", failed == 0, f"{failed} more")]
    after = subject.metrics()
    if before is None or after is None:
        return Observation(facts=(*facts, Fact("an own counter", None, "no metrics could be read")))
    grown = growth(before, after)
    errors = [series for series in grown if is_error_series(series)]
    counted = sum(value for series, value in grown.items() if counts_departures(series))
    facts.append(Fact("4xx, 5xx and failures in the metrics", not errors, ", ".join(errors) or "unchanged"))
    facts.append(Fact("an own counter", counted >= DEPARTURES, f"{counted:.0f} of {DEPARTURES} departures counted"))
    return Observation(facts=tuple(facts))


GET = b"GET /v2/health/live HTTP/1.1\r\nHost: {host}\r\n"
POST = b"POST {path} HTTP/1.1\r\nHost: {host}\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
JSON_TYPE = b"Content-Type: application/json\r\n"


def raw(*requests: bytes) -> tuple[Raw, ...]:
    """Each as the bytes of one connection."""
    return tuple(Raw(request) for request in requests)


BAD, BAD_OR_LARGE, BAD_HEADERS = expect("400"), expect("400", "413"), expect("431", "400")
TOO_LARGE, AT_ONCE = expect("413"), expect("413", note="at once")
LIBRARY_TOO_LARGE = expect(
    *("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT"), words_judged=False, note="RESOURCE_EXHAUSTED is the RPC library's own"
)
LIMITED = expect("400", "413", "415", note="the decompressed size is limited, or 415")
DEADLINE = expect(note="closed at a deadline, other clients unmoved")
COUNTED = expect(note="an own counter, no 4xx or 5xx counted")
CLAIM = POST + JSON_TYPE + b'Content-Length: 1099511627776\r\n\r\n{"inputs": ['
BOTH_LENGTHS = raw(
    POST + b"Content-Length: 2\r\n" + CHUNKED + b"\r\n2\r\n{}\r\n0\r\n\r\n",
    POST + CHUNKED + b"Content-Length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
)
BAD_LENGTHS = raw(
    *(POST + b"Content-Length: %s\r\n\r\n" % value for value in (b"abc", b"-5", b"1e3", b"%d" % 2**64)),
    POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{} ",
)
BAD_CHUNKS = raw(
    POST + CHUNKED + b"\r\nzz\r\n{}\r\n0\r\n\r\n",
    POST + CHUNKED + b"\r\n" + b"f" * 18 + b"\r\n{}",
    POST + CHUNKED + b"\r\n-2\r\n{}\r\n0\r\n\r\n",
)
BAD_STARTS = raw(
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    GET.replace(b"HTTP/1.1", b"HTTP/9.9") + b"\r\n",
    b"GET\r\nHost: {host}\r\n\r\n",
    b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nbad header line\r\n\r\n",
)
BARE_LF = raw(GET.replace(b"\r", b"") + b"\n", GET[:-2] + b"\n\n")
LONG_HEADER = raw(GET + b"X-Long: " + b"a" * HEADER_BYTES + b"\r\n\r\n")
MANY_HEADERS = raw(GET + b"".join(b"X-%d: a\r\n" % index for index in range(HEADER_COUNT)) + b"\r\n")
SLOW_HEADER, SLOW_BODY = slowly(POST + b"X-Slow: "), slowly(POST + JSON_TYPE + b"Content-Length: 1000000\r\n\r\n")
SMALL: dict[str, Any] = {"setting": SMALL_BODIES}
SLOW: dict[str, Any] = {"setting": SHORT_READS, "destructive": True}
BOMB_MEMORY = MemoryBound(retained_bytes=32 * MIB, peak_bytes=BOMB_BYTES // 2)

# fmt: off
SIZES = (
    Case("7a", "body exactly at the limit", at_limit(0), expect("200"), **SMALL),
    Case("7b", "body one byte over the limit", at_limit(1), TOO_LARGE, **SMALL),
    Case("7c", "chunked body one byte over the limit", at_limit(1, chunked=True), TOO_LARGE, **SMALL),
    Case("7d", "Content-Length of 1 TiB", Raw(CLAIM, 10.0), AT_ONCE),
    Case("7e", "message over the limit", _grpc_over_limit, LIBRARY_TOO_LARGE, Door.GRPC, **SMALL),
    Case("8a", "gzip body", infers(_gzipped), expect("200", "415")),
    Case("8b", f"gzip body that expands to {BOMB_BYTES // MIB} MiB", _bomb, LIMITED,
         memory=BOMB_MEMORY, destructive=True),
    Case("8c", f"{MALFORMED_COUNT} malformed gzip bodies", _malformed_gzip, expect("400", "415"),
         memory=MemoryBound(retained_bytes=32 * MIB), destructive=True),
    Case("9a", f"{CHUNK_LIMIT + 1:,} chunks", _many_chunks, BAD, destructive=True),
    Case("9b", f"{MANY_CHUNKS:,} chunks, {MANY_CHUNK_REQUESTS} requests", _a_million_chunks, BAD,
         warm_up=_warm_chunks, memory=MemoryBound(retained_bytes=MIB), destructive=True),
)

PARSING = (
    Case("10a", "Content-Length and Transfer-Encoding together", BOTH_LENGTHS, BAD),
    Case("10b", "Content-Length abc, −5, 1e3, 2^64, two that differ", BAD_LENGTHS, BAD_OR_LARGE),
    Case("10c", "chunk sizes that are none", BAD_CHUNKS, BAD_OR_LARGE),
    Case("10d", "no HTTP at all, unknown version, broken request and header lines", BAD_STARTS, expect("400", "505")),
    Case("10e", "a head whose lines, or last lines, end with LF alone", BARE_LF, expect("400", note="at once")),
    Case("10f", f"{EMPTY_LINES:,} empty lines before a request", raw(b"\r\n" * EMPTY_LINES + GET + b"\r\n"), BAD),
    Case("11a", f"one header of {HEADER_BYTES // MIB} MiB", LONG_HEADER, BAD_HEADERS, destructive=True),
    Case("11b", f"{HEADER_COUNT:,} headers", MANY_HEADERS, BAD_HEADERS, destructive=True),
    Case("12a", f"header at 1 B/s from {SLOW_CLIENTS} clients", SLOW_HEADER, DEADLINE, **SLOW),
    Case("12b", f"body at 1 B/s from {SLOW_CLIENTS} clients", SLOW_BODY, DEADLINE, **SLOW),
    Case("13", "client leaves mid-body", _leave, COUNTED, destructive=True),
)
# fmt: on

SECTIONS = (
    Section("Sizes", "A few bytes must not make a server hold many, whatever they claim or expand to.", SIZES),
    Section("HTTP parsing", "RFC 9112: ambiguous framing is refused; a slow client has a deadline.", PARSING),
)
