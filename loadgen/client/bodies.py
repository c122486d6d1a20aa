"""Request bodies, encoded before the measurement, and the bytes that make each request's inputs new.

The bodies are those of NVIDIA's encoder. A prepared body does not change and is shared by all users. Only a few bytes
per item differ between requests: a number is written over a few elements of every item right before it is sent. These
bytes are made for one request and sent in the place of the prepared ones, so nothing is copied. The request stays
valid, because the values are in the range of the samples: finite floats, any byte of a pixel, integers between the
smallest and the largest of the samples where those are enough, else one of these two. Only an item's own elements vary,
never its padding, and masks stay. In a JPEG file the quantisation table varies, by one step or none at each of 40
frequencies: the file can be decoded, but its pixels differ. In a text letters vary.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from operator import getitem

import numpy as np

from loadgen.client.connection import Address, PreparedRequest, split_at
from loadgen.client.endpoint import Signature, fits
from loadgen.client.http import request_head
from loadgen.client.inputs import BYTES_PREFIX, SAMPLE_TYPES, Array, InputError, SampleInputs
from loadgen.records.run import body_count

DIGITS = 5
"""Digits of a number, one byte each: 10¹² different items."""
_LEVELS = 256
_BITS = 8
_LETTERS = re.compile(rb"[A-Za-z]{2,}")
_IN_LETTERS = tuple(bytes((97 + (level >> 4), 97 + (level & 15))) for level in range(_LEVELS))
"""A digit as two letters from a to p."""

Tables = tuple[tuple[bytes, ...], ...]
"""The bytes to write, for each digit and each value of it."""


@dataclass(frozen=True, slots=True)
class Variation:
    """How the items of one input vary; `tables` and `places` hold an entry per item, or one for all items."""

    name: str
    """Name of the input."""
    tables: tuple[Tables, ...]
    places: tuple[int, ...]
    """Where the bytes that vary begin in an item's data."""

    @property
    def byte_size(self) -> int:
        """Bytes that vary in each item."""
        return sum(len(table[0]) for table in self.tables[0])

    @property
    def capacity(self) -> int:
        """How many different items can be made from a single item."""
        return int(_LEVELS ** len(self.tables[0]))

    def patch(self, item: int, number: int) -> bytes:
        """The bytes for this item and this number, modulo the capacity."""
        tables = self.tables[item % len(self.tables)]
        count = len(tables)
        digits = (number & ((1 << _BITS * count) - 1)).to_bytes(count, "little")
        return b"".join(map(getitem, tables, digits))

    def offsets(self, chosen: Array, items: Sequence[int]) -> tuple[int, ...]:
        """Where the bytes that vary begin in the binary data of these items, one per item."""
        offsets, start = [], 0
        for row, item in enumerate(items):
            encoded = chosen.dtype.hasobject
            offsets.append(start + self.places[item % len(self.places)] + (BYTES_PREFIX if encoded else 0))
            start += sum(BYTES_PREFIX + len(part) for part in chosen[row].flat) if encoded else chosen[row].nbytes
        return tuple(offsets)

    def varied(self, inputs: SampleInputs, item: int, number: int) -> SampleInputs:
        """The data of one item when it is sent with this number."""
        arrays = {name: inputs.take(name, (item,)) for name in inputs.arrays}
        array, place, patch = arrays[self.name], self.places[item % len(self.places)], self.patch(item, number)
        if array.dtype.hasobject:
            element = bytes(array.item(0))
            array.flat[0] = element[:place] + patch + element[place + len(patch) :]
        else:
            data = bytearray(array.tobytes())
            data[place : place + len(patch)] = patch
            arrays[self.name] = np.frombuffer(data, array.dtype).reshape(array.shape)
        return replace(inputs, arrays=arrays, lengths=inputs.lengths[item : item + 1], shapes={})


def fresh_numbers() -> Iterator[int]:
    """Consecutive numbers for the items that a process sends, so that no item is sent twice. The first one is random: a
    server that outlives a run may remember the items of an earlier run with the same seed."""
    return count(secrets.randbits(_BITS * DIGITS))


def find_variation(inputs: SampleInputs, signature: Signature) -> Variation | None:
    """The variation of the input that can vary most, whatever order a server names them in; None if none can."""
    names = sorted(tensor.name for tensor in signature.inputs if tensor.name in inputs.arrays)
    variations = [variation for name in names if (variation := _of_input(name, inputs)) is not None]
    return max(variations, key=lambda variation: (variation.capacity, -variation.byte_size), default=None)


