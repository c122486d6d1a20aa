"""What a GPU executes, as CUPTI reports it through torch's profiler: every kernel, copy and fill of this process.

CUPTI watches the process, not torch: the kernels of ONNX Runtime and TensorRT are listed too, and those that a CUDA
graph replays. It slows launches down, also after the profile, so nothing may be measured afterwards. All executions go
into one session: CUPTI loses some first records of each session that follows another in the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.profiler import ProfilerActivity, profile

from servers.engines.profiling.records import ProfileError
from servers.engines.profiling.timeline import Launch, between_marks

MARK_CYCLES = 2000
LEADING_MARKS = 32
"""Marks before the first execution, for CUPTI to lose: one more with every earlier session of the process."""


def device_launches(executions: Sequence[Callable[[], object]], device: str) -> list[list[Launch]]:
    """What each of `executions` made the device do; a short kernel of torch's that spins marks where one ends.

    `device` is cuda:N. Raises `ProfileError` where CUPTI reports nothing, or not every execution.
    """
    index = torch.device(device).index or 0
    try:
        with torch.cuda.device(index), profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(LEADING_MARKS):
                _mark()
            for execute in executions:
                execute()
                _mark()
        events = list(profiler.events() or ())
    except RuntimeError as exc:
        raise ProfileError(f"torch's profiler failed: {str(exc).partition(chr(10))[0]}") from exc
    launches = [
        Launch(event.name, round(event.time_range.start * 1e3), round(event.time_range.end * 1e3))
        for event in events
        if event.device_type.name == "CUDA" and event.device_index == index
    ]
    return split(launches, len(executions))


def split(launches: Sequence[Launch], executions: int) -> list[list[Launch]]:
    """The launches of each execution; raises `ProfileError` if they are not all there."""
    if not launches:
        raise ProfileError(
            "torch's profiler reports no kernel, so there is no profile: the driver may let only administrators "
            "profile (run as root, or load nvidia with NVreg_RestrictProfilingToAdminUsers=0), or another profiler is "
            "attached"
        )
    groups = [group for group in between_marks(launches, is_mark) if group]
    if len(groups) != executions:
        raise ProfileError(
            f"torch's profiler reports {len(groups)} executions where {executions} were made; profile fewer batch "
            "sizes at a time (--batches)"
        )
    return groups


def is_mark(name: str) -> bool:
    """Whether that is the kernel that `torch.cuda._sleep` launches."""
    return "spin_kernel" in name


def _mark() -> None:
    torch.cuda.synchronize()
    torch.cuda._sleep(MARK_CYCLES)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
