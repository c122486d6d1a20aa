"""Tensors inside JSON: `data` arrays, flat or nested, and JSON text that other people's parsers can read back."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import orjson

from servers.contract.binary_tensors import element_count
from servers.contract.errors import InvalidRequestError
from servers.contract.tensors import DATATYPES, Array

MAX_DEPTH = 64
"""JSON nested deeper than this is refused; a tensor has at most 32 dimensions."""

_PYTHON_TYPES: dict[str, set[type]] = {"BOOL": {bool}, "FP32": {int, float}, "FP64": {int, float}}


def parse_json(text: memoryview | bytes) -> Any:
    """Any JSON value, NaN and Infinity literals included. Raises `InvalidRequestError`."""
    raw = bytes(text)
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as exc:
        if b"NaN" not in raw and b"Infinity" not in raw:
            raise InvalidRequestError(f"failed to parse the request JSON: {exc.msg} at character {exc.pos}") from exc
        try:
            # orjson follows RFC 8259 and refuses NaN, which the protocol's clients and Triton write and read.
            value = json.loads(raw)
        except (ValueError, RecursionError) as second:
            raise InvalidRequestError("failed to parse the request JSON: it is not valid JSON") from second
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH:  # fewer brackets cannot nest deeper
        _check_depth(value)
    return value


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
    if not isinstance(data, list):
        raise InvalidRequestError(f"'data' of input '{name}' must be a JSON array")
    if datatype == "FP16":
        raise InvalidRequestError(f"input '{name}' is FP16, which JSON cannot carry: send it as binary data")
    flat = _flat_bytes(data, name) if datatype == "BYTES" else _flat_numbers(data, datatype, name)
    if flat.size != count:
        raise InvalidRequestError(f"input '{name}' needs {count} elements for its shape, got {flat.size} in 'data'")
    try:
        return flat.reshape(shape)
    except ValueError as exc:
        raise InvalidRequestError(f"the shape of input '{name}' cannot be represented") from exc


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
