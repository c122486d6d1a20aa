"""Tensors inside JSON: `data` arrays, flat or nested, and JSON text that other people's parsers can read back.

Long requests are read in pieces: a parser holds the interpreter, and with it every other thread, until it is done. The
text is cut into its members first, which is fast; the values of a tensor, which are what is long in it, stay text until
they are parsed a piece at a time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import orjson

from servers.contract.binary_tensors import element_count
from servers.contract.errors import InvalidRequestError
from servers.contract.tensors import DATATYPES, Array

MAX_DEPTH = 64
"""JSON nested deeper than this is refused; a tensor has at most 32 dimensions."""

MAX_SPECIAL_BYTES = 4 * 2**20
"""Longest JSON that may hold NaN: the parser that knows it is slow, and nothing else runs meanwhile."""

_PYTHON_TYPES: dict[str, set[type]] = {"BOOL": {bool}, "FP32": {int, float}, "FP64": {int, float}}
LONG_BYTES = 256 * 1024
"""Shorter JSON is parsed at once, in two milliseconds."""

PIECE_BYTES = 128 * 1024
PAUSE_S = 20e-6
"""Between pieces, so that others run. NumPy gives the interpreter up for moments, too short to take it up, and after
each of them another thread waits its five milliseconds anew: it got none for the 150 ms of a body of 24 MB."""
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]")

_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_inputs = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])


@dataclass(frozen=True, slots=True)
class LongArray:
    """The text of a JSON array, known to be valid."""

    text: bytes

    def depth(self, limit: int) -> int:
        """How deep its brackets nest, counted up to `limit` + 1. Right where there are no strings in it."""
        depth = deepest = 0
        for start in range(0, len(self.text), LONG_BYTES):
            for bracket in self.text[start : start + LONG_BYTES].translate(None, _NO_BRACKETS):
                depth += 1 if bracket == ord("[") else -1
                if depth > deepest:
                    deepest = depth
                    if deepest > limit:
                        return deepest
        return deepest

    def pieces(self) -> Iterator[list[Any]]:
        """Its values in order, whatever the nesting; numbers and literals alone. Raises `orjson.JSONDecodeError`."""
        start = 0
        while start < len(self.text):
            end = self.text.find(b",", start + PIECE_BYTES)
            end = len(self.text) if end < 0 else end
            yield orjson.loads(b"[%b]" % self.text[start:end].translate(None, b"[] \t\r\n"))
            start = end + 1
            time.sleep(PAUSE_S)


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


def split_request(text: bytes) -> dict[str, Any]:
    """A request's document as `json.loads` gives it, but for long `data`, which are `LongArray`s.

    Raises `InvalidRequestError`, and `msgspec.DecodeError` for what is no JSON by RFC 8259.
    """
    try:
        members = _members.decode(text)
        inputs = members.pop("inputs", None)
        document = {key: _value(raw, key) for key, raw in members.items()}
        if inputs is not None:
            document["inputs"] = [
                {key: _data(raw) if key == "data" else _value(raw, key) for key, raw in item.items()}
                for item in _inputs.decode(inputs)
            ]
    except msgspec.ValidationError as exc:
        raise InvalidRequestError("the request JSON must be an object with an array 'inputs' of objects") from exc
    except RecursionError as exc:
        raise InvalidRequestError("the request JSON is nested too deep") from exc
    return document


def _data(raw: msgspec.Raw) -> Any:
    text = bytes(raw)
    return LongArray(text) if len(text) > LONG_BYTES and text.startswith(b"[") else orjson.loads(text)


def _value(raw: msgspec.Raw, key: str) -> Any:
    text = bytes(raw)
    if len(text) > LONG_BYTES:
        raise InvalidRequestError(f"{key[:64]!r} in the request JSON has more than {LONG_BYTES} bytes")
    return orjson.loads(text)
