"""NVIDIA's driver library (libcuda) over ctypes, and the UUID of the GPU behind a CUDA ordinal.

Needs neither torch nor a CUDA runtime. Python's other threads run during a call, except during brief ones. CUDA counts
the GPUs in CUDA_VISIBLE_DEVICES in the order of CUDA_DEVICE_ORDER, NVML counts all by PCI address: only the UUID fits
both.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from contextlib import suppress
from ctypes import POINTER, byref, c_char_p, c_int, c_ubyte, c_uint, c_void_p
from typing import Any
from uuid import UUID

LIBRARY = "libcuda.so.1"

_ALWAYS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
}


class CudaError(Exception):
    """A call failed, or the driver is missing; the message begins with the driver's name of the error."""


class CudaLibrary:
    """An initialised driver, for any thread. Devices are numbered as this process sees them."""

    def __init__(self, signatures: Mapping[str, tuple[Any, ...]], *, brief: bool = False) -> None:
        """`signatures`: argument types of the functions that will be called. May take a second. `brief` calls keep the
        interpreter lock: waiting for it again would take longer than a call that only enqueues. Raises `CudaError`
        unless the library has all of the functions."""
        try:
            self._library = (ctypes.PyDLL if brief else ctypes.CDLL)(LIBRARY)
            for name, arguments in {**_ALWAYS, **signatures}.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = arguments, c_int
        except (OSError, AttributeError) as exc:
            raise CudaError(f"{LIBRARY} cannot be used: {exc}") from exc
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: object) -> None:
        """Call one of the declared functions. Raises `CudaError`."""
        code = self.code(name, *arguments)
        if code != 0:
            raise self.error(name, code)

    def code(self, name: str, *arguments: object) -> int:
        """The return code of one of the declared functions; 0 is success."""
        return self.function(name)(*arguments)

    def function(self, name: str) -> Callable[..., int]:
        """One of the declared functions itself, for calls that must be fast; it returns what `code` does."""
        function: Callable[..., int] = getattr(self._library, name)
        return function

    def error(self, name: str, code: int) -> CudaError:
        """The error for a function's return code."""
        return CudaError(f"{self._text('cuGetErrorName', code)} from {name}: {self._text('cuGetErrorString', code)}")

    def count(self) -> int:
        """Number of devices that this process may use. Raises `CudaError`."""
        count = c_int()
        self.call("cuDeviceGetCount", byref(count))
        return count.value

    def device(self, ordinal: int) -> c_int:
        """The driver's handle of a device. Raises `CudaError` if there is no device with that number."""
        handle = c_int()
        self.call("cuDeviceGet", byref(handle), ordinal)
        return handle

    def _text(self, function: str, code: int) -> str:
        text = c_char_p()
        getattr(self._library, function)(code, byref(text))
        return (text.value or b"%d" % code).decode("utf-8", "replace")


def make_context(ordinal: int) -> None:
    """Make the context of a device that all libraries of this process share, which takes a third of a second. Without
    effect where that fails: who needs it will say so."""
    with suppress(CudaError):
        library = CudaLibrary({"cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int)})
        library.call("cuDevicePrimaryCtxRetain", byref(c_void_p()), library.device(ordinal))


def device_uuid(ordinal: int) -> str | None:
    """The UUID as NVML writes it: "GPU-…", or "MIG-…" for a MIG instance. None without a driver or device."""
    gpu = _read("cuDeviceGetUuid", ordinal)  # always that of the whole GPU
    instance = _read("cuDeviceGetUuid_v2", ordinal)  # since CUDA 11.4; under MIG that of the instance
    if gpu is not None and instance is not None and gpu != instance:
        return f"MIG-{instance}"
    uuid = instance or gpu
    return None if uuid is None else f"GPU-{uuid}"


def _read(function: str, ordinal: int) -> UUID | None:
    """The UUID that the driver's function returns; None if the driver does not have the function or the device."""
    uuid = (c_ubyte * 16)()
    try:
        library = CudaLibrary({function: (POINTER(c_ubyte * 16), c_int)})
        library.call(function, byref(uuid), library.device(ordinal))
    except CudaError:
        return None
    return UUID(bytes=bytes(uuid))
