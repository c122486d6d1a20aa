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
from secrets import randbelow
from typing import Any, TypeVar

import msgspec
import numpy as np
import orjson

from servers.protocol.errors import InvalidRequestError
from servers.protocol.tensors import DATATYPES, Array

MAX_DIMENSIONS = 32
MAX_ELEMENTS = 2**60 - 1
"""Most elements of a tensor: 64 bits must be able to count their bytes."""
MAX_BYTES_ELEMENTS = 16_384
"""BYTES elements per request, over all inputs: each becomes an object, which holds the interpreter."""
_LENGTH = struct.Struct("<I")
MAX_SPECIAL_BYTES = 4 * 2**20
"""Longest JSON with NaN or with BYTES: it is read by Python, which takes ten times as long."""
LONG_BYTES = 256 * 1024
"""Shorter JSON is parsed in one go, in a few milliseconds."""
PIECE_BYTES = 128 * 1024
PIECE_VALUES = 8192
"""Values that become JSON text in one go, in less than two milliseconds, or in five where one of them is NaN."""
PAUSE_S = 20e-6
"""Pause between pieces, so that other threads run. NumPy releases the interpreter too briefly for another thread to
take it, which then waits its five milliseconds anew: without pauses none ran for the 150 ms of a body of 24 MB."""

_PYTHON_TYPES: dict[str, set[type]] = {"BOOL": {bool}, "FP32": {int, float}, "FP64": {int, float}}
_OPENING = re.compile(rb"(?:\s*\[)*")
_STRING = re.compile(rb'"(?:[^"\\]++|(?:\\.)++)*+"?', re.DOTALL)
"""One without an end reaches to that of the text: looking for it again from each of its quotes would take minutes."""
_STRUCTURE_OR_STRING = re.compile(rb'[\[\],\s]++|"(?:[^"\\]++|(?:\\.)++)*+"', re.DOTALL)
_QUOTE = ord('"')
_MARK_START = b"1e9%014d" % randbelow(10**14)
"""Of numbers that no client sends: larger than any datatype holds, and other ones in each process."""
_MARKS = ((b"NaN", _MARK_START + b"1"), (b"Infinity", _MARK_START + b"2"))
_UNMARKED = tuple((mark, special) for special, mark in _MARKS)

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


def check_byte_size(byte_size: int, datatype: str, shape: tuple[int, ...], name: str) -> None:
    """Raises `InvalidRequestError` when an input of this shape does not have `given` bytes."""
    expected = element_count(shape, name) * DATATYPES[datatype].itemsize
    if byte_size != expected:
        raise InvalidRequestError(f"input '{name}' needs {expected} bytes as {datatype} of its shape, got {byte_size}")


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


def with_marks(text: bytes) -> bytes:
    """JSON text with a mark, which is a number, in place of each NaN and Infinity outside of its strings. RFC 8259 does
    not have them, but Triton and its clients send them. `array_from_json` knows the marks."""
    marked, place = bytearray(), 0
    for string in _STRING.finditer(text):
        marked += _replaced(text[place : string.start()], _MARKS)
        marked += string[0]
        place = string.end()
    marked += _replaced(text[place:], _MARKS)
    return bytes(marked)


def array_from_json(data: msgspec.Raw, datatype: str, shape: tuple[int, ...], name: str) -> Array:
    """An array of `data`, valid JSON text. How its lists are nested does not matter. Raises `InvalidRequestError` when
    values, their number or their range do not fit."""
    count = element_count(shape, name)
    text = bytes(data)
    if datatype == "FP16":
        raise InvalidRequestError(f"input '{name}' is FP16, which JSON cannot carry: send it as binary data")
    if not text.startswith(b"["):
        raise InvalidRequestError(f"'data' of input '{name}' must be a JSON array")
    parts: list[Array] = []
    read = 0
    for part in _strings(text, count, name) if datatype == "BYTES" else _numbers(text, datatype, name):
        parts.append(part)
        read += part.size
        if read > count:
            break
    if read != count:
        got = "more" if read > count else read
        raise InvalidRequestError(f"input '{name}' needs {count} elements for its shape, got {got} in 'data'")
    return reshaped(parts[0] if len(parts) == 1 else np.concatenate(parts), shape, name)


def _numbers(text: bytes, datatype: str, name: str) -> Iterator[Array]:
    """The values of a JSON array, flat, in pieces of the text. Raises `InvalidRequestError`."""
    depth = text[: _OPENING.match(text).end()].count(b"[")  # type: ignore[union-attr]  # it matches any text
    if depth > MAX_DIMENSIONS:
        raise InvalidRequestError(f"'data' of input '{name}' is nested deeper than {MAX_DIMENSIONS} levels")
    start = 0
    while start < len(text):
        end = len(text) if len(text) <= LONG_BYTES else text.find(b",", start + PIECE_BYTES)
        end = len(text) if end < 0 else end
        # Without its brackets: a parser, and NumPy, would make an object of each list.
        piece = text[start:end].translate(None, b"[] \t\r\n")
        try:
            if not piece.strip(b","):  # as for a shape with a zero
                values = []
            elif _MARK_START in piece:
                values = json.loads(b"[%b]" % _replaced(piece, _UNMARKED))
            else:
                values = orjson.loads(b"[%b]" % piece)
        except ValueError as exc:  # a piece of a string or object, or a number beyond 64-bit floats
            raise InvalidRequestError(f"'data' of input '{name}' must hold only values of datatype {datatype}") from exc
        yield _converted(values, datatype, name)
        start = end + 1
        if start < len(text):
            time.sleep(PAUSE_S)


def _strings(text: bytes, count: int, name: str) -> Iterator[Array]:
    """The strings of a JSON array, flat, but not many more than `count`. Raises `InvalidRequestError`. Each is parsed
    by itself, in Python: parsing all of them in one go would hold the interpreter."""
    if len(text) > MAX_SPECIAL_BYTES:
        raise InvalidRequestError(
            f"BYTES in JSON may have {MAX_SPECIAL_BYTES} bytes: send input '{name}' as binary data"
        )
    flat: list[bytes] = []
    place = 0
    while place < len(text) and len(flat) <= count:
        token = _STRUCTURE_OR_STRING.match(text, place)
        if token is None:
            raise InvalidRequestError(f"'data' of input '{name}' must hold only strings for datatype BYTES")
        place = token.end()
        if text[token.start()] == _QUOTE:
            try:
                flat.append(orjson.loads(token[0]).encode())
            except ValueError as exc:
                raise InvalidRequestError(f"a string in 'data' of input '{name}' is not valid Unicode") from exc
    elements = np.empty(len(flat), dtype=object)
    elements[:] = flat
    yield elements


def _replaced(text: bytes, pairs: Sequence[tuple[bytes, bytes]]) -> bytes:
    for old, new in pairs:
        text = text.replace(old, new)
    return text


def _converted(values: list[Any], datatype: str, name: str) -> Array:
    dtype = DATATYPES[datatype]
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


def json_pieces(array: Array, name: str) -> Iterator[bytes]:
    """The `data` of an output as JSON text, in pieces with a pause between them: a writer holds Python's interpreter.
    NaN and Infinity are written as Python's json and Triton write them. Raises `InvalidRequestError` where JSON cannot
    carry the values."""
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
