"""Which device torch is to use, how it multiplies FP32 there, and which kernels one inference runs on it."""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import TypedDict

import torch
from torch.profiler import ProfilerActivity, profile

from servers.engines.interface import EngineError
from servers.engines.processors import cuda_index
from servers.gpu.cuda_library import device_uuid

TOP = 8
"""Kernels that a canary lists by name."""


def resolve_device(asked_for: str) -> torch.device:
    """The device for `auto`, `cpu` or `cuda:N`. Raises `EngineError` where it does not exist."""
    if asked_for == "cpu":
        return torch.device("cpu")
    if asked_for == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    index = cuda_index(asked_for)
    if index is None:
        raise EngineError(f"unknown device {asked_for!r}; use auto, cpu or cuda:N")
    if not torch.cuda.is_available():
        raise EngineError(f"device {asked_for}: torch {torch.__version__} sees no CUDA device; use device cpu")
    if index >= torch.cuda.device_count():
        raise EngineError(f"device {asked_for}: torch sees {torch.cuda.device_count()} CUDA device(s)")
    return torch.device("cuda", index)


def set_fp32_products(*, tf32: bool) -> None:
    """TF32 in every product and convolution of this process, or in none: torch's default lets cuDNN use it."""
    precision = "tf32" if tf32 else "ieee"
    # torch keeps its older switches beside the newer ones and raises where they differ, as torch.export finds out.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it also says that they are older
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cuda.matmul.fp32_precision = precision
    torch.backends.cudnn.conv.fp32_precision = precision  # type: ignore[attr-defined,unused-ignore]
    torch.backends.cudnn.rnn.fp32_precision = precision  # type: ignore[attr-defined,unused-ignore]


def fp32_products() -> dict[str, str]:
    """How FP32 is multiplied now, read back."""
    return {
        "matmul": torch.backends.cuda.matmul.fp32_precision,
        "convolution": torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined,unused-ignore]
    }


def device_details(device: torch.device) -> dict[str, object]:
    """What the description of every engine on torch's memory tells about the card."""
    details: dict[str, object] = {"cuda_build": torch.version.cuda, "cuda_available": torch.cuda.is_available()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        details |= {
            "device_name": properties.name,
            # torch's own leaves the prefix out, which under MIG is what tells an instance from the GPU that it is of.
            "device_uuid": device_uuid(device.index or 0) or str(properties.uuid),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_allocated_bytes": torch.cuda.memory_allocated(device),
        }
    return details


class Kernel(TypedDict):
    """All launches of one kernel."""

    name: str
    count: int
    seconds: float


class Canary(TypedDict):
    """One inference under torch's profiler, which lists the CUDA kernels that really ran.

    `kernel_count` leaves copies and fills out; `cuda_event_seconds` is between two events around the inference.
    """

    wall_seconds: float
    cuda_event_seconds: float
    kernel_count: int
    top_kernels: list[Kernel]


def run_canary(infer: Callable[[], object], device: torch.device) -> Canary:
    """Profile one call of `infer`, which returns when its answer is on the host.

    Never inside a measured window: the first call loads CUPTI, which takes a second, and profiling slows launches.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), profile(activities=[ProfilerActivity.CUDA]) as profiler:
        started_ns = time.perf_counter_ns()
        begin.record()
        infer()
        end.record()
        torch.cuda.synchronize(device)
        wall_ns = time.perf_counter_ns() - started_ns
    launches: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events() or ():
        if event.device_type.name == "CUDA" and not event.name.startswith(("Memcpy", "Memset")):
            launches[event.name].append(event.time_range.elapsed_us() / 1e6)
    kernels = [Kernel(name=name, count=len(times), seconds=sum(times)) for name, times in launches.items()]
    return Canary(
        wall_seconds=wall_ns / 1e9,
        cuda_event_seconds=begin.elapsed_time(end) / 1e3,
        kernel_count=sum(kernel["count"] for kernel in kernels),
        top_kernels=sorted(kernels, key=lambda kernel: -kernel["seconds"])[:TOP],
    )
