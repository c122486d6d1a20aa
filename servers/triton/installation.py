"""A tritonserver that is installed on this machine, and the Python that its python backend needs.

In NVIDIA's images it is in /opt/tritonserver: bin/tritonserver, TRITON_VERSION and one folder per backend in backends/.
The python backend's process, the stub, links to a shared libpython. Debian's and Ubuntu's static `python3` leaves that
to the package libpython3.X, which is fetched with apt's own signature checks and unpacked inside the virtual
environment, so that the system does not change.
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
from importlib.util import find_spec
from pathlib import Path

from servers.options.defaults import OptionError


class TritonError(Exception):
    """This machine or this Python environment cannot run the embedded Triton."""


class TritonDiedError(TritonError):
    """The server ended, or lost the process that executes its model. `log_lines` are the relevant ones where the
    message has no cause."""

    def __init__(self, message: str, log_lines: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.log_lines = log_lines


APT_TIMEOUT_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Interpreter:
    """Facts about one interpreter and its environment; tests make their own."""

    python: tuple[int, int]
    machine: str
    glibc: tuple[int, int] | None
    """Version of glibc; None for another C library, as on Alpine."""
    package: Path | None
    """Folder of the package `pytriton`, if it is installed."""
    prefix: Path
    """Root of the virtual environment."""
    base_prefix: Path
    """Root of the Python that made the environment."""
    libpython_folders: tuple[Path, ...]
    """Folders that may contain a shared libpython of this Python, the most likely first."""

    @property
    def minor(self) -> str:
        """The Python version, as in "3.11"."""
        return ".".join(map(str, self.python))

    @property
    def libpython_name(self) -> str:
        """The file that the stub of Triton's python backend links to."""
        return f"libpython{self.minor}.so.1.0"

    @property
    def is_system_python(self) -> bool:
        """Whether this is the distribution's own Python."""
        return self.base_prefix == Path("/usr")


def current_interpreter() -> Interpreter:
    """The facts of the running interpreter. Does not import pytriton, which may be broken."""
    spec = find_spec("pytriton")
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Interpreter(
        python=sys.version_info[:2],
        machine=platform.machine(),
        glibc=_glibc_version(),
        package=Path(locations[0]) if locations else None,
        prefix=Path(sys.prefix),
        base_prefix=Path(sys.base_prefix),
        libpython_folders=_libpython_folders(),
    )


def _glibc_version() -> tuple[int, int] | None:
    name, number = platform.libc_ver()
    major, _, minor = number.partition(".")
    return (int(major), int(minor.partition(".")[0])) if name == "glibc" else None


def _libpython_folders() -> tuple[Path, ...]:
    """This Python's own folders before the system's: a library of another build may not fit its standard library.
    sysconfig's LIBDIR is right for pyenv and Debian, but names the build machine's folder in uv's Pythons; base_prefix
    and the folder beside the resolved executable are right for those."""
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    candidates = [
        sysconfig.get_config_var("LIBDIR"),
        *(Path(sys.base_prefix) / lib for lib in ("lib", "lib64", f"lib/{multiarch}")),
        Path(sys.executable).resolve().parent.parent / "lib",
    ]
    if Path(sys.base_prefix) == Path("/usr"):
        candidates += [Path("/usr/lib") / multiarch, Path("/lib") / multiarch, Path("/usr/lib64")]
    return tuple(dict.fromkeys(Path(folder) for folder in candidates if folder))


def find_libpython(interpreter: Interpreter) -> Path | None:
    """The library in this Python's folders, the cache or the loader's list; None if it is missing there."""
    name = interpreter.libpython_name
    for folder in (*interpreter.libpython_folders, cache_folder(interpreter)):
        if (folder / name).is_file():
            return folder / name
    ldconfig = shutil.which("ldconfig") or "/sbin/ldconfig"
    try:
        listing = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(rf"^\s*{re.escape(name)} \(.*\) => (.+)$", listing, re.MULTILINE)
    return Path(match[1]) if match and Path(match[1]).is_file() else None


