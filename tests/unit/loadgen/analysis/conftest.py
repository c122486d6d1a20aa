"""Makes the generators of synthetic runs importable as `synthetic_run` and `gpu_run`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

for path in (Path(__file__).parents[3] / "golden" / "synthetic_run.py", Path(__file__).parent / "gpu_run.py"):
    if path.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[path.stem])
