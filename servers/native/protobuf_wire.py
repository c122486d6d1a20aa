"""A serialised ModelInferRequest before protobuf parses it: its raw inputs as views, and how many fields the rest has.

Follows protobuf's wire format, which any sender may write in any order. protobuf's parser would copy the raw inputs,
and it holds the interpreter until it is done: a map of millions of parameters took it a minute.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from servers.contract.errors import InvalidRequestError

MAX_TENSORS = 1024
"""More inputs or outputs than this are refused before anything is made of them."""
MAX_FIELDS = 16 * MAX_TENSORS
UNCOUNTED_BYTES = 64 * 1024
"""So much is parsed in a millisecond, however many fields it has."""

_INPUTS, _OUTPUTS, _RAW = 5, 6, 7
_CONTENTS = 5  # of an input
_COUNTED_IN: Mapping[int, Any] = {_INPUTS: {_CONTENTS: {}}, _OUTPUTS: {}}
"""Fields whose own fields are counted, too: what is packed into one of them is parsed fast."""

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


def cut_out_raw(serialised: bytes) -> tuple[bytes, list[memoryview]]:
    """The message without its raw inputs, and these. Raises `InvalidRequestError`."""
    view = memoryview(serialised)
    raw: list[memoryview] = []
    kept: list[memoryview] = []
    kept_from = 0
    for fields, (number, start, value, end) in enumerate(_fields(view, 0, len(view)), start=1):
        if fields > MAX_FIELDS:
            raise _too_many_fields()
        if number == _RAW:
            raw.append(view[value:end])
            kept.append(view[kept_from:start])
            kept_from = end
    if not raw:
        return serialised, raw
    kept.append(view[kept_from:])
    return b"".join(kept), raw


def check_fields(rest: bytes) -> None:
    """Raises `InvalidRequestError` for more fields, those inside of tensors included, than a request can need."""
    if len(rest) > UNCOUNTED_BYTES:
        view = memoryview(rest)
        _count(view, 0, len(view), _COUNTED_IN, 0)


def _count(view: memoryview, position: int, end: int, counted_in: Mapping[int, Any], fields: int) -> int:
    """`fields` and those of a message between two positions."""
    for number, _, value, stop in _fields(view, position, end):
        fields += 1
        if fields > MAX_FIELDS:
            raise _too_many_fields()
        if number in counted_in:
            fields = _count(view, value, stop, counted_in[number], fields)
    return fields


def _fields(view: memoryview, position: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Each field's number where it has a length, else 0; where it starts, where its value starts, and where it ends."""
    while position < end:
        start = position
        tag, position = _varint(view, position)
        kind, number = tag & 7, 0
        value = position
        if kind == _LENGTH:
            size, value = _varint(view, position)
            position, number = value + size, tag >> 3
        elif kind == _VARINT:
            _, position = _varint(view, position)
        elif kind in (_FIXED64, _FIXED32):
            position += 8 if kind == _FIXED64 else 4
        else:
            raise InvalidRequestError("the message is not a ModelInferRequest")
        if position > end:
            raise InvalidRequestError("the message ends inside a field")
        yield number, start, value, position


def _varint(view: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(view) and shift < 64:
        byte = view[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise InvalidRequestError("the message ends inside a field")


def _too_many_fields() -> InvalidRequestError:
    return InvalidRequestError(f"the message has more than {MAX_FIELDS} fields")
