"""Cases 1 to 6: JSON that cannot be read, and sizes of binary tensors that do not fit the shape or the body."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from loadgen.client.inputs import NUMPY_TYPES
from loadgen.conformance.case import Case, Section, changes, infers
from loadgen.conformance.model import HEADER, Body, InferenceRequest, json_body
from loadgen.conformance.records import Answer, Fact, NotApplicableError
from loadgen.conformance.subject import Subject
from loadgen.conformance.wire import infer_message

DEEP, DEEPEST = 120, 250_000
SPECIAL = (float("nan"), float("inf"), float("-inf"))
OCTETS = {"Content-Type": "application/octet-stream"}


@changes
def only_entry(request: InferenceRequest, /, **members: Any) -> Any:
    """JSON whose only input is the model's first with these members."""
    return {"inputs": [{**request.entries[0], **members}]}


@changes
def first_value(request: InferenceRequest, value: float) -> Body:
    """JSON with this number before zeros; Python writes NaN, Infinity and -Infinity."""
    entry = _float_entry(request)
    return json_body({"inputs": [{**entry, "data": [value, *[0] * (int(np.prod(entry["shape"])) - 1)]}]})


@changes
def special_values(request: InferenceRequest, *, binary_answer: bool) -> None:
    """NaN and the infinities as the first values of a binary tensor."""
    values = np.frombuffer(request.blobs[0], NUMPY_TYPES[_float_entry(request)["datatype"]]).copy()
    values[: len(SPECIAL)] = SPECIAL[: values.size]
    request.blobs[0] = values.tobytes()
    request.document["parameters"] = {"binary_data_output": binary_answer}


@changes
def header(request: InferenceRequest, value: str | None) -> Body:
    """A valid body with this header length; None means one byte more than the body has."""
    body = request.body()
    return Body({**body.headers, HEADER: value or str(len(body.content) + 1)}, body.content)


@changes
def declared(request: InferenceRequest, more: int, sent: int) -> None:
    """The last tensor declares `more` bytes beyond its shape, and sends `sent` bytes beyond its shape."""
    blob = request.blobs[-1]
    request.sizes[len(request.blobs) - 1] = len(blob) + more
    request.blobs[-1] = (blob + b"\x00" * 64)[: len(blob) + sent]


@changes
def declared_as(request: InferenceRequest, value: object) -> None:
    """Every tensor declares this size."""
    request.sizes = dict.fromkeys(range(len(request.blobs)), value)


@changes
def raw_body(request: InferenceRequest, content: bytes | None, applies: Callable[[int, int], bool], reason: str) -> Any:
    """Triton's raw request: these bytes, or the tensor's, without JSON. `applies` gets the number of inputs and the
    number of variable dimensions of the first, with the batch."""
    inputs = request.model.inputs
    if not applies(len(inputs), sum(size < 0 for size in inputs[0].shape)):
        raise NotApplicableError(reason)
    prefix = 4 if inputs[0].datatype == "BYTES" else 0  # the element's length
    return Body({**OCTETS, HEADER: "0"}, request.blobs[0][prefix:] if content is None else content)


def parseable(_: Subject, answers: Sequence[Answer]) -> Fact:
    """Whether the answer is valid JSON."""
    try:
        answer_json(answers[0])
    except (ValueError, RecursionError) as exc:
        return Fact("the answer is valid JSON", False, str(exc)[:80])
    return Fact("the answer is valid JSON", True, "yes")


def answer_json(answer: Answer) -> Any:
    """The JSON of an answer, with or without tensors behind it. Raises `ValueError`, `RecursionError`."""
    length = answer.headers.get(HEADER.lower())
    return json.loads(answer.body[: int(length)] if length else answer.body)


def _float_entry(request: InferenceRequest) -> dict[str, Any]:
    if len(request.entries) != 1 or request.entries[0]["datatype"] not in {"FP32", "FP64"}:
        raise NotApplicableError("needs a model with one FP32 or FP64 input")
    return request.entries[0]


def _nested_data(request: InferenceRequest) -> str:
    document = {"inputs": [{**entry, "data": "@"} for entry in request.entries]}
    return json.dumps(document).replace('"@"', "[" * DEEP + "0" + "]" * DEEP)


def _mixed_contents(request: InferenceRequest) -> Any:
    message = infer_message(request)
    message.inputs[0].contents.fp32_contents.extend([0.0] * 4)
    return message


