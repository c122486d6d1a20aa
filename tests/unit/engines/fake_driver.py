"""A stand-in for CUDA's driver, `fake_driver.c`, and copies through it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from servers.engines.torch.copies import CudaCopies


def compiled_driver(folder: Path) -> str:
    """A library with the driver's functions, whose device memory is the host's."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library, source = folder / "libdriver.so", Path(__file__).with_suffix(".c")
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, source], check=True)
    return str(library)


class DriverCopies(CudaCopies):
    """Copies through the stand-in. If it is late, it launches Python functions for graphs."""

    def __init__(self, kind: str) -> None:
        super().__init__(0, 1, 2, 3)
        assert self._copy_batch is not None
        self._late = kind == "late"
        if kind == "old":
            self._copy_batch = None

    def captured(self, run: Callable[[], object], pool: Any) -> Callable[[], object]:
        if not self._late:
            return run
        function = ctypes.CFUNCTYPE(None)(lambda: run() and None)
        return partial(self._launch, function, ctypes.cast(function, ctypes.c_void_p).value or 0)
