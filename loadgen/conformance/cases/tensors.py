"""Cases 18 to 21 and 23: requests that contradict the model's signature, through HTTP and gRPC from one list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loadgen.conformance.case import Case
from loadgen.conformance.grpc_calls import infer_message
from loadgen.conformance.model import Body, Model, binary_body, json_body, tensor_bytes
from loadgen.conformance.probes import BAD, BAD_GRPC, grpc_infers, grpc_refusal, infers, refusal
from loadgen.conformance.records import Door, NotApplicableError

MANY_OUTPUTS = 5000
OVERFLOWING = 2**33
SHORT_PREFIX = b"\x10\x00\x00\x00abc"
"""A length prefix that promises more bytes than follow."""


def _entry(model: Model, data: bytes | None = None, **changes: Any) -> Body:
    """One input whose entry is changed; its data stays as it is unless given."""
    blob = tensor_bytes(model.arrays(1)[model.inputs[0].name]) if data is None else data
    first = {**model.entries()[0], "parameters": {"binary_data_size": len(blob)}, **changes}
    rest = model.entries()[1:]
    blobs = [tensor_bytes(array) for array in list(model.arrays(1).values())[1:]]
    for entry, other in zip(rest, blobs, strict=True):
        entry["parameters"] = {"binary_data_size": len(other)}
    return binary_body({"inputs": [first, *rest]}, [blob, *blobs])


def _message_entry(model: Model, data: bytes | None = None, **changes: Any) -> Any:
    message = infer_message(model)
    for field, value in changes.items():
        if field == "shape":
            del message.inputs[0].shape[:]
            message.inputs[0].shape.extend(value)
        else:
            setattr(message.inputs[0], field, value)
    if data is not None:
        message.raw_input_contents[0] = data
    return message


def _outputs(model: Model, *names: str) -> Body:
    return model.binary(outputs=[{"name": name, "parameters": {"binary_data": True}} for name in names])


def _message_outputs(model: Model, *names: str) -> Any:
    message = infer_message(model)
    for name in names:
        message.outputs.add(name=name)
    return message


def _twice(model: Model) -> Body:
    document_inputs = model.entries() * 2
    blobs = [tensor_bytes(array) for array in model.arrays(1).values()] * 2
    for entry, blob in zip(document_inputs, blobs, strict=True):
        entry["parameters"] = {"binary_data_size": len(blob)}
    return binary_body({"inputs": [dict(entry) for entry in document_inputs]}, blobs)


def _message_twice(model: Model) -> Any:
    message = infer_message(model)
    message.inputs.extend(list(message.inputs))
    message.raw_input_contents.extend(list(message.raw_input_contents))
    return message


def _additional(model: Model) -> Body:
    body = model.entries()
    blobs = [tensor_bytes(array) for array in model.arrays(1).values()]
    for entry, blob in zip(body, blobs, strict=True):
        entry["parameters"] = {"binary_data_size": len(blob)}
    body.append({"name": "no_such", "shape": [1, 1], "datatype": "FP32", "parameters": {"binary_data_size": 4}})
    return binary_body({"inputs": body}, [*blobs, b"\x00" * 4])


def _message_additional(model: Model) -> Any:
    message = infer_message(model)
    message.inputs.add(name="no_such", datatype="FP32", shape=[1, 1])
    message.raw_input_contents.append(b"\x00" * 4)
    return message


def _no_inputs(model: Model) -> Any:
    message = infer_message(model)
    del message.inputs[:]
    del message.raw_input_contents[:]
    return message


def _shape(model: Model, change: Callable[[list[int]], list[int]]) -> list[int]:
    return change(model.shape(model.inputs[0], 1))


def _needs_batch(model: Model) -> None:
    if not model.batches:
        raise NotApplicableError("the model does not batch")


def _too_many(model: Model) -> int:
    _needs_batch(model)
    if not model.max_batch_size:
        raise NotApplicableError("the server does not say its largest batch")
    return model.max_batch_size + 1


def _batch(model: Model, rows: int) -> Body:
    return _entry(model, b"\x00" * (model.item_bytes * rows), shape=model.shape(model.inputs[0], rows))


def _message_batch(model: Model, rows: int) -> Any:
    return _message_entry(model, b"\x00" * (model.item_bytes * rows), shape=model.shape(model.inputs[0], rows))


def _batch_zero(model: Model) -> int:
    _needs_batch(model)
    return 0


def _unequal(model: Model) -> Body:
    if len(model.inputs) < 2:
        raise NotApplicableError("the model has one input")
    return _entry(model, tensor_bytes(model.arrays(2)[model.inputs[0].name]), shape=model.shape(model.inputs[0], 2))


def _other_datatype(model: Model) -> str:
    return "INT32" if model.inputs[0].datatype != "INT32" else "FP32"


def _bytes_shape(model: Model) -> list[int]:
    return model.shape(model.inputs[0], 1) if model.inputs[0].datatype == "BYTES" else [1, 1]


def _fp16_json(model: Model) -> Body:
    entry = {**model.entries()[0], "datatype": "FP16", "shape": [1, 2], "data": [1.0, 2.0]}
    return json_body({"inputs": [entry]})


def _pair(
    number: str,
    title: str,
    http: tuple[Callable[[Model], Body], ...],
    grpc: tuple[Callable[[Model], Any], ...],
    *mentions: tuple[str, ...],
) -> tuple[Case, Case]:
    """The same case at both doors; the gRPC one has a g at its end."""
    return (
        Case(number=number, title=title, probe=infers(*http), expected=refusal(*mentions) if mentions else BAD),
        Case(
            number=f"{number}g",
            title=title,
            door=Door.GRPC,
            probe=grpc_infers(*grpc),
            expected=grpc_refusal(*mentions) if mentions else BAD_GRPC,
        ),
    )


_DIMS = ("dim", "shape", "batch")

CASES = (
    *_pair(
        "18a",
        "unknown input in place of a known one",
        (lambda m: _entry(m, name="no_such"),),
        (lambda m: _message_entry(m, name="no_such"),),
        ("input",),
    ),
    *_pair("18b", "an input too many", (_additional,), (_message_additional,), ("input",)),
    *_pair("18c", "the same input twice", (_twice,), (_message_twice,)),
    Case(
        number="18dg",
        title="no inputs",
        door=Door.GRPC,
        probe=grpc_infers(_no_inputs),
        expected=grpc_refusal(("input",)),
    ),
    *_pair(
        "18e",
        "unknown output",
        (lambda m: _outputs(m, "no_such"),),
        (lambda m: _message_outputs(m, "no_such"),),
        ("output",),
    ),
    *_pair(
        "18f",
        "the same output twice",
        (lambda m: _outputs(m, m.outputs[0].name, m.outputs[0].name),),
        (lambda m: _message_outputs(m, m.outputs[0].name, m.outputs[0].name),),
        ("output",),
    ),
    *_pair(
        "18h",
        f"{MANY_OUTPUTS:,} outputs",
        (
            lambda m: _outputs(m, *(f"out{i}" for i in range(MANY_OUTPUTS))),
            lambda m: _outputs(m, *[m.outputs[0].name] * MANY_OUTPUTS),
        ),
        (lambda m: _message_outputs(m, *(f"out{i}" for i in range(MANY_OUTPUTS))),),
        ("output",),
    ),
    *_pair(
        "19a",
        "a negative dimension",
        (
            lambda m: _entry(m, shape=_shape(m, lambda s: [*s[:-1], -s[-1]])),
            lambda m: _entry(m, shape=_shape(m, lambda s: [-1, *s[1:]])),
        ),
        (
            lambda m: _message_entry(m, shape=_shape(m, lambda s: [*s[:-1], -s[-1]])),
            lambda m: _message_entry(m, shape=_shape(m, lambda s: [-1, *s[1:]])),
        ),
    ),
    *_pair(
        "19b",
        "a shape whose product overflows 64 bits",
        (
            lambda m: _entry(m, shape=_shape(m, lambda s: [OVERFLOWING, *[OVERFLOWING] * len(s[1:2]), *s[2:]])),
            lambda m: _entry(m, shape=[2**62, *m.shape(m.inputs[0], 1)[1:]]),
        ),
        (
            lambda m: _message_entry(m, shape=_shape(m, lambda s: [OVERFLOWING, *[OVERFLOWING] * len(s[1:2]), *s[2:]])),
            lambda m: _message_entry(m, shape=[2**62, *m.shape(m.inputs[0], 1)[1:]]),
        ),
        ("overflow", "exceed", "too large", "maximum"),
    ),
    Case(
        number="19c",
        title="a dimension of 2^64",
        probe=infers(lambda m: _entry(m, shape=_shape(m, lambda s: [2**64, *s[1:]]))),
        expected=BAD,
    ),
    *_pair(
        "20a",
        "another dtype",
        (lambda m: _entry(m, datatype=_other_datatype(m)),),
        (lambda m: _message_entry(m, datatype=_other_datatype(m)),),
        ("datatype", "data-type", "dtype", "data type", "FP32"),
    ),
    *_pair(
        "20b",
        "unknown dtype",
        (lambda m: _entry(m, datatype="FP33"), lambda m: _entry(m, datatype="")),
        (lambda m: _message_entry(m, datatype="FP33"), lambda m: _message_entry(m, datatype="")),
    ),
    *_pair(
        "20c",
        "wrong rank",
        (
            lambda m: _entry(m, shape=_shape(m, lambda s: [*s, 1])),
            lambda m: _entry(m, shape=_shape(m, lambda s: [s[0] * s[-1], *s[1:-1]])),
            lambda m: _entry(m, shape=[]),
        ),
        (
            lambda m: _message_entry(m, shape=_shape(m, lambda s: [*s, 1])),
            lambda m: _message_entry(m, shape=_shape(m, lambda s: [s[0] * s[-1], *s[1:-1]])),
            lambda m: _message_entry(m, shape=[]),
        ),
        _DIMS,
    ),
    *_pair(
        "20d",
        "wrong dimensions",
        (lambda m: _entry(m, shape=_shape(m, lambda s: [*s[:-1], s[-1] + 1])),),
        (lambda m: _message_entry(m, shape=_shape(m, lambda s: [*s[:-1], s[-1] + 1])),),
        ("expected", "size", "shape"),
    ),
    *_pair("21a", "batch 0", (lambda m: _batch(m, _batch_zero(m)),), (lambda m: _message_batch(m, _batch_zero(m)),)),
    *_pair(
        "21b",
        "a batch larger than the largest",
        (lambda m: _batch(m, _too_many(m)),),
        (lambda m: _message_batch(m, _too_many(m)),),
        ("batch",),
    ),
    Case(number="21c", title="inputs with different batch sizes", probe=infers(_unequal), expected=BAD),
    *_pair(
        "23a",
        "BYTES with a short length prefix",
        (
            lambda m: _entry(m, SHORT_PREFIX, datatype="BYTES", shape=_bytes_shape(m)),
            lambda m: _entry(m, b"\x10\x00", datatype="BYTES", shape=_bytes_shape(m)),
        ),
        (
            lambda m: _message_entry(m, SHORT_PREFIX, datatype="BYTES", shape=_bytes_shape(m)),
            lambda m: _message_entry(m, b"\x10\x00", datatype="BYTES", shape=_bytes_shape(m)),
        ),
    ),
    Case(number="23b", title="FP16 through JSON", probe=infers(_fp16_json), expected=BAD),
)
