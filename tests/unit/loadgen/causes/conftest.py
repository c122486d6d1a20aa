"""Makes the generator of synthetic runs importable as `synthetic_run`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if "synthetic_run" not in sys.modules:
    spec = importlib.util.spec_from_file_location(
        "synthetic_run", Path(__file__).parents[3] / "golden" / "synthetic_run.py"
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["synthetic_run"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["synthetic_run"])
