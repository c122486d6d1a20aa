"""The tritonserver inside NVIDIA's wheel nvidia-pytriton: its files, and whether they can run on this machine.

Only files of the wheel are used, not its Python API. Its metadata would pin the environment to NumPy 1, so pip unpacks
it in a folder beside the environment's packages, on first use. A copy installed in the environment is used, too.

    python -m servers.triton.wheel     fetches what is missing
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from servers.models.files import FolderError, atomic_folder, exclusive, remove_abandoned
from servers.options.launch import MachineCheck, machine_check
from servers.triton.installation import (
    BINARY,
    STUB,
    Installation,
    Interpreter,
    TritonError,
    cache_folder,
    can_fetch,
    current_interpreter,
    find_libpython,
    libpython_remedy,
    provide_libpython,
    stub_python,
)

WHEEL, VERSION, SERVER_VERSION = "nvidia-pytriton", "0.7.0", "2.51"
"""Name and version of the wheel, version of its tritonserver; a running server reports its own in its metadata."""
MACHINES = ("x86_64", "aarch64")
MINIMUM_GLIBC = (2, 35)
REQUIREMENTS = Path(__file__).with_name("nvidia-pytriton.txt")
NEEDED_BYTES = 400_000_000
"""The download of 55 MB and its files of 150 MB, which pip moves to their place."""
FETCH_TIMEOUT_SECONDS = 900
FETCH = "run python -m abserve -m servers.triton.wheel"
INSTALL = f"run pip install --no-deps {WHEEL}=={VERSION}"


def find_wheel(
    interpreter: Interpreter | None = None, announce: Callable[[str], None] = lambda _message: None
) -> Installation:
    """The wheel's tritonserver. Raises `TritonError` for the first unmet condition. May fetch the wheel and a missing
    libpython (see `provide_libpython`), each after a call of `announce`."""
    interpreter = interpreter or current_interpreter()
    _assert(*_platform_checks(interpreter))
    site = _find_site(interpreter) or _fetch(interpreter, announce)
    _assert(_stub_check(site, interpreter))
    stub = _stub(site, interpreter)
    return Installation(
        origin=f"{WHEEL} {VERSION}",
        version=SERVER_VERSION,
        binary=_root(site) / BINARY,
        backend_folder=_root(site) / "backends",
        stub=stub,
        libraries=_libraries(site),
        libpython=provide_libpython(interpreter, announce) if _needs_libpython(stub, interpreter) else None,
    )


def diagnose(interpreter: Interpreter | None = None) -> list[MachineCheck]:
    """Every condition of the embedded Triton, met or not, the most important first. Changes nothing."""
    interpreter = interpreter or current_interpreter()
    site = _find_site(interpreter)
    if site is None:
        detail = f"{WHEEL} {VERSION}, which contains tritonserver {SERVER_VERSION}, is not here yet"
    else:
        detail = f"tritonserver {SERVER_VERSION} of {WHEEL} {VERSION}"
    remedy = f"{FETCH} (otherwise abserve serve triton fetches it into {_own_site(interpreter)})"
    checks = [*_platform_checks(interpreter), machine_check("triton-wheel", site is not None, detail, remedy)]
    if site is not None:
        checks.append(_stub_check(site, interpreter))
    if site is None or _needs_libpython(_stub(site, interpreter), interpreter):
        checks.append(_libpython_check(interpreter))
    return checks


def _assert(*checks: MachineCheck) -> None:
    for check in checks:
        if not check.ok:
            raise TritonError(f"the embedded Triton cannot run here: {check.detail}; {check.remedy}")


def _platform_checks(interpreter: Interpreter) -> list[MachineCheck]:
    """What cannot be fetched."""
    glibc = interpreter.glibc
    return [
        machine_check(
            "triton-architecture",
            interpreter.machine in MACHINES,
            f"the processor architecture is {interpreter.machine}",
            "compare against a Triton on another machine by its URL",
        ),
        machine_check(
            "triton-glibc",
            glibc is not None and glibc >= MINIMUM_GLIBC,
            f"this system has {'glibc {}.{}'.format(*glibc) if glibc else 'another C library than glibc'}, "
            f"tritonserver needs glibc {MINIMUM_GLIBC[0]}.{MINIMUM_GLIBC[1]} or newer",
            "use Debian 12, Ubuntu 22.04 or newer",
        ),
    ]


def _stub_check(site: Path, interpreter: Interpreter) -> MachineCheck:
    has_stub = os.access(_stub(site, interpreter), os.X_OK)
    detail = f"the python backend {'supports' if has_stub else 'does not support'} Python {interpreter.minor}"
    return machine_check("triton-stub", has_stub, detail, "use Python 3.11, 3.12 or 3.13")


def _libpython_check(interpreter: Interpreter) -> MachineCheck:
    library = find_libpython(interpreter)
    detail, remedy = f"shared libpython at {library}", ""
    if library is None:
        detail, remedy = f"{interpreter.libpython_name} is missing", libpython_remedy(interpreter)
        if can_fetch(interpreter):
            remedy += f" (otherwise abserve serve triton fetches it into {cache_folder(interpreter)})"
    return machine_check("triton-libpython", library is not None, detail, remedy)


def _find_site(interpreter: Interpreter) -> Path | None:
    """The folder that holds all that is needed of the wheel: the environment's packages or the own folder."""
    sites = [_own_site(interpreter)]
    if interpreter.package is not None:
        sites.insert(0, interpreter.package.parent)
    for site in sites:
        binary, backend = _root(site) / BINARY, _root(site) / "backends" / "python"
        files = (backend / "libtriton_python.so", backend / "triton_python_backend_utils.py", _libraries(site))
        version = site / f"{WHEEL.replace('-', '_')}-{VERSION}.dist-info"
        if os.access(binary, os.X_OK) and all(path.exists() for path in (*files, version)):
            return site
    return None


