"""Tensors as raw little-endian bytes, in both directions, without copying where NumPy allows it."""

from __future__ import annotations

import struct
from math import prod

import numpy as np

from servers.contract.errors import InvalidRequestError
from servers.contract.tensors import DATATYPES, Array

MAX_BYTES = 2**63 - 1
MAX_DIMENSIONS = 32
MAX_BYTES_ELEMENTS = 16_384
"""Of one request, all its inputs together: each is an object, and nothing else runs while they are told apart."""
_LENGTH = struct.Struct("<I")


def element_count(shape: tuple[int, ...], name: str) -> int:
    """The product of a shape. Raises `InvalidRequestError` for a negative dimension or one past 64 bits."""
    check_rank(len(shape), name)
    for dimension in shape:
        if dimension < 0:
            raise InvalidRequestError(f"input '{name}' has a negative dimension {dimension} in its shape")
    count = prod(shape)
    if count > MAX_BYTES // 8:
        raise InvalidRequestError(f"the shape of input '{name}' overflows: it has more elements than 64 bits can count")
    return count


def check_rank(dimensions: int, name: str) -> None:
    """Raises `InvalidRequestError` for more dimensions than NumPy has."""
    if dimensions > MAX_DIMENSIONS:
        raise InvalidRequestError(f"input '{name}' has {dimensions} dimensions, at most {MAX_DIMENSIONS} are taken")


class BytesAllowance:
    """How many BYTES elements the rest of one request may still have."""

    def __init__(self) -> None:
        self._left = MAX_BYTES_ELEMENTS

    def take(self, shape: tuple[int, ...], name: str) -> None:
        """For one input, before its elements are read. Raises `InvalidRequestError`."""
        self._left -= element_count(shape, name)
        if self._left < 0:
            raise InvalidRequestError(
                f"a request has at most {MAX_BYTES_ELEMENTS} BYTES elements, input '{name}' makes them more"
            )


def wrong_size(name: str, datatype: str, expected_bytes: int, given_bytes: int) -> InvalidRequestError:
    """For an input whose bytes are not what its shape needs."""
    return InvalidRequestError(
        f"input '{name}' needs {expected_bytes} bytes for its shape and datatype {datatype}, got {given_bytes} bytes"
    )


def array_from_bytes(data: memoryview, datatype: str, shape: tuple[int, ...], name: str) -> Array:
    """A view over `data` (a copy for BYTES alone). Raises `InvalidRequestError` when the sizes disagree."""
    count = element_count(shape, name)
    if datatype == "BYTES":
        elements = _bytes_elements(data, count, name)
        try:
            return elements.reshape(shape)
        except ValueError as exc:
            raise InvalidRequestError(f"the shape of input '{name}' cannot be represented") from exc
    dtype = DATATYPES[datatype]
    expected = count * dtype.itemsize
    if expected != data.nbytes:
        raise wrong_size(name, datatype, expected, data.nbytes)
    try:
        return np.frombuffer(data, dtype=dtype).reshape(shape) if count else np.empty(shape, dtype)
    except ValueError as exc:  # dimensions around a zero that NumPy cannot hold
        raise InvalidRequestError(f"the shape of input '{name}' cannot be represented") from exc


def empty_elements(shape: tuple[int, ...], name: str) -> Array:
    """BYTES elements that are filled in later. Raises `InvalidRequestError`."""
    try:
        return np.empty(shape, object)
    except ValueError as exc:
        raise InvalidRequestError(f"the shape of input '{name}' cannot be represented") from exc


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
            raise InvalidRequestError(
                f"input '{name}' ends inside the length of BYTES element {index}: "
                f"expected {_LENGTH.size} bytes, got {data.nbytes - offset}"
            )
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
