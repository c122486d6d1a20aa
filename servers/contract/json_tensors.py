"""Tensors inside JSON: `data` arrays, flat or nested, and JSON text that other people's parsers can read back."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import orjson

from servers.contract.binary_tensors import element_count
from servers.contract.errors import InvalidRequestError
from servers.contract.long_json import LONG_BYTES, LongArray, split_request
from servers.contract.tensors import DATATYPES, Array

MAX_DEPTH = 64
"""JSON nested deeper than this is refused; a tensor has at most 32 dimensions."""

MAX_SPECIAL_BYTES = 4 * 2**20
"""Longest JSON that may hold NaN: the parser that knows it is slow, and nothing else runs meanwhile."""

_PYTHON_TYPES: dict[str, set[type]] = {"BOOL": {bool}, "FP32": {int, float}, "FP64": {int, float}}


def parse_json(text: memoryview | bytes) -> Any:
    """Any JSON value, NaN and Infinity literals included. Raises `InvalidRequestError`."""
    raw = bytes(text)
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as exc:
        if b"NaN" not in raw and b"Infinity" not in raw:
            raise InvalidRequestError(f"failed to parse the request JSON: {exc.msg} at character {exc.pos}") from exc
        if len(raw) > MAX_SPECIAL_BYTES:
            raise InvalidRequestError(
                f"JSON with NaN or Infinity in it may have {MAX_SPECIAL_BYTES} bytes: send the tensors as binary data"
            ) from exc
        try:
            # orjson follows RFC 8259 and refuses NaN, which the protocol's clients and Triton write and read.
            value = json.loads(raw)
        except (ValueError, RecursionError) as second:
            raise InvalidRequestError("failed to parse the request JSON: it is not valid JSON") from second
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH:  # fewer brackets cannot nest deeper
        _check_depth(value)
    return value


def parse_request(text: memoryview) -> Any:
    """The same for a request, whose long tensors stay text, as `LongArray`s, until `array_from_json` reads them."""
    if text.nbytes <= LONG_BYTES:
        return parse_json(text)
    try:
        return split_request(bytes(text))
    except (msgspec.DecodeError, orjson.JSONDecodeError) as exc:
        raw = bytes(text)
        if b"NaN" in raw or b"Infinity" in raw:
            return parse_json(raw)
        raise InvalidRequestError(f"failed to parse the request JSON: {exc}") from exc


def _check_depth(value: object) -> None:
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        deeper: list[object] = []
        for item in level:
            if isinstance(item, dict):
                # NumPy bounds `data` by its own 32 dimensions; walking a million numbers costs more than parsing them.
                deeper.extend(child for key, child in item.items() if key != "data")
            elif isinstance(item, list):
                deeper.extend(child for child in item if isinstance(child, dict | list))
        if not deeper:
            return
        level = deeper
    raise InvalidRequestError(f"the request JSON is nested more than {MAX_DEPTH} levels deep")


def array_from_json(data: object, datatype: str, shape: tuple[int, ...], name: str) -> Array:
    """An array of its own. Raises `InvalidRequestError` when values, count or range do not fit."""
    count = element_count(shape, name)
    if isinstance(data, LongArray) and datatype == "BYTES":
        if len(data.text) > MAX_SPECIAL_BYTES:
            raise InvalidRequestError(
                f"'data' of input '{name}' may have {MAX_SPECIAL_BYTES} bytes as JSON text: send it as binary data"
            )
        data = parse_json(data.text)
    if not isinstance(data, list | LongArray):
        raise InvalidRequestError(f"'data' of input '{name}' must be a JSON array")
    if datatype == "FP16":
        raise InvalidRequestError(f"input '{name}' is FP16, which JSON cannot carry: send it as binary data")
    if isinstance(data, LongArray):
        flat = _long_numbers(data, datatype, count, name)
    else:
        flat = _flat_bytes(data, name) if datatype == "BYTES" else _flat_numbers(data, datatype, name)
    if flat.size != count:
        raise InvalidRequestError(f"input '{name}' needs {count} elements for its shape, got {flat.size} in 'data'")
    try:
        return flat.reshape(shape)
    except ValueError as exc:
        raise InvalidRequestError(f"the shape of input '{name}' cannot be represented") from exc


def _long_numbers(data: LongArray, datatype: str, count: int, name: str) -> Array:
    """Piece by piece, so that other threads run in between."""
    if data.depth(MAX_DEPTH) > MAX_DEPTH:
        raise InvalidRequestError(f"the request JSON is nested more than {MAX_DEPTH} levels deep")
    parts: list[Array] = []
    read = 0
    try:
        for piece in data.pieces():
            parts.append(_flat_numbers(piece, datatype, name))
            read += len(piece)
            if read > count:
                raise InvalidRequestError(f"input '{name}' needs {count} elements for its shape, got more in 'data'")
    except orjson.JSONDecodeError as exc:
        raise InvalidRequestError(f"'data' of input '{name}' must hold only values of datatype {datatype}") from exc
    return np.concatenate(parts) if parts else np.empty(0, DATATYPES[datatype])


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
        with np.errstate(over="ignore"):  # 1e300 as FP32 is infinity, as it is for Triton
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
    """What `dump_json` writes as an output's `data`. Raises `InvalidRequestError` where JSON cannot carry it."""
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