def _fetch(interpreter: Interpreter, announce: Callable[[str], None]) -> Path:
    """The own folder, filled by pip, which refuses a file with another hash. A second process waits for the first."""
    site = _own_site(interpreter)
    try:
        with exclusive(site):
            site_of_wheel = _find_site(interpreter)
            if site_of_wheel is not None:
                return site_of_wheel
            announce(f"fetching tritonserver {SERVER_VERSION} ({WHEEL} {VERSION}, 55 MB) with pip into {site}")
            remove_abandoned(site)
            with atomic_folder(site, NEEDED_BYTES) as folder:
                _run_pip(folder)
    except FolderError as exc:
        raise TritonError(f"{WHEEL} {VERSION} cannot be unpacked: {exc}") from exc
    site_of_wheel = _find_site(interpreter)
    if site_of_wheel is None:
        raise TritonError(f"{WHEEL} {VERSION} in {site} is incomplete; remove that folder and try again")
    return site_of_wheel


def _run_pip(folder: Path) -> None:
    """The user's configuration of pip counts, such as another index. The folder gets no other package."""
    command = [sys.executable, "-P", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-user", "--no-compile", "--only-binary", ":all:", "--require-hashes"]
    try:
        subprocess.run(
            [*command, "--requirement", str(REQUIREMENTS), "--target", str(folder)],
            check=True,
            capture_output=True,
            text=True,
            timeout=FETCH_TIMEOUT_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as exc:
        errors = exc.stderr if isinstance(exc, subprocess.CalledProcessError) else str(exc)
        raise TritonError(
            f"pip could not fetch {WHEEL} {VERSION} ({_reason(errors)}); check the network and pip's configuration, or "
            f"{INSTALL} (in an environment without pip: uv {INSTALL.removeprefix('run ')})"
        ) from exc


def _reason(output: str) -> str:
    """The first error of pip, in one line; the last line of other programs."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("ERROR: ")), (lines or ["no reason given"])[-1])


def _own_site(interpreter: Interpreter) -> Path:
    """Inside the virtual environment, so that it disappears with it."""
    return interpreter.prefix / "share" / "abserve" / WHEEL


def _root(site: Path) -> Path:
    return site / "pytriton" / "tritonserver"


def _stub(site: Path, interpreter: Interpreter) -> Path:
    return _root(site) / "python_backend_stubs" / interpreter.minor / STUB


def _libraries(site: Path) -> Path:
    """The folder where auditwheel put the wheel's shared libraries."""
    return site / "nvidia_pytriton.libs"


def _needs_libpython(stub: Path, interpreter: Interpreter) -> bool:
    """The wheel brings the libpython of one Python, 3.13, under a name that only its stub asks for."""
    return stub.is_file() and stub_python(stub) == interpreter.minor


def main() -> None:
    """Fetch what is missing."""

    def announce(message: str) -> None:
        sys.stdout.write(f"{message}\n")
        sys.stdout.flush()

    try:
        announce(f"the embedded Triton is {find_wheel(announce=announce).binary}")
    except TritonError as exc:
        sys.exit(str(exc))


if __name__ == "__main__":
    main()
