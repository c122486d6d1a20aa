"""The tritonserver inside NVIDIA's wheel nvidia-pytriton: where its parts are, and whether they can run here.

Only files of the wheel are used; its Python API is not imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from servers.finding import Finding
from servers.triton.errors import TritonUnavailableError
from servers.triton.interpreter import WHEEL, Interpreter, current_interpreter
from servers.triton.libpython import cache_folder, can_fetch, find_libpython, libpython_remedy, provide_libpython

MACHINES = ("x86_64", "aarch64")
MINIMUM_GLIBC = (2, 35)
SERVER_VERSIONS = {"0.7.0": "2.51"}
"""Version of the wheel → version of the tritonserver in it; the running server tells its own in its metadata."""

INSTALL = "run pip install nvidia-pytriton==0.7.0"


@dataclass(frozen=True, slots=True)
class Wheel:
    """Files of a wheel that can run here."""

    server_version: str
    binary: Path
    python_backend: Path
    stub: Path
    libraries: Path
    libpython: Path


def find_wheel(
    interpreter: Interpreter | None = None, announce: Callable[[str], None] = lambda _message: None
) -> Wheel:
    """Everything that a launch needs. Raises `TritonUnavailableError` for the first thing that is wrong.

    May fetch a missing libpython (see `servers.triton.libpython`), after a call of `announce`.
    """
    interpreter = interpreter or current_interpreter()
    assert_environment(interpreter)
    assert interpreter.package is not None  # the line above saw to it, and to the next one
    assert interpreter.wheel is not None
    root = interpreter.package / "tritonserver"
    return Wheel(
        server_version=SERVER_VERSIONS[interpreter.wheel],
        binary=root / "bin" / "tritonserver",
        python_backend=root / "backends" / "python",
        stub=_stub(root, interpreter),
        libraries=_libraries(interpreter.package),
        libpython=provide_libpython(interpreter, announce),
    )


def assert_environment(interpreter: Interpreter | None = None) -> None:
    """Raise `TritonUnavailableError` for the first unmet condition; a missing libpython is not looked at here."""
    for finding in _environment_findings(interpreter or current_interpreter()):
        if not finding.ok:
            raise TritonUnavailableError(f"the embedded Triton cannot run here: {finding.detail}; {finding.remedy}")


def diagnose(interpreter: Interpreter | None = None) -> list[Finding]:
    """Every condition of the embedded Triton, met or not, in the order in which they matter. Changes nothing."""
    interpreter = interpreter or current_interpreter()
    return [*_environment_findings(interpreter), _libpython_finding(interpreter)]


def _environment_findings(interpreter: Interpreter) -> list[Finding]:
    return [
        _machine_finding(interpreter),
        _glibc_finding(interpreter),
        _wheel_finding(interpreter),
        _stub_finding(interpreter),
        _numpy_finding(interpreter),
    ]


def _machine_finding(interpreter: Interpreter) -> Finding:
    ok = interpreter.machine in MACHINES
    remedy = None if ok else "compare against a Triton on another machine by its URL"
    return Finding("triton-architecture", ok, f"the processor architecture is {interpreter.machine}", remedy)


def _glibc_finding(interpreter: Interpreter) -> Finding:
    ok = interpreter.glibc is not None and interpreter.glibc >= MINIMUM_GLIBC
    wanted = ".".join(map(str, MINIMUM_GLIBC))
    found = "glibc " + ".".join(map(str, interpreter.glibc)) if interpreter.glibc else "another C library than glibc"
    return Finding(
        "triton-glibc",
        ok,
        f"this system has {found}, tritonserver needs glibc {wanted} or newer",
        None if ok else "use Debian 12, Ubuntu 22.04 or newer",
    )


def _wheel_finding(interpreter: Interpreter) -> Finding:
    if interpreter.wheel is None or interpreter.package is None:
        return Finding("triton-wheel", False, f"the package {WHEEL} is not installed", INSTALL)
    if interpreter.wheel not in SERVER_VERSIONS:
        known = " or ".join(SERVER_VERSIONS)
        detail = f"{WHEEL} {interpreter.wheel} is installed, only {known} is known to work"
        return Finding("triton-wheel", False, detail, INSTALL)
    root = interpreter.package / "tritonserver"
    needed = [
        root / "bin" / "tritonserver",
        root / "backends" / "python" / "libtriton_python.so",
        root / "backends" / "python" / "triton_python_backend_utils.py",
        _libraries(interpreter.package),
    ]
    missing = [path.name for path in needed if not path.exists()]
    if missing:
        detail = f"{WHEEL} {interpreter.wheel} is incomplete, {', '.join(missing)} missing"
        return Finding("triton-wheel", False, detail, INSTALL.replace("install", "install --force-reinstall --no-deps"))
    if not os.access(needed[0], os.X_OK):
        return Finding("triton-wheel", False, "the tritonserver binary is not executable", f"run chmod +x {needed[0]}")
    version = SERVER_VERSIONS[interpreter.wheel]
    return Finding("triton-wheel", True, f"tritonserver {version} of {WHEEL} {interpreter.wheel}")


def _stub_finding(interpreter: Interpreter) -> Finding:
    minor = ".".join(map(str, interpreter.python))
    if interpreter.package is None:
        return Finding("triton-stub", False, f"no python backend for Python {minor}", INSTALL)
    stub = _stub(interpreter.package / "tritonserver", interpreter)
    ok = stub.is_file() and os.access(stub, os.X_OK)
    detail = f"the python backend {'supports' if ok else 'does not support'} Python {minor}"
    return Finding("triton-stub", ok, detail, None if ok else "use Python 3.11 or 3.12")


def _numpy_finding(interpreter: Interpreter) -> Finding:
    """NumPy 2 raises nothing in this stub: it answers HTTP 200 with an empty tensor, so it must not get that far."""
    remedy = "run pip install 'numpy>=1.26,<2'"
    if interpreter.numpy is None:
        return Finding("triton-numpy", False, "NumPy is not installed", remedy)
    ok = int(interpreter.numpy.partition(".")[0]) < 2
    detail = f"NumPy {interpreter.numpy}"
    if not ok:
        detail += " is installed, under which the python backend of Triton 2.51 answers empty tensors without an error"
    return Finding("triton-numpy", ok, detail, None if ok else remedy)


def _libpython_finding(interpreter: Interpreter) -> Finding:
    found = find_libpython(interpreter)
    if found is not None:
        return Finding("triton-libpython", True, f"shared libpython at {found}")
    detail = f"{interpreter.libpython_name} is missing"
    remedy = libpython_remedy(interpreter)
    if can_fetch(interpreter):
        remedy += f" (abserve serve triton otherwise fetches it into {cache_folder(interpreter)})"
    return Finding("triton-libpython", False, detail, remedy)


def _stub(root: Path, interpreter: Interpreter) -> Path:
    minor = ".".join(map(str, interpreter.python))
    return root / "python_backend_stubs" / minor / "triton_python_backend_stub"


def _libraries(package: Path) -> Path:
    """Where auditwheel put the wheel's shared libraries: beside the package."""
    return package.parent / "nvidia_pytriton.libs"
