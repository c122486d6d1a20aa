"""Cases 18 to 21 and 23: requests that contradict the model's metadata, through HTTP and gRPC from one row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loadgen.conformance.case import Case, Infer, Section, both, infers, spoils
from loadgen.conformance.model import InferenceRequest, json_body, tensor_bytes
from loadgen.conformance.records import Door, NotApplicableError, expect

MANY_OUTPUTS = 5000
Shape = list[int]


@spoils
def changed(request: InferenceRequest, /, **members: Any) -> None:
    """The first input with these members; a function is given the old value."""
    entry = request.entries[0]
    entry.update((name, value(entry[name]) if callable(value) else value) for name, value in members.items())


def shapes(*changes: Callable[[Shape], Shape]) -> tuple[Infer, ...]:
    """The first input with another shape, its data unchanged."""
    return tuple(changed(shape=change) for change in changes)


@spoils
def outputs(request: InferenceRequest, *names: str) -> None:
    """These outputs asked for; an empty name is the model's first."""
    first = request.model.outputs[0].name
    request.document["outputs"] = [{"name": name or first, "parameters": {"binary_data": True}} for name in names]


@spoils
def batch(request: InferenceRequest, rows: int | None) -> None:
    """So many rows; None is one more than the model takes."""
    model = request.model
    if not model.batches:
        raise NotApplicableError("the model does not batch")
    if rows is None and not model.max_batch_size:
        raise NotApplicableError("the server does not say its largest batch")
    count = (model.max_batch_size or 0) + 1 if rows is None else rows
    request.entries[0]["shape"] = model.shape(model.inputs[0], count)
    request.blobs[0] = b"\x00" * (model.item_bytes * count)


@spoils
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
    return "INT32" if datatype != "INT32" else "FP32"


def _unequal(request: InferenceRequest) -> None:
    model = request.model
    if len(model.inputs) < 2:
        raise NotApplicableError("the model has one input")
    request.entries[0]["shape"] = model.shape(model.inputs[0], 2)
    request.blobs[0] = tensor_bytes(model.arrays(2)[0])


def _fp16_json(request: InferenceRequest) -> Any:
    return json_body({"inputs": [{**request.entries[0], "datatype": "FP16", "shape": [1, 2], "data": [1.0, 2.0]}]})


BAD = expect("400")
NO_INPUT, NO_OUTPUT = expect("INVALID_ARGUMENT", naming=("input",)), expect("INVALID_ARGUMENT", naming=("output",))
UNKNOWN_OUTPUTS = outputs(*(f"out{index}" for index in range(MANY_OUTPUTS)))
SAME_OUTPUTS = outputs(*[""] * MANY_OUTPUTS)
NEGATIVE = shapes(lambda s: [*s[:-1], -s[-1]], lambda s: [-1, *s[1:]])
TOO_LARGE = shapes(lambda s: [2**33, *[2**33] * len(s[1:2]), *s[2:]], lambda s: [2**62, *s[1:]])
WRONG_RANK = shapes(lambda s: [*s, 1], lambda s: [s[0] * s[-1], *s[1:-1]], lambda _: [])
TOO_LARGE_WORDS = ("overflow", "exceed", "too large", "maximum")
DATATYPE_WORDS = ("datatype", "data-type", "dtype", "data type", "FP32")

# fmt: off
CASES = (
    *both("18a", "unknown input in place of a known one", changed(name="no_such"), "input"),
    *both("18b", "an input too many", infers(_added), "input"),
    *both("18c", "the same input twice", infers(_twice)),
    Case("18dg", "no inputs", infers(_no_inputs), NO_INPUT, Door.GRPC),
    *both("18e", "unknown output", outputs("no_such"), "output"),
    *both("18f", "the same output twice", outputs("", ""), "output"),
    Case("18h", f"{MANY_OUTPUTS:,} outputs", (UNKNOWN_OUTPUTS, SAME_OUTPUTS), expect("400", naming=("output",))),
    Case("18hg", f"{MANY_OUTPUTS:,} outputs", UNKNOWN_OUTPUTS, NO_OUTPUT, Door.GRPC),
    *both("19a", "a negative dimension", NEGATIVE),
    *both("19b", "a shape whose product overflows 64 bits", TOO_LARGE, *TOO_LARGE_WORDS),
    Case("19c", "a dimension of 2^64", shapes(lambda s: [2**64, *s[1:]]), BAD),
    *both("20a", "another dtype", changed(datatype=_other_datatype), *DATATYPE_WORDS),
    *both("20b", "unknown dtype", (changed(datatype="FP33"), changed(datatype=""))),
    *both("20c", "wrong rank", WRONG_RANK, "dim", "shape", "batch"),
    *both("20d", "wrong dimensions", shapes(lambda s: [*s[:-1], s[-1] + 1]), "expected", "size", "shape"),
    *both("21a", "batch 0", batch(0)),
    *both("21b", "a batch larger than the largest", batch(None), "batch"),
    Case("21c", "inputs with different batch sizes", infers(_unequal), BAD),
    *both("23a", "BYTES with a short length prefix", (bytes_of(b"\x10\x00\x00\x00abc"), bytes_of(b"\x10\x00"))),
    Case("23b", "FP16 through JSON", infers(_fp16_json), BAD),
)
# fmt: on

SECTIONS = (Section("Tensors", "What contradicts the model's metadata is refused before it is executed.", CASES),)
