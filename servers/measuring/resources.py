"""The memory and energy that one workload of the engine matrix takes: of this process, and of its device.

A value that cannot be read is None, never 0.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from servers.engines.processors import cuda_index
from servers.gpu.cuda_library import device_uuid

RAPL = Path("/sys/class/powercap")
ENERGY_SECONDS = 0.3
"""The shortest time over which energy is measured: a GPU's counter steps about every 100 ms."""
EDGE_SECONDS = 1.0
"""Longest wait for a step of the counter."""

Read = Callable[[], float | None]
"""Reads a counter of joules; None if it cannot be read."""


Energy = tuple[float, int, float]
"""Joules of a device, the number of runs that took them, and the seconds of one run without readings in between."""


class Resources:
    """Readings of one process on one device, cpu or cuda:N. Make it before the engine is loaded."""

    def __init__(self, device: str) -> None:
        self._cuda = cuda_index(device)
        self._gpu: int | None = None
        self._others: frozenset[int] = frozenset()
        self._joules = rapl_counter()
        if self._cuda is None:
            return
        from servers.gpu.nvml import NvmlReader

        uuid = device_uuid(self._cuda)
        self._reader = reader = NvmlReader(None if uuid is None else [uuid])
        devices = reader.connect().devices
        self._gpu = devices[0].index if uuid is not None and devices else None
        self._others = frozenset(self._processes())
        # A MIG instance has no energy counter, only its whole GPU.
        whole = self._gpu is not None and uuid is not None and uuid.startswith("GPU-")
        self._joules = self._gpu_joules if whole else lambda: None

    def begin(self) -> None:
        """Reset the framework's peaks of memory, which are those of earlier cells."""
        if (cuda := self._torch_cuda()) is not None:
            cuda.reset_peak_memory_stats(self._cuda)

    def memory(self) -> dict[str, int | None]:
        """The fields of a cell about memory."""
        cuda = self._torch_cuda()
        return {
            "allocated_bytes": None if cuda is None else cuda.max_memory_allocated(self._cuda) or None,
            "reserved_bytes": None if cuda is None else cuda.max_memory_reserved(self._cuda) or None,
            "process_device_bytes": self._process_bytes(),
            "rss_bytes": peak_rss_bytes(),
        }

    def energy(self, run: Callable[[], object]) -> Energy | None:
        """The energy of the device while `run` runs again and again; None if it cannot be read."""
        return joules_of(self._joules, run, ENERGY_SECONDS)

    def close(self) -> None:
        """Release NVIDIA's library."""
        if self._cuda is not None:
            self._reader.close()

    def _torch_cuda(self) -> Any:
        torch = sys.modules.get("torch")
        used = self._cuda is not None and torch is not None and torch.cuda.is_initialized()
        return torch.cuda if used and torch is not None else None

    def _gpu_joules(self) -> float | None:
        return None if self._gpu is None else self._reader.energy_joules(self._gpu)

    def _processes(self) -> dict[int, int | None]:
        processes = None if self._gpu is None else self._reader.edge(self._gpu).processes
        return {process.pid: process.used_bytes for process in processes or ()}

    def _process_bytes(self) -> int | None:
        """The device memory of this process, by its ID; in a container, where IDs differ, of the only new process."""
        if self._gpu is None:
            return None
        processes = self._processes()
        if os.getpid() in processes:
            return processes[os.getpid()]
        new = [used for pid, used in processes.items() if pid not in self._others]
        return new[0] if len(new) == 1 else None


def peak_rss_bytes(status: Path = Path("/proc/self/status")) -> int | None:
    """The peak of this process' resident memory so far."""
    try:
        peak = re.search(r"^VmHWM:\s*(\d+) kB$", status.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if peak is None else int(peak.group(1)) * 1024


def joules_of(read: Read, run: Callable[[], object], seconds: float) -> Energy | None:
    """The energy between two steps of a counter that are at least `seconds` apart. The counter may step rarely: between
    its steps a reading would count energy of the time before."""
    first = read()
    if first is None:
        return None
    start = _next_step(read, first, run)[0]
    runs, began = 0, perf_counter()
    while not runs or perf_counter() < began + seconds:
        run()
        runs += 1
    per_run = (perf_counter() - began) / runs
    before = read()
    end, further = (None, 0) if before is None else _next_step(read, before, run)
    return None if start is None or end is None or end <= start else (end - start, runs + further, per_run)


def _next_step(read: Read, before: float, run: Callable[[], object]) -> tuple[float | None, int]:
    """The reading after the counter's next step, and the runs until then."""
    runs, deadline = 0, perf_counter() + EDGE_SECONDS
    while (now := read()) == before and perf_counter() < deadline:
        run()
        runs += 1
    return now, runs


def rapl_counter(folder: Path = RAPL) -> Read:
    """A reader of the energy of all CPU packages since its first call, from the kernel's counters, which wrap around;
    it gives None if this user may not read them."""
    packages = sorted(folder.glob("intel-rapl:[0-9]")) + sorted(folder.glob("intel-rapl:[0-9][0-9]"))
    last: list[int] = []
    total_uj = 0

    def joules() -> float | None:
        nonlocal last, total_uj
        try:
            now = [int((package / "energy_uj").read_text()) for package in packages]
            ranges = [int((package / "max_energy_range_uj").read_text()) for package in packages]
        except (OSError, ValueError):
            return None
        if not now:
            return None
        for new, old, largest in zip(now, last or now, ranges, strict=True):
            total_uj += new - old if new >= old else new + largest - old
        last = now
        return total_uj / 1e6

    return joules
