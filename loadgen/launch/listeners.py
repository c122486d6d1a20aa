"""Finds the processes of a server that abserve did not start, by the port on which it listens on this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import psutil

from loadgen.client.requests import Address

RELAYS = frozenset(
    {"docker-proxy", "rootlessport", "slirp4netns", "pasta", "gvproxy", "ssh", "sshd", "nginx", "haproxy", "envoy",
     "traefik", "caddy", "kubectl", "socat"}
)  # fmt: skip
"""Programs that only forward requests: the process that listens is not the one that computes."""
Roots = tuple[psutil.Process, ...]


def find_listeners(address: Address) -> tuple[Roots, str | None]:
    """The processes that listen at an address; without any, the reason as the end of a sentence."""
    if not is_here(address.host):
        return (), "it runs on another machine"
    try:
        ips = [str(found[4][0]) for found in socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)]
        sockets = _listening(psutil.net_connections("tcp"), address.port)
        chosen = next((those for ip in ips if (those := _taking(sockets, ip))), [])
        if not chosen:
            return (), f"no process that this program can see listens on port {address.port}"
        if any(one.pid is None for one in chosen):
            return (), f"the process on port {address.port} belongs to another user or is in another container"
        roots = {_root(psutil.Process(one.pid), address.port) for one in chosen}
        names = {root.name() for root in roots}
    except (psutil.Error, OSError) as exc:
        return (), f"the processes of this machine cannot be read ({exc})"
    if RELAYS & names:
        return (), f"{min(RELAYS & names)} listens on port {address.port} and only forwards requests"
    if os.getpid() in {process.pid for process in tree(roots)}:  # as with a socket of systemd
        return (), f"the process on port {address.port} is this program or a parent of it"
    return tuple(sorted(roots, key=lambda root: root.pid)), None


def tree(roots: Iterable[psutil.Process]) -> tuple[psutil.Process, ...]:
    """The processes that are alive now with all their descendants."""
    found: dict[int, psutil.Process] = {}
    for root in roots:
        with suppress(psutil.NoSuchProcess):
            found |= {process.pid: process for process in (root, *root.children(recursive=True))}
    return tuple(found.values())


def cpu_ns(processes: Iterable[psutil.Process]) -> int | None:
    """CPU time of the processes so far (kernel resolution: 10 ms), with that of their children that have ended, so that
    it does not fall when one is restarted; None when they are gone."""
    seconds = []
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            times = process.cpu_times()
            seconds.append(times.user + times.system + times.children_user + times.children_system)
    return int(sum(seconds) * 1e9) if seconds else None


def is_here(host: str) -> bool:
    """Whether an address belongs to this machine: a socket can only be bound to its addresses."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _listening(sockets: Sequence[Any], port: int) -> list[Any]:
    return [one for one in sockets if one.status == psutil.CONN_LISTEN and one.laddr[1:2] == (port,)]


def _taking(sockets: Sequence[Any], ip: str) -> list[Any]:
    """The sockets that take connections to an address: those bound to it, else to all addresses."""
    wildcards = ["::"] if ":" in ip else ["0.0.0.0", "::"]
    return next((those for bound in (ip, *wildcards) if (those := [s for s in sockets if s.laddr[0] == bound])), [])


def _root(process: psutil.Process, port: int) -> psutil.Process:
    """The topmost of the parents that share the socket: a server's workers inherit it."""
    with suppress(psutil.Error):
        while (parent := process.parent()) is not None and _listening(parent.net_connections("tcp"), port):
            process = parent
    return process
