"""Tells who used the processors during a block: the servers and this tool, other processes, the hypervisor."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import psutil

from loadgen.bench.arms import Arm
from loadgen.documents import one_line
from loadgen.machine.processors import TICK_NS, ProcessorReading, descendants, read_processors
from loadgen.records.run import MachineLoad
from loadgen.transport.requests import Address

RELAYS = frozenset(
    {"docker-proxy", "rootlessport", "slirp4netns", "pasta", "gvproxy", "ssh", "sshd", "nginx", "haproxy", "envoy",
     "traefik", "caddy", "kubectl", "socat"}
)  # fmt: skip
"""Programs that only pass requests on: who listens is not who computes, so the server's processes are not known."""
NAMED_SHARE = 0.01
"""Of the cores: processes that use less are not named."""
MOST_NAMED = 3


class MachineWatch:
    """`start` right before a window, `end` right after it. Each reads /proc once."""

    def __init__(self, arms: Sequence[Arm]) -> None:
        self._arms = arms
        self._servers: tuple[int, ...] | None = None
        self._looked = False
        self._before: ProcessorReading | None = None

    def start(self) -> None:
        """Remember the counters."""
        if not self._looked:
            self._looked, self._servers = True, _server_processes(self._arms)
        self._before = read_processors()

    def end(self) -> MachineLoad | None:
        """What they have grown by since `start`; None where they cannot be read."""
        after = read_processors()
        return None if self._before is None or after is None else machine_load(self._before, after, self._servers)


def machine_load(before: ProcessorReading, after: ProcessorReading, servers: Sequence[int] | None) -> MachineLoad:
    """The difference of two readings. `servers` are processes that are not this one's descendants; None: not known."""
    roots = (os.getpid(), *(servers or ()))
    own_before, own_after = descendants(before.processes, roots), descendants(after.processes, roots)
    known = _all_ticks(after, own_after) - _all_ticks(before, own_before)
    stolen = None
    if before.steal_ticks is not None and after.steal_ticks is not None:
        stolen = (after.steal_ticks - before.steal_ticks) * TICK_NS
    waited_ns = None
    if before.waited_us is not None and after.waited_us is not None:
        waited_ns = (after.waited_us - before.waited_us) * 1000
    return MachineLoad(
        total_ns=(after.total_ticks - before.total_ticks) * TICK_NS,
        steal_ns=stolen,
        busy_ns=(after.busy_ticks - before.busy_ticks) * TICK_NS,
        known_ns=None if servers is None else known * TICK_NS,
        others=() if servers is None else _busiest(before, after, own_after),
        runnable=before.runnable,
        waited_ns=waited_ns,
    )


def _all_ticks(reading: ProcessorReading, numbers: set[int]) -> int:
    """With those of children that have ended: what ends between two readings moves to its parent and is not lost."""
    return sum(reading.processes[n].own_ticks + reading.processes[n].waited_ticks for n in numbers)


def _busiest(before: ProcessorReading, after: ProcessorReading, own: set[int]) -> tuple[str, ...]:
    cores = os.sched_getaffinity(0)
    used: dict[str, int] = {}
    for number, process in after.processes.items():
        earlier = before.processes.get(number)
        ticks = process.own_ticks - (earlier.own_ticks if earlier else 0)
        if number not in own and process.core in cores and ticks > 0:
            used[process.name] = used.get(process.name, 0) + ticks
    total = max(after.total_ticks - before.total_ticks, 1)
    named = sorted((name for name in used if used[name] >= NAMED_SHARE * total), key=lambda name: -used[name])
    return tuple(f"{one_line(name)} {len(cores) * used[name] / total:.2f} cores" for name in named[:MOST_NAMED])


def _server_processes(arms: Sequence[Arm]) -> tuple[int, ...] | None:
    """Those of all arms that run on this machine; None where one does and its processes cannot be told."""
    found: list[int] = []
    for arm in arms:
        address = Address.parse(arm.deployment.url)
        if arm.deployment.launched:
            numbers = arm.deployment.pids()
        elif not _is_here(address.host):
            continue
        else:
            numbers = _listeners(address.port)
        if not numbers:
            return None
        found += numbers
    return tuple(found)


def _is_here(host: str) -> bool:
    """Whether an address is this machine's: only then can a socket be bound to it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _listeners(port: int) -> tuple[int, ...]:
    """Processes that listen on a port; none where they cannot be seen, or where one passes requests on."""
    try:
        sockets = psutil.net_connections("tcp")
        numbers = {s.pid for s in sockets if s.status == psutil.CONN_LISTEN and s.laddr[1:2] == (port,)}
        named = {number: psutil.Process(number).name() for number in numbers if number is not None}
    except (psutil.Error, OSError):
        return ()
    return () if None in numbers or RELAYS & set(named.values()) else tuple(named)
