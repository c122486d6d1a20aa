"""The tritonserver inside NVIDIA's wheel nvidia-pytriton: its files, and whether they can run on this machine.

Only files of the wheel are used, not its Python API.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from servers.finding import Finding, finding
from servers.triton.errors import TritonUnavailableError
from servers.triton.installation import BINARY, STUB, Installation
from servers.triton.interpreter import (
    WHEEL,
    Interpreter,
    cache_folder,
    can_fetch,
    current_interpreter,
    find_libpython,
    libpython_remedy,
    provide_libpython,
)

MACHINES = ("x86_64", "aarch64")
MINIMUM_GLIBC = (2, 35)
SERVER_VERSIONS = {"0.7.0": "2.51"}
"""Version of the wheel → version of its tritonserver; a running server reports its own in its metadata."""

INSTALL = "run pip install nvidia-pytriton==0.7.0"


def find_wheel(
    interpreter: Interpreter | None = None, announce: Callable[[str], None] = lambda _message: None
) -> Installation:
    """The wheel's tritonserver. Raises `TritonUnavailableError` for the first unmet condition.

    May fetch a missing libpython (see `provide_libpython`), after a call of `announce`.
    """
    interpreter = interpreter or current_interpreter()
    assert_environment(interpreter)
    assert interpreter.package is not None  # `assert_environment` has checked both
    assert interpreter.wheel is not None
    root = interpreter.package / "tritonserver"
    return Installation(
        origin=f"{WHEEL} {interpreter.wheel}",
        version=SERVER_VERSIONS[interpreter.wheel],
        binary=root / BINARY,
        backend_folder=root / "backends",
        stub=_stub(interpreter.package, interpreter),
        libraries=_libraries(interpreter.package),
        libpython=provide_libpython(interpreter, announce),
    )


def assert_environment(interpreter: Interpreter | None = None) -> None:
    """Raise `TritonUnavailableError` for the first unmet condition, except a missing libpython."""
    for one in _environment_findings(interpreter or current_interpreter()):
        if not one.ok:
            raise TritonUnavailableError(f"the embedded Triton cannot run here: {one.detail}; {one.remedy}")


def diagnose(interpreter: Interpreter | None = None) -> list[Finding]:
    """Every condition of the embedded Triton, met or not, the most important first. Changes nothing."""
    interpreter = interpreter or current_interpreter()
    found = find_libpython(interpreter)
    detail, remedy = f"shared libpython at {found}", ""
    if found is None:
        detail, remedy = f"{interpreter.libpython_name} is missing", libpython_remedy(interpreter)
        if can_fetch(interpreter):
            remedy += f" (otherwise abserve serve triton fetches it into {cache_folder(interpreter)})"
    return [*_environment_findings(interpreter), finding("triton-libpython", found is not None, detail, remedy)]


def _environment_findings(interpreter: Interpreter) -> list[Finding]:
    glibc, minor = interpreter.glibc, interpreter.minor
    stub = None if interpreter.package is None else _stub(interpreter.package, interpreter)
    has_stub = stub is not None and stub.is_file() and os.access(stub, os.X_OK)
    return [
        finding(
            "triton-architecture",
            interpreter.machine in MACHINES,
            f"the processor architecture is {interpreter.machine}",
            "compare against a Triton on another machine by its URL",
        ),
        finding(
            "triton-glibc",
            glibc is not None and glibc >= MINIMUM_GLIBC,
            f"this system has {'glibc {}.{}'.format(*glibc) if glibc else 'another C library than glibc'}, "
            f"tritonserver needs glibc {MINIMUM_GLIBC[0]}.{MINIMUM_GLIBC[1]} or newer",
            "use Debian 12, Ubuntu 22.04 or newer",
        ),
        _wheel_finding(interpreter),
        finding(
            "triton-stub",
            has_stub,
            f"the python backend {'supports' if has_stub else 'does not support'} Python {minor}",
            INSTALL if stub is None else "use Python 3.11 or 3.12",
        ),
    ]


def _wheel_finding(interpreter: Interpreter) -> Finding:
    wheel, package = interpreter.wheel, interpreter.package
    if wheel is None or package is None:
        return finding("triton-wheel", False, f"the package {WHEEL} is not installed", INSTALL)
    if wheel not in SERVER_VERSIONS:
        known = " or ".join(SERVER_VERSIONS)
        return finding("triton-wheel", False, f"{WHEEL} {wheel} is installed, only {known} is known to work", INSTALL)
    root = package / "tritonserver"
    binary = root / BINARY
    backend = root / "backends" / "python"
    needed = (
        binary,
        backend / "libtriton_python.so",
        backend / "triton_python_backend_utils.py",
        _libraries(package),
    )
    missing = [path.name for path in needed if not path.exists()]
    if missing:
        remedy = INSTALL.replace("install", "install --force-reinstall --no-deps")
        return finding("triton-wheel", False, f"{WHEEL} {wheel} is incomplete, {', '.join(missing)} missing", remedy)
    if not os.access(binary, os.X_OK):
        return finding("triton-wheel", False, "the tritonserver binary is not executable", f"run chmod +x {binary}")
    return finding("triton-wheel", True, f"tritonserver {SERVER_VERSIONS[wheel]} of {WHEEL} {wheel}", "")


def _stub(package: Path, interpreter: Interpreter) -> Path:
    return package / "tritonserver" / "python_backend_stubs" / interpreter.minor / STUB


def _libraries(package: Path) -> Path:
    """The folder beside the package where auditwheel put the wheel's shared libraries."""
    return package.parent / "nvidia_pytriton.libs"
