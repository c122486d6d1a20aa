"""The Python that runs this: the facts that decide whether Triton's python backend can run beside it."""

from __future__ import annotations

import os
import platform
import sys
import sysconfig
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

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
