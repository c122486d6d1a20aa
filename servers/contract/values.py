"""The values of tensors, as raw little-endian bytes and as JSON.

Raw bytes become views: nothing is copied where NumPy allows that. A JSON parser holds Python's interpreter, and with it
every other thread, until it is done. So values in JSON stay text until they are parsed, a long text in pieces.
"""

from __future__ import annotations

import json
import re
import struct
import time
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, TypeVar

import msgspec
import numpy as np
import orjson

from servers.contract.errors import InvalidRequestError
from servers.contract.tensors import DATATYPES, Array

MAX_DIMENSIONS = 32
MAX_ELEMENTS = 2**60 - 1
"""Most elements of a tensor: 64 bits must be able to count their bytes."""
MAX_BYTES_ELEMENTS = 16_384
"""BYTES elements per request, over all inputs: each becomes an object, which holds the interpreter."""
_LENGTH = struct.Struct("<I")
MAX_SPECIAL_BYTES = 4 * 2**20
"""Longest JSON with NaN or with BYTES: it is parsed in one go, which holds the interpreter."""
LONG_BYTES = 256 * 1024
"""Shorter JSON is parsed in one go, in two milliseconds."""
PIECE_BYTES = 128 * 1024
PIECE_VALUES = 8192
"""Values that become JSON text in one go, in less than two milliseconds, or in five where one of them is NaN."""
PAUSE_S = 20e-6
"""Pause between pieces, so that other threads run. NumPy releases the interpreter too briefly for another thread to
take it, which then waits its five milliseconds anew: without pauses none ran for the 150 ms of a body of 24 MB."""

_PYTHON_TYPES: dict[str, set[type]] = {"BOOL": {bool}, "FP32": {int, float}, "FP64": {int, float}}
_OPENING = re.compile(rb"(?:\s*\[)*")

T = TypeVar("T")


def check_datatype(datatype: str, name: str) -> None:
    """Raises `InvalidRequestError` for a datatype that the protocol does not have."""
    if datatype not in DATATYPES and datatype != "BYTES":
        raise InvalidRequestError(f"input '{name}' must have a 'datatype', one of {', '.join(DATATYPES)}, BYTES")


def element_count(shape: Sequence[int], name: str) -> int:
    """The product of a shape. Raises `InvalidRequestError` for too many dimensions, a negative one, or an overflow."""
    if len(shape) > MAX_DIMENSIONS:
        raise InvalidRequestError(f"input '{name}' has {len(shape)} dimensions, the limit is {MAX_DIMENSIONS}")
    for dimension in shape:
        if dimension < 0:
            raise InvalidRequestError(f"input '{name}' has a negative dimension {dimension} in its shape")
    count = prod(shape)
    if count > MAX_ELEMENTS:
        raise InvalidRequestError(f"the shape of input '{name}' overflows: it has more elements than 64 bits can count")
    return count


def add_bytes_elements(total: int, shape: Sequence[int], name: str) -> int:
    """`total` plus one more BYTES input's elements. Raises `InvalidRequestError` for more than a request may have."""
    total += element_count(shape, name)
    if total > MAX_BYTES_ELEMENTS:
        raise InvalidRequestError(f"a request has at most {MAX_BYTES_ELEMENTS} BYTES elements, input '{name}' has more")
    return total


def check_byte_size(given: int, datatype: str, shape: tuple[int, ...], name: str) -> None:
    """Raises `InvalidRequestError` when an input of this shape does not have `given` bytes."""
    expected = element_count(shape, name) * DATATYPES[datatype].itemsize
    if given != expected:
        raise InvalidRequestError(f"input '{name}' needs {expected} bytes as {datatype} of its shape, got {given}")


def reshaped(flat: Array, shape: tuple[int, ...], name: str) -> Array:
    """Raises `InvalidRequestError` for a zero among dimensions too large for NumPy."""
    try:
        return flat.reshape(shape)
    except ValueError as exc:
        raise InvalidRequestError(f"the shape of input '{name}' cannot be represented") from exc


