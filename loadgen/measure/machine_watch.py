"""Measures who used the processors during a block: the servers and this tool, other processes, the hypervisor.

It reads /proc, whose counters move in ticks of 10 ms, so a reading describes stretches of a second or more. Linux only;
values that the kernel does not offer are None.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import sleep

from loadgen.base.documents import one_line
from loadgen.base.quantities import counted, share
from loadgen.client.connection import Address
from loadgen.launch.deployment import is_here
from loadgen.measure.arms import Arm
from loadgen.records.run import MachineLoad, programs_in_words

PROC = Path("/proc")
TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_STEAL = 7
NAMED_SHARE = 0.01
"""Share of all cores. Processes that use less are not named."""
MOST_NAMED = 3
INTERPRETER = re.compile(r"(python|pypy|node|ruby|perl|bash|sh|zsh|java|julia|Rscript|php)[\d.]*")
SCRIPT = re.compile(r"[\w.+-]{1,80}\.(py|js|mjs|rb|pl|sh|jar|jl|R|php)")
MODULE = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
"""What may be shown of the arguments: the names of a script and of a module, which hold no secret."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process; `waited_ticks` are those of its children that have ended."""

    parent: int
    name: str
    core: int
    """The core it last ran on."""
    own_ticks: int
    waited_ticks: int


@dataclass(frozen=True, slots=True)
class ProcessorReading:
    """Counters since the machine started, in ticks, of the cores that this process may use."""

    total_ticks: int
    """All time of these cores: idle, busy, interrupts, stolen."""
    busy_ticks: int
    """Time spent in processes. Interrupts are left out: most come from the network traffic of the load itself."""
    steal_ticks: int | None
    """Time in which a core had work but the hypervisor gave it to another machine."""
    runnable: int | None
    """Threads that ran or waited for a core at this moment, without this one."""
    waited_us: int | None
    """Time in which at least one thread waited for a core (pressure stall information)."""
    processes: Mapping[int, Process]


@dataclass(frozen=True, slots=True)
class OtherPrograms:
    """What uses the cores besides this program and the servers; as text, for people."""

    share: float
    """Of all cores that this process may use."""
    cores: int
    programs: tuple[str, ...]
    """The busiest: "PID 812 python3 train.py, 0.98 cores"; empty where none can be seen."""

    def __str__(self) -> str:
        named = programs_in_words(self.programs)
        return f"other programs use {share(self.share)} of {counted(self.cores, 'core')} ({named})"


def read_others(seconds: float, servers: Sequence[int]) -> OtherPrograms | None:
    """Watch for this long. `servers` are processes that are not others, with their descendants. None where /proc cannot
    be read."""
    before = read_processors()
    sleep(seconds)
    load = machine_load(before, read_processors(), servers)
    if load is None or load.known_ns is None or load.total_ns <= 0:
        return None
    taken = max(load.busy_ns - load.known_ns, 0) / load.total_ns
    return OtherPrograms(taken, len(os.sched_getaffinity(0)), load.others)


def machine_load(
    before: ProcessorReading | None, after: ProcessorReading | None, servers: Sequence[int] | None
) -> MachineLoad | None:
    """The difference of two readings, right before a window and right after it; None without one of them. `servers`
    are processes besides this one's descendants; None if unknown."""
    if before is None or after is None:
        return None
    roots = (os.getpid(), *filter(_shares_cores, servers or ()))
    own_before, own_after = descendants(before.processes, roots), descendants(after.processes, roots)
    our_ticks = _all_ticks(after, own_after) - _all_ticks(before, own_before)
    stolen, waited_ns = None, None
    if before.steal_ticks is not None and after.steal_ticks is not None:
        stolen = (after.steal_ticks - before.steal_ticks) * TICK_NS
    if before.waited_us is not None and after.waited_us is not None:
        waited_ns = (after.waited_us - before.waited_us) * 1000
    return MachineLoad(
        total_ns=(after.total_ticks - before.total_ticks) * TICK_NS,
        steal_ns=stolen,
        busy_ns=(after.busy_ticks - before.busy_ticks) * TICK_NS,
        known_ns=None if servers is None else our_ticks * TICK_NS,
        others=() if servers is None else _busiest(before, after, own_after),
        runnable=before.runnable,
        waited_ns=waited_ns,
    )


def _shares_cores(number: int) -> bool:
    """Whether a process may use one of the cores that this one may use. Otherwise its CPU time is not time of these
    cores, and would be subtracted from what other programs take of them."""
    try:
        return not os.sched_getaffinity(0).isdisjoint(os.sched_getaffinity(number))
    except OSError:  # it has ended
        return True


def _all_ticks(reading: ProcessorReading, numbers: set[int]) -> int:
    """CPU time with that of ended children: when a process ends between two readings, its parent inherits its time."""
    return sum(reading.processes[n].own_ticks + reading.processes[n].waited_ticks for n in numbers)


