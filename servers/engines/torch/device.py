"""A CUDA device through torch: which it is, the precision of products, the time between events, the kernel probe."""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from collections.abc import Callable

import torch
from torch.autograd.profiler import profile

from servers.engines.interface import EngineError
from servers.engines.processors import cuda_index
from servers.gpu.cuda_library import device_uuid

TOP_KERNELS = 8
"""How many kernels a kernel probe lists by name."""


def resolve_device(requested: str) -> torch.device:
    """The device for `auto`, `cpu` or `cuda:N`. Raises `EngineError` where it does not exist."""
    if requested == "cpu":
        return torch.device("cpu")
    if requested == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    index = cuda_index(requested)
    assert index is not None  # see EngineSettings.check
    if not torch.cuda.is_available():
        raise EngineError(f"device {requested}: torch {torch.__version__} finds no CUDA device; use device cpu")
    if index >= torch.cuda.device_count():
        raise EngineError(f"device {requested}: torch finds {torch.cuda.device_count()} CUDA device(s)")
    return torch.device("cuda", index)


def set_fp32_products(*, tf32: bool) -> None:
    """Use TF32 in every product and convolution of this process, or in none: torch's default lets cuDNN use it."""
    precision = "tf32" if tf32 else "ieee"
    # torch keeps its older switches beside the newer ones, and torch.export raises where they differ.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cuda.matmul.fp32_precision = precision
    torch.backends.cudnn.conv.fp32_precision = precision  # type: ignore[attr-defined,unused-ignore]
    torch.backends.cudnn.rnn.fp32_precision = precision  # type: ignore[attr-defined,unused-ignore]


def fp32_products() -> dict[str, str]:
    """The precision of FP32 products and convolutions, read back from torch."""
    return {
        "matmul": torch.backends.cuda.matmul.fp32_precision,
        "convolution": torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined,unused-ignore]
    }


def device_details(device: torch.device) -> dict[str, object]:
    """The details of the card in the description of an engine."""
    details: dict[str, object] = {"cuda_build": torch.version.cuda, "cuda_available": torch.cuda.is_available()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        details |= {
            "device_name": properties.name,
            # torch's UUID has no prefix, which distinguishes a MIG instance from its GPU.
            "device_uuid": device_uuid(device.index or 0) or str(properties.uuid),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_allocated_bytes": torch.cuda.memory_allocated(device),
        }
    return details


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