def provide_libpython(interpreter: Interpreter, announce: Callable[[str], None]) -> Path:
    """The library's path; fetched first if it is missing and apt can help. Calls `announce` once before a download.
    Raises `TritonError` with the exact remedy."""
    library = find_libpython(interpreter)
    if library is not None:
        return library
    missing = f"{interpreter.libpython_name} is missing"
    if not can_fetch(interpreter):
        raise TritonError(f"{missing}: {libpython_remedy(interpreter)}")
    announce(f"{missing}: fetching it with apt-get into {cache_folder(interpreter)}")
    try:
        return _fetch(interpreter)
    except (OSError, subprocess.SubprocessError) as exc:
        lines = exc.stderr.strip().splitlines() if isinstance(exc, subprocess.CalledProcessError) else [str(exc)]
        raise TritonError(
            f"{missing} and could not be fetched ({lines[-1] if lines else 'no reason given'}): "
            f"{libpython_remedy(interpreter)}"
        ) from exc


def libpython_remedy(interpreter: Interpreter) -> str:
    """The exact command that provides the library."""
    minor = interpreter.minor
    if ".pyenv" in interpreter.base_prefix.parts:
        return f"run PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install --force {interpreter.base_prefix.name}"
    if interpreter.is_system_python:
        return f"run sudo apt-get install libpython{minor}"
    return f"use a Python {minor} built with --enable-shared, for example from uv python install {minor}"


def can_fetch(interpreter: Interpreter) -> bool:
    """Whether apt can provide the library: only that of the distribution's own Python fits."""
    return interpreter.is_system_python and all(map(shutil.which, ("apt-get", "dpkg-deb")))


def cache_folder(interpreter: Interpreter) -> Path:
    """The cache of libpython, inside the virtual environment, so that both disappear together."""
    return interpreter.prefix / "share" / "abserve" / "libpython"


def _fetch(interpreter: Interpreter) -> Path:
    package = f"libpython{interpreter.minor}"
    with tempfile.TemporaryDirectory(prefix="abserve-libpython-") as name:
        folder = Path(name)
        try:
            _run(folder, "apt-get", "download", package)
        except subprocess.CalledProcessError:
            # A slim image has no package lists, and only root may write the system's: use private ones.
            for part in ("lists/partial", "cache/archives/partial"):
                (folder / part).mkdir(parents=True)
            options = ("-o", f"Dir::State::Lists={folder / 'lists'}", "-o", f"Dir::Cache={folder / 'cache'}")
            _run(folder, "apt-get", *options, "update")
            _run(folder, "apt-get", *options, "download", package)
        _run(folder, "dpkg-deb", "-x", str(next(folder.glob("*.deb"))), "unpacked")
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


IMAGE_FOLDER = Path("/opt/tritonserver")
BINARY = Path("bin", "tritonserver")
STUB = "triton_python_backend_stub"
CODE = "model.py"
"""The code of a model of the python backend, or of a backend that is written in Python."""


STUB_SECONDS = 10.0
"""Time limit of a stub without arguments, which ends in some ms."""


@dataclass(frozen=True, slots=True)
class Installation:
    """The files of one tritonserver."""

    origin: str
    """Where it comes from: a folder, or the wheel with its version."""
    version: str
    """As in "2.51"; empty where the installation does not say. A running server reports its own in its metadata."""
    binary: Path
    backend_folder: Path
    """Has one folder per backend."""
    stub: Path | None = None
    """The process of the python backend, for the Python that runs now; None without one."""
    libraries: Path | None = None
    """A folder of shared libraries that the binary needs."""
    libpython: Path | None = None
    """The library that the stub links to; None where the loader finds it."""

    @property
    def backends(self) -> tuple[str, ...]:
        """The names of the backends, as a config names them. A folder without library or code is not a backend."""
        folders = self.backend_folder.glob("*")
        return tuple(
            sorted(
                path.name for path in folders if (path / library_name(path.name)).is_file() or (path / CODE).is_file()
            )
        )

    def runs_in_python(self, backend: str) -> bool:
        """Whether a backend executes in the python backend's process: that backend itself, and one that is code."""
        folder = self.backend_folder / backend
        return backend == "python" or ((folder / CODE).is_file() and not (folder / library_name(backend)).is_file())

    @property
    def library_path(self) -> tuple[Path, ...]:
        """The folders where the loader must look for the libraries of the server and its processes."""
        return tuple(path for path in (self.libraries, self.libpython and self.libpython.parent) if path)

    @property
    def stub_in_place(self) -> bool:
        """Whether the stub is where Triton looks for it, as in NVIDIA's images."""
        return self.stub in (None, self._own_stub)

    @property
    def _own_stub(self) -> Path:
        return self.backend_folder / "python" / STUB

    @property
    def stub_python(self) -> str | None:
        """The Python of the stub in the python backend's own folder, as in "3.12"; None without one."""
        return stub_python(self._own_stub) if self._own_stub.is_file() else None

    @property
    def title(self) -> str:
        """As in "Triton 2.51"."""
        return f"Triton {self.version}".rstrip()


