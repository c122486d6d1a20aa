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
from servers.triton.interpreter import Interpreter

NATIVE = ("onnxruntime", "tensorrt")
"""Triton's own backends, the one that needs no plan first."""
CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))


def in_container() -> bool:
    """Whether this process runs inside a container."""
    named = os.environ.get("container")  # noqa: SIM112 - systemd and Podman write it so
    return bool(named) or any(mark.exists() for mark in CONTAINER_MARKS)


def installed_findings(server: Installation, interpreter: Interpreter) -> list[Finding]:
    """A tritonserver that is installed here, and the TensorRT tools that can build a plan for it."""
    native = [name for name in NATIVE if name in server.backends]
    detail = f"{server.title} in {server.origin}, backends: {', '.join(server.backends) or 'none'}"
    fits, remedy = True, f"install abserve with Python {server.stub_python}"
    if server.stub is None:
        detail += f"; {_no_stub(server, interpreter)}"
        fits = bool(native)
        if native:
            detail += f": use --backend {' or '.join(native)}"
        elif server.stub_python is None:
            remedy = "install a Triton with an onnxruntime, tensorrt or python backend, as NVIDIA's image has"
    found = [finding("tritonserver", fits, detail, remedy)]
    if "tensorrt" in native:
        found.append(_tools(others=[name for name in native if name != "tensorrt"] or ["python"] * bool(server.stub)))
    return found


def _no_stub(server: Installation, interpreter: Interpreter) -> str:
    if server.stub_python is None:
        return "it has no python backend that can run here"
    return f"its python backend is for Python {server.stub_python}; this is {interpreter.minor}"


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


def next_command(server: Installation | None, has_gpu: bool, has_docker: bool) -> Finding:
    """The comparison that shows most here. `has_docker`: an engine answers and can give containers the GPU."""
    command, why = "abserve compare", ""
    if has_gpu and server is not None:
        command += _arms(
            [name for name in NATIVE if name in server.backends and (name != "tensorrt" or builds_plans())]
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
