"""Cases 1 to 6, 18 to 21, 23 and 25 to 27: unreadable JSON, wrong sizes, tensors that contradict the model, images."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from loadgen.client.inputs import NUMPY_TYPES
from loadgen.conformance.case import Case, Send, Theme, changes, infers, over_both
from loadgen.conformance.model import (
    HEADER,
    Body,
    InferenceRequest,
    claiming_jpeg,
    flat_jpeg,
    flat_png,
    json_body,
    tensor_bytes,
)
from loadgen.conformance.records import Fact, NotApplicableError, Protocol, Response
from loadgen.conformance.servers import WITH_IMAGES, Subject
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
def special_values(request: InferenceRequest, *, binary_response: bool) -> None:
    """NaN and the infinities as the first values of a binary tensor."""
    values = np.frombuffer(request.blobs[0], NUMPY_TYPES[_float_entry(request)["datatype"]]).copy()
    values[: len(SPECIAL)] = SPECIAL[: values.size]
    request.blobs[0] = values.tobytes()
    request.document["parameters"] = {"binary_data_output": binary_response}


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


def parseable(_: Subject, responses: Sequence[Response]) -> Fact:
    """Whether the answer is valid JSON."""
    try:
        response_json(responses[0])
    except (ValueError, RecursionError) as exc:
        return Fact("the answer is valid JSON", False, str(exc)[:80])
    return Fact("the answer is valid JSON", True, "yes")


def response_json(response: Response) -> Any:
    """The JSON of an answer, with or without tensors behind it. Raises `ValueError`, `RecursionError`."""
    length = response.headers.get(HEADER.lower())
    return json.loads(response.body[: int(length)] if length else response.body)


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
    Case("3b", "NaN and Inf in a binary tensor, outputs in JSON", special_values(binary_response=False), "200",
         note="valid JSON", facts=(parseable,)),
    Case("3c", "NaN and Inf in a binary tensor, outputs in binary", special_values(binary_response=True), "200"),
    Case("3d", "NaN and Inf in raw_input_contents", special_values(binary_response=True), "OK"),
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


MANY_OUTPUTS = 5000
CLAIMED_PIXELS, CLAIMING_BYTES = 65_500, 692
HUGE_WIDTH, HUGE_HEIGHT = 10_000, 8_000
JPEG = flat_jpeg(224, 224)
Shape = list[int]


@changes
def changed(request: InferenceRequest, /, **members: Any) -> None:
    """The first input with these members; a function gets the old value."""
    entry = request.entries[0]
    entry.update((name, value(entry[name]) if callable(value) else value) for name, value in members.items())


def shapes(*changes_of_shape: Callable[[Shape], Shape]) -> tuple[Send, ...]:
    """The first input with another shape, its data unchanged."""
    return tuple(changed(shape=change) for change in changes_of_shape)


@changes
def outputs(request: InferenceRequest, *names: str) -> None:
    """Request these outputs; an empty name is the model's first."""
    first = request.model.outputs[0].name
    request.document["outputs"] = [{"name": name or first, "parameters": {"binary_data": True}} for name in names]


@changes
def batch(request: InferenceRequest, rows: int | None) -> None:
    """Inputs with this number of rows; None means one more than the model accepts."""
    model = request.model
    if not model.batches:
        raise NotApplicableError("the model does not batch")
    if rows is None and not model.max_batch_size:
        raise NotApplicableError("the server does not report its largest batch")
    count = (model.max_batch_size or 0) + 1 if rows is None else rows
    for index, entry in enumerate(request.entries):
        entry["shape"] = model.shape(model.inputs[index], count)
        request.blobs[index] *= count


@changes
def bytes_of(request: InferenceRequest, data: bytes) -> None:
    """A BYTES tensor of one element with this content."""
    first = request.entries[0]
    shape = first["shape"] if first["datatype"] == "BYTES" else [1, 1]
    first.update(datatype="BYTES", shape=shape)
    request.blobs[0] = data


@changes
def inputs_times(request: InferenceRequest, times: int) -> None:
    """All inputs so many times."""
    request.entries *= times
    request.blobs *= times


def _added(request: InferenceRequest) -> None:
    request.entries.append({"name": "no_such", "shape": [1, 1], "datatype": "FP32"})
    request.blobs.append(b"\x00" * 4)


def _other_datatype(datatype: str) -> str:
    """Another datatype whose elements have the same size, so that nothing else is wrong."""
    size = np.dtype(NUMPY_TYPES.get(datatype, np.float32)).itemsize
    return next(name for name, kind in NUMPY_TYPES.items() if name != datatype and np.dtype(kind).itemsize == size)


def _unequal(request: InferenceRequest) -> None:
    model = request.model
    if len(model.inputs) < 2:
        raise NotApplicableError("the model has one input")
    request.entries[0]["shape"] = model.shape(model.inputs[0], 2)
    request.blobs[0] = tensor_bytes(model.arrays(2)[0])


def image(make: bytes | Callable[[], bytes]) -> Send:
    """A request with this encoded image, which a function makes when it is sent."""

    def send(subject: Subject, _: Protocol) -> Response:
        model = subject.image_model
        if model is None:
            raise NotApplicableError("no model takes an encoded image; name one with --image-model")
        array = np.empty(model.shape(model.inputs[0], 1), object)
        array.fill(make if isinstance(make, bytes) else make())
        request = model.request(arrays=[array])
        return subject.infer(request.body(), path=request.path, deadline_s=60.0)

    return send