OPEN, CLOSE = b"[" * DEEPEST, b"]" * DEEPEST
NESTED = b"[" * DEEP + b"]" * DEEP
WRONG_TYPES = (
    *infers([], "1", "null", {"inputs": {}}, {"inputs": ["text"]}),
    *(only_entry(name=7, data=[0]), only_entry(shape="3", data=[0])),
    *(only_entry(data={"a": 1}), only_entry(data=["text"])),
)
ONE_FIXED: Any = (
    lambda inputs, free: inputs == 1 and free <= 1,
    "needs a model with one input and no variable dimension but the batch",
)
SEVERAL: Any = (lambda inputs, _: inputs > 1, "the model has one input")
VARIABLE: Any = (lambda inputs, free: inputs == 1 and free > 1, "the model has no variable dimension but the batch")
NAMES_HEADER: dict[str, Any] = {"naming": (HEADER,)}
SIZES: dict[str, Any] = {"numbers": 2}
HARM: dict[str, Any] = {"destructive": True}

# fmt: off
JSON = (
    Case("1a", "malformed JSON", infers(b'{"inputs": [', b"not json at all", b'{"inputs": [}]}', b"\xff\xfe\x00\x01"),
         "400"),
    Case("1b", "empty body, empty object, no inputs", infers(b"", {}, {"inputs": []}), "400"),
    Case("1c", "JSON of the wrong type", WRONG_TYPES, "400"),
    Case("1d", "bytes that are not a protobuf message; an empty message", infers(b"\xff" * 8, b""),
         "INVALID_ARGUMENT or INTERNAL or NOT_FOUND", check_words=False, note="INTERNAL comes from the RPC library"),
    Case("2a", f"JSON nested {DEEP} deep", infers(b'{"inputs": ' + NESTED + b"}", _nested_data), "400"),
    Case("2b", f"{DEEPEST:,} opening brackets", infers(b'{"inputs": ' + OPEN, OPEN), "400", **HARM),
    Case("2c", f"JSON nested {DEEPEST:,} deep, closed properly", infers(b'{"inputs": ' + OPEN + CLOSE + b"}"), "400",
         **HARM),
    Case("3a", "NaN and Infinity in a request's JSON", tuple(first_value(value) for value in SPECIAL), "200"),
    Case("3b", "NaN and Inf in a binary tensor, outputs in JSON", special_values(binary_answer=False), "200",
         note="valid JSON", facts=(parseable,)),
    Case("3c", "NaN and Inf in a binary tensor, outputs in binary", special_values(binary_answer=True), "200"),
    Case("3d", "NaN and Inf in raw_input_contents", special_values(binary_answer=True), "OK"),
)

BINARY = (
    Case("4a", f"{HEADER}: abc", header("abc"), "400", **NAMES_HEADER),
    Case("4b", f"{HEADER}: −1", header("-1"), "400", **NAMES_HEADER),
    Case("4c", f"{HEADER} one more than the body", header(None), "400", **NAMES_HEADER),
    Case("4d", f"{HEADER}: 99999999999, 2^64", (header("99999999999"), header(str(2**64))), "400", **NAMES_HEADER),
    Case("4e", "a binary body without the header", infers(lambda request: Body(OCTETS, request.body().content)), "400"),
    Case("5a", "header length 0 with a raw binary body", raw_body(None, *ONE_FIXED), "200"),
    Case("5b", "header length 0 with the wrong number of bytes", raw_body(bytes(7), *ONE_FIXED), "400"),
    Case("5c", "header length 0, model with several inputs", raw_body(bytes(64), *SEVERAL), "400"),
    Case("5d", "header length 0, several variable dimensions", raw_body(bytes(64), *VARIABLE), "400"),
    Case("6a", "binary_data_size smaller than the shape needs", declared(-4, -4), "400", **SIZES),
    Case("6b", "binary_data_size larger than the shape needs", declared(4, 4), "400", **SIZES),
    Case("6c", "binary_data_size larger than the body", (declared(0, -4), declared(4, 0)), "400", **SIZES),
    Case("6d", "extra bytes after the tensors", declared(0, 9), "400", **SIZES),
    Case("6e", "binary_data_size negative, a text, 2^63",
         (declared_as(-1), declared_as("12"), declared_as(2**63)), "400"),
    Case("6f", "raw_input_contents shorter and longer than the shape", (declared(0, -4), declared(0, 4)),
         "INVALID_ARGUMENT", **SIZES),
    Case("6g", "more and fewer raw_input_contents than inputs",
         infers(lambda request: request.blobs.append(bytes(16)), lambda request: request.blobs.clear()),
         "INVALID_ARGUMENT"),
    Case("6h", "contents and raw_input_contents together", infers(_mixed_contents), "INVALID_ARGUMENT"),
)
# fmt: on

SECTIONS = (
    Section("JSON", "RFC 8259 allows limits and has no NaN; unreadable JSON is the client's error.", JSON),
    Section("Binary tensors", "The sizes of the binary extension must fit the shape and the body exactly.", BINARY),
)
