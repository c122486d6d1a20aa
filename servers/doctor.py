"""`abserve doctor`: checks this machine for a comparison; every problem comes with its remedy."""

from __future__ import annotations

import ipaddress
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from servers.engines.factory import environment_of
from servers.engines.settings import KINDS, EngineError, engine_kind, engine_names
from servers.finding import Finding, finding
from servers.listener import ListenerError, check_free
from servers.native.settings import NativeSettings
from servers.options import fail
from servers.triton.errors import TritonOptionError
from servers.triton.settings import TritonSettings

if TYPE_CHECKING:
    from servers.triton.trial import ServerTrial

MIN_FREE_BYTES = 2 * 2**30
"""An export needs 0.4 GB and as much again while it is written; the samples and logs of a full run some tens of MB."""

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
PACKAGES = {
    "torch": "torch",
    "open_clip": "open_clip_torch",
    "torchvision": "torchvision",
    "timm": "timm",
    "transformers": "transformers",
    "onnx": "onnx",
    "onnxruntime": "onnxruntime-gpu",
    "fastapi": "fastapi",
}
"""Modules that the servers and the sources of models need, and the package of each."""
GPU_REMEDIES = {
    "driver_mismatch": "reboot, so that the driver's kernel module and library match again",
    "no_permission": "run the container with --gpus all, or give this user access to /dev/nvidia*",
    "gpu_lost": "reboot the machine; `dmesg | grep -i xid` shows why the GPU fell off the bus",
    "error": "run nvidia-smi and follow its message",
}
"""Remedies by status. Any other status means that there is no GPU, which is fine for a comparison of CPUs."""


