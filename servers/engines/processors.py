"""The processors that an engine may use: the cores of this process and the machine's NVIDIA GPUs."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path

from servers.gpu.cuda_library import make_context
from servers.options.defaults import usable_cores
from servers.options.libraries import installed_version

_NVIDIA_DEVICES = ("/dev/nvidiactl", "/dev/dxg")  # the second one is WSL's


def thread_count(requested: int) -> int:
    """The number of intra-op threads: `requested`, or for 0 every core that this process may use."""
    return requested if requested > 0 else usable_cores()


def wait_policy(spinning: bool | None) -> dict[str, str]:
    """The environment variable that lets libgomp's threads, which torch uses, spin or sleep in waits. By default, and
    so for True and None, they spin for some milliseconds; for False they sleep. Set it before torch is imported."""
    return {"OMP_WAIT_POLICY": "PASSIVE"} if spinning is False else {}


def openmp_spinning(threads: int) -> str:
    """Whether OpenMP's threads spin while they wait for each other, "on" or "off"; a single one never waits."""
    sleeps = os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE" or os.environ.get("GOMP_SPINCOUNT") == "0"
    return "off" if sleeps or threads == 1 else "on"


def nvidia_device_present() -> bool:
    """Whether the kernel offers an NVIDIA device. Loads no library and does not prove that the GPU works."""
    return any(Path(path).exists() for path in _NVIDIA_DEVICES)


def begin_gpu(device: str) -> None:
    """Begin what torch will need on a GPU, in threads beside its import: the context of the device, and the digest of
    all of Triton's files, which names compiled kernels. For the process that executes, once."""
    number = cuda_index(device)
    if number is not None and not (installed_version("torch") or "+cpu").endswith("+cpu"):
        for begin in (partial(make_context, number), _name_kernels):
            threading.Thread(target=begin, daemon=True).start()


def _name_kernels() -> None:
    with suppress(Exception):  # there is no Triton, or another one
        import_module("triton.runtime.cache").triton_key()


def check_devices(device: str) -> None:
    """Raise `ValueError` for a list with the same GPU twice, or with a GPU and the CPU, which compute in different
    precisions."""
    devices = device.split(",")
    gpus = set(map(cuda_index, devices))
    if len(devices) > 1 and set(devices) != {"cpu"} and (None in gpus or len(gpus) < len(devices)):
        raise ValueError("list different GPUs, such as cuda:0,cuda:1, or cpu several times")


def cuda_index(device: str) -> int | None:
    """The number in `cuda:N` (0 for plain `cuda`); None when `device` does not have that form."""
    kind, _, index = device.partition(":")
    if kind != "cuda" or not (index or "0").isdecimal():
        return None
    return int(index or "0")
