"""NVIDIA's driver library over ctypes: found, its functions declared, and its error codes turned into exceptions.

Needs neither torch nor any version of the CUDA runtime. ctypes lets Python's other threads run while a call lasts.
Also tells which physical GPU a CUDA ordinal of this process is: an engine counts the GPUs that CUDA_VISIBLE_DEVICES
leaves it, in the order of CUDA_DEVICE_ORDER; NVML counts all of them by their PCI address. Only the UUID means the
same to both.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, byref, c_char_p, c_int, c_ubyte, c_uint
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
    """A call failed, or the driver is not there; the message begins with the driver's name of the error."""


class CudaLibrary:
    """An initialised driver; any thread. Devices are numbered as this process sees them, that is by
    CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER."""

    def __init__(self, signatures: Mapping[str, tuple[Any, ...]]) -> None:
        """`signatures`: argument types of the functions that will be called. Raises `CudaError` unless the library
        has all of them; may take a second."""
        try:
            self._library = ctypes.CDLL(LIBRARY)
            for name, arguments in {**_ALWAYS, **signatures}.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = arguments, c_int
        except (OSError, AttributeError) as exc:
            raise CudaError(f"{LIBRARY} cannot be used: {exc}") from exc
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: object) -> None:
        """One of the declared functions. Raises `CudaError`."""
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise CudaError(f"{self._text('cuGetErrorName', code)} from {name}: {self._text('cuGetErrorString', code)}")

    def count(self) -> int:
        """Devices that this process may use. Raises `CudaError`."""
        found = c_int()
        self.call("cuDeviceGetCount", byref(found))
        return found.value

    def device(self, ordinal: int) -> c_int:
        """The driver's handle of a device. Raises `CudaError` where there is none of that number."""
        handle = c_int()
        self.call("cuDeviceGet", byref(handle), ordinal)
        return handle

    def _text(self, function: str, code: int) -> str:
        text = c_char_p()
        getattr(self._library, function)(code, byref(text))
        return (text.value or b"%d" % code).decode("utf-8", "replace")


class _Uuid(ctypes.Structure):
    """CUuuid."""

    _fields_ = (("bytes", c_ubyte * 16),)


_OF_GPU = "cuDeviceGetUuid"
"""Always of the whole GPU. CUDA 13 keeps it for programs built before."""
_OF_INSTANCE = "cuDeviceGetUuid_v2"
"""Since CUDA 11.4: under MIG that of the instance, else that of the GPU."""
_ARGUMENTS: tuple[Any, ...] = (POINTER(_Uuid), c_int)


def device_uuid(ordinal: int) -> str | None:
    """As NVML writes it: "GPU-…", or "MIG-…" where the ordinal is a MIG instance. None without a driver or device."""
    gpu, own = _read(_OF_GPU, ordinal), _read(_OF_INSTANCE, ordinal)
    if gpu is not None and own is not None and gpu != own:
        return f"MIG-{own}"
    found = own or gpu
    return None if found is None else f"GPU-{found}"


def _read(function: str, ordinal: int) -> UUID | None:
    """None where the driver lacks the function, or the device."""
    found = _Uuid()
    try:
        library = CudaLibrary({function: _ARGUMENTS})
        library.call(function, byref(found), library.device(ordinal))
    except CudaError:
        return None
    return UUID(bytes=bytes(found.bytes))
