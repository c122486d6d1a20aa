"""Cases 7 to 13, 15, 17, 24 and 34: limits, compression, chunks, headers, slow clients, routes, names and ids."""

from __future__ import annotations

import base64
import gzip
import os
import statistics
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any
from urllib.parse import quote

from loadgen.base.documents import user_path
from loadgen.conformance.case import Case, Condition, Send, Theme, changes, filled_in, grpc, http, infers, raw
from loadgen.conformance.cases.tensors import response_json
from loadgen.conformance.model import HEADER, Body, InferenceRequest
from loadgen.conformance.records import MIB, Fact, NotApplicableError, Protocol, Response, Seen
from loadgen.conformance.servers import (
    DISCONNECT_SERIES,
    ERROR_SERIES,
    SHORT_READS,
    SMALL_BODIES,
    WITH_MODEL_CONTROL,
    Subject,
    increases,
)
from loadgen.conformance.wire import infer_message, messages, request_head

BOMB_MIB = 512
MALFORMED_COUNT = 100
CHUNK_LIMIT = 65_536
MANY_CHUNKS, MANY_CHUNK_REQUESTS = 1_000_000, 100
HEADER_BYTES, HEADER_COUNT = 8 * MIB, 20_000
EMPTY_LINES = 1000
SLOW_CLIENTS = 20
LATENCY_SAMPLES = 40
SLACK_SECONDS = 5.0
UNKNOWN_TIMEOUT_SECONDS = 60.0
"""How long a server may wait for a slow client if its read timeout is not known."""
DISCONNECTS = 5
GRPC_SLACK_BYTES = 2**20
"""What a server may add to its body limit for the fields of a message."""


def _padded(body: Body, blanks: int) -> tuple[dict[str, str], bytes, bytes]:
    """The headers and both parts of a body whose JSON gets this many blanks between them, before its last brace."""
    length = int(body.headers[HEADER])
    return {**body.headers, HEADER: str(length + blanks)}, body.content[: length - 1], body.content[length - 1 :]


def _known_limit(subject: Subject) -> int:
    if subject.max_body_bytes is None:
        raise NotApplicableError("the body limit is not known; give it with --max-body-bytes")
    return subject.max_body_bytes


def at_limit(subject: Subject, _: Protocol, extra: int, *, chunked: bool = False) -> Response:
    """A valid request whose JSON is padded with blanks to the body limit and `extra` bytes."""
    body = subject.model.binary()
    missing = _known_limit(subject) + extra - len(body.content)
    if missing < 0:
        raise NotApplicableError("one item is larger than the body limit")
    headers, first, last = _padded(body, missing)
    content = first + b" " * missing + last
    if not chunked:
        return subject.infer(Body(headers, content))
    return subject.raw((_chunked_head(subject, headers), b"%x\r\n" % len(content) + content + b"\r\n0\r\n\r\n"))


