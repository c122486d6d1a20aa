"""The canary: one inference under torch's profiler, which lists the CUDA kernels that really ran.

Never inside a measured window: the first call loads CUPTI, which takes about a second, and profiling slows launches.
Afterwards CUPTI is detached again. Left attached, which is torch's default, it goes on slowing every launch of the
process, and only the servers that have a canary would pay for having proven where they run.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypedDict

import torch
from torch.profiler import ProfilerActivity, profile

TOP = 8
_DETACH = "TEARDOWN_CUPTI"
_SAFE_TO_DETACH = (12, 6)


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


@contextmanager
def _detached_afterwards() -> Iterator[None]:
    """The profiler asks the environment when it ends. Before CUDA 12.6 that made replays of graphs crash."""
    version = tuple(int(part) for part in (torch.version.cuda or "0").split("."))
    if version < _SAFE_TO_DETACH:
        yield
        return
    before = os.environ.get(_DETACH)
    os.environ[_DETACH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_DETACH]
        else:
            os.environ[_DETACH] = before


def run_canary(infer: Callable[[], object], device: torch.device) -> Canary:
    """Profile one call of `infer`, which returns when its answer is on the host."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    with _detached_afterwards(), torch.cuda.device(device), profile(activities=[ProfilerActivity.CUDA]) as profiler:
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
