"""Tensors of Triton's python backend as NumPy arrays, and back. Runs inside the backend's stub process.

The stub of Triton 2.51 was built for NumPy 1: it reads an element's size where NumPy 2 keeps flags, mostly a zero. Its
conversions then make empty tensors, without an error. Tensors of numbers therefore pass by DLPack, which does not use
that size. DLPack has no type for byte strings (BYTES); `repair_bytes` corrects the stub's conversions of those. All of
this also works with NumPy 1 and with newer stubs.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from servers.protocol.tensors import Array

CPU = (1, 0)
_CONSUMED = ctypes.c_char_p(b"used_dltensor")
"""A capsule keeps the address of its name, so the name lives as long as this module."""
_NEW_FROM_DESCR = 94
"""Place of PyArray_NewFromDescr in NumPy's table of C functions; the same in NumPy 1 and 2."""
_TABLE_SIZE = 320
_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", ctypes.pythonapi))
_kept: list[object] = []
"""What the stub calls after `repair_bytes`; it must not be freed."""


class _Capsule:
    """A tensor as `numpy.from_dlpack` takes it, without the arguments that the stub's own method refuses."""

    __slots__ = ("_capsule",)

    def __init__(self, capsule: object) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_options: object) -> object:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU


def array_of(tensor: Any) -> Array:
    """A read-only view of the tensor in shared memory, which keeps the tensor alive; BYTES become an object array."""
    array: Array = tensor.as_numpy()
    if array.dtype.hasobject:
        return array
    capsule: Any = _Capsule(tensor.to_dlpack())
    return np.from_dlpack(capsule)


def tensor_of(name: str, array: Any) -> Any:
    """A tensor with the array's memory, which it keeps alive; a read-only or divided array is copied."""
    if array.dtype.hasobject or not array.size:  # the stub checks the strides of empty DLPack tensors wrongly
        return pb_utils.Tensor(name, array)
    if not (array.flags.c_contiguous and array.flags.writeable):
        array = array.copy()
    capsule = array.__dlpack__()
    tensor = pb_utils.Tensor.from_dlpack(name, capsule)
    # The stub leaves a name that NumPy does not know: NumPy would print an error when it frees the capsule.
    _set_name(capsule, _CONSUMED)
    return tensor


def repair_bytes() -> None:
    """Make the stub convert BYTES under NumPy 2: otherwise the first such input ends its process.

    Call it before the stub handles the first tensor. The stub (pybind11 before 2.12) then takes its functions from
    `numpy.core.multiarray`, which newer code does not use.
    """
    if _kept or int(np.__version__.partition(".")[0]) < 2:
        return
    _repair_inputs()
    serialize = pb_utils.serialize_byte_tensor

    def serialize_byte_tensor(array: Array) -> object:
        elements = serialize(array)
        return _measurable(elements) if elements else elements

    pb_utils.serialize_byte_tensor = serialize_byte_tensor


def _repair_inputs() -> None:
    """The stub makes an array of an input's bytes with strides of zero: let NumPy compute the strides."""
    module: Any = importlib.import_module("numpy.core.multiarray")
    pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
        ("PyCapsule_New", ctypes.pythonapi)
    )
    table = (ctypes.c_void_p * _TABLE_SIZE)()
    ctypes.memmove(table, pointer(module._ARRAY_API, None), ctypes.sizeof(table))
    address, count = ctypes.c_void_p, ctypes.c_int
    # type, dtype, dimensions, shape, strides, data, flags, object
    new_from_descr = ctypes.PYFUNCTYPE(
        ctypes.py_object, address, address, count, address, address, address, count, address
    )
    original = new_from_descr(table[_NEW_FROM_DESCR] or 0)
    repaired = new_from_descr(
        lambda kind, dtype, dimensions, shape, _strides, *rest: original(kind, dtype, dimensions, shape, None, *rest)
    )
    table[_NEW_FROM_DESCR] = ctypes.cast(repaired, ctypes.c_void_p).value
    module._ARRAY_API = new(ctypes.addressof(table), None, None)
    _kept.extend((table, original, repaired))


def _measurable(elements: bytes) -> Array:
    """The bytes as an array of which an old and a new stub read the same size.

    An old stub takes the flags of the dtype, here 1, for an element's size, which is 1. No other array has the dtype.
    """
    dtype: Any = np.dtype([("", np.uint8)])
    array: Array = np.frombuffer(elements, dtype)
    dtype.__setstate__((*dtype.__reduce__()[2][:-1], 1))  # the last part of the state are the flags
    return array