def chunks(subject: Subject, count: int) -> Iterator[bytes]:
    """A valid request in `count` chunks, nearly all of which hold one blank of its JSON."""
    blanks = count - 2
    headers, first, last = _padded(subject.model.binary(), blanks)
    yield _chunked_head(subject, headers) + b"%x\r\n" % len(first) + first + b"\r\n"
    block = b"1\r\n \r\n" * 8192
    for _ in range(blanks // 8192):
        yield block
    yield b"1\r\n \r\n" * (blanks % 8192) + b"%x\r\n" % len(last) + last + b"\r\n0\r\n\r\n"


def _chunked_head(subject: Subject, headers: dict[str, str]) -> bytes:
    chunked = {**headers, "Transfer-Encoding": "chunked"}
    return request_head("POST", subject.model.path, subject.authority, chunked, None)


def _grpc_over_limit(subject: Subject, _: Protocol) -> Response:
    """The limit applies to the decoded message, which a parameter fills up."""
    message = infer_message(subject.model.request())
    message.parameters["padding"].string_param = "x" * (_known_limit(subject) + GRPC_SLACK_BYTES)
    return subject.grpc_client().call("ModelInfer", message)


def _gzipped(request: InferenceRequest) -> Body:
    body = request.body()
    return Body({**body.headers, "Content-Encoding": "gzip"}, gzip.compress(body.content, 1))


def gzip_of_blanks(mib: int) -> bytes:
    """This many MiB of blanks as one gzip stream, compressed piece by piece."""
    compressor = zlib.compressobj(1, zlib.DEFLATED, 31)
    block = b" " * MIB
    return b"".join([*(compressor.compress(block) for _ in range(mib)), compressor.flush()])


def _malformed_gzip(subject: Subject, _: Protocol) -> Seen:
    whole = gzip.compress(subject.model.binary().content, 1)
    for index in range(MALFORMED_COUNT):
        broken = bytearray(whole[: len(whole) - 1 - index * 37 % (len(whole) // 2)])
        broken[index % 20] ^= 0xA5
        headers = {"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"}
        yield subject.infer(Body(headers, bytes(broken)))


def in_chunks(subject: Subject, _: Protocol, count: int, requests: int) -> Seen:
    """Requests in this many chunks each, until the server is gone."""
    for _request in range(requests):
        response = subject.raw(chunks(subject, count))
        yield response
        if response.status == "refused" or (not response.received and subject.failure() is not None):
            break


def slowly(subject: Subject, _: Protocol, start: bytes) -> Seen:
    """After `start`, 20 clients send one byte per second, while others request health/live."""
    before = _latency_s(subject, LATENCY_SAMPLES)
    clients = [subject.connect() for _ in range(SLOW_CLIENTS)]
    try:
        begun = perf_counter()
        for client in clients:
            client.send(filled_in(start, subject))
        limit = (subject.read_timeout_s or UNKNOWN_TIMEOUT_SECONDS) + SLACK_SECONDS
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
    latency = f"{before * 1e3:.1f} ms without slow clients, {worst * 1e3:.1f} ms with them"
    yield Fact("slow clients closed at the read timeout", not waiting, closed)
    yield Fact("other clients' latency", worst < 3 * before + 0.1, latency)


def _latency_s(subject: Subject, count: int) -> float:
    """A high quantile of a few health requests, never above the slowest."""
    samples = []
    for _ in range(count):
        started = perf_counter()
        subject.http("GET", "/v2/health/live", deadline_s=5.0)
        samples.append(perf_counter() - started)
    return statistics.quantiles(samples, n=20, method="inclusive")[-1]


def _disconnect(subject: Subject, _: Protocol) -> Seen:
    """Clients that disconnect in the middle of their body are not failed requests."""
    failures_before = subject.statistics()["fail"]
    before = subject.metrics()
    request = subject.infer_bytes(subject.model.binary())
    for index in range(DISCONNECTS):
        with subject.connect() as connection:
            connection.send(request[: len(request) * 2 // 3])
            sleep(0.05)
            connection.close(abruptly=index % 2 == 0)
    sleep(0.5)
    failed = subject.statistics()["fail"] - failures_before
    yield Fact("failures in the statistics", failed == 0, f"{failed} more")
    after = subject.metrics()
    if before is None or after is None:
        yield Fact("a counter for disconnects", None, "the metrics could not be read")
        return
    grown = increases(before, after)
    errors = [series for series in grown if ERROR_SERIES.search(series)]
    counted = sum(value for series, value in grown.items() if DISCONNECT_SERIES.search(series))
    yield Fact("4xx, 5xx and failures in the metrics", not errors, ", ".join(errors) or "unchanged")
    seen = f"{counted:.0f} of {DISCONNECTS} disconnects counted"
    yield Fact("a counter for disconnects", counted >= DISCONNECTS, seen)


def raws(*requests: bytes) -> tuple[Send, ...]:
    """Requests as raw bytes, each on one connection."""
    return tuple(raw(request) for request in requests)


GET = b"GET /v2/health/live HTTP/1.1\r\nHost: {host}\r\n"
POST = b"POST {path} HTTP/1.1\r\nHost: {host}\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
JSON_TYPE = b"Content-Type: application/json\r\n"
GZIP_JSON = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
CLAIM = POST + JSON_TYPE + b'Content-Length: 1099511627776\r\n\r\n{"inputs": ['
BOTH_LENGTHS = raws(
    POST + b"Content-Length: 2\r\n" + CHUNKED + b"\r\n2\r\n{}\r\n0\r\n\r\n",
    POST + CHUNKED + b"Content-Length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
)
BAD_LENGTHS = raws(
    *(POST + b"Content-Length: %s\r\n\r\n" % value for value in (b"abc", b"-5", b"1e3", b"%d" % 2**64)),
    POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{} ",
)
BAD_CHUNKS = raws(
    POST + CHUNKED + b"\r\nzz\r\n{}\r\n0\r\n\r\n",
    POST + CHUNKED + b"\r\n" + b"f" * 18 + b"\r\n{}",
    POST + CHUNKED + b"\r\n-2\r\n{}\r\n0\r\n\r\n",
)
BAD_STARTS = raws(
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    GET.replace(b"HTTP/1.1", b"HTTP/9.9") + b"\r\n",
    b"GET\r\nHost: {host}\r\n\r\n",
    b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nbad header line\r\n\r\n",
)
BARE_LF = raws(GET.replace(b"\r", b"") + b"\n", GET[:-2] + b"\n\n")
LONG_HEADER = raws(GET + b"X-Long: " + b"a" * HEADER_BYTES + b"\r\n\r\n")
MANY_HEADERS = raws(GET + b"".join(b"X-%d: a\r\n" % index for index in range(HEADER_COUNT)) + b"\r\n")
TOO_MANY_CHUNKS = partial(in_chunks, count=CHUNK_LIMIT + 1, requests=1)
SLOW_HEADER = partial(slowly, start=POST + b"X-Slow: ")
SLOW_BODY = partial(slowly, start=POST + JSON_TYPE + b"Content-Length: 1000000\r\n\r\n")
SMALL: dict[str, Any] = {"setting": SMALL_BODIES}
HARM: dict[str, Any] = {"destructive": True}
SLOW: dict[str, Any] = HARM | {"setting": SHORT_READS, "note": "closed at the read timeout, other clients not slowed"}

# fmt: off
SIZES = (
    Case("7a", "body exactly at the limit", partial(at_limit, extra=0), "200", **SMALL),
    Case("7b", "body one byte over the limit", partial(at_limit, extra=1), "413", **SMALL),
    Case("7c", "chunked body one byte over the limit", partial(at_limit, extra=1, chunked=True), "413", **SMALL),
    Case("7d", "Content-Length of 1 TiB", raw(CLAIM, 10.0), "413", note="at once"),
    Case("7e", "message over the limit", _grpc_over_limit, "RESOURCE_EXHAUSTED or INVALID_ARGUMENT",
         check_words=False, note="RESOURCE_EXHAUSTED comes from the RPC library", **SMALL),
    Case("8a", "gzip body", infers(_gzipped), "200 or 415"),
    Case("8b", f"gzip body that expands to {BOMB_MIB} MiB",
         lambda subject, _: subject.infer(Body(GZIP_JSON, gzip_of_blanks(BOMB_MIB)), deadline_s=60.0),
         "400 or 413 or 415",
         note="the decompressed size is limited, or 415", retained_mib=32, peak_mib=BOMB_MIB // 2, **HARM),
    Case("8c", f"{MALFORMED_COUNT} malformed gzip bodies", _malformed_gzip, "400 or 415", retained_mib=32, **HARM),
    Case("9a", f"{CHUNK_LIMIT + 1:,} chunks", TOO_MANY_CHUNKS, "400", **HARM),
    Case("9b", f"{MANY_CHUNKS:,} chunks, {MANY_CHUNK_REQUESTS} requests",
         partial(in_chunks, count=MANY_CHUNKS, requests=MANY_CHUNK_REQUESTS), "400",
         warm_up=lambda subject: list(in_chunks(subject, "http", CHUNK_LIMIT + 1, 3)), retained_mib=1, **HARM),
)

PARSING = (
    Case("10a", "Content-Length and Transfer-Encoding together", BOTH_LENGTHS, "400"),
    Case("10b", "Content-Length abc, −5, 1e3, 2^64, two that differ", BAD_LENGTHS, "400 or 413"),
    Case("10c", "invalid chunk sizes", BAD_CHUNKS, "400 or 413"),
    Case("10d", "bytes that are not HTTP, unknown version, malformed request and header lines", BAD_STARTS,
         "400 or 505"),
    Case("10e", "a request head whose lines, or last lines, end with LF alone", BARE_LF, "400", note="at once"),
    Case("10f", f"{EMPTY_LINES:,} empty lines before a request", raw(b"\r\n" * EMPTY_LINES + GET + b"\r\n"), "400"),
    Case("11a", f"one header of {HEADER_BYTES // MIB} MiB", LONG_HEADER, "431 or 400", **HARM),
    Case("11b", f"{HEADER_COUNT:,} headers", MANY_HEADERS, "431 or 400", **HARM),
    Case("12a", f"header at 1 B/s from {SLOW_CLIENTS} clients", SLOW_HEADER, "", **SLOW),
    Case("12b", f"body at 1 B/s from {SLOW_CLIENTS} clients", SLOW_BODY, "", **SLOW),
    Case("13", "client disconnects mid-body", _disconnect, "", note="counted separately, not as 4xx or 5xx", **HARM),
)
# fmt: on


LONG_ID = "i" * MIB
MARK = "FORGED-BY-ABSERVE-CONFORMANCE"
FORGING_ID = f"a\r\n{MARK}-LINE\r\nX-{MARK}: 1"
NAMES = ("../etc", "..", "../../../../tmp/abserve", "n" * 256, "a\nb")
FORBIDDEN_FILE = f"abserve-conformance-file-{os.getpid()}"


def https(*lines: str) -> tuple[Send, ...]:
    """HTTP requests without a document."""
    return tuple(http(line) for line in lines)


@changes
def infer_with(request: InferenceRequest, /, name: str | None = None, version: str = "", **document: Any) -> None:
    """A valid inference request under another name or version, or with more members in its JSON."""
    request.name, request.version = name or request.name, version
    request.document |= document


def control(action: str, *names: str) -> tuple[Send, ...]:
    """Load or unload models of these names."""
    return https(*(f"POST /v2/repository/models/{quote(name, safe='')}/{action}" for name in names))


def load_outside(path: str) -> Send:
    """A load with its own configuration and a file whose name points out of the repository."""
    config = '{"backend": "python", "input": [], "output": []}'
    content = base64.b64encode(b"conformance").decode()
    document = {"parameters": {"config": config, f"file:{path}{FORBIDDEN_FILE}": content}}
    return http(f"POST /v2/repository/models/{FORBIDDEN_FILE}/load", document)


def echoed(identifier: str) -> Condition:
    """Whether an answer of 200 echoes the identifier unchanged; a refusal need not."""

    def observe(_: Subject, responses: Sequence[Response]) -> Fact:
        name, response = "the id comes back unchanged", responses[0]
        if not response.succeeded:
            return Fact(name, True, f"refused with {response.status}")
        back: Any = None
        if response.status == "OK":
            back = messages.ModelInferResponse.FromString(response.body).id
        else:
            with suppress(ValueError, RecursionError, AttributeError):
                back = response_json(response).get("id")
        return Fact(name, back == identifier, "yes" if back == identifier else f"came back as {str(back)[:40]!r}")

    return observe


def no_forged_header(_: Subject, responses: Sequence[Response]) -> Fact:
    """Whether the identifier has become a header of an answer."""
    return Fact("no header made by the id", f"x-{MARK.lower()}" not in responses[0].headers, "a header was injected")


def log_escaped(subject: Subject, _: Sequence[Response]) -> Fact:
    """Whether the identifier has become a line of the log."""
    name = "log line escaped"
    if subject.log_path is None:
        return Fact(name, None, "the log cannot be read; use --launch")
    lines = subject.log_path.read_text(errors="replace").splitlines()
    forged = any(line.startswith((MARK, f"X-{MARK}")) for line in lines)
    return Fact(name, not forged, "the log holds a forged line" if forged else "no forged line")


def nothing_written(*_: object) -> Fact:
    """Whether the server has written the file of `load_outside`."""
    folders = (Path(tempfile.gettempdir()), Path("/"), Path.cwd(), user_path("~"))
    written = [path for folder in folders if (path := folder / FORBIDDEN_FILE).exists()]
    for path in written:
        path.unlink(missing_ok=True)
    return Fact(
        "nothing written", not written, "a file was written outside the repository" if written else "no new file"
    )


UNKNOWN_ROUTES = https("GET /", "GET /v1/models", "GET /v2/no", "GET /v2/models/{model}/no", "POST /v2/no")
WRONG_VERBS = https(
    *("POST /v2/health/live", "DELETE /v2/health/ready", "POST /v2"),
    *("GET /v2/models/{model}/infer", "PUT /v2/models/{model}/infer", "DELETE /v2/models/{model}"),
)
NOT_MESSAGES = tuple(
    grpc(method, b"\xff" * 40) for method in ("ModelReady", "ModelMetadata", "ModelStatistics", "RepositoryIndex")
)
UNKNOWN_METADATA = https(
    "GET /v2/models/no_such_model", "GET /v2/models/{model}/versions/999", "GET /v2/models/no_such_model/config"
)
UNKNOWN_READY = https(
    *("GET /v2/models/no_such_model/ready", "GET /v2/models/{model}/versions/999/ready"),
    "GET /v2/models/no_such_model/stats",
)
UNKNOWN_CALLS = (
    grpc("ModelMetadata", {"name": "no_such_model"}),
    grpc("ModelMetadata", {"name": "{model}", "version": "999"}),
    grpc("ModelConfig", {"name": "no_such_model"}),
    grpc("ModelStatistics", {"name": "no_such_model"}),
)
NO_SUCH, VERSION_999, VERSION_ABC = infer_with("no_such_model"), infer_with(version="999"), infer_with(version="abc")
FORGING = (infer_with(id=FORGING_ID), infer_with(id=FORGING_ID, outputs=[{"name": "no_such"}]))
SERVED_MODEL = https(*(f"POST /v2/repository/models/{{model}}/{action}" for action in ("unload", "load")))
LOADS_OUTSIDE = (load_outside("../" * 12 + "tmp/"), load_outside("/tmp/"))
LOAD_CALLS = tuple(grpc("RepositoryModelLoad", {"model_name": name}) for name in NAMES)
ECHOED: dict[str, Any] = {"note": "echoed or refused, log line escaped"}
REFUSED = "400 or 403 or 404 or 501 or 503"
REFUSED_GRPC = "INVALID_ARGUMENT or NOT_FOUND or UNIMPLEMENTED or UNAVAILABLE or PERMISSION_DENIED"
CONTROL: dict[str, Any] = {"destructive": True, "note": "nothing written"}
NOTHING_WRITTEN = CONTROL | {"facts": (nothing_written,)}
ALLOWED = NOTHING_WRITTEN | {"setting": WITH_MODEL_CONTROL}

# fmt: off
ROUTES = (
    Case("15a", "unknown routes", UNKNOWN_ROUTES, "404"),
    Case("15b", "wrong verbs", WRONG_VERBS, "405"),
    Case("15c", "unknown method", grpc("NoSuchMethod", b""), "UNIMPLEMENTED", check_words=False),
    Case("15d", "bytes that are not a message, to methods other than inference", NOT_MESSAGES, "INVALID_ARGUMENT"),
    Case("17a", "inference with an unknown model or version", (NO_SUCH, VERSION_999, VERSION_ABC), "404"),
    Case("17b", "metadata and config of an unknown model or version", UNKNOWN_METADATA, "404"),
    Case("17c", "ready and statistics of an unknown model or version", UNKNOWN_READY, "404"),
    Case("17d", "inference with an unknown model or version", (NO_SUCH, VERSION_999), "NOT_FOUND"),
    Case("17e", "metadata, config and statistics of an unknown model or version", UNKNOWN_CALLS, "NOT_FOUND"),
)

IDENTIFIERS = (
    Case("24a", "request id of 1 MiB", infer_with(id=LONG_ID), "200 or 400",
         facts=(echoed(LONG_ID), no_forged_header, log_escaped), **ECHOED),
    Case("24b", "CR and LF in the request id", FORGING, "200 or 400",
         facts=(echoed(FORGING_ID), no_forged_header, log_escaped), **ECHOED),
    Case("24c", "CR and LF in the request id", FORGING[:1], "OK or INVALID_ARGUMENT",
         facts=(echoed(FORGING_ID), log_escaped), **ECHOED),
)

MODEL_CONTROL = (
    Case("34a", "unload and load the served model, default settings", SERVED_MODEL, REFUSED, **CONTROL),
    Case("34b", "load names with ../, of 256 characters, with a line break, default settings",
         control("load", *NAMES), REFUSED, **NOTHING_WRITTEN),
    Case("34c", "load such names, model control allowed",
         control("load", *NAMES, "no_such_model"), REFUSED, **ALLOWED),
    Case("34d", "unload such names, model control allowed",
         control("unload", *NAMES, "no_such_model"), REFUSED, **ALLOWED),
    Case("34e", "load with a file whose name points out of the repository", LOADS_OUTSIDE, REFUSED, **ALLOWED),
    Case("34f", "load names with ../ and of 256 characters", LOAD_CALLS, REFUSED_GRPC, **NOTHING_WRITTEN),
)
# fmt: on

THEMES = (
    Theme("Sizes", "A small request must not make a server allocate much memory, whatever it claims.", SIZES),
    Theme("HTTP parsing", "RFC 9112: ambiguous framing is refused; a slow client is disconnected.", PARSING),
    Theme("Routes and models", "A client must be able to distinguish an unknown name from a failure.", ROUTES),
    Theme("Identifiers", "A request id is the client's text: it must not forge headers or log lines.", IDENTIFIERS),
    Theme("Model control", "A loaded model can run code; names must not point out of the repository.", MODEL_CONTROL),
)