def find_folder(requested: Path | None) -> Path | None:
    """The folder of a tritonserver installed here: `requested`, that of the one on PATH, or NVIDIA's; else None. Raises
    `OptionError` where `requested` holds none."""
    if requested is not None:
        if not os.access(requested / BINARY, os.X_OK):
            raise OptionError(
                f"--tritonserver {requested}: it has no executable {BINARY}; give the folder that holds bin and "
                f"backends, such as {IMAGE_FOLDER}"
            )
        return requested.absolute()
    program = shutil.which("tritonserver")
    if program is not None and (folder := Path(program).resolve().parents[1]) / BINARY == Path(program).resolve():
        return folder
    return IMAGE_FOLDER if os.access(IMAGE_FOLDER / BINARY, os.X_OK) else None


def read_installation(folder: Path, interpreter: Interpreter) -> Installation:
    """The tritonserver in `folder`. Its python backend counts only with a stub for this Python."""
    backends, libraries = folder / "backends", folder / "lib"
    stub = _stub_for(interpreter, backends / "python" / STUB, folder / "python_backend_stubs")
    return Installation(
        origin=str(folder),
        version=_version(folder),
        binary=folder / BINARY,
        backend_folder=backends,
        stub=stub,
        libraries=libraries if libraries.is_dir() else None,
        libpython=None if stub is None else find_libpython(interpreter),
    )


def missing_library(stub: Path, library_path: str) -> str | None:
    """The loader's message if the stub cannot start because a library is missing; None if it starts. Triton waits
    minutes for such a stub. Started without arguments, a stub prints how many it needs, and ends."""
    environment = {**os.environ, "LD_LIBRARY_PATH": library_path}
    try:
        done = subprocess.run(
            [stub], env=environment, capture_output=True, stdin=subprocess.DEVNULL, timeout=STUB_SECONDS, check=False
        )
    except OSError as exc:
        return f"{stub}: {exc.strerror or exc}"
    except subprocess.TimeoutExpired:
        return None
    match = re.search(r"error while loading shared libraries: (.+)", done.stderr.decode("utf-8", "replace"))
    return None if match is None else match[1]


def stub_python(stub: Path) -> str | None:
    """The Python that a stub links to, as in "3.12"; None for a file that names none."""
    match = re.search(rb"libpython(3\.\d+)\.so", stub.read_bytes())
    return None if match is None else match[1].decode()


def takes_numpy_2(stub: Path) -> bool:
    """Whether a stub's own conversions fit NumPy 2: one that was built before looks for NumPy 1's module only."""
    return b"numpy._core" in stub.read_bytes()


def _stub_for(interpreter: Interpreter, first: Path, others: Path) -> Path | None:
    """The stub for this Python: the backend's own, as in NVIDIA's images, or the one of several in the wheel."""
    candidates = (first, others / interpreter.minor / STUB)
    return next((path for path in candidates if path.is_file() and stub_python(path) == interpreter.minor), None)


def library_name(backend: str) -> str:
    """The file in a backend's folder that Triton loads."""
    return f"libtriton_{backend}.so"


def _version(folder: Path) -> str:
    """Major and minor release; NVIDIA's images state it in a file and in a variable."""
    try:
        text = (folder / "TRITON_VERSION").read_text(encoding="utf-8")
    except OSError:
        text = os.environ.get("TRITON_SERVER_VERSION", "") if folder == IMAGE_FOLDER else ""
    match = re.match(r"\d+\.\d+", text.strip())
    return "" if match is None else match[0]
