"""The outputs of an inference response, whatever bytes the server has sent: arrays, or one `DocumentError`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from loadgen.client.inputs import NUMPY_TYPES, Array, byte_array, exact_array
from loadgen.documents import MOST_CHARACTERS, DocumentError, decode_json, one_line

HEADER_LENGTH = "inference-header-content-length"
_MOST_JSON_BYTES = 2**26
_MOST_ELEMENTS = 2**20
"""Most elements of an output of the datatype BYTES."""
_MOST_DIMENSIONS = 32
_BYTES_PREFIX = 4
_MOST_DIGITS = 10

_CONTENTS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip
"""The field of `InferTensorContents` by datatype."""

Size = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Parameters(msgspec.Struct):
    """Parameters of an output; other parameters are not read."""

    binary_data_size: Size | None = None


class Output(msgspec.Struct):
    """One output as the response's JSON describes it."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    datatype: str
    shape: Annotated[list[Size], msgspec.Meta(max_length=_MOST_DIMENSIONS)]
    parameters: Parameters | None = None
    data: list[Any] | None = None
    """Values in the JSON. They are never read, because binary outputs are requested."""

    @property
    def binary_bytes(self) -> int | None:
        """Number of its bytes after the JSON; None if it is not binary."""
        return None if self.parameters is None else self.parameters.binary_data_size

    def __str__(self) -> str:
        return one_line(f"{self.name} ({self.datatype} {self.shape})", 120)


class _Document(msgspec.Struct):
    outputs: list[Output]


def read_document(content: bytes | memoryview) -> list[Output]:
    """The outputs in a response's JSON, with different names. Raises `DocumentError`."""
    document: _Document = decode_json(content, _Document, most_bytes=_MOST_JSON_BYTES)
    return _with_different_names(document.outputs)


def _with_different_names(outputs: list[Output]) -> list[Output]:
    names = [output.name for output in outputs]
    if odd := next((name for name in names if not name.isprintable() or len(name) > MOST_CHARACTERS), None):
        raise DocumentError(f"the name of output {one_line(odd, 40)} cannot be printed")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DocumentError(f"it has two outputs named {one_line(twice)}")
    return outputs


def read_body(body: memoryview, header_length: str | None) -> dict[str, Array]:
    """The outputs of an HTTP response, whose JSON has `header_length` bytes or is all of it. Raises `DocumentError`."""
    end = len(body)
    if header_length is not None:
        if not header_length.isascii() or not header_length.isdigit() or len(header_length) > _MOST_DIGITS:
            raise DocumentError("Inference-Header-Content-Length is not a number")
        end = int(header_length)
        if end > len(body):
            raise DocumentError(f"Inference-Header-Content-Length is {end:,}, but the body has {len(body):,} bytes")
    found = {}
    for output in read_document(body[:end]):
        size = output.binary_bytes
        if size is None:
            raise DocumentError(
                f"output {output} is not binary, although binary outputs were requested; use --transport grpc if the "
                "server has it"
            )
        if end + size > len(body):
            raise DocumentError(f"output {output} declares {size:,} bytes, but {len(body) - end:,} are left")
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
        raise DocumentError(f"{len(raw)} of its {len(outputs)} outputs are binary")
    found = {}
    for number, output in enumerate(_with_different_names(outputs)):
        if len(output.shape) > _MOST_DIMENSIONS or any(not 0 <= size < 2**31 for size in output.shape):
            raise DocumentError(f"output {one_line(output.name)} has an impossible shape")
        if raw:
            found[output.name] = read_tensor(output, memoryview(raw[number]))
        else:
            found[output.name] = _read_values(output, typed_values(message.outputs[number]))
    return found


def typed_values(output: Any) -> Sequence[Any]:
    """The values of an `InferOutputTensor` that is not in `raw_output_contents`. Raises `DocumentError` when there are
    fewer or more than its shape needs, or for a datatype that has no such values (FP16, BF16)."""
    field = _CONTENTS.get(output.datatype)
    if field is None:
        raise DocumentError(f"output {one_line(output.name)} is {one_line(output.datatype)}, which has to be binary")
    values: Sequence[Any] = getattr(output.contents, field)
    if len(values) != math.prod(output.shape):
        raise DocumentError(
            f"output {one_line(output.name)} has {len(values):,} elements, but its shape needs "
            f"{math.prod(output.shape):,}"
        )
    return values


def _read_values(output: Output, values: Sequence[Any]) -> Array:
    if output.datatype == "BYTES":
        return byte_array(list(values)).reshape(output.shape)
    found = exact_array(values, output.datatype)
    if found is None:
        raise DocumentError(f"output {output} has a value that its datatype cannot hold")
    return found.reshape(output.shape)


def byte_size(datatype: str, shape: Sequence[int]) -> int | None:
    """Bytes of a tensor's binary form. None if they are not fixed: BYTES, free dimensions, an unknown datatype."""
    numpy_type = "<u2" if datatype == "BF16" else NUMPY_TYPES.get(datatype)
    if numpy_type is None or any(size < 0 for size in shape):
        return None
    return math.prod(shape) * np.dtype(numpy_type).itemsize


def read_tensor(output: Output, data: memoryview) -> Array:
    """A copy of the tensor in the protocol's binary form. Raises `DocumentError`."""
    if output.datatype == "BYTES":
        return _read_bytes(output, data)
    expected = byte_size(output.datatype, output.shape)
    if expected is None:
        raise DocumentError(f"output {output} has a datatype that the protocol does not define")
    if len(data) != expected:
        raise DocumentError(f"output {output} has {len(data):,} bytes, but its shape needs {expected:,}")
    dtype = "<u2" if output.datatype == "BF16" else NUMPY_TYPES[output.datatype]
    values = np.frombuffer(data, dtype)  # flat: a shift of an array without dimensions makes a number
    values = (values.astype(np.uint32) << 16).view(np.float32) if output.datatype == "BF16" else values.copy()
    return values.reshape(output.shape)


def elements_end(data: memoryview, count: int) -> int | None:
    """Where the last of `count` elements of BYTES ends; None if they do not fit."""
    end = 0
    for _ in range(count):
        if end + _BYTES_PREFIX > len(data):
            return None
        end += _BYTES_PREFIX + int.from_bytes(data[end : end + _BYTES_PREFIX], "little")
    return end if end <= len(data) else None


def read_elements(data: bytes | memoryview) -> list[bytes] | None:
    """The elements of BYTES in the protocol's binary form: each follows its length, four bytes in little-endian order.
    None if the data end in the middle of one."""
    found, place = [], 0
    while place < len(data):
        start = place + _BYTES_PREFIX
        place = start + int.from_bytes(data[place:start], "little")
        if start > len(data) or place > len(data):
            return None
        found.append(bytes(data[start:place]))
    return found


def _read_bytes(output: Output, data: memoryview) -> Array:
    expected = math.prod(output.shape)
    if expected > _MOST_ELEMENTS:
        raise DocumentError(f"output {output} has more than {_MOST_ELEMENTS:,} elements")
    found = read_elements(data)
    if found is None:
        raise DocumentError(f"output {output} ends in the middle of an element")
    if len(found) != expected:
        raise DocumentError(f"output {output} has {len(found):,} elements, but its shape needs {expected:,}")
    return byte_array(found).reshape(output.shape)
