"""Answers of language models as a shadow sees them: when the first token came, and whether two answers are alike.

Two right servers need not give equal texts. Where the request asks for the most probable tokens (temperature 0), they
begin alike but for ties within rounding, as in a comparison of language models; where tokens are drawn, nothing can be
said of a single answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import msgspec

from loadgen.base.documents import DocumentError, decode_json, uncompressed
from loadgen.client.event_stream import MOST_STREAM_BYTES, ReceivedStream
from loadgen.client.generation import StreamedAnswer, read_answer_stream
from loadgen.recorder.shadow import PairedRequest
from loadgen.records.traffic import plain

_MOST_TOKENS = 2**15
"""Of an answer to a request that does not limit it."""
_BEGINNING = 8
"""Characters of a text without ids that must be equal: about two tokens."""


def is_text(request: PairedRequest) -> bool:
    """Whether a language model answers it."""
    return request.transport == "http" and not request.route.endswith("/infer")


def fields_of(content: bytes, headers: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a request, with those among its `parameters`; empty if it cannot be read."""
    content = plain(content, headers.get("content-encoding"))
    try:
        fields: dict[str, Any] = decode_json(content, dict[str, Any], most_bytes=MOST_STREAM_BYTES)
    except DocumentError:
        return {}
    parameters = fields.get("parameters")
    return {**parameters, **fields} if isinstance(parameters, dict) else fields


def is_certain(fields: Mapping[str, Any]) -> bool:
    """Whether a request asks for the most probable tokens. Without a temperature most servers draw them."""
    try:
        return float(fields.get("temperature", 1)) == 0.0 or int(fields.get("top_k", 0)) == 1
    except (TypeError, ValueError, OverflowError):
        return False


def read_text(request: PairedRequest, fields: Mapping[str, Any]) -> StreamedAnswer:
    """The answer to a request with these fields. Its first token gives the request the time of its first byte; one that
    cannot be read gives it a `failure`."""
    limits = (fields.get(name) for name in ("max_tokens", "max_completion_tokens"))
    asked = next((limit for limit in limits if isinstance(limit, int) and limit > 0), _MOST_TOKENS)
    try:
        answer = read_answer_stream(_stream(request), asked)
    except Exception as exc:  # noqa: BLE001 (the candidate may answer anything)
        answer = StreamedAnswer(error=f"the answer cannot be read ({type(exc).__name__})")
    fault = answer.error or ("the stream ended inside an event" if answer.torn else None)
    if fault is None and not (answer.output_tokens or answer.ended):
        fault = "the answer has no text"
    request.failure = fault
    if answer.chunks:
        request.first_byte_ns = answer.chunks[0].at_ns
    return answer


def _stream(request: PairedRequest) -> ReceivedStream:
    """An answer as a stream of events; one that is not a stream as a single event."""
    body = b"".join(request.answer)
    ends, moments, total = array("q"), array("q", request.moments), 0
    for piece in request.answer:
        total += len(piece)
        ends.append(total)
    coding = request.answer_headers.get("content-encoding", "identity")
    is_stream = request.answer_headers.get("content-type", "").startswith("text/event-stream") or body[:5] == b"data:"
    if is_stream and coding == "identity":
        return ReceivedStream(body, ends, moments)
    body = uncompressed(body, coding, MOST_STREAM_BYTES) or b""
    if not is_stream:
        body = b"data: " + msgspec.json.encode(msgspec.json.decode(body)) + b"\n\n"
    return ReceivedStream(body, array("q", [len(body)]), array("q", [request.end_ns or 0]))


def are_alike(expected: StreamedAnswer, actual: StreamedAnswer) -> bool | None:
    """Whether two certain answers begin with the same token, by its id or as text; None if one has neither. Servers may
    send more or less text at once, so that one text is the beginning of the other."""
    if expected.has_ids and actual.has_ids:
        return expected.ids[0] == actual.ids[0]
    shorter, longer = sorted((each.text.strip()[:_BEGINNING] for each in (expected, actual)), key=len)
    return longer.startswith(shorter) if shorter else None
