"""The kernels that torch launches on a GPU, by its profiler."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

import torch
from torch.autograd.profiler import profile

TOP_KERNELS = 8
"""How many kernels a kernel probe lists by name."""


def event_pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Two events that measure the device time between them."""
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def probe_kernels(infer: Callable[[], object], device: torch.device) -> dict[str, object]:
    """Profile one call of `infer`, which returns when its answer is on the host. `kernel_count` leaves out copies and
    fills; `cuda_event_seconds` is between two events around the inference. Never call it in a measured window:
    profiling slows launches."""
    begin, end = event_pair()
    # torch.profiler does the same, but imports torch's compiler first, which takes seconds of a start.
    with torch.cuda.device(device), profile(use_cpu=False, use_device="cuda", use_kineto=True) as profiler:
        started_ns = time.perf_counter_ns()
        begin.record()
        infer()
        end.record()
        end.synchronize()  # not the device: another model may capture a graph
        wall_ns = time.perf_counter_ns() - started_ns
    launches: dict[str, list[float]] = defaultdict(list)
    for event in profiler.function_events or ():
        if event.device_type.name == "CUDA" and not event.name.startswith(("Memcpy", "Memset")):
            launches[event.name].append(event.time_range.elapsed_us() / 1e6)
    kernels = [{"name": name, "count": len(times), "seconds": sum(times)} for name, times in launches.items()]
    return {
        "wall_seconds": wall_ns / 1e9,
        "cuda_event_seconds": begin.elapsed_time(end) / 1e3,
        "kernel_count": sum(map(len, launches.values())),
        "top_kernels": sorted(kernels, key=lambda kernel: -sum(launches[str(kernel["name"])]))[:TOP_KERNELS],
    }
