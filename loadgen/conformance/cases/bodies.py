"""Cases 1 to 6: JSON that cannot be read, and the numbers that say where each tensor's bytes are."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from loadgen.conformance.case import Case, Section, infers, spoils
from loadgen.conformance.grpc_calls import infer_message
from loadgen.conformance.model import HEADER, Body, InferenceRequest, json_body
from loadgen.conformance.records import Answer, Door, Fact, NotApplicableError, expect
from loadgen.conformance.subject import Subject
from loadgen.transport.inputs import NUMPY_TYPES

DEEP, DEEPEST = 120, 250_000
SPECIAL = (float("nan"), float("inf"), float("-inf"))
OCTETS = {"Content-Type": "application/octet-stream"}


@spoils
def only_entry(request: InferenceRequest, /, **members: Any) -> Any:
    """JSON whose one input is the model's first with these members."""
    return {"inputs": [{**request.entries[0], **members}]}


@spoils
def first_value(request: InferenceRequest, value: float) -> Body:
    """JSON with this number before zeros; Python writes NaN, Infinity and -Infinity."""
    entry = _float_entry(request)
    return json_body({"inputs": [{**entry, "data": [value, *[0] * (int(np.prod(entry["shape"])) - 1)]}]})


@spoils
def special_values(request: InferenceRequest, *, binary_answer: bool) -> None:
    """NaN and the infinities as the first values of a binary tensor."""
    values = np.frombuffer(request.blobs[0], NUMPY_TYPES[_float_entry(request)["datatype"]]).copy()
    values[: len(SPECIAL)] = SPECIAL[: values.size]
    request.blobs[0] = values.tobytes()
    request.document["parameters"] = {"binary_data_output": binary_answer}


@spoils
def header(request: InferenceRequest, value: str | None) -> Body:
    """A valid body with this header length; None is one more than the body has."""
    body = request.body()
    return Body({**body.headers, HEADER: value or str(len(body.content) + 1)}, body.content)


@spoils
def declared(request: InferenceRequest, more: int, sent: int) -> None:
    """The last tensor declares so many bytes more than its shape has, and sends so many more."""
    blob = request.blobs[-1]
    request.sizes[len(request.blobs) - 1] = len(blob) + more
    request.blobs[-1] = (blob + b"\x00" * 64)[: len(blob) + sent]


@spoils
def declared_as(request: InferenceRequest, value: object) -> None:
    """Every tensor declares this as its size."""
    request.sizes = dict.fromkeys(range(len(request.blobs)), value)


def parseable(_: Subject, answers: tuple[Answer, ...]) -> Fact:
    """Whether the answer's JSON is JSON."""
    try:
        answer_json(answers[0])
    except (ValueError, RecursionError) as exc:
        return Fact("the answer is parseable", False, str(exc)[:80])
    return Fact("the answer is parseable", True, "yes")


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


def _without_header(request: InferenceRequest) -> Body:
    return Body(OCTETS, request.body().content)


@spoils
def raw(request: InferenceRequest, content: bytes | None, reason: str, applies: Callable[[int, int], bool]) -> Body:
    """Triton's raw request: these bytes, or the one tensor, and no JSON at all. `applies` is told how many inputs the
    model has, and how many variable dimensions the first has with the batch."""
    inputs = request.model.inputs
    if not applies(len(inputs), sum(size < 0 for size in inputs[0].shape)):
        raise NotApplicableError(reason)
    skipped = 4 if inputs[0].datatype == "BYTES" else 0  # the element's length
    return Body({**OCTETS, HEADER: "0"}, request.blobs[0][skipped:] if content is None else content)


def _mixed(request: InferenceRequest) -> Any:
    message = infer_message(request)
    message.inputs[0].contents.fp32_contents.extend([0.0] * 4)
    return message


OPEN, CLOSE = b"[" * DEEPEST, b"]" * DEEPEST
NESTED = b"[" * DEEP + b"]" * DEEP
BAD, FINE = expect("400"), expect("200")
NAMES_HEADER = expect("400", naming=(HEADER,))
TWO_NUMBERS = expect("400", numbers=2)
BAD_GRPC, GRPC_TWO_NUMBERS = expect("INVALID_ARGUMENT"), expect("INVALID_ARGUMENT", numbers=2)
RPC_LIBRARY = expect(
    "INVALID_ARGUMENT", "INTERNAL", "NOT_FOUND", words_judged=False, note="INTERNAL is the RPC library's own"
)
PARSEABLE = expect("200", note="parseable")
ONE_FIXED = "needs a model with one input and no variable dimension but the batch"
FREE = "the model has no variable dimension but the batch"
RAW = raw(None, ONE_FIXED, lambda inputs, free: inputs == 1 and free <= 1)
RAW_WRONG_SIZE = raw(b"\x00" * 7, ONE_FIXED, lambda inputs, free: inputs == 1 and free <= 1)
RAW_SEVERAL = raw(b"\x00" * 64, "the model has one input", lambda inputs, _: inputs > 1)
RAW_VARIABLE = raw(b"\x00" * 64, FREE, lambda inputs, free: inputs == 1 and free > 1)
SPECIAL_IN_JSON = tuple(first_value(value) for value in SPECIAL)
JSON_OUT, BINARY_OUT = special_values(binary_answer=False), special_values(binary_answer=True)
WRONG_TYPES = (
    *infers([], "1", "null", {"inputs": {}}, {"inputs": ["text"]}),
    *(only_entry(name=7, data=[0]), only_entry(shape="3", data=[0])),
    *(only_entry(data={"a": 1}), only_entry(data=["text"])),
)

