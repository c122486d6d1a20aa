"""The tritonserver inside NVIDIA's wheel nvidia-pytriton: where its parts are, and whether they can run here.

Only files of the wheel are used; its Python API is not imported.

The python backend's stub links to a shared libpython. Debian's and Ubuntu's `python3` is linked statically and leaves
the library to the package libpython3.X. That package is fetched with apt's own signature checks and unpacked inside the
virtual environment: the system stays as it is.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from servers.finding import Finding
from servers.triton.errors import TritonUnavailableError

MACHINES = ("x86_64", "aarch64")
MINIMUM_GLIBC = (2, 35)
SERVER_VERSIONS = {"0.7.0": "2.51"}
"""Version of the wheel → version of the tritonserver in it; the running server tells its own in its metadata."""

INSTALL = "run pip install nvidia-pytriton==0.7.0"

APT_TIMEOUT_SECONDS = 120
WHEEL = "nvidia-pytriton"


@dataclass(frozen=True, slots=True)
class Interpreter:
    """Facts about one interpreter and its environment; tests make their own."""

    python: tuple[int, int]
    machine: str
    glibc: tuple[int, int] | None
    """None where the C library is another one, as on Alpine."""
    numpy: str | None
    wheel: str | None
    """Installed version of nvidia-pytriton."""
    package: Path | None
    """Folder of the package `pytriton`."""
    prefix: Path
    """Root of the virtual environment."""
    base_prefix: Path
    """Root of the Python that the environment was made from."""
    libpython_folders: tuple[Path, ...]
    """Where a shared libpython of this very Python may lie, the likeliest first."""

    @property
    def libpython_name(self) -> str:
        """The file that the stub of Triton's python backend links to."""
        return f"libpython{self.python[0]}.{self.python[1]}.so.1.0"


def current_interpreter() -> Interpreter:
    """The facts of the running interpreter. Imports neither numpy nor pytriton: both may be what is broken."""
    spec = find_spec("pytriton")
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Interpreter(
        python=sys.version_info[:2],
        machine=platform.machine(),
        glibc=_glibc_version(),
        numpy=_installed("numpy"),
        wheel=_installed(WHEEL),
        package=Path(locations[0]) if locations else None,
        prefix=Path(sys.prefix),
        base_prefix=Path(sys.base_prefix),
        libpython_folders=_libpython_folders(),
    )


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _glibc_version() -> tuple[int, int] | None:
    try:
        name, _, number = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        major, minor = number.split(".")[:2]
        return (int(major), int(minor)) if name == "glibc" else None
    except (ValueError, OSError):
        return None


def _libpython_folders() -> tuple[Path, ...]:
    """This Python's own folders before the system's: a library of another build may not fit its standard library.

    sysconfig's LIBDIR is right for pyenv and Debian, but names the build machine's folder in uv's Pythons; base_prefix
    and the folder beside the resolved executable are right for those.
    """
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    candidates = [
        sysconfig.get_config_var("LIBDIR"),
        *(Path(sys.base_prefix) / lib for lib in ("lib", "lib64", f"lib/{multiarch}")),
        Path(sys.executable).resolve().parent.parent / "lib",
    ]
    if Path(sys.base_prefix) == Path("/usr"):
        candidates += [Path("/usr/lib") / multiarch, Path("/lib") / multiarch, Path("/usr/lib64")]
    return tuple(dict.fromkeys(Path(folder) for folder in candidates if folder))


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

    May fetch a missing libpython (see `provide_libpython`), after a call of `announce`.
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
    server_version = SERVER_VERSIONS[interpreter.wheel]
    return Finding("triton-wheel", True, f"tritonserver {server_version} of {WHEEL} {interpreter.wheel}")


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


def find_libpython(interpreter: Interpreter) -> Path | None:
    """The library's path, or None. Looks where this Python keeps it, in our cache, then in the loader's own list."""
    name = interpreter.libpython_name
    for folder in (*interpreter.libpython_folders, cache_folder(interpreter)):
        if (folder / name).is_file():
            return folder / name
    return _loader_path(name)