def _busiest(before: ProcessorReading, after: ProcessorReading, ours: set[int]) -> tuple[str, ...]:
    """The programs that used the most CPU time: "PID 812 python3 train.py, 0.98 cores". Processes of one name are one
    program, so that a build with many short ones is named."""
    cores = os.sched_getaffinity(0)
    used: dict[str, dict[int, int]] = {}
    for number, process in after.processes.items():
        earlier = before.processes.get(number)
        ticks = process.own_ticks - (earlier.own_ticks if earlier else 0)
        if number not in ours and process.core in cores and ticks > 0:
            used.setdefault(process.name, {})[number] = ticks
    total = max(after.total_ticks - before.total_ticks, 1)
    sums = {name: sum(ticks.values()) for name, ticks in used.items()}
    named = sorted((name for name in used if sums[name] >= NAMED_SHARE * total), key=lambda name: -sums[name])
    words = []
    for name in named[:MOST_NAMED]:
        busiest, others = max(used[name], key=lambda number: used[name][number]), len(used[name]) - 1
        more = f" and {others} more" if others else ""
        words.append(f"PID {busiest}{more} {short_command(busiest, name)}, {len(cores) * sums[name] / total:.2f} cores")
    return tuple(words)


def short_command(number: int, name: str) -> str:
    """A process's program and the script that it runs, without their folders: "python3 train.py". Every other argument
    may hold a password or a token and is left out. `name` is the kernel's name, for a process that has ended or may not
    be read."""
    try:
        arguments = (PROC / str(number) / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        arguments = []
    program = one_line(arguments[0].split(" ")[0].rpartition("/")[2]) if arguments else ""
    if not program or not INTERPRETER.fullmatch(program):
        return one_line(name)
    for argument, following in pairwise([*arguments[1:], ""]):
        if argument == "-m" and MODULE.fullmatch(following):
            return f"{program} -m {following}"
        if SCRIPT.fullmatch(script := argument.rpartition("/")[2]):
            return f"{program} {script}"
    return program


def descendants(processes: Mapping[int, Process], roots: Collection[int]) -> set[int]:
    """The roots that exist, with all their descendants."""
    children: dict[int, list[int]] = {}
    for number, process in processes.items():
        children.setdefault(process.parent, []).append(number)
    family: set[int] = set()
    waiting = [root for root in roots if root in processes]
    while waiting:
        number = waiting.pop()
        if number not in family:
            family.add(number)
            waiting += children.get(number, ())
    return family


def server_processes(arms: Iterable[Arm]) -> tuple[int, ...] | None:
    """The processes of all arms that run on this machine; None if they are unknown for one arm."""
    servers: list[int] = []
    for arm in arms:
        if not arm.deployment.launched and not is_here(Address.parse(arm.deployment.url).host):
            continue
        numbers = arm.deployment.pids()
        if not numbers:
            return None
        servers += numbers
    return tuple(servers)


def read_processors(folder: Path = PROC, cores: Collection[int] | None = None) -> ProcessorReading | None:
    """Read all counters; None when /proc/stat cannot be read. `cores` defaults to those of this process."""
    try:
        lines = (folder / "stat").read_text().splitlines()
    except OSError:
        return None
    chosen = os.sched_getaffinity(0) if cores is None else cores
    # user, nice, system, idle, iowait, irq, softirq, steal; guests are in user and nice.
    times = [[int(word) for word in line.split()[1:]] for line in lines if _core(line) in chosen]
    if not times:
        return None
    running = next((int(line.split()[1]) for line in lines if line.startswith("procs_running ")), None)
    return ProcessorReading(
        total_ticks=sum(sum(core_times[: _STEAL + 1]) for core_times in times),
        busy_ticks=sum(sum(core_times[:3]) for core_times in times),
        steal_ticks=sum(core_times[_STEAL] for core_times in times)
        if all(len(core_times) > _STEAL for core_times in times)
        else None,
        runnable=None if running is None else max(running - 1, 0),
        waited_us=_waited_us(folder / "pressure" / "cpu"),
        processes=_processes(folder),
    )


def _core(line: str) -> int | None:
    """The core's number in a line such as "cpu3 …"; the line "cpu  …" is the sum of all."""
    name = line.partition(" ")[0].removeprefix("cpu")
    return int(name) if line.startswith("cpu") and name.isdigit() else None


def _waited_us(path: Path) -> int | None:
    try:
        some = next(line for line in path.read_text().splitlines() if line.startswith("some "))
    except (OSError, StopIteration):
        return None
    return int(some.rpartition("total=")[2])


def _processes(folder: Path) -> dict[int, Process]:
    processes = {}
    for name in (path.name for path in folder.iterdir()):
        if not name.isdigit():
            continue
        try:
            # os.open takes a third of the time of Path.read_bytes, for each of perhaps thousands of processes.
            file = os.open(f"{folder}/{name}/stat", os.O_RDONLY | os.O_CLOEXEC)
            try:
                stat = os.read(file, 4096)
            finally:
                os.close(file)
        except OSError:  # the process has ended since
            continue
        # Fields as in proc(5); the name before them may hold blanks and brackets.
        head, _, rest = stat.decode("utf-8", "replace").rpartition(")")
        fields = rest.split()
        processes[int(name)] = Process(
            parent=int(fields[1]),
            name=head.partition("(")[2],
            core=int(fields[36]),
            own_ticks=int(fields[11]) + int(fields[12]),
            waited_ticks=int(fields[13]) + int(fields[14]),
        )
    return processes
