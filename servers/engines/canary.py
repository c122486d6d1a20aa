"""The canary: one inference under torch's profiler, which lists the CUDA kernels that really ran.

Never inside a measured window: the first call loads CUPTI, which takes about a second, and profiling slows launches.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import TypedDict

import torch
from torch.profiler import ProfilerActivity, profile

TOP = 8


class Kernel(TypedDict):
    """All launches of one kernel."""

    name: str
    count: int
    seconds: float


class Canary(TypedDict):
    """`kernel_count` leaves copies and fills out; `cuda_event_seconds` is between two events around the inference."""

    wall_seconds: float
    cuda_event_seconds: float
    kernel_count: int
    top_kernels: list[Kernel]


def run_canary(infer: Callable[[], object], device: torch.device) -> Canary:
    """Profile one call of `infer`, which returns when its answer is on the host."""
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
