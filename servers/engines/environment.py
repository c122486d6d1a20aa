"""The Python environment of an engine: this one, or a second one that holds what cannot be installed beside it.

`make engines` builds the second environment beside the first: .venv-engines for .venv. A process whose engine lives
there continues in it, with the same command and the same process ID.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from servers.engines.settings import EngineError, engine_kind

VARIABLE = "ABSERVE_ENGINES_PYTHON"
"""The interpreter of the second environment, where it is not beside this one."""
_SECONDS = 60


def environment_of(name: str) -> Path | None:
    """The interpreter that has the libraries of an engine; None: this one has them.

    Raises `EngineError` with the command that installs them where no environment has them.
    """
    kind = engine_kind(name)
    missing = [library for library in kind.libraries if find_spec(library) is None]
    if not missing:
        return None
    other = second_interpreter()
    if other is not None and _has(other, kind.libraries):
        return other
    raise EngineError(f"the {name} engine needs {missing[0]}, which is not installed; run: {kind.install}")


def second_interpreter() -> Path | None:
    """The interpreter of the second environment; None where there is none, and in that environment itself."""
    given = os.environ.get(VARIABLE)
    path = Path(given) if given else Path(f"{sys.prefix}-engines") / "bin" / "python"
    return path if path.is_file() and path.absolute() != Path(sys.executable).absolute() else None


def enter_environment_of(name: str) -> None:
    """Continue this command in the interpreter that has the engine's libraries, or return if this one has them.

    Call it before anything is bound, started or printed. Raises `EngineError` as `environment_of` does.
    """
    other = environment_of(name)
    if other is None:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(other, [str(other), *sys.orig_argv[1:]])


def _has(interpreter: Path, libraries: tuple[str, ...]) -> bool:
    program = "import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, sys.argv[1:])))"
    try:
        done = subprocess.run([interpreter, "-P", "-c", program, *libraries], capture_output=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