def flipped(position: int) -> bytes:
    """A JPEG with flipped bits in its coded blocks; a decoder that notices must refuse it."""
    data = bytearray(JPEG)
    data[-position] ^= 0x55
    return bytes(data)


UNKNOWN_OUTPUTS = outputs(*(f"out{index}" for index in range(MANY_OUTPUTS)))
SAME_OUTPUTS = outputs(*[""] * MANY_OUTPUTS)
NEGATIVE = shapes(lambda s: [*s[:-1], -s[-1]], lambda s: [-1, *s[1:]])
OVERFLOWING = shapes(lambda s: [2**33, *[2**33] * len(s[1:2]), *s[2:]], lambda s: [2**62, *s[1:]])
WRONG_RANK = shapes(lambda s: [*s, 1], lambda s: [s[0] * s[-1], *s[1:-1]], lambda _: [])
OVERFLOW_WORDS = ("overflow", "exceed", "too large", "maximum")
DATATYPE_WORDS = ("datatype", "data-type", "dtype", "data type", "FP32")
BIGGER = flat_jpeg(448, 448)
IMAGES: dict[str, Any] = {"setting": WITH_IMAGES}
DOCUMENTED = IMAGES | {"note": "a documented result"}

# fmt: off
TENSORS = (
    *over_both("18a", "unknown input instead of a known one", changed(name="no_such"), "input"),
    *over_both("18b", "one input too many", infers(_added), "input"),
    *over_both("18c", "the same input twice", inputs_times(2)),
    Case("18dg", "no inputs", inputs_times(0), "INVALID_ARGUMENT", naming=("input",)),
    *over_both("18e", "unknown output", outputs("no_such"), "output"),
    *over_both("18f", "the same output twice", outputs("", ""), "output"),
    Case("18h", f"{MANY_OUTPUTS:,} outputs", (UNKNOWN_OUTPUTS, SAME_OUTPUTS), "400", naming=("output",)),
    Case("18hg", f"{MANY_OUTPUTS:,} outputs", UNKNOWN_OUTPUTS, "INVALID_ARGUMENT", naming=("output",)),
    *over_both("19a", "a negative dimension", NEGATIVE),
    *over_both("19b", "a shape whose product overflows 64 bits", OVERFLOWING, *OVERFLOW_WORDS),
    Case("19c", "a dimension of 2^64", shapes(lambda s: [2**64, *s[1:]]), "400"),
    *over_both("20a", "another dtype", changed(datatype=_other_datatype), *DATATYPE_WORDS),
    *over_both("20b", "unknown dtype", (changed(datatype="FP33"), changed(datatype=""))),
    *over_both("20c", "wrong rank", WRONG_RANK, "dim", "shape", "batch"),
    *over_both("20d", "wrong dimensions", shapes(lambda s: [*s[:-1], s[-1] + 1]), "expected", "size", "shape"),
    *over_both("21a", "batch 0", batch(0)),
    *over_both("21b", "a batch larger than the maximum", batch(None), "batch"),
    Case("21c", "inputs with different batch sizes", infers(_unequal), "400"),
    *over_both("23a", "BYTES with a short length prefix", (bytes_of(b"\x10\x00\x00\x00abc"), bytes_of(b"\x10\x00"))),
    Case("23b", "FP16 through JSON", only_entry(datatype="FP16", shape=[1, 2], data=[1.0, 2.0]), "400"),
)

ENCODED_IMAGES = (
    Case("25", f"JPEG header claiming {CLAIMED_PIXELS}×{CLAIMED_PIXELS} in {CLAIMING_BYTES} bytes",
         image(claiming_jpeg(CLAIMED_PIXELS, CLAIMED_PIXELS, CLAIMING_BYTES)), "400", peak_mib=16, destructive=True,
         warm_up=lambda subject: image(JPEG)(subject, "http"), **IMAGES),
    Case("26", f"valid JPEG of {HUGE_WIDTH * HUGE_HEIGHT // 1_000_000} megapixels",
         image(lambda: flat_jpeg(HUGE_WIDTH, HUGE_HEIGHT)), "400", note="over the pixel limit", destructive=True,
         **IMAGES),
    Case("27a", "JPEG truncated at 80 %", image(BIGGER[: len(BIGGER) * 4 // 5]), "400", **IMAGES),
    Case("27b", "JPEG with flipped bits", tuple(image(flipped(place)) for place in (10, 30, 60)), "200 or 400",
         **DOCUMENTED),
    Case("27c", "bytes that are not an image; no bytes", (image(b"not an image"), image(b"")), "400", **IMAGES),
    Case("27d", "a PNG instead of a JPEG", image(flat_png(64, 64)), "200 or 400", **DOCUMENTED),
    Case("27e", "CMYK JPEG", image(flat_jpeg(224, 224, 4)), "200 or 400", **DOCUMENTED),
    Case("27f", "greyscale JPEG", image(flat_jpeg(224, 224, 1)), "200", **IMAGES),
)
# fmt: on

THEMES = (
    Theme("JSON", "RFC 8259 allows limits and has no NaN; unreadable JSON is the client's error.", JSON),
    Theme("Binary tensors", "The sizes of the binary extension must fit the shape and the body exactly.", BINARY),
    Theme("Tensors", "A request that contradicts the model's metadata is refused before it is executed.", TENSORS),
    Theme("Images", "A decoder checks the size of an image before it allocates memory for it.", ENCODED_IMAGES),
)
