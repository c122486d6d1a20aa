"""Inputs that never repeat: a number written over the first elements of every item right before it is sent.

A prepared body stays as it is, shared by all users. What differs from request to request are a few bytes of each item,
which are made for one request and sent in their place, so nothing is copied. The values are ones that the samples hold
or that lie between them, so that the request stays valid: finite floats, any byte of a picture, one of two numbers of
other integers. Of a JPEG file it is the quantisation table that varies, by one step or none at each of 40 frequencies:
the file stays decodable, and other pixels come out.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from operator import getitem

import numpy as np

from loadgen.transport.endpoint import Signature
from loadgen.transport.inputs import Array, SampleInputs

DIGITS = 5
"""Of a number, each a byte: 10¹² different items."""
_LEVELS = 256
_BITS = 8

Tables = tuple[tuple[bytes, ...], ...]
"""What is written for each value of each digit."""


@dataclass(frozen=True, slots=True)
class Variation:
    """How the items of one input are varied; `tables` and `places` are of each item, or one for all of them."""

    name: str
    """Of the input."""
    tables: tuple[Tables, ...]
    places: tuple[int, ...]
    """Where in an item's data the varied bytes begin."""

    @property
    def byte_size(self) -> int:
        """Of what varies, in each item."""
        return sum(len(table[0]) for table in self.tables[0])

    @property
    def capacity(self) -> int:
        """Different items that can be made of one."""
        return int(_LEVELS ** len(self.tables[0]))

    def patch(self, item: int, number: int) -> bytes:
        """What is written into this item for a number, of which the capacity's remainder counts."""
        tables = self.tables[item % len(self.tables)]
        count = len(tables)
        digits = (number & ((1 << _BITS * count) - 1)).to_bytes(count, "little")
        return b"".join(map(getitem, tables, digits))

    def offsets(self, chosen: Array, items: Sequence[int]) -> tuple[int, ...]:
        """Where the varied bytes of each of these items begin in the input's binary data."""
        offsets, start = [], 0
        for row, item in enumerate(items):
            place = self.places[item % len(self.places)]
            if chosen.dtype.hasobject:
                offsets.append(start + _LENGTH_BYTES + place)
                start += _LENGTH_BYTES + len(chosen[row, 0])
            else:
                offsets.append(start + place)
                start += chosen[row].nbytes
        return tuple(offsets)

    def varied(self, inputs: SampleInputs, item: int, number: int) -> SampleInputs:
        """One item alone, as it is sent under this number."""
        arrays = {name: array[item : item + 1].copy() for name, array in inputs.arrays.items()}
        own, place, patch = arrays[self.name], self.places[item % len(self.places)], self.patch(item, number)
        if own.dtype.hasobject:
            file = own[0, 0]
            own[0, 0] = file[:place] + patch + file[place + len(patch) :]
        else:
            data = bytearray(own.tobytes())
            data[place : place + len(patch)] = patch
            arrays[self.name] = np.frombuffer(data, own.dtype).reshape(own.shape)
        return SampleInputs(arrays, inputs.kind)


_LENGTH_BYTES = 4
"""Before each element of the datatype BYTES."""


class FreshNumbers:
    """Counts the items that one process sends, so that none is sent twice.

    The count begins anywhere: a server that outlives a run may remember what an earlier run with the same seed sent.
    """

    def __init__(self) -> None:
        self._next = secrets.randbits(_BITS * DIGITS)

    def take(self, count: int) -> int:
        """The first of so many numbers that follow each other."""
        first, self._next = self._next, self._next + count
        return first


@dataclass(frozen=True, slots=True)
class FreshItems:
    """The bodies of one block, each with its items, and the numbers that make them new."""

    variation: Variation
    items: tuple[tuple[int, ...], ...]
    numbers: FreshNumbers

    def patches(self, body: int) -> tuple[int, list[bytes]]:
        """The number of the body's first item, the others follow it, and what is written into each."""
        items, patch = self.items[body], self.variation.patch
        first = self.numbers.take(len(items))
        return first, [patch(item, first + row) for row, item in enumerate(items)]


def find_variation(inputs: SampleInputs, signature: Signature) -> Variation | None:
    """Of the input that can vary the most, the same in whatever order a server names them; None where none can."""
    wanted = sorted(tensor.name for tensor in signature.inputs if tensor.name in inputs.arrays)
    found = [_of(name, inputs.arrays[name]) for name in wanted]
    able = [one for one in found if one is not None]
    return max(able, key=lambda one: one.capacity, default=None)


def _of(name: str, array: Array) -> Variation | None:
    if array.dtype.hasobject:
        return _of_files(name, [row[0] for row in array])
    size = array[0].size
    if array.dtype.kind == "f":
        low, high = float(array.min()), float(array.max())
        levels = np.linspace(low, high if high > low else low + 1.0, _LEVELS).astype(array.dtype)
        return _shared(name, tuple(level.tobytes() for level in levels), min(DIGITS, size))
    if array.dtype == np.uint8 and array.max() > 1:
        return _shared(name, tuple(bytes([level]) for level in range(_LEVELS)), min(DIGITS, size))
    two = np.array([0, 1] if array.dtype.kind == "b" else [array.min(), array.max()], dtype=array.dtype)
    if two[0] == two[1]:
        return None
    table = tuple(
        b"".join(two[level >> bit & 1].tobytes() for bit in range(_BITS)) for level in range(_LEVELS)
    )  # a bit for each element
    return _shared(name, table, min(DIGITS, size // _BITS))


def _shared(name: str, table: tuple[bytes, ...], digits: int) -> Variation | None:
    return Variation(name, ((table,) * digits,), (0,)) if digits else None


def _of_files(name: str, files: Sequence[bytes]) -> Variation | None:
    """JPEG files; None where one has no quantisation table of whole bytes."""
    places = [_quantisation(file) for file in files]
    known = tuple(place for place in places if place is not None)
    if len(known) < len(places):
        return None
    tables = tuple(_quantisers(file[place : place + DIGITS * _BITS]) for file, place in zip(files, known, strict=True))
    return Variation(name, tables, known)


def _quantisers(steps: bytes) -> Tables:
    """Each step of the table as it is, or one larger."""
    return tuple(
        tuple(
            bytes(min(step, 254) + (level >> bit & 1) for bit, step in enumerate(steps[start : start + _BITS]))
            for level in range(_LEVELS)
        )
        for start in range(0, len(steps), _BITS)
    )


def _quantisation(file: bytes) -> int | None:
    """Where the steps of the first table begin, after that of the mean (ISO/IEC 10918-1, B.2.4.1)."""
    place = 2
    while file[place : place + 1] == b"\xff" and place + 4 < len(file):
        length = int.from_bytes(file[place + 2 : place + 4], "big")
        if file[place + 1] == 0xDB:
            whole_bytes = file[place + 4] >> 4 == 0
            return place + 6 if whole_bytes and length >= 67 else None
        place += 2 + length
    return None
