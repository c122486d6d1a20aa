"""Cases 18 to 21, 23 and 25 to 27: requests that contradict the model's metadata, and images that cannot be decoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from loadgen.client.inputs import NUMPY_TYPES
from loadgen.conformance.case import Case, Section, Send, both, changes, infers
from loadgen.conformance.model import InferenceRequest, claiming_jpeg, flat_jpeg, flat_png, json_body, tensor_bytes
from loadgen.conformance.records import Answer, NotApplicableError, Protocol
from loadgen.conformance.servers import WITH_IMAGES
from loadgen.conformance.subject import Subject

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


def _added(request: InferenceRequest) -> None:
    request.entries.append({"name": "no_such", "shape": [1, 1], "datatype": "FP32"})
    request.blobs.append(b"\x00" * 4)


def _twice(request: InferenceRequest) -> None:
    request.entries *= 2
    request.blobs *= 2


def _no_inputs(request: InferenceRequest) -> None:
    request.entries, request.blobs = [], []


def _other_datatype(datatype: str) -> str:
    """One whose elements have the same size, so that nothing else is wrong."""
    size = np.dtype(NUMPY_TYPES.get(datatype, np.float32)).itemsize
    return next(name for name, kind in NUMPY_TYPES.items() if name != datatype and np.dtype(kind).itemsize == size)


def _unequal(request: InferenceRequest) -> None:
    model = request.model
    if len(model.inputs) < 2:
        raise NotApplicableError("the model has one input")
    request.entries[0]["shape"] = model.shape(model.inputs[0], 2)
    request.blobs[0] = tensor_bytes(model.arrays(2)[0])


def _fp16_json(request: InferenceRequest) -> Any:
    return json_body({"inputs": [{**request.entries[0], "datatype": "FP16", "shape": [1, 2], "data": [1.0, 2.0]}]})


def image(make: bytes | Callable[[], bytes]) -> Send:
    """A request with this encoded image, which a function makes when it is sent."""

    def send(subject: Subject, _: Protocol) -> Answer:
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
    *both("18a", "unknown input instead of a known one", changed(name="no_such"), "input"),
    *both("18b", "one input too many", infers(_added), "input"),
    *both("18c", "the same input twice", infers(_twice)),
    Case("18dg", "no inputs", infers(_no_inputs), "INVALID_ARGUMENT", naming=("input",)),
    *both("18e", "unknown output", outputs("no_such"), "output"),
    *both("18f", "the same output twice", outputs("", ""), "output"),
    Case("18h", f"{MANY_OUTPUTS:,} outputs", (UNKNOWN_OUTPUTS, SAME_OUTPUTS), "400", naming=("output",)),
    Case("18hg", f"{MANY_OUTPUTS:,} outputs", UNKNOWN_OUTPUTS, "INVALID_ARGUMENT", naming=("output",)),
    *both("19a", "a negative dimension", NEGATIVE),
    *both("19b", "a shape whose product overflows 64 bits", OVERFLOWING, *OVERFLOW_WORDS),
    Case("19c", "a dimension of 2^64", shapes(lambda s: [2**64, *s[1:]]), "400"),
    *both("20a", "another dtype", changed(datatype=_other_datatype), *DATATYPE_WORDS),
    *both("20b", "unknown dtype", (changed(datatype="FP33"), changed(datatype=""))),
    *both("20c", "wrong rank", WRONG_RANK, "dim", "shape", "batch"),
    *both("20d", "wrong dimensions", shapes(lambda s: [*s[:-1], s[-1] + 1]), "expected", "size", "shape"),
    *both("21a", "batch 0", batch(0)),
    *both("21b", "a batch larger than the maximum", batch(None), "batch"),
    Case("21c", "inputs with different batch sizes", infers(_unequal), "400"),
    *both("23a", "BYTES with a short length prefix", (bytes_of(b"\x10\x00\x00\x00abc"), bytes_of(b"\x10\x00"))),
    Case("23b", "FP16 through JSON", infers(_fp16_json), "400"),
)

ENCODED_IMAGES = (
    Case("25", f"JPEG header claiming {CLAIMED_PIXELS}×{CLAIMED_PIXELS} in {CLAIMING_BYTES} bytes",
         image(claiming_jpeg(CLAIMED_PIXELS, CLAIMED_PIXELS, CLAIMING_BYTES)), "400", peak_mib=16, destructive=True,
         warm_up=lambda subject: image(JPEG)(subject, Protocol.HTTP), **IMAGES),
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

SECTIONS = (
    Section("Tensors", "A request that contradicts the model's metadata is refused before it is executed.", TENSORS),
    Section("Images", "A decoder checks the size of an image before it allocates memory for it.", ENCODED_IMAGES),
)
