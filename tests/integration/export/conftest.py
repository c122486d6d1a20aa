"""What the tests that export share: torch's list of ONNX operators, which it builds anew for each export."""

from __future__ import annotations

from functools import cache

import pytest


@pytest.fixture(autouse=True, scope="session")
def operators_listed_once() -> None:
    """Building the list takes 1.1 of the 1.7 seconds that a small model's export takes."""
    from torch.onnx._internal.exporter import _registration

    registry = _registration.ONNXRegistry
    registry.from_torchlib = staticmethod(cache(registry.from_torchlib))  # type: ignore[method-assign]