def _of_input(name: str, inputs: SampleInputs) -> Variation | None:
    array = inputs.arrays[name]
    if array.dtype.hasobject:
        elements = [bytes(row.flat[0]) for row in array if row.size]
        return (_of_jpegs(name, elements) or _of_texts(name, elements)) if len(elements) == len(array) else None
    if not array.size:
        return None  # every item is empty
    leading = min(_leading(inputs.own_shape(name, item), array.shape[1:]) for item in range(len(array)))
    digits, place = min(DIGITS, leading), 0
    if array.dtype.kind == "f":
        finite = array[np.isfinite(array)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
        levels = np.linspace(low, high if high > low else low + 1.0, _LEVELS).astype(array.dtype)
        table = tuple(level.tobytes() for level in levels)
    elif array.dtype == np.uint8 and array.max() > 1:
        table = tuple(bytes([level]) for level in range(_LEVELS))
    elif array.dtype.kind != "b" and (integers := _integers(name, inputs)) is not None:
        table = tuple(level.tobytes() for level in integers)
        if leading > 2:  # the first and the last token of a text have a meaning of their own
            digits, place = min(DIGITS, leading - 2), array.itemsize
    else:  # one bit of the digit per element
        two = np.array([0, 1] if array.dtype.kind == "b" else [array.min(), array.max()], dtype=array.dtype)
        bits = ([level >> bit & 1 for bit in range(_BITS)] for level in range(_LEVELS))
        table = tuple(two[chosen].tobytes() for chosen in bits)
        digits = 0 if two[0] == two[1] or inputs.axis is not None else min(DIGITS, leading // _BITS)
    return Variation(name, ((table,) * digits,), (place,)) if digits else None


def _leading(shape: Sequence[int], padded: Sequence[int]) -> int:
    """The number of elements at an item's beginning that padding neither moves nor replaces."""
    count = 1
    for size, whole in zip(reversed(shape), reversed(padded), strict=True):
        count *= size
        if size != whole:
            break
    return count


def _integers(name: str, inputs: SampleInputs) -> Array | None:
    """256 integers between the smallest and the largest inside the items, one for each value of a digit; None if there
    are fewer."""
    array = inputs.arrays[name]
    values = np.concatenate(
        [array[item][tuple(map(slice, inputs.own_shape(name, item)))].ravel() for item in range(len(array))]
    )
    low, high = int(values.min()), int(values.max())
    if high - low < _LEVELS - 1:
        return None
    return np.array([low + (high - low) * level // (_LEVELS - 1) for level in range(_LEVELS)], dtype=array.dtype)


def _of_texts(name: str, texts: Sequence[bytes]) -> Variation | None:
    """A variation of the longest word of each text. None for texts without two letters, for JSON, whose names have a
    meaning, and for other bytes."""
    words = [max(_LETTERS.finditer(text), key=lambda word: len(word[0]), default=None) for text in texts]
    if any(word is None or not _is_text(text) for word, text in zip(words, texts, strict=True)):
        return None
    matches = [word for word in words if word is not None]
    digits = min(DIGITS, *(len(word[0]) // 2 for word in matches))
    return Variation(name, ((_IN_LETTERS,) * digits,), tuple(word.start() for word in matches))


def _is_text(text: bytes) -> bool:
    try:
        return text.decode().replace("\n", " ").isprintable() and text.lstrip()[:1] not in (b"{", b"[")
    except UnicodeDecodeError:
        return False


def _of_jpegs(name: str, files: Sequence[bytes]) -> Variation | None:
    """A variation of each file's quantisation table. None if a file has no table of whole bytes."""
    places = tuple(place for file in files if (place := _quantisation(file)) is not None)
    if len(places) < len(files):
        return None
    tables = tuple(_quantisers(file[place : place + DIGITS * _BITS]) for file, place in zip(files, places, strict=True))
    return Variation(name, tables, places)


def _quantisers(steps: bytes) -> Tables:
    """The tables that leave each step of a quantisation table unchanged, or make it one larger."""
    return tuple(
        tuple(
            bytes(min(step, 254) + (level >> bit & 1) for bit, step in enumerate(steps[start : start + _BITS]))
            for level in range(_LEVELS)
        )
        for start in range(0, len(steps), _BITS)
    )


def _quantisation(file: bytes) -> int | None:
    """Where the steps of a JPEG's first quantisation table begin, after that of the mean (ISO/IEC 10918-1, B.2.4.1)."""
    place = 2
    while file[place : place + 1] == b"\xff" and place + 4 < len(file):
        length = int.from_bytes(file[place + 2 : place + 4], "big")
        if file[place + 1] == 0xDB:
            whole_bytes = file[place + 4] >> 4 == 0
            return place + 6 if whole_bytes and length >= 67 else None
        place += 2 + length
    return None


@dataclass(frozen=True, slots=True)
class RawTensor:
    """An input in the protocol's binary form."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes
    places: tuple[int, ...] = ()
    """Where the bytes that vary begin."""


def raw_tensors(
    inputs: SampleInputs, signature: Signature, items: Sequence[int], variation: Variation | None = None
) -> tuple[RawTensor, ...]:
    """The model's inputs for these items. Raises `InputError` when one is missing or has another datatype or shape."""
    tensors = []
    if len(items) > 1 and not signature.batched:
        raise InputError(f"{signature.model} has no batch dimension, so a request cannot have {len(items)} items")
    for expected in signature.inputs:
        if expected.name in signature.optional and expected.name not in inputs.arrays:
            continue
        chosen = inputs.take(expected.name, items)
        if chosen.dtype != SAMPLE_TYPES.get(expected.datatype):
            raise InputError(
                f"the samples do not fit input {expected.name}: the model takes {expected.datatype}, "
                f"the samples are {chosen.dtype}"
            )
        if chosen.ndim == 1 and expected.shape[1:] == (1,):
            chosen = chosen[:, np.newaxis]  # Triton takes one value per item as a list of one
        if not signature.batched and fits(chosen.shape, expected.shape[1:]):
            chosen = chosen[np.newaxis]  # the item's row is the first dimension of a model that has no other batch
        if not fits(chosen.shape[1:], expected.shape[1:]):
            raise InputError(
                f"the samples do not fit input {expected.name}: the model takes items of shape "
                f"{list(expected.shape[1:])}, the samples have {list(chosen.shape[1:])}"
            )
        data = chosen.tobytes()
        if expected.datatype == "BYTES":
            data = b"".join(
                len(element).to_bytes(BYTES_PREFIX, "little") + element for element in chosen.ravel().tolist()
            )
        places = variation.offsets(chosen, items) if variation and variation.name == expected.name else ()
        shape = chosen.shape if signature.batched else chosen.shape[1:]
        tensors.append(RawTensor(expected.name, expected.datatype, shape, data, places))
    return tuple(tensors)


def for_server(request: PreparedRequest, address: Address, model: str) -> PreparedRequest:
    """The request of `prepare_body` with the head for one server; the body is shared, not copied."""
    length = len(request.body)
    headers = (
        {
            "Content-Type": "application/octet-stream",
            "Inference-Header-Content-Length": str(length - request.payload_bytes),
        }
        if request.headers is None
        else dict(request.headers)
    )
    path = f"{address.model_path(model)}/infer"
    return replace(request, head=request_head("POST", path, address, content_length=length, headers=headers))


def prepare_body(
    inputs: SampleInputs, signature: Signature, items: Sequence[int], variation: Variation | None = None
) -> PreparedRequest:
    """One request over HTTP for these items, without a head: JSON, then the tensors, with every output requested in
    binary, cut at the places that vary. Raises `InputError` when an input is missing or has another datatype."""
    tensors, places, start = raw_tensors(inputs, signature, items, variation), list[int](), 0
    for raw in tensors:
        places += [start + place for place in raw.places]
        start += len(raw.data)
    sizes = [(raw, {"binary_data_size": len(raw.data)}) for raw in tensors]
    head = request_json(sizes, {output.name: {"binary_data": True} for output in signature.outputs})
    body = b"".join([head, *(raw.data for raw in tensors)])
    pieces = () if variation is None else split_at(body, [len(head) + place for place in places], variation.byte_size)
    return PreparedRequest(b"", body, len(body) - len(head), pieces)


def request_json(
    inputs: Iterable[tuple[RawTensor, Mapping[str, object]]], outputs: Mapping[str, Mapping[str, object]]
) -> bytes:
    """The JSON of a request, with the parameters of every tensor that is sent or asked for."""
    document = {
        "inputs": [
            {"name": raw.name, "shape": raw.shape, "datatype": raw.datatype, "parameters": parameters}
            for raw, parameters in inputs
        ],
        "outputs": [{"name": name, "parameters": parameters} for name, parameters in outputs.items()],
    }
    return json.dumps(document, separators=(",", ":")).encode()


def choose_items(
    inputs: SampleInputs, batch_size: int, seed: int, *, length: int | None = None, count: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """The items of each body of a batch size, of all lengths or of one; the same for every transport and payload.

    Within a body, and over all of them, items repeat as late as possible. Where items of different shapes cannot share
    a request, a body has items of one shape, drawn in proportion to their number. Raises `InputError` if no item has
    that length.
    """
    random = np.random.default_rng((seed, batch_size) if length is None else (seed, batch_size, length))
    count = body_count(batch_size) if count is None else count
    groups = inputs.groups(length)
    sizes = np.array([len(group) for group in groups])
    picks = random.choice(len(groups), count, p=sizes / sizes.sum()) if len(groups) > 1 else np.zeros(count, dtype=int)
    order = [_endless(random, group) for group in groups]
    return tuple(tuple(next(order[pick]) for _ in range(batch_size)) for pick in picks)


def _endless(random: np.random.Generator, items: Sequence[int]) -> Iterator[int]:
    """All items in random order, again and again."""
    while True:
        yield from (items[place] for place in random.permutation(len(items)))
