"""What `abserve doctor` finds on a rented box: a container, an installed tritonserver, TensorRT's tools.

This project's tests run a scripted trtexec only, for want of NVIDIA's image.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from servers.export.tensorrt_tools import bindings_version, library_version, trtexec_version
from servers.finding import Finding, finding
from servers.triton.installation import Installation
from servers.triton.interpreter import Interpreter, libpython_remedy
from servers.triton.trial import ServerTrial

NATIVE = ("onnxruntime", "tensorrt")
"""Triton's own backends, the one that needs no plan first."""
CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))


def in_container() -> bool:
    """Whether this process runs inside a container."""
    named = os.environ.get("container")  # noqa: SIM112 - systemd and Podman write it so
    return bool(named) or any(mark.exists() for mark in CONTAINER_MARKS)


def trial_findings(server: Installation, interpreter: Interpreter, trial: ServerTrial) -> list[Finding]:
    """What a tritonserver did here, then each of its backends that does not work."""
    name = f"{server.title} in {server.origin}"
    if trial.failure is not None:
        remedy = "copy all of the installation, with its bin, lib and backends, or give another one with --tritonserver"
        return [Finding("tritonserver", False, f"{name} does not start: {trial.failure}", remedy)]
    served = [one for one in trial.working if one != "tensorrt"]
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
    found = [finding("tritonserver", bool(trial.working), detail, remedy)]
    for backend, fault in trial.backends.items():
        if fault is not None:
            remedy = f"copy all files of {server.backend_folder / backend} from its release, or remove the folder"
            if interpreter.libpython_name in fault:
                remedy = libpython_remedy(interpreter)
            found.append(Finding(f"triton {backend}", False, fault, remedy))
    return found


def tensorrt_findings(trial: ServerTrial) -> list[Finding]:
    """The tools that can build a plan, where there is a backend for it."""
    others = [name for name in trial.working if name != "tensorrt"]
    return [_tools(others)] if "tensorrt" in trial.backends else []


def _tools(others: Sequence[str]) -> Finding:
    """`others` are the backends that need no plan; without one, the missing tool is a failure."""
    library, tools = library_version(), {"trtexec": trtexec_version(), "Python bindings": bindings_version()}
    text = ", ".join(f"{name} {release}" for name, release in tools.items() if release) or "no tool that builds plans"
    detail = f"libnvinfer {library or 'not found'}; {text}"
    remedy = f"install trtexec or Python's tensorrt {library or 'of the version of libnvinfer'}"
    if builds_plans():
        return Finding("tensorrt", True, f"{detail}: it can build plans here")
    if others:
        return Finding(
            "tensorrt", True, f"{detail}: no plan can be built here, so use --backend {others[0]}, or {remedy}"
        )
    return Finding("tensorrt", False, detail, remedy)


def builds_plans() -> bool:
    """Whether a tool here has the version of libnvinfer: a plan runs only in the release that built it."""
    library = library_version()
    return library is not None and library in (trtexec_version(), bindings_version())


def next_command(installed: ServerTrial | None, has_gpu: bool, has_docker: bool) -> Finding:
    """The comparison that shows most here. `installed` is what an installed tritonserver did, `has_docker` whether an
    engine answers and can give containers the GPU."""
    command, why = "abserve compare", ""
    if has_gpu and installed is not None:
        command += _arms(
            [name for name in NATIVE if name in installed.working and (name != "tensorrt" or builds_plans())]
        )
    elif has_gpu and has_docker:
        command = f"docker compose up --detach --wait && abserve compare --deployment compose{_arms(NATIVE)}"
        why = " (write .env first: docs/running.md)"
    elif has_gpu:
        why = " (with the python backend; Triton's own backends need NVIDIA's image: docs/rented-box.md)"
    return Finding("next", True, command + why)


def _arms(backends: Sequence[str]) -> str:
    """The options of one Triton arm per backend: B, then C."""
    words = [f" --{arm} triton --{arm}-option backend={name}" for arm, name in zip("bc", backends, strict=False)]
    return "".join([" --a native" if words else "", *words])
