"""Which physical GPU a CUDA ordinal of this process is: the UUID that NVML knows it by.

An engine counts the GPUs that CUDA_VISIBLE_DEVICES leaves it, in the order of CUDA_DEVICE_ORDER; NVML counts all of
them by their PCI address. Only the UUID means the same to both.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_int, c_ubyte
from typing import Any
from uuid import UUID

from servers.gpu.cuda_library import CudaError, CudaLibrary


class _Uuid(ctypes.Structure):
    """CUuuid."""

    _fields_ = (("bytes", c_ubyte * 16),)


_OF_GPU = "cuDeviceGetUuid"
_OF_INSTANCE = "cuDeviceGetUuid_v2"
"""Since CUDA 11.4: under MIG that of the instance, else that of the GPU."""
_ARGUMENTS: tuple[Any, ...] = (POINTER(_Uuid), c_int)


def device_uuid(ordinal: int) -> str | None:
    """As NVML writes it: "GPU-…", or "MIG-…" where the ordinal is a MIG instance. None without a driver or device."""
    try:
        gpu = _read(_OF_GPU, ordinal)
    except CudaError:
        return None
    try:
        own = _read(_OF_INSTANCE, ordinal)
    except CudaError:  # a driver from before 11.4
        own = gpu
    return f"GPU-{gpu}" if own == gpu else f"MIG-{own}"


def _read(function: str, ordinal: int) -> UUID:
    library = CudaLibrary({function: _ARGUMENTS})
    found = _Uuid()
    library.call(function, byref(found), library.device(ordinal))
    return UUID(bytes=bytes(found.bytes))
