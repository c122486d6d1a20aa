"""The running Python as Triton's python backend needs it: facts about it, and the shared libpython of its process.

The python backend's stub links to a shared libpython. Debian's and Ubuntu's static `python3` leaves that to the package
libpython3.X, which is fetched with apt's own signature checks and unpacked inside the virtual environment, so that the
system does not change.
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
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from servers.triton.errors import TritonUnavailableError

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
    with suppress(ValueError, OSError):
        name, _, number = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        major, minor = number.split(".")[:2]
        return (int(major), int(minor)) if name == "glibc" else None
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
    """The library's path; fetched first if it is missing and apt can help.

    Calls `announce` once before a download. Raises `TritonUnavailableError` with the exact remedy.
    """
    found = find_libpython(interpreter)
    if found is not None:
        return found
    missing = f"{interpreter.libpython_name} is missing"
    if not can_fetch(interpreter):
        raise TritonUnavailableError(f"{missing}: {libpython_remedy(interpreter)}")
    announce(f"{missing}: fetching it with apt-get into {cache_folder(interpreter)}")
    try:
        return _fetch(interpreter)
    except (OSError, subprocess.SubprocessError) as exc:
        lines = exc.stderr.strip().splitlines() if isinstance(exc, subprocess.CalledProcessError) else [str(exc)]
        raise TritonUnavailableError(
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
    """Inside the virtual environment, so that it disappears with it."""
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
