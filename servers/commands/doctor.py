"""`abserve doctor`: checks this machine for a comparison; every problem comes with its remedy.

A machine without Docker passes: `make compare` needs no Docker. This project's tests have no NVIDIA image and
run a scripted trtexec only.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import orjson
import psutil
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from servers.engines.choice import choices_folder, clear_stored_choices, stored_choices
from servers.engines.factory import environment_of
from servers.engines.settings import KINDS, EngineError, engine_kind, engine_names
from servers.export.tensorrt import bindings_version, library_version, trtexec_version
from servers.gpu.info import gpu_info, in_container
from servers.native.shared.settings import NativeSettings
from servers.options.command_line import counted, fail
from servers.options.defaults import OptionError, usable_cores
from servers.options.launch import MachineCheck, check_free, is_loopback, machine_check
from servers.triton.config import NATIVE_BACKENDS
from servers.triton.installation import (
    Installation,
    Interpreter,
    current_interpreter,
    find_folder,
    libpython_remedy,
    read_installation,
)
from servers.triton.settings import TritonSettings
from servers.triton.trial import ServerTrial, try_installation
from servers.triton.wheel import diagnose, find_wheel

HELP_GROUP = "Machine"

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
INSTALL = "pip install 'abserve[servers]'"
GPU_REMEDIES = {
    "driver_mismatch": "reboot, so that the driver's kernel module and library match again",
    "no_permission": "run the container with --gpus all, or give this user access to /dev/nvidia*",
    "gpu_lost": "reboot the machine; `dmesg | grep -i xid` shows why the GPU fell off the bus",
    "error": "run nvidia-smi and follow its message",
}
"""Remedies by status. Any other status means that there is no GPU, which is fine for a comparison of CPUs."""
LEAST_DRIVER = 580
"""The images in docker-compose.yml use CUDA 13."""
LEAST_COMPOSE = (2, 20)
"""The first release with `depends_on: … required: false`."""
OLDEST_IMAGE_DAYS = 90
"""An older base image lacks important fixes."""
IMAGES = ("abserve/servers:0.1.0", "abserve/load:0.1.0")
NAME_WIDTH = 22
"""Columns of the longest name, that of an engine."""
CONTAINERS = "docker compose"
"""What Docker, its toolkit and the images are needed for."""
IN_CONTAINER = "not needed: this is a container; use abserve compare"
_SECONDS = 10.0

Command = Callable[[Sequence[str]], str | None]


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
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the findings as JSON.", rich_help_panel="Output")
    ] = False,
    clear_choices: Annotated[
        bool,
        typer.Option(help="First delete what servers chose at their starts; the next start of each chooses again."),
    ] = False,
) -> None:
    """Check this machine: Python, packages, Triton, GPU, ports, disk. Exit status 1 if something required is missing.

    Triton is started for a moment, with a small model for each of its backends. A circle marks an optional thing that
    is missing, with what it is needed for.
    """
    checks: list[MachineCheck] = []
    if clear_choices and (kept := clear_stored_choices()):
        fail(kept)
    try:
        for check in machine_checks(tritonserver):
            if not (checks or as_json):
                Console(highlight=False).print("This machine", style="italic")
            checks.append(check)
            if not as_json:
                _show(check)
    except OptionError as exc:
        fail(str(exc), exc, status=2)
    if as_json:
        typer.echo(orjson.dumps(checks, option=orjson.OPT_INDENT_2).decode())
    else:
        _sum_up(checks)
    raise typer.Exit(1 if any(check.fails for check in checks) else 0)


def machine_checks(tritonserver: Path | None = None) -> Iterator[MachineCheck]:
    """Every check as it is made, Python and the packages first. Raises `OptionError` for a folder without a
    tritonserver, before any."""
    folder = find_folder(tritonserver)
    python = machine_check(
        "python",
        (3, 11) <= sys.version_info[:2] <= (3, 13),
        f"Python {'.'.join(map(str, sys.version_info[:3]))}",
        "make PYTHON=python3.12 setup",
    )
    yield python
    gpu: Mapping[str, Any] = gpu_info(None)
    if is_client_only() and folder is None:
        yield MachineCheck("mode", True, "client only: compares servers by URL, and starts none")
        yield MachineCheck("servers", False, "not installed", INSTALL, "servers and engines on this machine")
        yield from [_gpu(gpu), _disk(), next_command(None, False, False)]
        return
    yield from [*_packages(), *_engines()]
    here = [_gpu(gpu), *_ports(), _disk(), _choices(), _shared_memory(), _exposure()]
    has_gpu = gpu["status"] == "ok" and bool(gpu["devices"])
    yield from here
    triton, installed = _triton(folder, "cuda:0" if has_gpu else "cpu")
    yield from triton
    containers = docker_checks(gpu)
    yield from containers
    has_docker = any(check.name == "container toolkit" and check.ok for check in containers)
    yield next_command(installed, has_gpu, has_docker)


def _triton(folder: Path | None, device: str) -> tuple[list[MachineCheck], ServerTrial | None]:
    """What the tritonserver does here that a launch would start, and its trial if it is an installed one."""
    interpreter = current_interpreter()
    if folder is not None:
        server = read_installation(folder, interpreter)
        trial = try_installation(server, device)
        return [*trial_checks(server, interpreter, trial), *tensorrt_checks(trial)], trial
    checks = diagnose(interpreter)
    if all(check.ok for check in checks):
        server = find_wheel(interpreter)
        checks += trial_checks(server, interpreter, try_installation(server))
    return checks, None


def _packages() -> list[MachineCheck]:
    installed = {package: find_spec(module) is not None for module, package in PACKAGES.items()}  # imports none of them
    return [machine_check(name, ok, "installed" if ok else "not installed", INSTALL) for name, ok in installed.items()]


def is_client_only() -> bool:
    """Whether this installation can only load servers by URL: it executes no model."""
    return find_spec("torch") is None and find_spec("onnxruntime") is None


def _engines() -> list[MachineCheck]:
    """The engines that `abserve[servers]` does not install. Only a comparison of one of them needs it."""
    checks = []
    for name in engine_names():
        try:
            if engine_kind(name).install == KINDS["torch"].install:
                continue
            other = environment_of(name)
            detail = "installed" if other is None else f"installed in {other.parent.parent}, which its processes enter"
            checks.append(MachineCheck(f"engine {name}", True, detail))
        except EngineError as exc:
            checks.append(MachineCheck(f"engine {name}", False, "not installed", str(exc), f"--engine {name}"))
    return checks


def _gpu(document: Mapping[str, Any]) -> MachineCheck:
    status = document["status"]
    if status == "ok" and document["devices"]:
        return MachineCheck("gpu", True, ", ".join(str(device["name"]) for device in document["devices"]))
    detail = f"{document['message']} Comparisons on this machine compare CPUs."
    return machine_check("gpu", status not in GPU_REMEDIES, detail, GPU_REMEDIES.get(status, ""))


def _ports() -> list[MachineCheck]:
    """The default ports: `abserve serve` uses them, `abserve compare` takes free ones."""
    result = []
    for port, use in PORTS.items():
        try:
            check_free("127.0.0.1", port, use)
            ok = True
        except OptionError:
            ok = False
        remedy = f"stop the process on it (ss -ltnp 'sport = :{port}'), or choose another port"
        check = machine_check(f"port {port}", ok, f"{use}: {'free' if ok else 'in use'}", remedy)
        result.append(replace(check, needed_for="abserve serve without another port"))
    return result


def _disk() -> MachineCheck:
    free = shutil.disk_usage(Path.cwd()).free
    remedy = "free 2 GB here, or choose --artefacts and --out folders on another disk"
    return machine_check("disk", free >= MIN_FREE_BYTES, f"{free / 2**30:.1f} GiB free in this folder", remedy)


def _choices() -> MachineCheck:
    """What servers chose at their starts."""
    stored = stored_choices()
    models = ", ".join(f"{name} ({count})" for name, count in sorted(Counter(stored.values()).items()))
    what = f"{counted(len(stored), 'stored choice')} of servers' starts in {choices_folder()}"
    return MachineCheck("choices", True, f"{what}: {models}; --clear-choices deletes them" if stored else what)


def _shared_memory() -> MachineCheck:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return MachineCheck("/dev/shm", False, "missing", "mount a tmpfs there, or give the container --shm-size=1g")
    return machine_check("/dev/shm", free >= MIN_SHM_BYTES, f"{free / 2**20:.0f} MiB free", "run with --shm-size=1g")


def _exposure() -> MachineCheck:
    """Whether other machines can reach a default port, whose server may ask for no key."""
    listeners = _listeners()
    if listeners is None:
        return MachineCheck("exposure", True, "not available: this user may not list the listening sockets")
    public = sorted({PORTS[port] for host, port in listeners if port in PORTS and not is_loopback(host)})
    remedy = "start the server with --host 127.0.0.1 and reach it through an SSH tunnel"
    detail = f"other machines can reach {', '.join(public)}" if public else "only this machine can reach the servers"
    return machine_check("exposure", not public, detail, remedy)


def _listeners() -> Sequence[tuple[str, int]] | None:
    """Host and port of every listening socket; None where only root may list them."""
    try:
        connections = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        return None
    return [(at.laddr.ip, at.laddr.port) for at in connections if at.laddr and at.status == psutil.CONN_LISTEN]


def _show(check: MachineCheck) -> None:
    """One row, printed as soon as it is known; the columns have fixed widths."""
    detail = Text(check.detail)
    if not check.ok and check.needed_for:
        detail.append(f"; only needed for {check.needed_for}")
    if check.remedy:
        detail.append(f"\n→ {check.remedy}", "yellow")
    mark = Text("✓", "green") if check.ok else Text("✗", "bold red") if check.fails else Text("○", "dim")
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_column(width=1)
    row.add_column(width=NAME_WIDTH, overflow="fold")
    row.add_column(overflow="fold")
    row.add_row(mark, check.name, detail)
    Console().print(row)


def _sum_up(checks: Sequence[MachineCheck]) -> None:
    failed = sum(check.fails for check in checks)
    missing = sum(not check.ok for check in checks) - failed
    optional = f" Missing (○): {counted(missing, 'optional thing')}." if missing else ""
    if failed:
        needs = "needs" if failed == 1 else "need"
        text = f"[bold red]{failed} of {counted(len(checks), 'check')} {needs} attention.[/]{optional}"
    else:
        cores = usable_cores()
        text = f"[green]Ready to compare.[/]{optional} CPU cores that this process may use: {cores}."
    Console().print(text)


def trial_checks(server: Installation, interpreter: Interpreter, trial: ServerTrial) -> list[MachineCheck]:
    """What a tritonserver did here, then each of its backends that does not work."""
    name = f"{server.title} in {server.origin}"
    if trial.failure is not None:
        remedy = "copy all of the installation, with its bin, lib and backends, or give another one with --tritonserver"
        return [MachineCheck("tritonserver", False, f"{name} does not start: {trial.failure}", remedy)]
    served = [backend for backend in trial.working if backend != "tensorrt"]
    detail = f"{name} started in {trial.ready_seconds:.1f} s; a model of each of these backends answered: "
    detail += ", ".join(served) or "none"
    if "tensorrt" in trial.working:
        detail += "; tensorrt loads"
    remedy = f"install abserve with Python {server.stub_python}"
    if server.stub is None and server.stub_python is not None:
        detail += f"; its python backend is for Python {server.stub_python}; this is {interpreter.minor}"
        detail += f": use --backend {' or '.join(trial.working)}" if trial.working else ""
    else:
        remedy = "install a Triton with an onnxruntime, tensorrt or python backend, as NVIDIA's image has"
    checks = [machine_check("tritonserver", bool(trial.working), detail, remedy)]
    for backend, fault in trial.backends.items():
        if fault is not None:
            remedy = f"copy all files of {server.backend_folder / backend} from its release, or remove the folder"
            if interpreter.libpython_name in fault:
                remedy = libpython_remedy(interpreter)
            checks.append(MachineCheck(f"triton {backend}", False, fault, remedy))
    return checks


def tensorrt_checks(trial: ServerTrial) -> list[MachineCheck]:
    """Whether a tool can build TensorRT plans, if there is a backend for them."""
    if "tensorrt" not in trial.backends:
        return []
    others = [name for name in trial.working if name != "tensorrt"]
    library, tools = library_version(), {"trtexec": trtexec_version(), "Python bindings": bindings_version()}
    text = ", ".join(f"{name} {release}" for name, release in tools.items() if release) or "no tool that builds plans"
    detail = f"libnvinfer {library or 'not found'}; {text}"
    remedy = f"install trtexec or Python's tensorrt {library or 'of the version of libnvinfer'}"
    if builds_plans():
        return [MachineCheck("tensorrt", True, f"{detail}: it can build plans here")]
    if others:  # they need no plan
        detail += f": no plan can be built here, so use --backend {others[0]}, or {remedy}"
    return [machine_check("tensorrt", bool(others), detail, remedy)]


def builds_plans() -> bool:
    """Whether a tool here has the version of libnvinfer: a plan runs only in the release that built it."""
    library = library_version()
    return library is not None and library in (trtexec_version(), bindings_version())


def next_command(installed: ServerTrial | None, has_gpu: bool, has_docker: bool) -> MachineCheck:
    """The most telling comparison that can run here.

    `installed` is what an installed tritonserver did, `has_docker` whether an engine can give containers the GPU.
    """
    command, why = "abserve compare", ""
    if is_client_only():
        command += " --a http://HOST:PORT --b http://HOST:PORT"
        why = " (servers by URL; this installation starts none)"
    elif has_gpu and installed is not None:
        backends = [name for name in NATIVE_BACKENDS if name in installed.working]
        command += _arms(name for name in backends if name != "tensorrt" or builds_plans())
    elif has_gpu and has_docker:
        command = "docker compose up --detach --wait && abserve compare --deployment compose" + _arms(NATIVE_BACKENDS)
    elif has_gpu:
        why = " (with the python backend; Triton's own backends need NVIDIA's image: docs/rented-box.md)"
    return MachineCheck("next", True, command + why)


def _arms(backends: Iterable[str]) -> str:
    """The options of one Triton arm per backend: B, then C."""
    words = [f" --{arm} triton --{arm}-option backend={name}" for arm, name in zip("bc", backends, strict=False)]
    return "".join([" --a native" if words else "", *words])


def docker_checks(gpu: Mapping[str, Any], run: Command | None = None) -> list[MachineCheck]:
    """`gpu` is the /gpu-info document; `run` returns a command's standard output, None if it fails."""
    run = run or _output
    has_gpu = gpu.get("status") == "ok" and bool(gpu.get("devices"))
    checks = [replace(_driver(gpu), needed_for=CONTAINERS)] if has_gpu else []
    engine = _engine(run)
    if engine is None and in_container():
        return [*checks, MachineCheck("docker", True, IN_CONTAINER, None, CONTAINERS)]
    if engine is None:
        detail = "installed, but no engine answers" if shutil.which("docker") else "not installed"
        remedy = "install Docker with its compose plugin, or use abserve compare, which needs none"
        return [*checks, MachineCheck("docker", False, detail, remedy, CONTAINERS)]
    checks += [MachineCheck("docker", True, f"engine {engine.get('ServerVersion')}"), _compose(run)]
    if has_gpu:
        checks.append(_toolkit(engine))
    checks += _images(run, _newest_source(), datetime.now(UTC))
    return [replace(check, needed_for=CONTAINERS) for check in checks]


