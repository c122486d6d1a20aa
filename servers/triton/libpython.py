"""The shared libpython that the python backend's stub links to: where it lies, or how to get it without root.

Debian's and Ubuntu's `python3` is linked statically and leaves the library to the package libpython3.X. That package
is fetched with apt's own signature checks and unpacked inside the virtual environment: the system stays as it is.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from servers.triton.errors import TritonUnavailableError
from servers.triton.interpreter import Interpreter

APT_TIMEOUT_SECONDS = 120


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
