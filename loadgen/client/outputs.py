"""The outputs in a response: read as arrays, and checked under load against the model's metadata.

`read_body` and `read_message` turn whatever bytes the server has sent into arrays, or raise one `DocumentError`.
`ExpectedOutputs` checks names, datatypes, shapes and sizes of every response under load, not the values. A server
describes its outputs with the same bytes each time, so after the first good response a check compares some hundred
bytes, which takes about a microsecond.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from google.protobuf.message import DecodeError

from loadgen.base.documents import MOST_CHARACTERS, DocumentError, decode_json, one_line
from loadgen.client.connection import Exchange
from loadgen.client.endpoint import Signature, fits
from loadgen.client.grpc_messages import ModelInferResponse
from loadgen.client.inputs import NUMPY_TYPES, Array, byte_array, exact_array, read_elements
from loadgen.records.targets import ROUTES, Transport

HEADER_LENGTH = "inference-header-content-length"
_MOST_JSON_BYTES = 2**26
_MOST_ELEMENTS = 2**20
"""Most elements of an output of the datatype BYTES."""
_MOST_DIMENSIONS = 32
_MOST_DIGITS = 10

_CONTENTS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip
"""The field of `InferTensorContents` by datatype."""

Size = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]

_MOST_HEADS = 1_000
"""Most beginnings of good responses that are remembered."""
_NOT_BINARY = "is not binary, although binary outputs were requested; use --transport grpc if the server has it"


class AnswerError(Exception):
    """An inference failed, or its response breaks the protocol; the message says how. `status` is HTTP's; 0 if none
    came, or if it does not matter; `answered` is false if no answer came, or an error."""

    def __init__(self, message: str, status: int = 0, *, answered: bool = True) -> None:
        super().__init__(message)
        self.status, self.answered = status, answered


class OutputParameters(msgspec.Struct):
    """Parameters of an output; other parameters are not read."""

    binary_data_size: Size | None = None


class ResponseOutput(msgspec.Struct):
    """One output as the response's JSON describes it."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    datatype: str
    shape: Annotated[list[Size], msgspec.Meta(max_length=_MOST_DIMENSIONS)]
    parameters: OutputParameters | None = None
    data: list[Any] | None = None
    """Values in the JSON, which are read only where no binary ones were requested."""

    @property
    def binary_bytes(self) -> int | None:
        """Number of its bytes after the JSON; None if it is not binary."""
        return None if self.parameters is None else self.parameters.binary_data_size

    def __str__(self) -> str:
        return one_line(f"{self.name} ({self.datatype} {self.shape})", 120)


class _Document(msgspec.Struct):
    outputs: list[ResponseOutput]


def read_document(content: bytes | memoryview) -> list[ResponseOutput]:
    """The outputs in a response's JSON, with different names. Raises `DocumentError`."""
    document: _Document = decode_json(content, _Document, most_bytes=_MOST_JSON_BYTES)
    return _with_different_names(document.outputs)


def _with_different_names(outputs: list[ResponseOutput]) -> list[ResponseOutput]:
    names = [output.name for output in outputs]
    if odd := next((name for name in names if not name.isprintable() or len(name) > MOST_CHARACTERS), None):
        raise DocumentError(f"the name of output {one_line(odd, 40)} cannot be printed")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DocumentError(f"it has two outputs named {one_line(twice)}")
    return outputs


def read_body(body: memoryview, header_length: str | None, *, binary: bool = True) -> dict[str, Array]:
    """The outputs of an HTTP response, whose JSON has `header_length` bytes or is all of it. With `binary` values in
    the JSON are an error, because binary ones were requested. Raises `DocumentError`."""
    end = len(body)
    if header_length is not None:
        if not header_length.isascii() or not header_length.isdigit() or len(header_length) > _MOST_DIGITS:
            raise DocumentError("Inference-Header-Content-Length is not a number")
        end = int(header_length)
        if end > len(body):
            raise DocumentError(f"Inference-Header-Content-Length is {end:,}, but the body has {len(body):,} bytes")
    arrays = {}
    for output in read_document(body[:end]):
        size = output.binary_bytes
        if size is None:
            if binary or output.data is None:
                raise DocumentError(f"output {output} {_NOT_BINARY}")
            arrays[output.name] = _read_values(output, [*_leaves(output.data)])
            continue
        if end + size > len(body):
            raise DocumentError(f"output {output} declares {size:,} bytes, but {len(body) - end:,} are left")
        arrays[output.name] = read_tensor(output, body[end : end + size])
        end += size
    if header_length is not None and end < len(body):
        raise DocumentError(f"{len(body) - end:,} bytes follow its outputs")
    return arrays


