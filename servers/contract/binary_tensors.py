"""Tensors as raw little-endian bytes, in both directions, without copying where NumPy allows it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import prod

import numpy as np

from servers.contract.errors import InvalidRequestError
from servers.contract.tensors import DATATYPES, Array

MAX_DIMENSIONS = 32
MAX_ELEMENTS = 2**60 - 1
"""Their bytes must be countable in 64 bits."""
MAX_BYTES_ELEMENTS = 16_384
"""BYTES elements per request, over all inputs: each becomes an object, and no other Python code runs meanwhile."""
_LENGTH = struct.Struct("<I")


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
        raise InvalidRequestError(
            f"a request has at most {MAX_BYTES_ELEMENTS} BYTES elements, input '{name}' exceeds that"
        )
    return total


def check_byte_size(given: int, datatype: str, shape: tuple[int, ...], name: str) -> None:
    """Raises `InvalidRequestError` when an input of this shape does not have `given` bytes."""
    expected = element_count(shape, name) * DATATYPES[datatype].itemsize
    if given != expected:
        raise InvalidRequestError(
            f"input '{name}' needs {expected} bytes for its shape and datatype {datatype}, got {given} bytes"
        )


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
        raise InvalidRequestError(
            f"input '{name}' needs at least {count * _LENGTH.size} bytes for {count} BYTES elements, got {data.nbytes}"
        )
    elements = np.empty(count, dtype=object)
    offset = 0
    for index in range(count):
        start = offset + _LENGTH.size
        if start > data.nbytes:
            raise InvalidRequestError(f"input '{name}' ends inside the length of BYTES element {index}")
        (size,) = _LENGTH.unpack_from(data, offset)
        offset = start + size
        if offset > data.nbytes:
            raise InvalidRequestError(
                f"BYTES element {index} of input '{name}' announces {size} bytes, "
                f"but only {data.nbytes - start} are left"
            )
        elements[index] = bytes(data[start:offset])
    if offset != data.nbytes:
        raise InvalidRequestError(
            f"input '{name}' has {data.nbytes - offset} bytes after its {count} BYTES elements, expected 0"
        )
    return elements


def bytes_from_array(array: Array) -> bytes:
    """The bytes of an output, as the protocol sends them."""
    if array.dtype == object:
        return b"".join(_LENGTH.pack(len(element)) + bytes(element) for element in array.reshape(-1))
    return array.tobytes()
