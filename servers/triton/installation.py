"""A tritonserver to start: the record of its files, and how one that is installed on this machine is read.

In NVIDIA's images it is in /opt/tritonserver: bin/tritonserver, TRITON_VERSION and one folder per backend in backends/.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from servers.triton.errors import TritonOptionError
from servers.triton.interpreter import Interpreter, find_libpython

IMAGE_FOLDER = Path("/opt/tritonserver")
BINARY = Path("bin", "tritonserver")
STUB = "triton_python_backend_stub"
CODE = "model.py"
"""The code of a model of the python backend, or of a backend that is written in Python."""


STUB_SECONDS = 10.0
"""For a stub without arguments, which ends in some ms."""


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
        """The names of the backends, as a config names them. A folder without a library or code is not a backend."""
        found = self.backend_folder.glob("*")
        return tuple(
            sorted(path.name for path in found if (path / library_name(path.name)).is_file() or (path / CODE).is_file())
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
    """The folder of a tritonserver installed here: `requested`, that of the one on PATH, or NVIDIA's; else None.

    Raises `TritonOptionError` where `requested` holds none.
    """
    if requested is not None:
        if not os.access(requested / BINARY, os.X_OK):
            raise TritonOptionError(
                f"--tritonserver {requested}: it has no executable {BINARY}; give the folder that holds bin and "
                f"backends, such as {IMAGE_FOLDER}"
            )
        return requested.absolute()
    found = shutil.which("tritonserver")
    if found is not None and (folder := Path(found).resolve().parents[1]) / BINARY == Path(found).resolve():
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
    """The loader's words if the stub cannot start here for want of a library; None if it starts.

    Triton waits minutes for such a stub. Without arguments it says how many it needs, and ends.
    """
    environment = {**os.environ, "LD_LIBRARY_PATH": library_path}
    try:
        done = subprocess.run(
            [stub], env=environment, capture_output=True, stdin=subprocess.DEVNULL, timeout=STUB_SECONDS, check=False
        )
    except OSError as exc:
        return f"{stub}: {exc.strerror or exc}"
    except subprocess.TimeoutExpired:
        return None
    found = re.search(r"error while loading shared libraries: (.+)", done.stderr.decode("utf-8", "replace"))
    return None if found is None else found[1]


def stub_python(stub: Path) -> str | None:
    """The Python that a stub links to, as in "3.12"; None for a file that names none."""
    found = re.search(rb"libpython(3\.\d+)\.so", stub.read_bytes())
    return None if found is None else found[1].decode()


def takes_numpy_2(stub: Path) -> bool:
    """Whether a stub's own conversions fit NumPy 2: one that was built before looks for NumPy 1's module only."""
    return b"numpy._core" in stub.read_bytes()


def _stub_for(interpreter: Interpreter, own: Path, others: Path) -> Path | None:
    """NVIDIA's images have one stub, in the backend's folder; the wheel has one per Python beside the backends."""
    candidates = (own, others / interpreter.minor / STUB)
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
    found = re.match(r"\d+\.\d+", text.strip())
    return "" if found is None else found[0]
