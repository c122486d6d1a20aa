"""The TensorRT of this machine: the library that Triton's backend loads, and the tools that build plans.

This project's tests run a scripted trtexec only, for want of NVIDIA's libraries.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

TRTEXEC_FOLDERS = ("/usr/src/tensorrt/bin", "/opt/tensorrt/bin")
LIBRARY_FOLDERS = (Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib/aarch64-linux-gnu"))
PACKAGES = ("tensorrt", "tensorrt-cu13", "tensorrt-cu12")


def library_version() -> str | None:
    """The TensorRT that Triton's backend loads, from the name of libnvinfer's file: "10.13.3"."""
    for path in _libraries():
        if found := re.search(r"\.so\.(\d+\.\d+\.\d+)", path.resolve().name):
            return found[1]
    return None


def find_trtexec() -> str | None:
    """The path of trtexec."""
    return shutil.which("trtexec", path=os.pathsep.join([os.environ.get("PATH", ""), *TRTEXEC_FOLDERS]))


def trtexec_version() -> str | None:
    """The version in trtexec's banner, where v101303 is 10.13.3; None without trtexec."""
    if (program := find_trtexec()) is None:
        return None
    found = re.search(r"\[TensorRT v(\d+)\]", _output([program, "--help"]))
    return None if found is None else "{}.{}.{}".format(*_parts(int(found[1])))


def bindings_version() -> str | None:
    """The version of Python's package `tensorrt`, without the build number."""
    for package in PACKAGES:
        try:
            return ".".join(version(package).split(".")[:3])
        except PackageNotFoundError:
            continue
    return None


def _libraries() -> Iterator[Path]:
    """Files of libnvinfer in the loader's order: LD_LIBRARY_PATH, its cache, the usual folders."""
    for folder in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)):
        yield from sorted(Path(folder).glob("libnvinfer.so.*"))
    loader = shutil.which("ldconfig", path=os.pathsep.join([os.environ.get("PATH", ""), "/sbin", "/usr/sbin"]))
    if loader is not None:
        yield from map(Path, re.findall(r"libnvinfer\.so\.\S+ .*=> (\S+)", _output([loader, "-p"])))
    for known in LIBRARY_FOLDERS:
        yield from sorted(known.glob("libnvinfer.so.*"))


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def _parts(number: int) -> tuple[int, int, int]:
    return number // 10_000, number // 100 % 100, number % 100
