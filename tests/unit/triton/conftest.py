"""A made-up interpreter with a made-up wheel, in which everything is right until a test takes something away."""

from __future__ import annotations

from pathlib import Path

import pytest

from servers.triton.installation import Interpreter

LIBRARY = "libpython3.99.so.1.0"  # of a Python that no machine has, so that nothing real is ever found


@pytest.fixture
def interpreter(tmp_path: Path) -> Interpreter:
    package = tmp_path / "site-packages" / "pytriton"
    root = package / "tritonserver"
    for name in (
        "bin/tritonserver",
        "backends/python/libtriton_python.so",
        "backends/python/triton_python_backend_utils.py",
        "python_backend_stubs/3.99/triton_python_backend_stub",
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n# libpython3.99.so.1.0\n")
        path.chmod(0o755)
    (package.parent / "nvidia_pytriton.libs").mkdir()
    (package.parent / "nvidia_pytriton-0.7.0.dist-info").mkdir()
    folder = tmp_path / "lib"
    folder.mkdir()
    (folder / LIBRARY).touch()
    return Interpreter(
        python=(3, 99),
        machine="x86_64",
        glibc=(2, 36),
        package=package,
        prefix=tmp_path / "venv",
        base_prefix=tmp_path / "python",
        libpython_folders=(tmp_path / "nowhere", folder),
    )
