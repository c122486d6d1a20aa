"""The canary leaves the process as it found it: its profiler is detached, and only where that is safe."""

from __future__ import annotations

import os

import pytest
import torch

from servers.engines.canary import _DETACH, _detached_afterwards


@pytest.mark.parametrize("before", [None, "0"])
def test_the_profiler_is_told_to_detach_while_it_is_used(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv(_DETACH, raising=False)
    if before is not None:
        monkeypatch.setenv(_DETACH, before)

    def failing() -> None:
        with _detached_afterwards():
            assert os.environ[_DETACH] == "1"
            raise RuntimeError

    with pytest.raises(RuntimeError):
        failing()
    assert os.environ.get(_DETACH) == before


@pytest.mark.parametrize("version", [None, "11.8", "12.4"])
def test_where_graphs_would_crash_it_stays_attached(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.delenv(_DETACH, raising=False)
    with _detached_afterwards():
        assert _DETACH not in os.environ