def provide_libpython(interpreter: Interpreter, announce: Callable[[str], None]) -> Path:
    """The library's path; fetched first where it is missing and apt can help.

    `announce` is called once before anything is downloaded. Raises `TritonUnavailableError` with the exact remedy.
    """
    found = find_libpython(interpreter)
    if found is not None:
        return found
    if not can_fetch(interpreter):
        raise TritonUnavailableError(f"{interpreter.libpython_name} is missing: {libpython_remedy(interpreter)}")
    announce(f"{interpreter.libpython_name} is missing: fetching it with apt-get into {cache_folder(interpreter)}")
    try:
        return _fetch(interpreter)
    except (OSError, subprocess.SubprocessError) as exc:
        detail = exc.stderr.strip().splitlines() if isinstance(exc, subprocess.CalledProcessError) else [str(exc)]
        raise TritonUnavailableError(
            f"{interpreter.libpython_name} is missing and could not be fetched"
            f" ({detail[-1] if detail else 'no reason given'}): {libpython_remedy(interpreter)}"
        ) from exc


def libpython_remedy(interpreter: Interpreter) -> str:
    """What a person has to do to get the library, as an exact command."""
    minor = f"{interpreter.python[0]}.{interpreter.python[1]}"
    if ".pyenv" in interpreter.base_prefix.parts:
        return f"run PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install --force {interpreter.base_prefix.name}"
    if _is_system_python(interpreter):
        return f"run sudo apt-get install libpython{minor}"
    return f"use a Python {minor} built with --enable-shared, for example the one of uv python install {minor}"


def can_fetch(interpreter: Interpreter) -> bool:
    """Whether this is a distribution's own Python and its package tools are there."""
    return _is_system_python(interpreter) and all(map(shutil.which, ("apt-get", "dpkg-deb")))


def cache_folder(interpreter: Interpreter) -> Path:
    """Inside the virtual environment, so that it disappears together with it."""
    return interpreter.prefix / "share" / "abserve" / "libpython"


def _is_system_python(interpreter: Interpreter) -> bool:
    return interpreter.base_prefix == Path("/usr")


def _fetch(interpreter: Interpreter) -> Path:
    package = f"libpython{interpreter.python[0]}.{interpreter.python[1]}"
    with tempfile.TemporaryDirectory(prefix="abserve-libpython-") as name:
        folder = Path(name)
        try:
            _run(folder, "apt-get", "download", package)
        except subprocess.CalledProcessError:
            # A slim image ships no package lists, and the system's may be written by root only: use private ones.
            for part in ("lists/partial", "cache/archives/partial"):
                (folder / part).mkdir(parents=True)
            options = ("-o", f"Dir::State::Lists={folder / 'lists'}", "-o", f"Dir::Cache={folder / 'cache'}")
            _run(folder, "apt-get", *options, "update")
            _run(folder, "apt-get", *options, "download", package)
        archive = next(folder.glob("*.deb"))
        _run(folder, "dpkg-deb", "-x", str(archive), "unpacked")
        source = next(folder.glob(f"unpacked/usr/lib/*/{interpreter.libpython_name}"))
        target = cache_folder(interpreter) / interpreter.libpython_name
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(f".{os.getpid()}.part")
        shutil.copyfile(source, unfinished)
        unfinished.replace(target)
    return target


def _run(folder: Path, *command: str) -> None:
    subprocess.run(
        command,
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
        timeout=APT_TIMEOUT_SECONDS,
        env={**os.environ, "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
    )


def _loader_path(name: str) -> Path | None:
    ldconfig = shutil.which("ldconfig") or "/sbin/ldconfig"
    try:
        listing = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(rf"^\s*{re.escape(name)} \(.*\) => (.+)$", listing, re.MULTILINE)
    return Path(match[1]) if match and Path(match[1]).is_file() else None