def _driver(gpu: Mapping[str, Any]) -> MachineCheck:
    version = str((gpu.get("nvml") or {}).get("driver_version") or "")
    major = version.partition(".")[0]
    if not major.isdecimal():
        return MachineCheck("driver", False, "its version cannot be read", "run nvidia-smi and follow its message")
    remedy = f"docker compose needs NVIDIA driver r{LEAST_DRIVER} or newer: install it, or use make compare"
    return machine_check("driver", int(major) >= LEAST_DRIVER, f"NVIDIA driver {version}", remedy)


def _engine(run: Command) -> Mapping[str, Any] | None:
    """`docker info`; None if no engine answers."""
    try:
        document = json.loads(run(["docker", "info", "--format", "{{json .}}"]) or "")
    except ValueError:
        return None
    return document if isinstance(document, dict) and document.get("ServerVersion") else None


def _compose(run: Command) -> MachineCheck:
    text = (run(["docker", "compose", "version", "--short"]) or "").strip().lstrip("v")
    numbers = tuple(int(part) for part in text.split("-")[0].split(".")[:2] if part.isdecimal())
    remedy = "install Docker Compose 2.20 or newer: sudo apt-get install docker-compose-plugin"
    return machine_check(
        "docker compose", numbers >= LEAST_COMPOSE, f"version {text}" if text else "not installed", remedy
    )


