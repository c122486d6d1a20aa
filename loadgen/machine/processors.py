"""Reads from /proc who used the processors: the cores' counters and every process with its CPU time.

The kernel counts in ticks of 10 ms, so a reading says something of stretches of a second or more. Linux only; what the
kernel does not offer is None.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_STEAL = 7


@dataclass(frozen=True, slots=True)
class Process:
    """One process; `waited_ticks` are those of its children that have ended."""

    parent: int
    name: str
    core: int
    """Where it ran last."""
    own_ticks: int
    waited_ticks: int


@dataclass(frozen=True, slots=True)
class ProcessorReading:
    """Counters since the machine started, in ticks, of the cores that this process may use."""

    total_ticks: int
    """All time of these cores: idle, busy, interrupts, stolen."""
    busy_ticks: int
    """In processes. Interrupts are left out: most of them are the network traffic of the load itself."""
    steal_ticks: int | None
    """In which a core had work and the hypervisor gave it to another machine."""
    runnable: int | None
    """Threads that ran or waited for a core at this moment, this one not counted."""
    waited_us: int | None
    """Time in which at least one thread waited for a core (pressure stall information)."""
    processes: Mapping[int, Process]


def read_processors(folder: Path = PROC, cores: Collection[int] | None = None) -> ProcessorReading | None:
    """Everything now; None where /proc/stat cannot be read. `cores` are this process's own unless told."""
    try:
        stat = (folder / "stat").read_text()
    except OSError:
        return None
    chosen = os.sched_getaffinity(0) if cores is None else cores
    times = [_times(line) for line in stat.splitlines() if _core(line) in chosen]
    if not times:
        return None
    return ProcessorReading(
        total_ticks=sum(sum(one[: _STEAL + 1]) for one in times),
        busy_ticks=sum(sum(one[:3]) for one in times),
        steal_ticks=sum(one[_STEAL] for one in times) if all(len(one) > _STEAL for one in times) else None,
        runnable=_runnable(stat),
        waited_us=_waited_us(folder / "pressure" / "cpu"),
        processes=_processes(folder),
    )


def descendants(processes: Mapping[int, Process], roots: Collection[int]) -> set[int]:
    """The roots that there are, with all their descendants."""
    children: dict[int, list[int]] = {}
    for number, process in processes.items():
        children.setdefault(process.parent, []).append(number)
    found: set[int] = set()
    waiting = [root for root in roots if root in processes]
    while waiting:
        number = waiting.pop()
        if number not in found:
            found.add(number)
            waiting += children.get(number, ())
    return found


def _core(line: str) -> int | None:
    """Of a line such as "cpu3 …"; the line "cpu  …" is the sum of all."""
    name = line.partition(" ")[0].removeprefix("cpu")
    return int(name) if line.startswith("cpu") and name.isdigit() else None


def _times(line: str) -> list[int]:
    """user, nice, system, idle, iowait, irq, softirq, steal; guests are in user and nice."""
    return [int(word) for word in line.split()[1:]]


def _runnable(stat: str) -> int | None:
    line = next((line for line in stat.splitlines() if line.startswith("procs_running ")), None)
    return None if line is None else max(int(line.split()[1]) - 1, 0)


def _waited_us(path: Path) -> int | None:
    try:
        some = next(line for line in path.read_text().splitlines() if line.startswith("some "))
    except (OSError, StopIteration):
        return None
    return int(some.rpartition("total=")[2])


def _processes(folder: Path) -> dict[int, Process]:
    found = {}
    for name in (path.name for path in folder.iterdir()):
        if not name.isdigit():
            continue
        try:
            # A third of the time that Path.read_bytes takes, for each of perhaps thousands of processes.
            file = os.open(f"{folder}/{name}/stat", os.O_RDONLY | os.O_CLOEXEC)
            try:
                stat = os.read(file, 4096)
            finally:
                os.close(file)
        except OSError:  # the process has ended since
            continue
        found[int(name)] = _process(stat.decode("utf-8", "replace"))
    return found


def _process(stat: str) -> Process:
    """Fields as in proc(5), behind the name, which may hold blanks and brackets."""
    head, _, rest = stat.rpartition(")")
    fields = rest.split()
    return Process(
        parent=int(fields[1]),
        name=head.partition("(")[2],
        core=int(fields[36]),
        own_ticks=int(fields[11]) + int(fields[12]),
        waited_ticks=int(fields[13]) + int(fields[14]),
    )
