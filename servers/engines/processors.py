"""Which processors an engine may use: the cores of this process and whether the machine shows an NVIDIA GPU."""

from __future__ import annotations

import os
from pathlib import Path

_NVIDIA_DEVICES = ("/dev/nvidiactl", "/dev/dxg")  # the second one is WSL's


def thread_count(asked_for: int) -> int:
    """Intra-op threads: what was asked for, or for 0 every core that this process may use."""
    return asked_for if asked_for > 0 else len(os.sched_getaffinity(0))


def nvidia_device_present() -> bool:
    """Whether the kernel offers an NVIDIA device: a cheap sign that loads no library, and no proof that it works."""
    return any(Path(path).exists() for path in _NVIDIA_DEVICES)


def cuda_index(device: str) -> int | None:
    """The number in `cuda:N` (0 for plain `cuda`); None when `device` is not of that form."""
    kind, _, index = device.partition(":")
    if kind != "cuda" or not (index or "0").isdecimal():
        return None
    return int(index or "0")