def _toolkit(engine: Mapping[str, Any]) -> MachineCheck:
    """Whether the engine has NVIDIA's runtime, or finds devices by the container device interface (CDI)."""
    if "nvidia" in (engine.get("Runtimes") or {}):
        return MachineCheck("container toolkit", True, "the engine has the runtime nvidia")
    if any("nvidia.com/gpu" in str(device) for device in engine.get("DiscoveredDevices") or ()):
        return MachineCheck("container toolkit", True, "the engine finds the GPU through CDI")
    if shutil.which("nvidia-ctk"):
        detail = "installed, but the engine does not use it"
        remedy = "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker"
    else:
        detail = "not installed: containers get no GPU"
        remedy = "install nvidia-container-toolkit from NVIDIA's repository, then run nvidia-ctk runtime configure"
    return MachineCheck("container toolkit", False, detail, remedy)


def _images(run: Command, newest_source: datetime | None, now: datetime) -> list[MachineCheck]:
    """One check per image that was built here."""
    checks = []
    for image in IMAGES:
        text = run(["docker", "image", "inspect", "--format", "{{.Created}}", image]) or ""
        try:
            created = datetime.fromisoformat(text.strip()[:19]).replace(tzinfo=UTC)  # without nanoseconds
        except ValueError:
            continue
        days = (now - created).days
        if newest_source is not None and created < newest_source:
            checks.append(MachineCheck(image, False, "older than the code here", "docker compose build"))
        elif days > OLDEST_IMAGE_DAYS:
            remedy = "make pin-images, then docker compose build --no-cache"
            checks.append(MachineCheck(image, False, f"built {counted(days, 'day')} ago, without later fixes", remedy))
        else:
            compared = "" if newest_source is None else ", newer than the code here"
            checks.append(MachineCheck(image, True, f"built {counted(days, 'day')} ago{compared}"))
    return checks


def _newest_source() -> datetime | None:
    """When the code here last changed; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "docker-compose.yml").exists():
        return None
    times = [path.stat().st_mtime for name in ("servers", "loadgen") for path in (root / name).rglob("*.py")]
    return datetime.fromtimestamp(int(max(times)), UTC)


def _output(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
