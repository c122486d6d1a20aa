"""What the tests of the native server on real GPUs share."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def cuda_memory() -> Any:
    try:
        import tritonclient.utils.cuda_shared_memory as module
    except (ImportError, RuntimeError) as exc:
        pytest.skip(f"tritonclient's CUDA shared memory needs cuda-python: {exc}")
    return module