# fmt: off
JSON = (
    Case("1a", "malformed JSON",
         infers(b'{"inputs": [', b"not json at all", b'{"inputs": [}]}', b"\xff\xfe\x00\x01"), BAD),
    Case("1b", "empty body, empty object, no inputs", infers(b"", {}, {"inputs": []}), BAD),
    Case("1c", "JSON of the wrong type", WRONG_TYPES, BAD),
    Case("1d", "a message that is no protobuf; an empty message", infers(b"\xff" * 8, b""), RPC_LIBRARY, Door.GRPC),
    Case("2a", f"JSON nested {DEEP} deep", infers(b'{"inputs": ' + NESTED + b"}", _nested_data), BAD),
    Case("2b", f"{DEEPEST:,} opening brackets", infers(b'{"inputs": ' + OPEN, OPEN), BAD, destructive=True),
    Case("2c", f"JSON nested {DEEPEST:,} deep, closed properly",
         infers(b'{"inputs": ' + OPEN + CLOSE + b"}"), BAD, destructive=True),
    Case("3a", "NaN and Infinity in a request's JSON", SPECIAL_IN_JSON, FINE),
    Case("3b", "NaN and Inf in a binary tensor, outputs in JSON", JSON_OUT, PARSEABLE, facts=(parseable,)),
    Case("3c", "NaN and Inf in a binary tensor, outputs in binary", BINARY_OUT, FINE),
    Case("3d", "NaN and Inf in raw_input_contents", BINARY_OUT, expect("OK"), Door.GRPC),
)

BINARY = (
    Case("4a", f"{HEADER}: abc", header("abc"), NAMES_HEADER),
    Case("4b", f"{HEADER}: −1", header("-1"), NAMES_HEADER),
    Case("4c", f"{HEADER} one more than the body", header(None), NAMES_HEADER),
    Case("4d", f"{HEADER}: 99999999999, 2^64", (header("99999999999"), header(str(2**64))), NAMES_HEADER),
    Case("4e", "a binary body without the header", infers(_without_header), BAD),
    Case("5a", "header length 0 with a raw binary body", RAW, FINE),
    Case("5b", "header length 0 with the wrong number of bytes", RAW_WRONG_SIZE, BAD),
    Case("5c", "header length 0, model with several inputs", RAW_SEVERAL, BAD),
    Case("5d", "header length 0, several variable dimensions", RAW_VARIABLE, BAD),
    Case("6a", "binary_data_size less than the bytes of the shape", declared(-4, -4), TWO_NUMBERS),
    Case("6b", "binary_data_size more than the bytes of the shape", declared(4, 4), TWO_NUMBERS),
    Case("6c", "binary_data_size more than the body has", (declared(0, -4), declared(4, 0)), TWO_NUMBERS),
    Case("6d", "trailing bytes after the tensors", declared(0, 9), TWO_NUMBERS),
    Case("6e", "binary_data_size negative, a text, 2^63",
         (declared_as(-1), declared_as("12"), declared_as(2**63)), BAD),
    Case("6f", "raw_input_contents shorter and longer than the shape",
         (declared(0, -4), declared(0, 4)), GRPC_TWO_NUMBERS, Door.GRPC),
    Case("6g", "more and fewer raw_input_contents than inputs",
         infers(lambda request: request.blobs.append(b"\x00" * 16), lambda request: request.blobs.clear()),
         BAD_GRPC, Door.GRPC),
    Case("6h", "contents and raw_input_contents together", infers(_mixed), BAD_GRPC, Door.GRPC),
)
# fmt: on

SECTIONS = (
    Section("JSON", "RFC 8259 allows limits and has no NaN; what cannot be read is the client's error.", JSON),
    Section("Binary tensors", "The binary extension's sizes must fit the shape and the body, to the byte.", BINARY),
)
