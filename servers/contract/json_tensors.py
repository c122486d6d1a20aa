"""JSON of requests and responses: parsing, and the values of tensors.

A parser holds Python's interpreter, and with it every other thread, until it is done. So the values of a tensor stay
text until they are parsed, and a long text is parsed in pieces.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
import numpy as np
import orjson

from servers.contract.binary_tensors import MAX_DIMENSIONS, element_count, reshaped
from servers.contract.errors import InvalidRequestError
from servers.contract.tensors import DATATYPES, Array

MAX_SPECIAL_BYTES = 4 * 2**20
"""Longest JSON with NaN or with BYTES: it is parsed in one go, and nothing else runs meanwhile."""
LONG_BYTES = 256 * 1024
"""Shorter JSON is parsed in one go, in two milliseconds."""
PIECE_BYTES = 128 * 1024
PAUSE_S = 20e-6
"""Between pieces, so that other threads run. NumPy releases the interpreter too briefly for another thread to take it,
which then waits its five milliseconds anew: without pauses none ran for the 150 ms of a body of 24 MB."""

_PYTHON_TYPES: dict[str, set[type]] = {"BOOL": {bool}, "FP32": {int, float}, "FP64": {int, float}}
_OPENING = re.compile(rb"(?:\s*\[)*")

T = TypeVar("T")


def parse_json(document: Any, decoder: msgspec.json.Decoder[T], owner: str = "the request JSON") -> T:
    """What `decoder` makes of JSON text, or of values that another parser has read. Raises `InvalidRequestError`."""
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
        raise InvalidRequestError(
            f"input '{name}' needs {count} elements for its shape, got {'more' if read > count else read} in 'data'"
        )
    return reshaped(parts[0] if len(parts) == 1 else np.concatenate(parts), shape, name)


def _pieces(text: bytes, datatype: str, name: str) -> Iterator[Any]:
    """The values of a JSON array; those of a long one flat, a piece at a time. Raises `InvalidRequestError`."""
    if datatype == "BYTES" and len(text) > MAX_SPECIAL_BYTES:
        raise InvalidRequestError(
            f"'data' of input '{name}' has at most {MAX_SPECIAL_BYTES} bytes as JSON: send it as binary data"
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
            raise InvalidRequestError(
                f"'data' of input '{name}' is outside the range of {datatype}, {limits.min} to {limits.max}"
            )
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


def json_from_array(array: Array, name: str) -> Array | list[Any]:
    """The `data` of an output, for `dump_json`. Raises `InvalidRequestError` where JSON cannot carry it."""
    flat = array.reshape(-1)
    if flat.dtype == object:
        try:
            return [bytes(element).decode("utf-8") for element in flat]
        except UnicodeDecodeError as exc:
            raise InvalidRequestError(f"output '{name}' is not text: request it as binary data") from exc
    if flat.dtype == np.float16:
        raise InvalidRequestError(f"output '{name}' is FP16, which JSON cannot carry: request it as binary data")
    if flat.dtype.kind == "f" and not np.isfinite(flat).all():
        return [float(value) for value in flat]
    return np.ascontiguousarray(flat)


def dump_json(value: dict[str, Any], *, finite: bool) -> bytes:
    """JSON text. When not `finite`, NaN and Infinity are written as Python's json and Triton write them."""
    if finite:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    return json.dumps(value, separators=(",", ":"), default=lambda item: item.tolist()).encode()
