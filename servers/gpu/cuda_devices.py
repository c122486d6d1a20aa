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
