"""What `abserve doctor` finds on a rented box: a container, an installed tritonserver, TensorRT's tools.

This project's tests run a scripted trtexec only, for want of NVIDIA's image.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from servers.finding import Finding, finding
from servers.triton.installation import BINARY, STUB, Installation, stub_python

CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))
TRTEXEC_FOLDERS = ("/usr/src/tensorrt/bin", "/opt/tensorrt/bin")
LIBRARY_FOLDERS = (Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib/aarch64-linux-gnu"))


def in_container() -> bool:
    """Whether this process runs inside a container."""
    named = os.environ.get("container")  # noqa: SIM112 - systemd and Podman write it so
    return bool(named) or any(mark.exists() for mark in CONTAINER_MARKS)


def installed_findings(folder: Path) -> list[Finding]:
    """The tritonserver in `folder`, and the TensorRT tools that can build a plan for it."""
    server = Installation(str(folder), "", folder / BINARY, folder / "backends")
    own = folder / "backends" / "python" / STUB
    stub = f"; its python backend is for Python {stub_python(own)}" if own.is_file() else ""
    found = [Finding("tritonserver", True, f"{folder}, backends: {', '.join(server.backends) or 'none'}{stub}")]
    if "tensorrt" in server.backends:
        found.append(_tools())
    return found


def _tools() -> Finding:
    library, tools = library_version(), {"trtexec": trtexec_version(), "Python bindings": _bindings_version()}
    text = ", ".join(f"{name} {release}" for name, release in tools.items() if release) or "no tool that builds plans"
    remedy = (
        "install trtexec or Python's tensorrt of the version of libnvinfer, or compare without the tensorrt backend"
    )
    matches = library is not None and library in tools.values()
    return finding("tensorrt", matches, f"libnvinfer {library or 'not found'}; {text}", remedy)


def library_version() -> str | None:
    """The TensorRT that the backend loads, from the name of libnvinfer's file: "10.13.3"."""
    for folder in LIBRARY_FOLDERS:
        for path in sorted(folder.glob("libnvinfer.so.*")):
            if found := re.search(r"\.so\.(\d+\.\d+\.\d+)", path.resolve().name):
                return found[1]
    return None


def trtexec_version() -> str | None:
    """The version in trtexec's banner, where v101303 is 10.13.3; None without trtexec."""
    program = shutil.which("trtexec", path=os.pathsep.join([os.environ.get("PATH", ""), *TRTEXEC_FOLDERS]))
    if program is None:
        return None
    try:
        done = subprocess.run([program, "--help"], capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"\[TensorRT v(\d+)\]", done.stdout + done.stderr)
    return None if found is None else "{}.{}.{}".format(*_parts(int(found[1])))


def _parts(number: int) -> tuple[int, int, int]:
    return number // 10_000, number // 100 % 100, number % 100


def _bindings_version() -> str | None:
    try:
        return ".".join(version("tensorrt").split(".")[:3])
    except PackageNotFoundError:
        return None


def next_command(folder: Path | None, has_gpu: bool) -> Finding:
    """The simplest comparison for what was found; the tensorrt backend needs a plan and is never the first."""
    native = has_gpu and folder is not None and (folder / "backends" / "onnxruntime").is_dir()
    return Finding("next", True, "abserve compare" + (" --b-option backend=onnxruntime" if native else ""))
