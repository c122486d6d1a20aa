"""abserve from Python: `compare` servers, `load` a finished run, and describe your own `models` (docs/python-api.md).

In scope: the names that users import. Not in scope: how anything is measured (`loadgen`) or served (`servers`); a
comparison is a process of the command `abserve compare`. Importing this package imports nothing heavy.
"""

from abserve.comparison import compare, compare_async
from abserve.errors import AbserveError
from abserve.run import Columns, Run, load

__all__ = ["AbserveError", "Columns", "Run", "compare", "compare_async", "load"]
