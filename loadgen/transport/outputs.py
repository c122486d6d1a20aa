"""The outputs of an inference answer, read from whatever a server has sent: arrays, or one `DocumentError`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from loadgen.documents import MOST_CHARACTERS, DocumentError, decode_json, one_line
from loadgen.transport.inputs import NUMPY_TYPES, Array

_MOST_JSON_BYTES = 2**26
_MOST_ELEMENTS = 2**20
"""Of an output of the datatype BYTES."""
_MOST_DIMENSIONS = 32
_BYTES_PREFIX = 4
_CONTENTS = {"FP16": "", "BF16": "", "FP32": "fp32", "FP64": "fp64", "INT64": "int64", "UINT64": "uint64",
             "BOOL": "bool", "BYTES": "bytes"}  # fmt: skip
"""Datatype → which field of gRPC's `InferTensorContents` holds it; the other integers are in `int` or `uint`."""

Size = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Parameters(msgspec.Struct):
    """Of an output; other parameters are not read."""

    binary_data_size: Size | None = None


class Output(msgspec.Struct):
    """One output as the answer's JSON names it."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    datatype: str
    shape: Annotated[list[Size], msgspec.Meta(max_length=_MOST_DIMENSIONS)]
    parameters: Parameters | None = None
    data: list[Any] | None = None


class _Document(msgspec.Struct):
    outputs: list[Output]


def read_document(content: bytes | memoryview) -> list[Output]:
    """The outputs that an answer's JSON names, each once. Raises `DocumentError`."""
    document: _Document = decode_json(content, _Document, most_bytes=_MOST_JSON_BYTES)
    return once_each(document.outputs)


def once_each(outputs: list[Output]) -> list[Output]:
    """Raises `DocumentError` where two have the same name, or one has a name that cannot be shown."""
    names = [output.name for output in outputs]
    if odd := next((name for name in names if not name.isprintable() or len(name) > MOST_CHARACTERS), None):
        raise DocumentError(f"it names an output {one_line(odd, 40)}, which cannot be shown")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DocumentError(f"the output {one_line(twice)} is there twice")
    return outputs


def read_body(body: memoryview, header_length: str | None) -> dict[str, Array]:
    """The outputs of an HTTP answer, whose JSON has `header_length` bytes, or is all of it. Raises `DocumentError`."""
    end = len(body)
    if header_length is not None:
        if not header_length.isascii() or not header_length.isdigit() or len(header_length) > 10:
            raise DocumentError("Inference-Header-Content-Length is no number")
        end = int(header_length)
        if end > len(body):
            raise DocumentError(f"Inference-Header-Content-Length is {end:,}, and the answer has {len(body):,} bytes")
    found = {}
    for output in read_document(body[:end]):
        size = None if output.parameters is None else output.parameters.binary_data_size
        if size is None:
            found[output.name] = read_values(output, output.data)
        else:
            if end + size > len(body):
                raise DocumentError(f"the output {_told(output)} announces {size:,} bytes, {len(body) - end:,} came")
            found[output.name] = read_tensor(output, body[end : end + size])
            end += size
    if header_length is not None and end < len(body):
        raise DocumentError(f"{len(body) - end:,} bytes follow its outputs")
    return found


def read_message(message: Any) -> dict[str, Array]:
    """The outputs of a gRPC `ModelInferResponse`. Raises `DocumentError`."""
    outputs = [Output(output.name, output.datatype, list(output.shape)) for output in message.outputs]
    raw = message.raw_output_contents
    if raw and len(raw) != len(outputs):
        raise DocumentError(f"it has {len(outputs)} outputs and the contents of {len(raw)}")
    found = {}
    for index, output in enumerate(once_each(outputs)):
        if len(output.shape) > _MOST_DIMENSIONS or any(not 0 <= size < 2**31 for size in output.shape):
            raise DocumentError(f"the output {one_line(output.name)} has an impossible shape")
        if raw:
            found[output.name] = read_tensor(output, memoryview(raw[index]))
            continue
        field = _CONTENTS.get(output.datatype, "uint" if output.datatype.startswith("U") else "int")
        contents = message.outputs[index].contents
        found[output.name] = read_values(output, list(getattr(contents, f"{field}_contents")) if field else None)
    return found


