"""abserve from Python: `compare` servers, `load` a finished run, and describe your own `models` (docs/python-api.md).

In scope: the names that users import. Not in scope: how anything is measured (`loadgen`) or served (`servers`); a
comparison is a process of the command `abserve compare`. Importing this package imports nothing, since every process of
a comparison begins with it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from abserve.comparison import compare, compare_async
    from abserve.errors import AbserveError
    from abserve.run import Columns, Run, load
    from abserve.traffic import load_traffic

__all__ = ["AbserveError", "Columns", "Run", "compare", "compare_async", "load", "load_traffic"]


def __getattr__(name: str) -> Any:
    """A public name, when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module 'abserve' has no attribute {name!r}")
    module = {"AbserveError": "errors", "load_traffic": "traffic"}.get(name, "run")
    module = "comparison" if name.startswith("compare") else module
    return getattr(import_module(f"abserve.{module}"), name)


def __dir__() -> list[str]:
    return __all__