def array_from_bytes(data: memoryview, datatype: str, shape: tuple[int, ...], name: str) -> Array:
    """A view over `data`, for BYTES a copy. Raises `InvalidRequestError` when the sizes disagree."""
    if datatype == "BYTES":
        return reshaped(_bytes_elements(data, element_count(shape, name), name), shape, name)
    check_byte_size(data.nbytes, datatype, shape, name)
    dtype = DATATYPES[datatype]
    return reshaped(np.frombuffer(data, dtype) if data.nbytes else np.empty(0, dtype), shape, name)


def _bytes_elements(data: memoryview, count: int, name: str) -> Array:
    if count * _LENGTH.size > data.nbytes:
        raise InvalidRequestError(f"input '{name}' has {data.nbytes} bytes, too few for {count} BYTES elements")
    elements = np.empty(count, dtype=object)
    offset = 0
    for index in range(count):
        start = offset + _LENGTH.size
        if start > data.nbytes:
            raise InvalidRequestError(f"input '{name}' ends inside the length of BYTES element {index}")
        (size,) = _LENGTH.unpack_from(data, offset)
        offset = start + size
        if offset > data.nbytes:
            left = data.nbytes - start
            raise InvalidRequestError(f"BYTES element {index} of '{name}' has {size} bytes, but only {left} are left")
        elements[index] = bytes(data[start:offset])
    if offset != data.nbytes:
        raise InvalidRequestError(f"input '{name}' has {data.nbytes - offset} bytes after its {count} BYTES elements")
    return elements


def bytes_from_array(array: Array) -> bytes:
    """The bytes of an output, as the protocol sends them."""
    if array.dtype == object:
        return b"".join(_LENGTH.pack(len(element)) + bytes(element) for element in array.reshape(-1).tolist())
    return array.tobytes()


def parse_json(document: Any, decoder: msgspec.json.Decoder[T], owner: str = "the request JSON") -> T:
    """JSON text, or values that another parser has read, decoded by `decoder`. Raises `InvalidRequestError`."""
    try:
        if isinstance(document, bytes | msgspec.Raw):
            return decoder.decode(document)
        return msgspec.convert(document, decoder.type)
    except msgspec.ValidationError as exc:
        raise InvalidRequestError(f"{owner} is not valid: {exc}") from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidRequestError(f"failed to parse {owner}: {exc}") from exc


def array_from_json(data: msgspec.Raw | object, datatype: str, shape: tuple[int, ...], name: str) -> Array:
    """An array of `data`, valid JSON text or the values in it.

    Raises `InvalidRequestError` when values, their number or their range do not fit.
    """
    count = element_count(shape, name)
    if datatype == "FP16":
        raise InvalidRequestError(f"input '{name}' is FP16, which JSON cannot carry: send it as binary data")
    parts: list[Array] = []
    read = 0
    for values in _pieces(bytes(data), datatype, name) if isinstance(data, msgspec.Raw) else (data,):
        if not isinstance(values, list):
            raise InvalidRequestError(f"'data' of input '{name}' must be a JSON array")
        part = _flat_bytes(values, name) if datatype == "BYTES" else _flat_numbers(values, datatype, name)
        parts.append(part)
        read += part.size
        if read > count:
            break
    if read != count:
        got = "more" if read > count else read
        raise InvalidRequestError(f"input '{name}' needs {count} elements for its shape, got {got} in 'data'")
    return reshaped(parts[0] if len(parts) == 1 else np.concatenate(parts), shape, name)


