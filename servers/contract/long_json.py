"""Long JSON requests, read in pieces: a parser holds the interpreter, and with it every other thread, until it is done.

The text is cut into its members first, which is fast; the values of a tensor, which are what is long in it, stay text
until they are parsed a piece at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from servers.contract.errors import InvalidRequestError

LONG_BYTES = 256 * 1024
"""Shorter JSON is parsed at once, in two milliseconds."""

PIECE_BYTES = 64 * 1024
_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]")

_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_inputs = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])


@dataclass(frozen=True, slots=True)
class LongArray:
    """The text of a JSON array, known to be valid."""

    text: bytes

    def depth(self, limit: int) -> int:
        """How deep its brackets nest, counted up to `limit` + 1. Right where there are no strings in it."""
        brackets = self.text.translate(None, _BRACKETS)
        depth = deepest = 0
        for bracket in brackets:
            depth += 1 if bracket == ord("[") else -1
            if depth > deepest:
                deepest = depth
                if deepest > limit:
                    break
        return deepest

    def pieces(self) -> Iterator[list[Any]]:
        """Its values in order, whatever the nesting; numbers and literals alone. Raises `orjson.JSONDecodeError`."""
        flat = self.text.translate(None, b"[] \t\r\n")
        start = 0
        while start < len(flat):
            end = flat.find(b",", start + PIECE_BYTES)
            end = len(flat) if end < 0 else end
            yield orjson.loads(b"[%b]" % flat[start:end])
            start = end + 1


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
