"""Cases 7 to 9: bodies at a limit, compressed, or in a million chunks."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator

from loadgen.conformance.case import Case, Probe
from loadgen.conformance.grpc_calls import infer_message
from loadgen.conformance.model import Body, Model
from loadgen.conformance.probes import infers
from loadgen.conformance.records import (
    MIB,
    Answer,
    Door,
    ErrorBody,
    Expectation,
    MemoryBound,
    NotApplicableError,
    Observation,
)
from loadgen.conformance.settings import SMALL_BODIES
from loadgen.conformance.subject import Subject
from loadgen.conformance.wire import request_head

BOMB_BYTES = 512 * MIB
MALFORMED_COUNT = 100
CHUNK_LIMIT = 65_536
MANY_CHUNKS, MANY_CHUNK_REQUESTS = 1_000_000, 100
WARM_UP_REQUESTS = 3


def _padded(subject: Subject, extra: int) -> Body:
    """A valid request whose JSON is filled up with blanks to the body limit and so many bytes."""
    if subject.max_body_bytes is None:
        raise NotApplicableError("the body limit is not known; give it with --max-body-bytes")
    body = subject.model.binary()
    missing = subject.max_body_bytes + extra - len(body.content)
    if missing < 0:
        raise NotApplicableError("one item is larger than the body limit")
    length = int(body.headers["Inference-Header-Content-Length"])
    text = body.content[: length - 1] + b" " * missing + b"}"
    return Body(
        {**body.headers, "Inference-Header-Content-Length": str(length + missing)}, text + body.content[length:]
    )


def _at_limit(extra: int, *, chunked: bool = False) -> Probe:
    def probe(subject: Subject) -> Observation:
        body = _padded(subject, extra)
        if chunked:
            head = _chunked_head(subject, dict(body.headers))
            return Observation((subject.raw((head, b"%x\r\n" % len(body.content) + body.content + b"\r\n0\r\n\r\n")),))
        return Observation((subject.infer(body),))

    return probe


def _claims_much(subject: Subject) -> Observation:
    head = request_head(
        "POST", subject.model.path, subject.authority, {"Content-Type": "application/json"}, 1_099_511_627_776
    )
    return Observation((subject.raw(head + b'{"inputs": [', 10.0),))


def _chunked_head(subject: Subject, headers: dict[str, str]) -> bytes:
    return request_head(
        "POST", subject.model.path, subject.authority, {**headers, "Transfer-Encoding": "chunked"}, None
    )


def _compressed(model: Model) -> Body:
    body = model.binary()
    return Body({**body.headers, "Content-Encoding": "gzip"}, gzip.compress(body.content, 1))


def _bomb(subject: Subject) -> Observation:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    return Observation((subject.infer(Body(headers, gzip_of_blanks(BOMB_BYTES)), deadline_s=60.0),))


def gzip_of_blanks(size: int) -> bytes:
    """`size` blanks in one gzip stream, without ever holding them."""
    compressor = zlib.compressobj(1, zlib.DEFLATED, 31)
    block = b" " * MIB
    return b"".join([*(compressor.compress(block) for _ in range(size // MIB)), compressor.flush()])


def _malformed_gzip(subject: Subject) -> Observation:
    whole = gzip.compress(subject.model.binary().content, 1)
    answers: list[Answer] = []
    for index in range(MALFORMED_COUNT):
        broken = bytearray(whole[: len(whole) - 1 - index * 37 % (len(whole) // 2)])
        broken[index % 20] ^= 0xA5
        headers = {"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"}
        answers.append(subject.infer(Body(headers, bytes(broken))))
    return Observation(tuple(answers))


def _chunks(subject: Subject, count: int) -> Iterator[bytes]:
    """A valid request in `count` chunks, nearly all of them one blank of its JSON."""
    body = subject.model.binary()
    length, blanks = int(body.headers["Inference-Header-Content-Length"]), count - 2
    first, last = body.content[: length - 1], body.content[length - 1 :]
    headers = {**body.headers, "Inference-Header-Content-Length": str(length + blanks)}
    yield _chunked_head(subject, headers) + b"%x\r\n" % len(first) + first + b"\r\n"
    block = b"1\r\n \r\n" * 8192
    for _ in range(blanks // 8192):
        yield block
    yield b"1\r\n \r\n" * (blanks % 8192) + b"%x\r\n" % len(last) + last + b"\r\n0\r\n\r\n"


def _too_many_chunks(subject: Subject) -> Observation:
    return Observation((subject.raw(_chunks(subject, CHUNK_LIMIT + 1)),))


def _warm_chunks(subject: Subject) -> None:
    """What a first request allocates for good is no growth."""
    for _ in range(WARM_UP_REQUESTS):
        subject.raw(_chunks(subject, CHUNK_LIMIT + 1))


def _a_million_chunks(subject: Subject) -> Observation:
    answers = []
    for _ in range(MANY_CHUNK_REQUESTS):
        answers.append(subject.raw(_chunks(subject, MANY_CHUNKS)))
        if answers[-1].status == "refused" or (not answers[-1].came and subject.failure() is not None):
            break
    return Observation(tuple(answers))


def _grpc_over_limit(subject: Subject) -> Observation:
    """The limit holds for the decoded message, whose id is the padding."""
    if subject.max_body_bytes is None:
        raise NotApplicableError("the body limit is not known; give it with --max-body-bytes")
    message = infer_message(subject.model)
    message.parameters["padding"].string_param = "x" * subject.max_body_bytes
    return Observation((subject.call().infer(message),))


_LIMIT_OR_415 = Expectation(statuses=("400", "413", "415"), note="the decompressed size is limited, or 415")

CASES = (
    Case(
        number="7a",
        title="body exactly at the limit",
        probe=_at_limit(0),
        expected=Expectation(statuses=("200",)),
        setting=SMALL_BODIES,
    ),
    Case(
        number="7b",
        title="body one byte over the limit",
        probe=_at_limit(1),
        expected=Expectation(statuses=("413",)),
        setting=SMALL_BODIES,
    ),
    Case(
        number="7c",
        title="chunked body one byte over the limit",
        probe=_at_limit(1, chunked=True),
        expected=Expectation(statuses=("413",)),
        setting=SMALL_BODIES,
    ),
    Case(
        number="7d",
        title="Content-Length of 1 TiB",
        probe=_claims_much,
        expected=Expectation(statuses=("413",), note="at once"),
    ),
    Case(
        number="7e",
        title="message over the limit",
        door=Door.GRPC,
        probe=_grpc_over_limit,
        expected=Expectation(
            statuses=("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT"),
            error_body=ErrorBody.FRAMEWORK,
            note="RESOURCE_EXHAUSTED is the RPC library's own",
        ),
        setting=SMALL_BODIES,
    ),
    Case(
        number="8a",
        title="gzip body",
        probe=infers(_compressed),
        expected=Expectation(statuses=("200", "415")),
    ),
    Case(
        number="8b",
        title=f"gzip body that expands to {BOMB_BYTES // MIB} MiB",
        probe=_bomb,
        expected=_LIMIT_OR_415,
        memory=MemoryBound(retained_bytes=32 * MIB, peak_bytes=BOMB_BYTES // 2),
        destructive=True,
    ),
    Case(
        number="8c",
        title=f"{MALFORMED_COUNT} malformed gzip bodies",
        probe=_malformed_gzip,
        expected=Expectation(statuses=("400", "415")),
        memory=MemoryBound(retained_bytes=32 * MIB),
        destructive=True,
    ),
    Case(
        number="9a",
        title=f"{CHUNK_LIMIT + 1:,} chunks",
        probe=_too_many_chunks,
        expected=Expectation(statuses=("400",)),
        destructive=True,
    ),
    Case(
        number="9b",
        title=f"{MANY_CHUNKS:,} chunks, {MANY_CHUNK_REQUESTS} requests",
        probe=_a_million_chunks,
        warm_up=_warm_chunks,
        expected=Expectation(statuses=("400",)),
        memory=MemoryBound(retained_bytes=MIB),
        destructive=True,
    ),
)
