"""Cases 4 to 6: the header that says where the JSON ends, and how many bytes the tensors have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from loadgen.conformance.case import Case
from loadgen.conformance.grpc_calls import infer_message
from loadgen.conformance.model import Body, Model, binary_body, tensor_bytes
from loadgen.conformance.probes import BAD, FINE, grpc_infers, grpc_refusal, infers, refusal
from loadgen.conformance.records import Door, Expectation, NotApplicableError

HEADER = "Inference-Header-Content-Length"


def _header(model: Model, value: str | None) -> Body:
    body = model.binary()
    headers = {**body.headers, HEADER: value if value is not None else str(len(body.content) + 1)}
    return Body(headers, body.content)


def _without_header(model: Model) -> Body:
    body = model.binary()
    return Body({"Content-Type": "application/octet-stream"}, body.content)


def raw(content: bytes) -> Body:
    """Triton's raw request: no JSON at all."""
    return Body({"Content-Type": "application/octet-stream", HEADER: "0"}, content)


def _raw_tensor(model: Model) -> Body:
    if len(model.inputs) != 1 or sum(size < 0 for size in model.inputs[0].shape) > 1:
        raise NotApplicableError("needs a model with one input and no variable dimension but the batch")
    array = next(iter(model.arrays(1).values()))
    return raw(array.ravel()[0] if model.inputs[0].datatype == "BYTES" else tensor_bytes(array))


def _raw_wrong_size(model: Model) -> Body:
    return replace(_raw_tensor(model), content=b"\x00" * 7)


def _raw_several_inputs(model: Model) -> Body:
    if len(model.inputs) < 2:
        raise NotApplicableError("the model has one input")
    return raw(b"\x00" * 64)


def _raw_variable(model: Model) -> Body:
    if len(model.inputs) != 1 or sum(size < 0 for size in model.inputs[0].shape) < 2:
        raise NotApplicableError("the model has no variable dimension but the batch")
    return raw(b"\x00" * 64)


def _declared(model: Model, declared: int | None, sent: int | None = None) -> Body:
    """One binary tensor whose declared and sent sizes differ from the shape's by these many bytes."""
    blobs = [tensor_bytes(array) for array in model.arrays(1).values()]
    entries = model.entries()
    for entry, blob in zip(entries, blobs, strict=True):
        entry["parameters"] = {"binary_data_size": len(blob)}
    size = len(blobs[-1])
    if declared is not None:
        entries[-1]["parameters"] = {"binary_data_size": size + declared}
    blobs[-1] = (blobs[-1] + b"\x00" * 64)[: size + (sent or 0)]
    return binary_body({"inputs": entries}, blobs)


def _size_type(model: Model, value: object) -> Body:
    entries = model.entries()
    for entry in entries:
        entry["parameters"] = {"binary_data_size": value}
    return binary_body({"inputs": entries}, [b"\x00" * model.item_bytes])


def _message(model: Model, change: int) -> Any:
    message = infer_message(model)
    content = message.raw_input_contents[0]
    message.raw_input_contents[0] = content[:change] if change < 0 else content + b"\x00" * change
    return message


def _contents_count(model: Model, extra: bool) -> Any:
    message = infer_message(model)
    if extra:
        message.raw_input_contents.append(b"\x00" * 16)
    else:
        del message.raw_input_contents[:]
    return message


def _mixed(model: Model) -> Any:
    message = infer_message(model)
    message.inputs[0].contents.fp32_contents.extend([0.0] * 4)
    return message


_NAMES_HEADER = refusal((HEADER,))
_TWO_NUMBERS = Expectation(statuses=("400",), numbers=2)

CASES = (
    Case(
        number="4a",
        title=f"{HEADER}: abc",
        probe=infers(lambda m: _header(m, "abc")),
        expected=_NAMES_HEADER,
    ),
    Case(
        number="4b",
        title=f"{HEADER}: −1",
        probe=infers(lambda m: _header(m, "-1")),
        expected=_NAMES_HEADER,
    ),
    Case(
        number="4c",
        title=f"{HEADER} one more than the body",
        probe=infers(lambda m: _header(m, None)),
        expected=_NAMES_HEADER,
    ),
    Case(
        number="4d",
        title=f"{HEADER}: 99999999999, 2^64",
        probe=infers(lambda m: _header(m, "99999999999"), lambda m: _header(m, str(2**64))),
        expected=_NAMES_HEADER,
    ),
    Case(
        number="4e",
        title="a binary body without the header",
        probe=infers(_without_header),
        expected=BAD,
    ),
    Case(
        number="5a",
        title="header length 0 with a raw binary body",
        probe=infers(_raw_tensor),
        expected=FINE,
    ),
    Case(
        number="5b",
        title="header length 0 with the wrong number of bytes",
        probe=infers(_raw_wrong_size),
        expected=BAD,
    ),
    Case(
        number="5c",
        title="header length 0, model with several inputs",
        probe=infers(_raw_several_inputs),
        expected=BAD,
    ),
    Case(
        number="5d",
        title="header length 0, several variable dimensions",
        probe=infers(_raw_variable),
        expected=BAD,
    ),
    Case(
        number="6a",
        title="binary_data_size less than the bytes of the shape",
        probe=infers(lambda m: _declared(m, -4, -4)),
        expected=_TWO_NUMBERS,
    ),
    Case(
        number="6b",
        title="binary_data_size more than the bytes of the shape",
        probe=infers(lambda m: _declared(m, 4, 4)),
        expected=_TWO_NUMBERS,
    ),
    Case(
        number="6c",
        title="binary_data_size more than the body has",
        probe=infers(lambda m: _declared(m, None, -4), lambda m: _declared(m, 4, 0)),
        expected=_TWO_NUMBERS,
    ),
    Case(
        number="6d",
        title="trailing bytes after the tensors",
        probe=infers(lambda m: _declared(m, None, 9)),
        expected=_TWO_NUMBERS,
    ),
    Case(
        number="6e",
        title="binary_data_size negative, a text, 2^63",
        probe=infers(lambda m: _size_type(m, -1), lambda m: _size_type(m, "12"), lambda m: _size_type(m, 2**63)),
        expected=BAD,
    ),
    Case(
        number="6f",
        title="raw_input_contents shorter and longer than the shape",
        door=Door.GRPC,
        probe=grpc_infers(lambda m: _message(m, -4), lambda m: _message(m, 4)),
        expected=Expectation(statuses=("INVALID_ARGUMENT",), numbers=2),
    ),
    Case(
        number="6g",
        title="more and fewer raw_input_contents than inputs",
        door=Door.GRPC,
        probe=grpc_infers(lambda m: _contents_count(m, True), lambda m: _contents_count(m, False)),
        expected=grpc_refusal(),
    ),
    Case(
        number="6h",
        title="contents and raw_input_contents together",
        door=Door.GRPC,
        probe=grpc_infers(_mixed),
        expected=grpc_refusal(),
    ),
)