def doctor(
    tritonserver: Annotated[
        Path | None,
        typer.Option(
            envvar="ABSERVE_TRITON_TRITONSERVER",
            metavar="DIR",
            help="Folder of an installed tritonserver (default: on PATH or in /opt/tritonserver, else the wheel's).",
            rich_help_panel="Target",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.", rich_help_panel="Output")] = False,
) -> None:
    """Check this machine: Python, packages, Triton, GPU, ports, disk. Exit status 1 if something is missing.

    Triton is started for a moment, with a small model for each of its backends.
    """
    try:
        found = findings(tritonserver)
    except TritonOptionError as exc:
        fail(str(exc), exc, status=2)
    if json:
        import orjson

        typer.echo(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode())
    else:
        _show(found)
    raise typer.Exit(0 if all(one.ok for one in found) else 1)


def findings(tritonserver: Path | None = None) -> list[Finding]:
    """Every finding, the required things first. Raises `TritonOptionError` for a folder without a tritonserver."""
    from servers.container_findings import container_findings
    from servers.gpu.info import gpu_info
    from servers.triton.box import next_command

    gpu: Mapping[str, Any] = gpu_info(None)
    python = finding(
        "python",
        (3, 11) <= sys.version_info[:2] <= (3, 13),
        f"Python {'.'.join(map(str, sys.version_info[:3]))}",
        "make PYTHON=python3.12 setup",
    )
    here = [_gpu(gpu), *_ports(), _disk(), _shared_memory(), _exposure()]
    has_gpu = gpu["status"] == "ok" and bool(gpu["devices"])
    triton, installed = _triton(tritonserver, "cuda:0" if has_gpu else "cpu")
    containers = container_findings(gpu)
    has_docker = any(one.name == "container toolkit" and one.ok for one in containers)
    next_step = next_command(installed, has_gpu, has_docker)
    return [python, *_packages(), *_engines(), *triton, *here, *containers, next_step]


def _triton(requested: Path | None, device: str) -> tuple[list[Finding], ServerTrial | None]:
    """What the tritonserver does here that a launch would start, and its trial if it is an installed one."""
    from servers.triton.box import tensorrt_findings, trial_findings
    from servers.triton.installation import find_folder, read_installation
    from servers.triton.interpreter import current_interpreter
    from servers.triton.trial import try_installation
    from servers.triton.wheel import diagnose, find_wheel

    folder, interpreter = find_folder(requested), current_interpreter()
    if folder is not None:
        server = read_installation(folder, interpreter)
        trial = try_installation(server, device)
        return [*trial_findings(server, interpreter, trial), *tensorrt_findings(trial)], trial
    found = diagnose(interpreter)
    if all(one.ok for one in found):
        server = find_wheel(interpreter)
        found += trial_findings(server, interpreter, try_installation(server))
    return found, None


def _packages() -> list[Finding]:
    found = {package: find_spec(module) is not None for module, package in PACKAGES.items()}  # imports none of them
    remedy = "pip install 'abserve[servers]'"
    return [finding(name, ok, "installed" if ok else "not installed", remedy) for name, ok in found.items()]


def _engines() -> list[Finding]:
    """The engines that `abserve[servers]` does not install. A comparison needs none of them, so none is a failure."""
    found = []
    for name in engine_names():
        try:
            if engine_kind(name).install == KINDS["torch"].install:
                continue
            other = environment_of(name)
            detail = "installed" if other is None else f"installed in {other.parent.parent}, which its processes enter"
        except EngineError as exc:
            detail = f"optional: {exc}"
        found.append(Finding(f"engine {name}", True, detail))
    return found


def _gpu(document: Mapping[str, Any]) -> Finding:
    status = document["status"]
    if status == "ok" and document["devices"]:
        return Finding("gpu", True, ", ".join(str(device["name"]) for device in document["devices"]))
    detail = f"{document['message']} Comparisons on this machine compare CPUs."
    return finding("gpu", status not in GPU_REMEDIES, detail, GPU_REMEDIES.get(status, ""))


def _ports() -> list[Finding]:
    """The default ports: `abserve serve` uses them, `abserve compare` takes free ones."""
    result = []
    for port, use in PORTS.items():
        try:
            check_free("127.0.0.1", port, use)
            ok = True
        except ListenerError:
            ok = False
        remedy = f"stop the process on it (ss -ltnp 'sport = :{port}'), or choose another port"
        result.append(finding(f"port {port}", ok, f"{use}: {'free' if ok else 'in use'}", remedy))
    return result


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    remedy = "free 2 GB here, or choose --artefacts and --out folders on another disk"
    return finding("disk", free >= MIN_FREE_BYTES, f"{free / 2**30:.1f} GiB free in this folder", remedy)


def _shared_memory() -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return Finding("/dev/shm", False, "missing", "mount a tmpfs there, or give the container --shm-size=1g")
    return finding("/dev/shm", free >= MIN_SHM_BYTES, f"{free / 2**20:.0f} MiB free", "run with --shm-size=1g")


def _exposure() -> Finding:
    """Whether other machines can reach a default port: the servers have no authentication."""
    listeners = _listeners()
    if listeners is None:
        return Finding("exposure", True, "not available: this user may not list the listening sockets")
    public = sorted({PORTS[port] for host, port in listeners if port in PORTS and not _is_loopback(host)})
    remedy = "start the server with --host 127.0.0.1 and reach it through an SSH tunnel"
    detail = f"other machines can reach {', '.join(public)}" if public else "only this machine can reach the servers"
    return finding("exposure", not public, detail, remedy)


def _listeners() -> Sequence[tuple[str, int]] | None:
    """Host and port of every listening socket; None where only root may list them."""
    import psutil

    try:
        connections = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        return None
    return [(one.laddr.ip, one.laddr.port) for one in connections if one.laddr and one.status == psutil.CONN_LISTEN]


def _is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address; gRPC listens on ::ffff:127.0.0.1."""
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _show(found: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, title="This machine", title_justify="left")
    table.add_column("")
    table.add_column("Check")
    table.add_column("Found", overflow="fold")
    for one in found:
        detail = Text(one.detail)
        if one.remedy:
            detail.append(f"\n→ {one.remedy}", "yellow")
        table.add_row(Text("✓", "green") if one.ok else Text("✗", "bold red"), one.name, detail)
    console = Console()
    console.print(table)
    failed = sum(not one.ok for one in found)
    if failed:
        console.print(f"[bold red]{failed} of {len(found)} checks need attention.[/]")
    else:
        cores = len(os.sched_getaffinity(0))
        console.print(f"[green]All {len(found)} checks pass.[/] CPU cores that this process may use: {cores}.")
