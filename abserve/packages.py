"""Imports the packages `loadgen` and `servers` of this installation, whatever stands in the user's project.

A notebook or a script has its own folder first on the path, and a project may have a `loadgen.py` or a folder
`servers`. While our packages are imported and used they then take the place of the project's; afterwards an import of
these names is the project's again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from threading import RLock
from types import ModuleType

NAMES = ("loadgen", "servers")
_INSTALLED = Path(__file__).resolve().with_name("_packages")
FOLDER = str(_INSTALLED if _INSTALLED.is_dir() else _INSTALLED.parents[1])
"""The folder that holds both packages: a checkout, or one inside this package, because other packages may have such
names too. Our own processes have it first on their path."""
_lock = RLock()
_ours: dict[str, ModuleType] = {}
"""Our modules while the project's have their names."""


@contextmanager
def own_packages() -> Iterator[None]:
    """Imports within this context get our packages. It may be entered again, and waits for other threads."""
    with _lock:
        if all(_is_ours(name) for name in NAMES):
            yield
            return
        theirs = _taken_out()
        sys.modules.update(_ours)
        sys.path.insert(0, FOLDER)
        try:
            yield
        finally:
            sys.path.remove(FOLDER)
            _ours.update(_taken_out())
            sys.modules.update(theirs)


def _is_ours(name: str) -> bool:
    """Whether an import of the name gets our package."""
    module = sys.modules.get(name)
    if module is None:
        spec = PathFinder.find_spec(name)
        file = None if spec is None else spec.origin
    else:
        file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve() == Path(FOLDER, name, "__init__.py").resolve()


def _taken_out() -> dict[str, ModuleType]:
    """The modules with these names, after removing them from those that are imported."""
    names = [name for name in sys.modules if name.partition(".")[0] in NAMES]
    return {name: sys.modules.pop(name) for name in names}