def byte_size(datatype: str, shape: Sequence[int]) -> int | None:
    """How long a tensor's binary form is. None where that is not fixed: BYTES, free dimensions, an unknown datatype."""
    numpy_type = "<u2" if datatype == "BF16" else NUMPY_TYPES.get(datatype)
    if numpy_type is None or any(size < 0 for size in shape):
        return None
    return math.prod(shape) * np.dtype(numpy_type).itemsize


def read_tensor(output: Output, data: memoryview) -> Array:
    """From the protocol's binary form; a copy. Raises `DocumentError`."""
    if output.datatype == "BYTES":
        return _array(output, _elements(output, data))
    dtype = np.dtype("<u2" if output.datatype == "BF16" else _numpy_type(output))
    expected = math.prod(output.shape) * dtype.itemsize
    if len(data) != expected:
        raise DocumentError(f"the output {_told(output)} has {len(data):,} bytes where its shape needs {expected:,}")
    values = np.frombuffer(data, dtype).reshape(output.shape)
    return (values.astype(np.uint32) << 16).view(np.float32) if output.datatype == "BF16" else values.copy()


def read_values(output: Output, values: list[Any] | None) -> Array:
    """From the numbers or texts of a JSON answer, flat or nested. Raises `DocumentError`."""
    if values is None:
        raise DocumentError(f"the output {_told(output)} holds no data")
    flat = _flat(values)
    if output.datatype == "BYTES":
        return _array(output, [text.encode() if isinstance(text, str) else text for text in flat])
    dtype = np.dtype(np.float32 if output.datatype == "BF16" else _numpy_type(output))
    kinds = {"f": (int, float), "b": (int, bool)}.get(dtype.kind, (int,))
    limits = np.iinfo(dtype) if dtype.kind in "iu" else None
    if not all(type(value) in kinds and (limits is None or limits.min <= value <= limits.max) for value in flat):
        raise DocumentError(f"the output {_told(output)} holds other values than {output.datatype}")
    with np.errstate(over="ignore"):  # what is too large for the datatype is infinite
        return _array(output, np.array(flat, np.float64 if dtype.kind == "f" else dtype).astype(dtype))


def _flat(values: list[Any], depth: int = _MOST_DIMENSIONS) -> list[Any]:
    if not any(isinstance(value, list) for value in values):
        return list(values)
    if depth == 0:
        raise DocumentError(f"its data is nested more than {_MOST_DIMENSIONS} deep")
    return [leaf for value in values for leaf in _flat(value if isinstance(value, list) else [value], depth - 1)]


def _array(output: Output, values: Array | list[Any]) -> Array:
    expected = math.prod(output.shape)
    if len(values) != expected:
        raise DocumentError(
            f"the output {_told(output)} holds {len(values):,} values where its shape needs {expected:,}"
        )
    if isinstance(values, list):
        found = np.empty(expected, dtype=object)
        found[:] = values
        values = found
    return values.reshape(output.shape)


def _elements(output: Output, data: memoryview) -> list[bytes]:
    """Of BYTES: each has its length before it, four bytes in little-endian order."""
    if math.prod(output.shape) > _MOST_ELEMENTS:
        raise DocumentError(f"the output {_told(output)} has more than {_MOST_ELEMENTS:,} elements")
    found, place = [], 0
    while place < len(data):
        start = place + _BYTES_PREFIX
        place = start + int.from_bytes(data[place:start], "little")
        if start > len(data) or place > len(data):
            raise DocumentError(f"the output {_told(output)} ends in the middle of an element")
        found.append(bytes(data[start:place]))
    return found


def _numpy_type(output: Output) -> str:
    found = NUMPY_TYPES.get(output.datatype)
    if found is None:
        raise DocumentError(f"the output {_told(output)} has a datatype that the protocol does not know")
    return found


def _told(output: Output) -> str:
    return one_line(f"{output.name} ({output.datatype} {output.shape})", 120)