def _pieces(text: bytes, datatype: str, name: str) -> Iterator[Any]:
    """The values of a JSON array; a long one is parsed in pieces and returned flat. Raises `InvalidRequestError`."""
    if datatype == "BYTES" and len(text) > MAX_SPECIAL_BYTES:
        raise InvalidRequestError(
            f"BYTES in JSON may have {MAX_SPECIAL_BYTES} bytes: send input '{name}' as binary data"
        )
    try:
        if len(text) <= LONG_BYTES or datatype == "BYTES" or not text.startswith(b"["):
            yield orjson.loads(text)
            return
        depth = text[: _OPENING.match(text).end()].count(b"[")  # type: ignore[union-attr]  # it matches any text
        if depth > MAX_DIMENSIONS:
            raise InvalidRequestError(f"'data' of input '{name}' is nested deeper than {MAX_DIMENSIONS} levels")
        start = 0
        while start < len(text):
            end = text.find(b",", start + PIECE_BYTES)
            end = len(text) if end < 0 else end
            yield orjson.loads(b"[%b]" % text[start:end].translate(None, b"[] \t\r\n"))
            start = end + 1
            time.sleep(PAUSE_S)
    except orjson.JSONDecodeError as exc:  # a piece of a string or object, or a number beyond 64-bit floats
        raise InvalidRequestError(f"'data' of input '{name}' must hold only values of datatype {datatype}") from exc


def _flat_numbers(data: list[Any], datatype: str, name: str) -> Array:
    dtype = DATATYPES[datatype]
    # As objects: NumPy would turn one long string among a million numbers into a million long strings.
    values = np.array(data, dtype=object).reshape(-1).tolist()
    if not set(map(type, values)) <= _PYTHON_TYPES.get(datatype, {int}):
        raise InvalidRequestError(f"'data' of input '{name}' must hold only values of datatype {datatype}")
    if dtype.kind in "iu" and values:
        limits = np.iinfo(dtype.name)
        if min(values) < limits.min or max(values) > limits.max:
            allowed = f"{limits.min} to {limits.max}"
            raise InvalidRequestError(f"'data' of input '{name}' is outside the range of {datatype}, {allowed}")
    try:
        with np.errstate(over="ignore"):  # 1e300 as FP32 is infinity, as in Triton
            return np.array(values, dtype=np.float64 if dtype.kind == "f" else dtype).astype(dtype)
    except OverflowError as exc:
        raise InvalidRequestError(f"'data' of input '{name}' holds a number too large for {datatype}") from exc


def _flat_bytes(data: list[Any], name: str) -> Array:
    flat: list[bytes] = []
    stack: list[Any] = [data]
    while stack:
        item = stack.pop()
        if isinstance(item, list):
            stack.extend(reversed(item))
        elif isinstance(item, str):
            try:
                flat.append(item.encode())
            except UnicodeEncodeError as exc:
                raise InvalidRequestError(f"a string in 'data' of input '{name}' is not valid Unicode") from exc
        else:
            raise InvalidRequestError(f"'data' of input '{name}' must hold only strings for datatype BYTES")
    elements = np.empty(len(flat), dtype=object)
    elements[:] = flat
    return elements


def json_pieces(array: Array, name: str) -> Iterator[bytes]:
    """The `data` of an output as JSON text, in pieces with a pause between them: a writer holds Python's interpreter.

    NaN and Infinity are written as Python's json and Triton write them. Raises `InvalidRequestError` where JSON cannot
    carry the values.
    """
    flat = array.reshape(-1)
    if flat.dtype == np.float16:
        raise InvalidRequestError(f"output '{name}' is FP16, which JSON cannot carry: request it as binary data")
    finite = flat.dtype.kind != "f" or bool(np.isfinite(flat).all())
    for start in range(0, max(1, flat.size), PIECE_VALUES):
        if start:
            time.sleep(PAUSE_S)
        end = start + PIECE_VALUES
        text = _json_text(flat[start:end], name, finite=finite)[1:-1]
        yield b"%b%b%b" % (b"," if start else b"[", text, b"]" if end >= flat.size else b"")


def _json_text(flat: Array, name: str, *, finite: bool) -> bytes:
    if flat.dtype == object:
        try:
            return orjson.dumps([bytes(element).decode("utf-8") for element in flat.tolist()])
        except UnicodeDecodeError as exc:
            raise InvalidRequestError(f"output '{name}' is not text: request it as binary data") from exc
    if finite:
        return orjson.dumps(np.ascontiguousarray(flat), option=orjson.OPT_SERIALIZE_NUMPY)
    return json.dumps(flat.tolist(), separators=(",", ":")).encode()