def read_message(message: Any) -> dict[str, Array]:
    """The outputs of a gRPC `ModelInferResponse`. Raises `DocumentError`."""
    outputs = [ResponseOutput(output.name, output.datatype, list(output.shape)) for output in message.outputs]
    raw = message.raw_output_contents
    if raw and len(raw) != len(outputs):
        raise DocumentError(f"{len(raw)} of its {len(outputs)} outputs are binary")
    arrays = {}
    for number, output in enumerate(_with_different_names(outputs)):
        if len(output.shape) > _MOST_DIMENSIONS or any(not 0 <= size < 2**31 for size in output.shape):
            raise DocumentError(f"output {one_line(output.name)} has an impossible shape")
        if raw:
            arrays[output.name] = read_tensor(output, memoryview(raw[number]))
        else:
            arrays[output.name] = _read_values(output, typed_values(message.outputs[number]))
    return arrays


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


def _leaves(data: Iterable[Any]) -> Iterator[Any]:
    """The elements of nested lists in order, text as bytes."""
    for each in data:
        if isinstance(each, list):
            yield from _leaves(each)
        else:
            yield each.encode() if isinstance(each, str) else each


def _read_values(output: ResponseOutput, values: Sequence[Any]) -> Array:
    if output.datatype == "BYTES":
        return _shaped(byte_array(list(values)), output)
    array = exact_array(values, output.datatype) if output.datatype in NUMPY_TYPES else None
    if array is None or len(array) != math.prod(output.shape):
        raise DocumentError(f"output {output} has a value that its datatype cannot hold")
    return _shaped(array, output)


def _shaped(values: Array, output: ResponseOutput) -> Array:
    """Raises `DocumentError` for sizes that no array can have, such as 0 beside some whose product is too large."""
    try:
        return values.reshape(output.shape)
    except ValueError as exc:
        raise DocumentError(f"output {output} has an impossible shape") from exc


def byte_size(datatype: str, shape: Sequence[int]) -> int | None:
    """Bytes of a tensor's binary form. None if they are not fixed: BYTES, free dimensions, an unknown datatype."""
    numpy_type = "<u2" if datatype == "BF16" else NUMPY_TYPES.get(datatype)
    if numpy_type is None or any(size < 0 for size in shape):
        return None
    return math.prod(shape) * np.dtype(numpy_type).itemsize


def read_tensor(output: ResponseOutput, data: memoryview) -> Array:
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
    return _shaped(values, output)


def _read_bytes(output: ResponseOutput, data: memoryview) -> Array:
    expected = math.prod(output.shape)
    if expected > _MOST_ELEMENTS:
        raise DocumentError(f"output {output} has more than {_MOST_ELEMENTS:,} elements")
    elements = read_elements(data)
    if elements is None:
        raise DocumentError(f"output {output} ends in the middle of an element")
    if len(elements) != expected:
        raise DocumentError(f"output {output} has {len(elements):,} elements, but its shape needs {expected:,}")
    return _shaped(byte_array(elements), output)


