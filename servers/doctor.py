"""`abserve doctor`: looks at this machine and says, with a remedy each, what stands in the way of a comparison."""

from __future__ import annotations

import ipaddress
import os
import shutil
import struct
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from servers.finding import Finding
from servers.native.listener import ListenerError, check_free
from servers.native.settings import NativeSettings
from servers.triton.settings import TritonSettings

MIN_FREE_BYTES = 2 * 2**30
"""An export needs 0.4 GB and as much again while it is written; a full run's samples and logs some tens of MB."""

MIN_SHM_BYTES = 128 * 2**20
"""Triton's python backend passes every tensor through /dev/shm."""

_NATIVE, _TRITON = NativeSettings.model_fields, TritonSettings.model_fields
PORTS: dict[int, str] = {
    _NATIVE["http_port"].default: "native HTTP",
    _NATIVE["grpc_port"].default: "native gRPC",
    _TRITON["http_port"].default: "Triton HTTP",
    _TRITON["grpc_port"].default: "Triton gRPC",
    _TRITON["metrics_port"].default: "Triton metrics",
}


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this machine: Python, packages, Triton, GPU, ports, disk. Exit status 1 when something is missing."""
    found = findings()
    if json:
        import orjson

        typer.echo(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode())
    else:
        _show(found)
    raise typer.Exit(0 if all(finding.ok for finding in found) else 1)


def findings() -> list[Finding]:
    """Everything that was looked at, needed things first."""
    from servers.container_findings import container_findings
    from servers.gpu.info import gpu_info
    from servers.triton.wheel import diagnose

    gpu = gpu_info(None)
    machine = [_python(), *_packages(), *diagnose(), _gpu(gpu), *_ports(), _disk(), _shared_memory(), _exposure()]
    return [*machine, *container_findings(gpu)]


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    ok = sys.version_info[:2] in ((3, 11), (3, 12))
    return Finding("python", ok, f"Python {version}", None if ok else "make PYTHON=python3.12 setup")


def _packages() -> list[Finding]:
    """One finding a package that a server needs; `find_spec` does not import them, so this stays quick."""
    needed = {"torch": "torch", "open_clip": "open_clip_torch", "onnxruntime": "onnxruntime-gpu", "fastapi": "fastapi"}
    result = []
    for module, package in needed.items():
        ok = find_spec(module) is not None
        remedy = None if ok else "pip install 'abserve[servers]'"
        result.append(Finding(package, ok, "installed" if ok else "not installed", remedy))
    return result


def _gpu(document: Mapping[str, object]) -> Finding:
    """A machine without a GPU is fine for a CPU comparison, and the finding says which of the two this is."""
    status = str(document["status"])
    devices = document["devices"]
    if status == "ok" and isinstance(devices, list) and devices:
        names = ", ".join(str(device["name"]) for device in devices)
        return Finding("gpu", True, names)
    fatal = status in ("driver_mismatch", "no_permission", "gpu_lost", "error")
    remedies = {
        "driver_mismatch": "reboot, so that the kernel module and the library of the driver match again",
        "no_permission": "run the container with --gpus all, or give this user access to /dev/nvidia*",
        "gpu_lost": "reboot the machine; `dmesg | grep -i xid` tells why the GPU fell off the bus",
        "error": "run nvidia-smi and follow what it says",
    }
    detail = f"{document['message']} Comparisons here compare CPUs."
    return Finding("gpu", not fatal, detail, remedies.get(status))


def _ports() -> list[Finding]:
    """Default ports; `abserve compare` picks free ones by itself, `abserve serve` uses these."""
    result = []
    for port, use in PORTS.items():
        try:
            check_free("127.0.0.1", port, use)
        except ListenerError:
            remedy = f"stop what listens there (ss -ltnp 'sport = :{port}'), or give another port"
            result.append(Finding(f"port {port}", False, f"{use}: taken", remedy))
        else:
            result.append(Finding(f"port {port}", True, f"{use}: free"))
    return result


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    ok = free >= MIN_FREE_BYTES
    remedy = None if ok else "free 2 GB here, or give --artefacts and --out folders on another disk"
    return Finding("disk", ok, f"{free / 2**30:.1f} GiB free in this folder", remedy)


def _shared_memory() -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return Finding("/dev/shm", False, "missing", "mount a tmpfs there, or give the container --shm-size=1g")
    ok = free >= MIN_SHM_BYTES
    return Finding("/dev/shm", ok, f"{free / 2**20:.0f} MiB free", None if ok else "give the container --shm-size=1g")


def _exposure() -> Finding:
    """Listening sockets of the default ports on every interface: no server here has authentication."""
    public = sorted(PORTS[port] for port in _public_listeners() if port in PORTS)
    if not public:
        return Finding("exposure", True, "no abserve port listens beyond 127.0.0.1")
    remedy = "start the server with --host 127.0.0.1 and reach it through an SSH tunnel"
    return Finding("exposure", False, f"reachable from outside: {', '.join(public)}", remedy)


def _public_listeners() -> set[int]:
    """Ports of TCP sockets that listen on another address than loopback, from /proc/net/tcp and tcp6."""
    ports = set()
    for name in ("tcp", "tcp6"):
        path = Path("/proc/net") / name
        if not path.exists():
            continue
        for line in path.read_text().splitlines()[1:]:
            fields = line.split()
            address, _, port = fields[1].partition(":")
            if fields[3] == "0A" and not _is_loopback(address):
                ports.add(int(port, 16))
    return ports


def _is_loopback(address: str) -> bool:
    """As the kernel writes it: words of 32 bits, each in the machine's byte order. gRPC listens on ::ffff:127.0.0.1."""
    words = struct.unpack(f">{len(address) // 8}I", bytes.fromhex(address))
    found = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def _show(found: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, title="This machine", title_justify="left")
    table.add_column("")
    table.add_column("What")
    table.add_column("Seen", overflow="fold")
    for finding in found:
        mark = Text("✓", "green") if finding.ok else Text("✗", "bold red")
        detail = Text(finding.detail)
        if finding.remedy:
            detail.append(f"\n→ {finding.remedy}", "yellow")
        table.add_row(mark, finding.name, detail)
    console = Console()
    console.print(table)
    missing = sum(not finding.ok for finding in found)
    if missing:
        console.print(f"[bold red]{missing} of {len(found)} need attention.[/]")
    else:
        cores = len(os.sched_getaffinity(0))
        console.print(f"[green]All {len(found)} well.[/] CPU cores this process may use: {cores}.")
