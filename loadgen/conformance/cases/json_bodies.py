"""Cases 1 to 3: JSON that is malformed, nested too deep, or holds what JSON does not know."""

from __future__ import annotations

import json

import numpy as np

from loadgen.conformance.case import Case
from loadgen.conformance.grpc_calls import infer_message
from loadgen.conformance.model import Body, Model, binary_body, json_body, tensor_bytes
from loadgen.conformance.probes import BAD, FINE, FINE_GRPC, grpc_infers, infers
from loadgen.conformance.records import (
    Answer,
    Door,
    ErrorBody,
    Expectation,
    Fact,
    NotApplicableError,
    Observation,
)
from loadgen.conformance.subject import Subject

DEEP, DEEPEST = 120, 250_000
SPECIAL = (float("nan"), float("inf"), float("-inf"))
GARBAGE = b"\xff\xff\xff\xff\xff\xff\xff\xff"


def _float_input(model: Model) -> None:
    if len(model.inputs) != 1 or model.inputs[0].datatype not in {"FP32", "FP64"}:
        raise NotApplicableError("needs a model with one FP32 or FP64 input")


def _special_json(token: str) -> Body:
    return Body({"Content-Type": "application/json"}, token.encode())


def _json_with(model: Model, token: str) -> Body:
    _float_input(model)
    text = model.json().content.decode()
    return _special_json(text.replace('"data": [0', f'"data": [{token}', 1))


def special_values(model: Model, *, binary_answer: bool) -> Body:
    """A binary request whose first values are NaN and the infinities."""
    _float_input(model)
    array = model.arrays(1)[model.inputs[0].name]
    array.reshape(-1)[: len(SPECIAL)] = SPECIAL[: array.size]
    blob = tensor_bytes(array)
    entries = model.entries()
    entries[0]["parameters"] = {"binary_data_size": len(blob)}
    return binary_body({"inputs": entries, "parameters": {"binary_data_output": binary_answer}}, [blob])


def _json_answer(subject: Subject) -> Observation:
    answer = subject.infer(special_values(subject.model, binary_answer=False))
    return Observation((answer,), (_parseable(answer),))


def _parseable(answer: Answer) -> Fact:
    try:
        length = answer.headers.get("inference-header-content-length")
        json.loads(answer.body[: int(length)] if length else answer.body)
    except ValueError as exc:
        return Fact("the answer is parseable", False, str(exc)[:80])
    return Fact("the answer is parseable", True, "yes")


def _special_message(model: Model) -> object:
    _float_input(model)
    message = infer_message(model)
    values = np.frombuffer(message.raw_input_contents[0], np.float32).copy()
    values[: len(SPECIAL)] = SPECIAL[: values.size]
    message.raw_input_contents[0] = values.tobytes()
    return message


def _nested(depth: int, *, closed: bool) -> Body:
    return json_body(b'{"inputs": ' + b"[" * depth + (b"]" * depth + b"}" if closed else b""))


def _nested_data(model: Model) -> Body:
    document = {"inputs": [{**entry, "data": "@"} for entry in model.entries()]}
    return json_body(json.dumps(document).replace('"@"', "[" * DEEP + "0" + "]" * DEEP))


CASES = (
    Case(
        number="1a",
        title="malformed JSON",
        probe=infers(
            lambda _: json_body(b'{"inputs": ['),
            lambda _: json_body(b"not json at all"),
            lambda _: json_body(b'{"inputs": [}]}'),
            lambda _: json_body(b"\xff\xfe\x00\x01"),
        ),
        expected=BAD,
    ),
    Case(
        number="1b",
        title="empty body, empty object, no inputs",
        probe=infers(lambda _: json_body(b""), lambda _: json_body({}), lambda _: json_body({"inputs": []})),
        expected=BAD,
    ),
    Case(
        number="1c",
        title="JSON of the wrong type",
        probe=infers(
            lambda _: json_body([]),
            lambda _: json_body("1"),
            lambda _: json_body("null"),
            lambda _: json_body({"inputs": {}}),
            lambda _: json_body({"inputs": ["text"]}),
            lambda m: json_body({"inputs": [{**m.entries()[0], "name": 7, "data": [0]}]}),
            lambda m: json_body({"inputs": [{**m.entries()[0], "shape": "3", "data": [0]}]}),
            lambda m: json_body({"inputs": [{**m.entries()[0], "data": {"a": 1}}]}),
            lambda m: json_body({"inputs": [{**m.entries()[0], "data": ["text"]}]}),
        ),
        expected=BAD,
    ),
    Case(
        number="1d",
        title="a message that is no protobuf; an empty message",
        door=Door.GRPC,
        probe=grpc_infers(lambda _: GARBAGE, lambda _: b""),
        expected=Expectation(
            statuses=("INVALID_ARGUMENT", "INTERNAL", "NOT_FOUND"),
            error_body=ErrorBody.FRAMEWORK,
            note="INTERNAL is the RPC library's own",
        ),
    ),
    Case(
        number="2a",
        title=f"JSON nested {DEEP} deep",
        probe=infers(lambda _: _nested(DEEP, closed=True), _nested_data),
        expected=BAD,
    ),
    Case(
        number="2b",
        title=f"{DEEPEST:,} opening brackets",
        probe=infers(lambda _: _nested(DEEPEST, closed=False), lambda _: json_body(b"[" * DEEPEST)),
        expected=BAD,
        destructive=True,
    ),
    Case(
        number="2c",
        title=f"JSON nested {DEEPEST:,} deep, closed properly",
        probe=infers(lambda _: _nested(DEEPEST, closed=True)),
        expected=BAD,
        destructive=True,
    ),
    Case(
        number="3a",
        title="NaN and Infinity in a request's JSON",
        probe=infers(*(lambda m, token=token: _json_with(m, token) for token in ("NaN", "Infinity", "-Infinity"))),
        expected=FINE,
    ),
    Case(
        number="3b",
        title="NaN and Inf in a binary tensor, outputs in JSON",
        probe=_json_answer,
        expected=Expectation(statuses=("200",), note="parseable"),
    ),
    Case(
        number="3c",
        title="NaN and Inf in a binary tensor, outputs in binary",
        probe=infers(lambda m: special_values(m, binary_answer=True)),
        expected=FINE,
    ),
    Case(
        number="3d",
        title="NaN and Inf in raw_input_contents",
        door=Door.GRPC,
        probe=grpc_infers(_special_message),
        expected=FINE_GRPC,
    ),
)