class ExpectedOutputs:
    """The outputs that responses to requests of one batch size must have over one transport. Not thread-safe."""

    def __init__(self, transport: Transport, signature: Signature, batch_size: int) -> None:
        self._outputs = {
            output.name: (
                output.datatype,
                output.shape[1:]
                if not signature.batched
                else (batch_size, *output.shape[1:])
                if output.shape and output.shape[0] < 0
                else output.shape,
            )
            for output in signature.outputs
        }
        self._route = ROUTES[transport]
        self._good_heads: set[tuple[bytes, int]] = set()
        """The bytes before the tensors of good responses, with the number of bytes of the tensors (over gRPC: before
        them)."""
        sizes = [byte_size(*output) for output in self._outputs.values()]
        self._raw_heads: list[tuple[int, bytes]] = []
        """The field number and length before each tensor of a gRPC message, with its place after the first."""
        self._raw_bytes = 0
        """Bytes of all tensors with these; 0 if a size is not fixed."""
        for size in sizes if None not in sizes else ():
            field = ModelInferResponse(raw_output_contents=[bytes(size or 0)]).SerializeToString()
            self._raw_heads.append((self._raw_bytes, field[: len(field) - (size or 0)]))
            self._raw_bytes += len(field)

    def fault(self, exchange: Exchange) -> str | None:
        """How a response of good status differs from the metadata; None if it does not."""
        try:
            wrong = self._grpc_fault(exchange) if self._route.is_grpc else self._http_fault(exchange)
        except (ValueError, DecodeError) as exc:
            wrong = f"it cannot be read ({one_line(str(exc))})"
        return None if wrong is None else f"the response does not match the model's metadata: {wrong}"

    def _http_fault(self, exchange: Exchange) -> str | None:
        length, body = exchange.header(HEADER_LENGTH), exchange.body
        json_bytes = int(length) if length is not None and length.isdigit() and len(length) < 12 else len(body)
        key = bytes(body[:json_bytes]), len(body) - json_bytes
        if key in self._good_heads:
            return None
        outputs, left = read_document(key[0]), key[1]
        wrong = self._shapes_fault([(output.name, output.datatype, tuple(output.shape)) for output in outputs])
        for output in outputs if wrong is None else ():
            if self._route.shares_memory:
                if output.data is not None:
                    return f"output {output.name} is not in the shared memory"
                continue
            sent = output.binary_bytes
            if sent is None:
                return f"output {output.name} {_NOT_BINARY}"
            wrong = wrong or _size_fault(output.name, output.datatype, tuple(output.shape), sent)
            left -= sent
        if wrong is None and left:
            wrong = f"its outputs end {abs(left):,} bytes {'before' if left > 0 else 'after'} the body does"
        if wrong is None and len(self._good_heads) < _MOST_HEADS:
            self._good_heads.add(key)
        return wrong

    def _grpc_fault(self, exchange: Exchange) -> str | None:
        body = exchange.body
        start = len(body) - self._raw_bytes
        placed = self._raw_bytes > 0 and start >= 0
        placed = placed and all(body[start + at : start + at + len(head)] == head for at, head in self._raw_heads)
        if placed and (bytes(body[:start]), start) in self._good_heads:
            return None
        message = ModelInferResponse.FromString(bytes(body))
        outputs = [(output.name, output.datatype, tuple(output.shape)) for output in message.outputs]
        wrong = self._shapes_fault(outputs)
        if wrong is None and not message.raw_output_contents:
            for output in message.outputs:
                typed_values(output)
            return None
        if wrong is None and len(message.raw_output_contents) != len(outputs):
            return f"{len(message.raw_output_contents)} of {len(outputs)} outputs are binary"
        for described, raw in zip(outputs, message.raw_output_contents, strict=False):
            wrong = wrong or _size_fault(*described, len(raw))
        in_order = [name for name, _, _ in outputs] == list(self._outputs)
        if wrong is None and placed and in_order and len(self._good_heads) < _MOST_HEADS:
            self._good_heads.add((bytes(body[:start]), start))
        return wrong

    def _shapes_fault(self, outputs: list[tuple[str, str, tuple[int, ...]]]) -> str | None:
        names = sorted(name for name, _, _ in outputs)
        if names != sorted(self._outputs):
            return one_line(f"its outputs are {names} instead of {sorted(self._outputs)}")
        for name, datatype, shape in outputs:
            expected_type, expected = self._outputs[name]
            if datatype != expected_type or not fits(shape, expected):
                return one_line(
                    f"output {name} is {datatype} {list(shape)} instead of {expected_type} {list(expected)}"
                )
        return None


def _size_fault(name: str, datatype: str, shape: tuple[int, ...], sent: int) -> str | None:
    size = byte_size(datatype, shape)
    return None if size in (None, sent) else one_line(f"output {name} has {sent:,} bytes instead of {size:,}")
